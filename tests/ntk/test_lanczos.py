"""Lanczos' iteration where its Krylov space ends, against NumPy's eigenvalues."""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxttp.ntk import extreme_eigenvalues, spectral_density
from jaxttp.ntk._lanczos import lanczos, length

SIZE = 20
KEY = jax.random.key(0)

# Distinct eigenvalues a tenth apart or more (or tiny, or zero), with copies.
EIGENVALUES = st.lists(
    st.sampled_from([0.0, 1e-8, -1.0, 0.3, 1.0, 2.0, 9.0]), min_size=SIZE, max_size=SIZE
)


def symmetric(values, dtype=np.float64):
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((len(values), len(values))))[0]
    matrix = (basis * np.asarray(values)) @ basis.T
    return (0.5 * (matrix + matrix.T)).astype(dtype)


@jax.jit
def with_fresh(matrix, start):
    draws = jax.random.normal(jax.random.key(1), (SIZE, SIZE), start.dtype)
    return lanczos(lambda v: matrix @ v, start, SIZE, fresh=lambda i, _: draws[i])


@settings(max_examples=10)
@given(values=EIGENVALUES)
def test_fresh_vectors_find_every_eigenvalue_with_its_copies(values):
    matrix = symmetric(values)
    found = with_fresh(matrix, jnp.ones(SIZE))
    # The length that ends a Krylov space, 10 eps sqrt(20) of the largest, bounds the error.
    np.testing.assert_allclose(found.values, np.sort(values), atol=1e-13 * (1 + np.ptp(values)))
    assert int(found.made) == SIZE
    vectors = np.asarray(found.vectors())
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(SIZE), atol=1e-12)  # rounding
    np.testing.assert_allclose(matrix @ vectors, vectors * np.asarray(found.values), atol=1e-12)


@settings(max_examples=10)
@given(values=EIGENVALUES, narrow=st.booleans())
def test_extremes_and_density_of_any_spectrum(values, narrow):
    """The old iteration gave (-8602, 8608) for 3 I, NaN for zeros, -117,518 for a zero."""
    dtype = np.float32 if narrow else np.float64
    matrix, scale = symmetric(values, dtype), max(np.max(np.abs(values)), 1e-30)
    # Rounding of the matrix and of the iteration, 10 eps sqrt(20) each at the worst.
    rounding = 100 * np.finfo(dtype).eps * scale
    low, high = extreme_eigenvalues(matrix, key=KEY)
    np.testing.assert_allclose([low, high], [min(values), max(values)], atol=rounding)
    density = spectral_density(matrix, key=KEY, depth=SIZE, probes=2)
    nodes, weights = np.asarray(density.nodes), np.asarray(density.weights)
    assert nodes.shape == (2, SIZE)
    assert nodes.min() >= min(values) - rounding
    assert nodes.max() <= max(values) + rounding
    assert weights.min() >= 0
    np.testing.assert_allclose(weights.sum(), 1.0, rtol=100 * np.finfo(dtype).eps)
    # A probe that exhausts its space is exact for any function: v^T f(A) v / n.
    probes = np.asarray(jax.random.rademacher(KEY, (2, SIZE), dtype), np.float64)
    for f in (np.square, lambda x: x / (1 + np.abs(x))):
        exact = np.mean(np.einsum("pi,ij,pj->p", probes, symmetric(f(np.asarray(values))), probes))
        got = np.sum(weights.astype(float) * f(nodes.astype(float)))
        np.testing.assert_allclose(got, exact / SIZE, atol=10 * rounding * max(scale, 1))


@pytest.mark.parametrize("depth", [1, 64])
@pytest.mark.parametrize("value", [3.0, 0.0, -2.0])
def test_multiples_of_the_identity(value, depth):
    matrix = value * np.eye(100)
    assert [float(v) for v in extreme_eigenvalues(matrix, key=KEY, depth=depth)] == (
        pytest.approx([value, value], rel=1e-14)
    )
    density = spectral_density(matrix, key=KEY, depth=depth, probes=3)
    np.testing.assert_allclose(density.nodes, value, rtol=1e-14)
    np.testing.assert_allclose(jnp.sum(density.weights, axis=1), 1 / 3, rtol=1e-14)
    assert density.plot().axes  # zeros have no logarithm to draw


def test_one_row():
    assert [float(v) for v in extreme_eigenvalues(np.array([[4.0]]), key=KEY)] == [4.0, 4.0]
    assert float(spectral_density(np.array([[4.0]]), key=KEY).nodes[0, 0]) == 4.0


def test_whitened_data_with_a_linear_model():
    """x^T x = I, so the kernel has the eigenvalues 1, copied, and 0."""
    x = np.linalg.qr(np.random.default_rng(0).standard_normal((60, 12)))[0]
    low, high = extreme_eigenvalues(x @ x.T, key=KEY)
    np.testing.assert_allclose([low, high], [0.0, 1.0], atol=1e-14)  # rounding


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_entries_whose_squares_are_beyond_float32(scale):
    matrix = (scale * np.diag(np.arange(1.0, 21.0))).astype(np.float32)
    low, high = extreme_eigenvalues(matrix, key=KEY)
    np.testing.assert_allclose([low / scale, high / scale], [1.0, 20.0], rtol=1e-4)  # 10 eps sqrt n
    tiny = jnp.full(4, 3e-30, jnp.float32)
    assert float(length(tiny)) == pytest.approx(6e-30, rel=1e-6)
    assert float(length(jnp.zeros(3))) == 0.0


def test_what_is_not_finite_stays_visible():
    for bad in (np.nan, np.inf):
        matrix = np.eye(6)
        matrix[2, 2] = bad
        with pytest.raises(ValueError, match="kernel holds 1 value"):
            extreme_eigenvalues(matrix, key=KEY)
        operator = lx.MatrixLinearOperator(jnp.asarray(matrix), lx.symmetric_tag)
        assert np.isnan(extreme_eigenvalues(operator, key=KEY)).all()


def test_what_is_projected_and_the_steps_that_are_saved():
    matrix = symmetric(np.concatenate([[10.0, 8.0], np.linspace(0.0, 1.0, 30)]))
    found = lanczos(lambda v: jnp.asarray(matrix) @ v, jnp.ones(32), 8)
    assert not bool(found.closed)
    basis, below = np.asarray(found.basis), np.asarray(found.projected)
    np.testing.assert_allclose(basis @ matrix @ basis.T, below[:-1], atol=1e-13)  # rounding
    image = matrix @ basis.T - basis.T @ below[:-1]  # beta_k q_(k+1) e_k^T
    np.testing.assert_allclose(np.linalg.norm(image, axis=0), below[-1], atol=1e-13)
    calls = []

    def product(v):
        jax.debug.callback(lambda: calls.append(0))
        return 2.0 * v

    found = jax.block_until_ready(lanczos(product, jnp.ones(32), 8))
    jax.effects_barrier()
    assert len(calls) == 1
    assert bool(found.closed)
    assert found.known.tolist() == [False] * 7 + [True]


def test_a_start_of_zeros_is_a_constant_one():
    found = lanczos(lambda v: jnp.arange(3.0) * v, jnp.zeros(3), 3)
    np.testing.assert_allclose(found.values, [0.0, 1.0, 2.0], atol=1e-14)  # rounding
