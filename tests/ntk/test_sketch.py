"""Sketches: unbiased, of the predicted variance, the same whatever the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp import predict_training_time
from jaxttp.forecast import Problem
from jaxttp.ntk import (
    ClassSketched,
    Exact,
    class_sketch,
    empirical_ntk,
    sketch_error,
    sketch_jacobian,
)
from tests import oracles
from tests.draws import normal
from tests.ntk.networks import mlp

KINDS = ("countsketch", "rademacher", "gaussian", "achlioptas")
KEYS = 200
DIM = 24


def _linear(d=240, n=4):
    """J is the data itself: every moment of the sketch is known."""
    x = normal(3, (n, d)) * jnp.exp(normal(4, (1, d)))
    return lambda w, x: x @ w, jnp.zeros((d, 1)), x


def _variance(x, kind):
    """E|Θ̂ − Θ|² (n, n): MATH.md's formula. Of CountSketch 240 coordinates are one block of 240
    buckets, in which none meet, and of its pairs (240/24 - 1)/239 are folded together."""
    xx = jnp.einsum("na,ma->nma", x, x)
    first = jnp.sum(x**2, 1)[:, None] * jnp.sum(x**2, 1)[None] + jnp.sum(xx, -1) ** 2
    same = jnp.sum(xx**2, -1)
    if kind in ("gaussian", "achlioptas"):
        return first / DIM
    if kind == "rademacher":
        return (first - 2 * same) / DIM
    return (first - 2 * same) * (x.shape[1] / DIM - 1) / (x.shape[1] - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_unbiased_with_the_predicted_variance(kind):
    apply_fn, w, x = _linear()

    def kernel(key):
        s = sketch_jacobian(apply_fn, w, x, key=key, dim=DIM, kind=kind)[:, 0]
        return s @ s.T

    kernels = jax.jit(jax.vmap(kernel))(jax.random.split(jax.random.key(0), KEYS))
    exact, variance = x @ x.T, _variance(x, kind)
    # The mean over 200 keys has a standard error of sqrt(variance / 200): 4 of them.
    error = jnp.abs(jnp.mean(kernels, 0) - exact) / jnp.sqrt(variance / KEYS)
    assert float(jnp.max(error)) < 4
    # Summed over entries, the ratio of measured to predicted variance is within 20 %.
    measured = jnp.mean((kernels - exact[None]) ** 2, 0)
    assert 0.8 < float(jnp.sum(measured) / jnp.sum(variance)) < 1.2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_batch_size_changes_nothing(kind):
    apply_fn, params, x = mlp()
    options = {"key": jax.random.key(1), "dim": 16, "kind": kind}
    whole = sketch_jacobian(apply_fn, params, x, **options)
    assert whole.shape == (5, 3, 16)
    parts = sketch_jacobian(apply_fn, params, x, batch_size=2, **options)
    np.testing.assert_allclose(parts, whole, rtol=1e-12, atol=1e-12)  # rounding
    # And two data sets share the projection.
    np.testing.assert_allclose(
        sketch_jacobian(apply_fn, params, x[2:], **options), whole[2:], rtol=1e-12, atol=1e-12
    )


def test_frozen_parameters_are_left_out():
    apply_fn, params, x = mlp()
    theta = empirical_ntk(apply_fn, params, x, trainable=lambda path: path == "2/b")
    # 3 biases fit into one block of 16: CountSketch is exact there.
    s = sketch_jacobian(
        apply_fn, params, x, key=jax.random.key(0), dim=16, trainable=lambda path: path == "2/b"
    )
    np.testing.assert_allclose(jnp.einsum("ncd,med->ncme", s, s), theta, rtol=1e-12, atol=1e-12)


def test_error_estimate():
    apply_fn, w, x = _linear(d=2400, n=12)
    exact = x @ x.T

    def both(key):
        s = sketch_jacobian(apply_fn, w, x, key=key, dim=200)
        theta = s[:, 0] @ s[:, 0].T
        return sketch_error(s), jnp.sum((theta - exact) ** 2) / jnp.sum(exact**2)

    estimates, squared = jax.vmap(both)(jax.random.split(jax.random.key(5), 50))
    # An upper bound that leaves out what CountSketch spares (about 1 block of 12): within 30 %.
    assert 0.9 < float(jnp.mean(estimates) / jnp.sqrt(jnp.mean(squared))) < 1.3


def test_error_estimate_where_most_of_the_sketch_is_noise():
    """Of J = I (30 rows), E|S S^T - I|^2 = (30^2 + 30) / 20, while |S S^T|^2 is 2.5 times 30."""
    draws = jax.random.normal(jax.random.key(6), (40, 30, 1, 20)) / jnp.sqrt(20.0)
    estimates = jax.vmap(sketch_error)(draws)
    # an estimate's own spread is a tenth, their mean's below two hundredths
    np.testing.assert_allclose(jnp.mean(estimates), np.sqrt(930 / 20 / 30), rtol=0.1)


@pytest.mark.slow
def test_class_sketch_measures_its_error():
    apply_fn, params, x = mlp()
    theta = oracles.kernel(apply_fn, params, x)
    result = class_sketch(apply_fn, params, x, key=jax.random.key(2), check=3)
    guess = jnp.einsum("nm,cd->ncmd", result.kernel, jnp.eye(3))[:3, :, :3]
    block = theta[:3, :, :3]
    wanted = jnp.linalg.norm((guess - block).ravel()) / jnp.linalg.norm(block.ravel())
    np.testing.assert_allclose(result.error, wanted, rtol=1e-10)  # rounding
    assert result.checked == 3
    assert float(result.shared) <= float(result.error) * (1 + 1e-10)
    # Unbiased: all 8 sign patterns are equally likely, so the mean over many keys is the trace.
    keys = jax.random.split(jax.random.key(3), 400)
    kernels = jax.jit(
        jax.vmap(lambda key: class_sketch(apply_fn, params, x, key=key, check=1).kernel)
    )(keys)
    trace = jnp.einsum("ncmc->nm", theta) / 3
    spread = jnp.std(kernels, axis=0) / jnp.sqrt(400.0)
    assert float(jnp.max(jnp.abs(jnp.mean(kernels, 0) - trace) / (spread + 1e-12))) < 4.5


def test_kernels_by_class_sketch_average_their_draws():
    """By brute force: the outputs under each draw's signs, K = G G^T of their gradients."""
    apply_fn, params, x = mlp()
    problem = Problem.of(apply_fn, params, x, jnp.arange(len(x)) % 3, x_test=x[:2], y_test=[0, 1])
    key, flat = jax.random.key(4), oracles.jacobian(apply_fn, params, x)
    wanted = 0.0
    for one in jax.random.split(key, 2):
        signs = jax.random.rademacher(one, (3, 1), x.dtype)[:, 0] / np.sqrt(3.0)
        gradients = jnp.einsum("ncp,c->np", flat, signs)
        wanted = wanted + gradients @ gradients.T / 2
    estimator = ClassSketched(key, draws=2)
    found = estimator.estimate(problem, problem.weights)
    np.testing.assert_allclose(found.kernel, wanted, rtol=1e-10, atol=1e-12)  # rounding
    assert found.parts is None
    cross = estimator.cross(problem, problem.weights, x[:2])
    np.testing.assert_allclose(cross, wanted[:2], rtol=1e-10, atol=1e-12)
    assert (estimator.passes(problem), Exact().passes(problem)) == (2, 3)
    # The one draw of `class_sketch` is the same kernel.
    single = jax.random.split(key, 1)[0]
    alone = ClassSketched(key).estimate(problem, problem.weights).kernel
    np.testing.assert_allclose(
        alone, class_sketch(apply_fn, params, x, key=single).kernel, rtol=1e-12
    )


def test_rebuilt_class_sketches_are_corrected_by_the_network():
    """Outputs of different classes mix in this network, which no class sketch knows.

    Its class mean alone is off by a third (`class_sketch`'s `error`); with kernels rebuilt and the
    network asked at their ends the forecast is that of exact kernels to a few per cent.
    """
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "a": jax.random.normal(keys[0], (6, 16)) / np.sqrt(6.0),
        "b": jax.random.normal(keys[1], (16, 4)) / 4.0,
    }
    x = jax.random.normal(keys[2], (20, 6))
    y = jnp.arange(20) % 4

    def apply_fn(p, x):
        return jnp.tanh(x @ p["a"]) @ p["b"]

    assert 0.2 < float(class_sketch(apply_fn, params, x, key=keys[0]).error) < 0.6
    common = {"learning_rate": 1.0, "steps": 30, "relinearize": 4}
    exact, by_class = (
        predict_training_time(apply_fn, params, x, y, kernel=kernel, **common)
        for kernel in (Exact(), ClassSketched(keys[1]))
    )
    drop = float(exact.loss[0] - exact.loss[-1])
    assert drop > 0.5
    np.testing.assert_allclose(by_class.loss, exact.loss, atol=0.05 * drop)
    # 5 kernels of one way back each, in place of 3; the network is asked more often beside them.
    assert by_class.cost.gradient_evaluations <= exact.cost.gradient_evaluations
    assert by_class.cost.kernels == exact.cost.kernels == 5


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"key": 3}, "key"),
        ({"draws": 0}, "draws must be"),
        ({"batch_size": 0}, "kernel_batch_size must be"),
        ({"max_bytes": 0}, "max_bytes must be"),
    ],
)
def test_bad_class_sketches(options, match):
    with pytest.raises((ValueError, TypeError), match=match):
        ClassSketched(**({"key": jax.random.key(0)} | options))


@pytest.mark.parametrize(
    ("changes", "match"),
    [({"kind": "hash"}, "kind='hash'"), ({"dim": 0}, "dim"), ({"batch_size": 0}, "batch_size")],
)
def test_bad_input(changes, match):
    apply_fn, params, x = mlp()
    with pytest.raises(ValueError, match=match):
        sketch_jacobian(apply_fn, params, x, **{"key": jax.random.key(0), "dim": 4, **changes})


def test_the_error_of_a_sketch_does_not_depend_on_its_scale():
    sketch = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 8)))
    wanted = float(sketch_error(sketch))
    for scale in (1e-100, 1e100):  # fourth powers of these are no numbers
        assert float(sketch_error(scale * sketch)) == pytest.approx(wanted, rel=1e-12)
    assert float(sketch_error(0 * sketch)) == 0.0
    with pytest.raises(ValueError, match=r"^sketch must be \(N, C, dim\)"):
        sketch_error(jnp.ones((0, 2, 3)))
