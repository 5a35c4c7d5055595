"""Lanczos' iteration, also where its Krylov space ends, against NumPy's eigenvalues; densities."""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxttp.ntk import extreme_eigenvalues, ntk_operator, spectral_density
from jaxttp.ntk import lanczos as lanczos_module
from jaxttp.ntk.lanczos import lanczos, length
from tests.ntk.test_spectrum import prescribed

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


@settings(max_examples=6)
@given(values=EIGENVALUES, narrow=st.booleans())
def test_extremes_and_density_of_any_spectrum(values, narrow):
    """The old iteration gave (-8602, 8608) for 3 I, NaN for zeros, -117,518 for a zero."""
    dtype = np.float32 if narrow else np.float64
    matrix, scale = symmetric(values, dtype), max(np.max(np.abs(values)), 1e-30)
    # Rounding of the matrix and of the iteration, 10 eps sqrt(20) each at the worst.
    rounding = 100 * np.finfo(dtype).eps * scale
    with jax.enable_x64(False):  # what is in float64 stays so
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


@pytest.mark.parametrize(("value", "depth"), [(3.0, 1), (0.0, 64), (-2.0, 64)])
def test_multiples_of_the_identity(value, depth):
    matrix = value * np.eye(100)
    assert [float(v) for v in extreme_eigenvalues(matrix, key=KEY, depth=depth)] == (
        pytest.approx([value, value], rel=1e-14)
    )
    density = spectral_density(matrix, key=KEY, depth=depth, probes=3)
    np.testing.assert_allclose(density.nodes, value, rtol=1e-14)
    np.testing.assert_allclose(jnp.sum(density.weights, axis=1), 1 / 3, rtol=1e-14)
    assert value != 0 or density.plot().axes  # zeros have no logarithm to draw


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


def test_integrals_and_zeros_with_their_error():
    """60 zeros of 100 by probes whose spaces are exhausted: what is off is the draw of them."""
    matrix = prescribed(jnp.asarray(np.r_[np.zeros(60), np.linspace(-1.0, 2.0, 40)]))[1]
    density = spectral_density(matrix, key=jax.random.key(0), depth=60, probes=50)
    for (value, error), exact in (
        (density.zeros(), 60.0),
        (density.integral(jnp.square), jnp.trace(matrix @ matrix) / 100),
    ):
        assert abs(value - exact) < 3 * error  # standard errors, of one fixed draw
    # The variance of v^T P v for +-1 probes is 2 (|P|^2 - sum of squares of its diagonal).
    values, vectors = np.linalg.eigh(matrix)
    null = vectors[:, np.abs(values) < 1e-9]
    null = null @ null.T
    exact = (2 * (np.sum(null**2) - np.sum(np.diag(null) ** 2)) / 50) ** 0.5
    np.testing.assert_allclose(density.zeros()[1], exact, rtol=0.3)  # of 50 draws, to 10 % each
    words = str(density)
    assert words.startswith("100 eigenvalues from -1 to 2, mean 0.")
    assert " ± " in words
    alone = spectral_density(matrix, key=jax.random.key(0), probes=1)
    assert np.isnan(alone.zeros()[1])
    assert "±" not in str(alone)


def make_operators():
    keys = jax.random.split(jax.random.key(4), 3)
    params = {"in": jax.random.normal(keys[0], (3, 4)), "out": jax.random.normal(keys[1], (4, 2))}
    x = jax.random.normal(keys[2], (5, 3))
    network = lambda p, x: jnp.tanh(x @ p["in"]) @ p["out"]  # noqa: E731
    thrice = lx.FunctionLinearOperator(lambda v: 3.0 * v, jax.ShapeDtypeStruct((6,), float))
    return {
        "kernel": ntk_operator(network, params, x),
        "a multiple of the identity": thrice,  # ends after one step
    }  # fmt: skip


@pytest.mark.parametrize("name", ["kernel", "a multiple of the identity"])
def test_steps_from_outside_are_those_of_one_program(name, monkeypatch):
    """On a CPU every step is a program of its own, unless a transformation is going on."""
    operator, key = make_operators()[name], jax.random.key(1)
    found = extreme_eigenvalues(operator, key=key, depth=5)
    traced = jax.jit(lambda key: extreme_eigenvalues(operator, key=key, depth=5))(key)
    np.testing.assert_allclose(found, traced, rtol=1e-12)
    density = spectral_density(operator, key=key, depth=4, probes=2)
    monkeypatch.setattr(lanczos_module, "runs_a_network", lambda operator: False)
    whole = spectral_density(operator, key=key, depth=4, probes=2)
    assert density.size == whole.size
    np.testing.assert_allclose(density.nodes, whole.nodes, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(density.weights, whole.weights, rtol=1e-8, atol=1e-12)
