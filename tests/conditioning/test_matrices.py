import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

from jaxttp import conditioning
from tests import oracles


def network(params, x):
    hidden = jnp.tanh(x @ params["v"] + params["b"][None])
    return hidden @ params["w"]


@pytest.fixture(scope="module")
def task():
    rng = np.random.default_rng(0)
    params = {"b": rng.standard_normal(4), "v": rng.standard_normal((3, 4)),
              "w": rng.standard_normal((4, 2))}  # fmt: skip
    params = {name: jnp.asarray(leaf) for name, leaf in params.items()}
    return params, rng.standard_normal((5, 3)), np.array([0, 1, 1, 0, 1])


_HESSIANS = {}


def brute(task, kind, loss):
    params, x, labels = task
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    j = oracles.jacobian(network, params, x)
    y = np.eye(2)[labels]

    def value(w):
        f = network(unravel(w), x)
        if loss == "squared_error":
            return 0.5 * jnp.sum((f - y) ** 2) / 5
        return -jnp.sum(y * jax.nn.log_softmax(f)) / 5

    if kind == "gauss_newton":
        return np.einsum("nap,naq->pq", j, j) / 5
    if loss not in _HESSIANS:  # once for all kinds
        _HESSIANS[loss] = np.asarray(jax.jit(jax.hessian(value))(flat))
    full = _HESSIANS[loss]
    p = oracles.softmax(np.asarray(network(params, x)))
    h = np.stack([np.diag(q) - np.outer(q, q) for q in p])
    h = h if loss == "cross_entropy" else np.stack([np.eye(2)] * 5)
    outer = np.einsum("nap,nab,nbq->pq", j, h, j) / 5
    return {"generalized": outer, "hessian": full}.get(kind, full - outer)


@pytest.mark.parametrize("loss", ["squared_error", "cross_entropy"])
@pytest.mark.parametrize("kind", ["gauss_newton", "generalized", "functional_hessian", "hessian"])
def test_matrices_and_operators_equal_brute_force(task, kind, loss):
    params, x, labels = task
    want = brute(task, kind, loss)
    options = {} if kind == "gauss_newton" else {"y": labels, "loss": loss}
    got = conditioning.curvature_matrix(
        network, params, x, kind=kind, form="parameters", batch_size=2, **options
    )
    scale = np.abs(want).max()
    np.testing.assert_allclose(got, want, atol=1e-12 * scale)  # rounding
    operator = conditioning.curvature_operator(network, params, x, kind=kind, **options)
    v = np.random.default_rng(1).standard_normal(len(want))
    np.testing.assert_allclose(operator.mv(jnp.asarray(v)), want @ v, atol=1e-11 * scale)
    assert lx.is_symmetric(operator)
    assert lx.is_positive_semidefinite(operator) == (kind in ("gauss_newton", "generalized"))


@pytest.mark.parametrize("kind", ["gauss_newton", "generalized"])
def test_both_forms_fraction_their_spectrum_and_auto_takes_the_smaller(task, kind):
    params, x, labels = task
    options = {} if kind == "gauss_newton" else {"y": labels, "loss": "cross_entropy"}
    auto = conditioning.curvature_matrix(network, params, x, kind=kind, **options)
    assert auto.shape == (10, 10)  # N C = 10 < p = 24
    small, large = np.linalg.eigvalsh(auto), np.linalg.eigvalsh(brute(task, kind, "cross_entropy"))
    np.testing.assert_allclose(small, large[-10:], atol=1e-12 * large[-1])
    frozen = conditioning.curvature_matrix(
        network, params, x, kind=kind, trainable={"b": True, "v": False, "w": False}, **options
    )
    assert frozen.shape == (4, 4)


@pytest.mark.parametrize(
    ("v", "match"),
    [
        (jnp.ones(5), r"v must be \(6,\), .*ravel_pytree; got \(5,\)"),
        (jnp.ones((3, 2)), r"v must be \(6,\), .*; got \(3, 2\)"),
        (jnp.ones(6, complex), "v must hold real numbers; got complex128"),
    ],
)
def test_vectors_that_are_no_parameters(v, match):
    operator = conditioning.curvature_operator(
        lambda w, x: x @ w, jnp.ones((3, 2)), jnp.ones((4, 3))
    )
    with pytest.raises(ValueError, match=match):
        operator.mv(v)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kind": "fisher"}, "kind="),
        ({"form": "rows"}, "form="),
        ({"kind": "hessian", "loss": "squared_error", "form": "outputs"}, "parameters"),
        ({"kind": "hessian"}, "needs y and loss"),
        ({"kind": "generalized", "loss": "hinge"}, "loss="),
        ({"loss": "cross_entropy"}, "loss='cross_entropy' does nothing here: .*'generalized'"),
        ({"y": None, "form": "parameters", "batch_size": 0}, "batch_size"),
    ],
)
def test_bad_input(task, options, match):
    params, x, labels = task
    with pytest.raises(ValueError, match=match):
        conditioning.curvature_matrix(network, params, x, **{"y": labels} | options)


def test_bad_networks_and_options(task):
    params, x, _ = task
    with pytest.raises(ValueError, match="apply_fn"):
        conditioning.curvature_matrix(lambda p, x: network(p, x)[0], params, x)


def test_sums_in_float32_on_request():
    x = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    w = {"a": np.random.default_rng(1).standard_normal((4, 30)).astype(np.float32),
         "b": np.random.default_rng(2).standard_normal((30, 2)).astype(np.float32)}  # fmt: skip

    def network(w, x):
        return jnp.tanh(x @ w["a"]) @ w["b"]

    exact = conditioning.curvature_matrix(network, w, x, form="outputs")
    single = conditioning.curvature_matrix(
        network, w, x, form="outputs", promote=False, accumulate="float32"
    )
    assert (exact.dtype, single.dtype) == (jnp.float64, jnp.float32)
    # float32 rounding of the entries
    np.testing.assert_allclose(single, exact, rtol=0, atol=3e-6 * np.abs(exact).max())
    with pytest.raises(ValueError, match="needs promote=False"):
        conditioning.curvature_matrix(network, w, x, accumulate="float32")
    with pytest.raises(ValueError, match="accumulate='half'"):
        conditioning.curvature_matrix(network, w, x, promote=False, accumulate="half")
