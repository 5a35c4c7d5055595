import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxttp import conditioning
from tests.conditioning import brute

SHAPES = [(5, 3), (5, 7, 3), (4, 2, 5, 3)]


@pytest.mark.parametrize("widths", SHAPES)
@pytest.mark.parametrize("with_covariance", [False, True])
def test_matrix_equals_kronecker_products_and_the_jacobian(widths, with_covariance):
    rng = np.random.default_rng(0)
    weights = brute.draw(rng, widths)
    sigma = brute.covariance(rng, widths[0]) if with_covariance else None
    got = np.asarray(jax.jit(conditioning.gauss_newton_linear)(weights, sigma))
    want = brute.gauss_newton(weights, sigma)
    j = brute.jacobian(weights, sigma)
    scale = np.abs(want).max()
    # rounding of a few products of small matrices
    np.testing.assert_allclose(got, want, atol=1e-13 * scale)
    np.testing.assert_allclose(got, j @ j.T, atol=1e-13 * scale)


@pytest.mark.parametrize("widths", SHAPES)
def test_operator_equals_the_matrix(widths):
    rng = np.random.default_rng(1)
    weights, sigma = brute.draw(rng, widths), brute.covariance(rng, widths[0])
    scales = [rng.uniform(0.5, 2, w.shape[0]) for w in weights[:-1]]
    v = rng.standard_normal(widths[-1] * widths[0])

    @jax.jit  # one program instead of one for every operation and shape
    def both(weights, sigma, scales, v):
        options = {"skip": 0.3, "scales": scales}
        operator = conditioning.gauss_newton_linear_operator(weights, sigma, **options)
        block = operator.mv(v.reshape(widths[-1], widths[0])).reshape(-1)
        matrix = conditioning.gauss_newton_linear(weights, sigma, **options)
        return operator, matrix, operator.mv(v), block, operator.as_matrix()

    operator, matrix, product, block, dense = both(weights, sigma, scales, v)
    wanted = np.asarray(matrix) @ v
    # rounding
    np.testing.assert_allclose(product, wanted, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(block, wanted, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(dense, matrix, rtol=1e-11, atol=1e-12)
    assert lx.is_symmetric(operator)
    assert lx.is_positive_semidefinite(operator)
    assert operator.T is operator
    with pytest.raises(ValueError, match="vector"):
        operator.mv(np.ones(len(matrix) + 1))


def test_skip_adds_a_rectangular_identity():
    weights = brute.draw(np.random.default_rng(4), (4, 6, 3))
    shifted = [w + 0.7 * np.eye(*w.shape) for w in weights]
    got = conditioning.gauss_newton_linear(weights, skip=0.7)
    np.testing.assert_allclose(got, brute.gauss_newton(shifted), rtol=1e-12, atol=1e-13)


def test_scales_are_fixed_factors_and_batch_norm_normalises():
    rng = np.random.default_rng(5)
    weights, sigma = brute.draw(rng, (4, 6, 5, 3)), brute.covariance(rng, 4)
    scales = conditioning.batch_norm_scales(weights, sigma, epsilon=0.0)
    hidden = brute.root(sigma)
    for weight, scale in zip(weights[:-1], scales, strict=True):
        hidden = np.asarray(scale)[:, None] * (weight @ hidden)
        np.testing.assert_allclose(np.sum(hidden**2, axis=1), 1.0, rtol=1e-12)

    def network(ws):
        total = jnp.asarray(brute.root(sigma))
        for index, weight in enumerate(ws):
            total = weight @ total
            total = total * scales[index][:, None] if index < len(scales) else total
        return total.reshape(-1)

    parts = jax.jit(jax.jacrev(network))([jnp.asarray(w) for w in weights])
    j = np.concatenate([np.asarray(p).reshape(12, -1) for p in parts], axis=1)
    got = conditioning.gauss_newton_linear(weights, sigma, scales=scales)
    np.testing.assert_allclose(got, j @ j.T, rtol=1e-11, atol=1e-12)  # rounding


@given(
    widths=st.lists(st.integers(1, 7), min_size=2, max_size=5),
    fraction=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_generic_rank_is_exact(widths, fraction, seed):
    rng = np.random.default_rng(seed)
    r = 1 + round(fraction * (widths[0] - 1))
    x = rng.standard_normal((widths[0], r))
    matrix = brute.gauss_newton(brute.draw(rng, widths), x @ x.T)
    values = np.linalg.eigvalsh(matrix)
    # zeros are below 1e-13 of the largest; the smallest non-zero of these sizes stays above 1e-12
    # for all but freak draws, which the fixed seeds of the profile do not contain
    assert np.sum(values > 3e-13 * values[-1]) == conditioning.generic_rank(widths, r)


W = [np.ones((3, 2)), np.ones((1, 3))]


@pytest.mark.parametrize(
    ("weights", "options", "match"),
    [
        ([], {}, "weights must be a list"),
        (np.ones((2, 2)), {}, "weights must be a list"),
        ([np.ones(3)], {}, r"weights\[0\] must have 2 axes"),
        ([np.ones((3, 2)), np.ones((1, 4))], {}, r"weights\[1\]"),
        ([np.ones((0, 2))], {}, "empty"),
        ([np.ones((2, 2)) * 1j], {}, "real"),
        ([np.full((2, 2), np.nan)], {}, r"weights\[0\]"),
        (W, {"covariance": np.eye(3)}, "covariance has shape"),
        (W, {"covariance": np.array([[1.0, 0.5], [0.0, 1.0]])}, "covariance must be symmetric"),
        (W, {"covariance": np.diag([1.0, -1.0])}, "positive semi-definite"),
        (W, {"covariance": np.zeros((2, 2))}, "not zero"),
        (W, {"skip": np.nan}, "skip"),
        (W, {"scales": [np.ones(2)]}, r"scales\[0\]"),
        (W, {"scales": []}, "scales must be a list of 1"),
    ],
)
def test_bad_input(weights, options, match):
    with pytest.raises(ValueError, match=match):
        conditioning.linear_bound(weights, **options)


@pytest.mark.parametrize(("widths", "rank"), [((3,), None), ((3, 0), None), ((3, 2), 4)])
def test_bad_rank_arguments(widths, rank):
    with pytest.raises(ValueError, match=r"widths|data_rank"):
        conditioning.generic_rank(widths, rank)
