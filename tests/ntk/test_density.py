"""Spectra by Lanczos: extremes and densities."""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

from jaxttp.conditioning import curvature_operator
from jaxttp.ntk import as_matrix, extreme_eigenvalues, ntk_operator, spectral_density
from jaxttp.ntk import density as module
from tests import oracles
from tests.ntk.networks import mlp
from tests.ntk.test_spectrum import prescribed


@pytest.mark.slow
def test_lanczos_extremes_of_arrays_and_operators():
    values = jnp.linspace(0.5, 3.0, 20)
    low, high = extreme_eigenvalues(prescribed(values)[1], key=jax.random.key(0))
    # Full Krylov space with reorthogonalisation: exact up to rounding.
    np.testing.assert_allclose([low, high], [0.5, 3.0], rtol=1e-10)
    apply_fn, params, x = mlp()
    theta = as_matrix(oracles.kernel(apply_fn, params, x))
    operator = ntk_operator(apply_fn, params, x)
    _, high = extreme_eigenvalues(operator, key=jax.random.key(0), depth=12)
    np.testing.assert_allclose(high, jnp.linalg.eigvalsh(theta)[-1], rtol=1e-8)  # 12 of 15 steps


def test_density_has_the_moments_of_the_spectrum():
    values = jnp.linspace(1.0, 2.0, 50)
    _, matrix = prescribed(values)
    density = spectral_density(matrix, key=jax.random.key(1), depth=10, probes=40)
    np.testing.assert_allclose(jnp.sum(density.weights), 1.0, rtol=1e-12)  # rounding
    # Quadrature is exact for low moments; what is left is the noise of 40 probes in dimension 50.
    for power in (1, 2):
        got = jnp.sum(density.weights * density.nodes**power)
        np.testing.assert_allclose(got, jnp.mean(values**power), rtol=0.02)
    grid = jnp.linspace(-1.0, 4.0, 2001)
    area = jnp.trapezoid(density.smoothed(grid, 0.1), grid)
    np.testing.assert_allclose(area, 1.0, rtol=1e-3)  # tails of the bumps beyond the grid


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


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([-4.0, -1.0, 1.0, 9.0], "symlog"),
        ([0.0, 0.0, 1.0, 9.0], "symlog"),
        ([1.0, 2.0, 5.0, 9.0], "log"),
    ],
)
def test_the_picture_shows_both_signs_and_zeros(values, scale):
    density = spectral_density(jnp.diag(jnp.asarray(values)), key=jax.random.key(0), probes=3)
    (axes,) = density.plot(width=0.2).axes
    assert axes.get_xscale() == scale
    curves = [line.get_xydata() for line in axes.lines if len(line.get_xdata()) > 2]
    low, high = axes.get_xlim()
    assert all(low <= curve[:, 0].min() and curve[:, 0].max() <= high for curve in curves)
    shown = np.concatenate(curves)
    # Unit probes of a diagonal matrix are exact: the density is as high at each single eigenvalue.
    for value in (one for one in values if one != 0):
        nearest = shown[np.argmin(np.abs(shown[:, 0] - value)), 1]
        assert nearest >= 0.99 / (0.2 * (2 * np.pi) ** 0.5)
    labels = axes.get_legend_handles_labels()[1]
    assert ("zero to rounding: 2 ± 0" in labels) == (0.0 in values)
    assert labels[0] == "± standard error (3 probes)"


def make_operators():
    keys = jax.random.split(jax.random.key(4), 3)
    params = {"in": jax.random.normal(keys[0], (3, 4)), "out": jax.random.normal(keys[1], (4, 2))}
    x = jax.random.normal(keys[2], (5, 3))
    network = lambda p, x: jnp.tanh(x @ p["in"]) @ p["out"]  # noqa: E731
    labels = jnp.array([0, 1, 1, 0, 1])
    thrice = lx.FunctionLinearOperator(lambda v: 3.0 * v, jax.ShapeDtypeStruct((6,), float))
    return {
        "kernel": ntk_operator(network, params, x),
        "Hessian": curvature_operator(network, params, x, labels, kind="hessian",
                                      loss="cross_entropy"),
        "a multiple of the identity": thrice,  # ends after one step
    }  # fmt: skip


@pytest.mark.parametrize("name", ["kernel", "Hessian", "a multiple of the identity"])
def test_steps_from_outside_are_those_of_one_program(name, monkeypatch):
    """On a CPU every step is a program of its own, unless a transformation is going on."""
    operator, key = make_operators()[name], jax.random.key(1)
    found = extreme_eigenvalues(operator, key=key, depth=5)
    traced = jax.jit(lambda key: extreme_eigenvalues(operator, key=key, depth=5))(key)
    np.testing.assert_allclose(found, traced, rtol=1e-12)
    density = spectral_density(operator, key=key, depth=4, probes=2)
    monkeypatch.setattr(module, "is_walked", lambda kernel: False)
    whole = spectral_density(operator, key=key, depth=4, probes=2)
    assert density.size == whole.size
    np.testing.assert_allclose(density.nodes, whole.nodes, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(density.weights, whole.weights, rtol=1e-8, atol=1e-12)
