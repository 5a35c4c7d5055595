"""Spectra of matrices that were built from a prescribed one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp.ntk import (
    class_separation,
    eigendecomposition,
    extreme_eigenvalues,
    fit_power_law,
    gradient_components,
    label_alignment,
)
from tests import oracles
from tests.draws import normal
from tests.ntk.networks import mlp


def prescribed(values, seed=0):
    basis, _ = jnp.linalg.qr(normal(seed, (len(values), len(values))))
    return basis, (basis * jnp.asarray(values)[None]) @ basis.T


def test_eigendecomposition_cleans_negative_rounding():
    _, matrix = prescribed([4.0, 2.0, 1e-18, -1e-17])
    system = eigendecomposition(matrix)
    np.testing.assert_allclose(system.values, [4, 2, 0, 0], atol=1e-14)  # eps times the largest
    assert bool(jnp.all(system.values >= 0))
    assert float(system.clipped) <= 0
    assert int(system.rank) == 2
    rebuilt = jnp.einsum("k,kn,km->nm", system.values, system.vectors, system.vectors)
    np.testing.assert_allclose(rebuilt, matrix, atol=1e-14)


def test_a_kernel_that_is_not_finite_is_an_error():
    with pytest.raises(Exception, match="NaN or inf"):
        jax.block_until_ready(eigendecomposition(jnp.full((2, 2), jnp.nan)))


@pytest.mark.slow
def test_alignment_components_and_separation():
    apply_fn, params, x = mlp(8)
    theta = oracles.kernel(apply_fn, params, x)
    system = eigendecomposition(theta)
    residual = normal(4, theta.shape[:2])
    p = label_alignment(system, residual)
    np.testing.assert_allclose(jnp.sum(p), jnp.sum(residual**2), rtol=1e-12)  # Parseval
    # (g_i . u_k)_i from the singular vectors of J itself, up to a sign for each k.
    jac = oracles.jacobian(apply_fn, params, x).reshape(24, -1)
    _, _, right = jnp.linalg.svd(jac, full_matrices=False)
    points = gradient_components(system, 4)
    assert points.shape == (8, 3, 4)
    wanted = jnp.abs(jac @ right[:4].T)
    np.testing.assert_allclose(
        jnp.abs(points.reshape(24, 4)), wanted, atol=1e-9
    )  # eigenvector gaps
    labels = jnp.array([0, 0, 0, 0, 1, 1, 1, 1])
    far = points + 100.0 * labels.reshape(8, 1, 1)
    result = class_separation(far, labels, classes=3)
    assert float(result.between_fraction) > 0.99
    assert float(result.nearest_mean) == 1.0
    per = class_separation(far, labels, classes=3, over="component").between_fraction
    assert per.shape == (12,)


def test_bad_shapes():
    with pytest.raises(ValueError, match="kernel must be"):
        eigendecomposition(jnp.zeros((2, 3)))
    system = eigendecomposition(jnp.eye(4))
    with pytest.raises(ValueError, match="residual must be"):
        label_alignment(system, jnp.ones(3))
    with pytest.raises(ValueError, match="count"):
        gradient_components(system, 5)
    with pytest.raises(ValueError, match="labels must be"):
        class_separation(jnp.ones((4, 2)), jnp.zeros(3, int), classes=2)


def test_fractions_and_means_do_not_depend_on_the_scale():
    points, labels = jnp.array([[0.0], [0.1], [1.0], [1.1]]), jnp.array([0, 0, 1, 1])
    for scale in (1e-200, 1.0, 1e200):  # squares of these are no numbers
        found = class_separation(scale * points, labels, classes=2)
        assert float(found.between_fraction) == pytest.approx(0.9901, abs=1e-4)
        assert float(found.nearest_mean) == 1.0


@pytest.mark.parametrize("labels", [[0, 0, 1, 2], [0, -1, 1, 1], [0.0, 0.0, 1.0, 1.0]])
def test_labels_beyond_the_classes_are_refused(labels):
    with pytest.raises(ValueError, match=r"^labels must"):
        class_separation(jnp.ones((4, 1)), jnp.array(labels), classes=2)


def test_kernels_of_integers_and_of_half_precision():
    matrix = [[2, 1], [1, 2]]
    assert eigendecomposition(jnp.array(matrix)).values.tolist() == pytest.approx([3.0, 1.0])
    half = eigendecomposition(jnp.array(matrix, jnp.bfloat16)).values
    assert half.dtype == jnp.float32
    with pytest.raises(ValueError, match=r"key must be a jax.random.key"):
        extreme_eigenvalues(jnp.eye(2), key=jnp.zeros(2))
    with pytest.raises(ValueError, match="kernel must hold real numbers; got complex128"):
        eigendecomposition(1j * jnp.eye(2))


def test_power_law_and_its_goodness():
    ranks = jnp.arange(1.0, 201.0)
    law = fit_power_law(2.0 * ranks**-1.3, window=(5, 150))
    np.testing.assert_allclose([law.exponent, law.coefficient], [1.3, 2.0], rtol=1e-10)  # rounding
    np.testing.assert_allclose(law.r_squared, 1.0, rtol=1e-10)
    assert law.window == (5, 150)
    # An exponential is no power law, and says so.
    assert float(fit_power_law(jnp.exp(-ranks / 10), window=(1, 200)).r_squared) < 0.9


@pytest.mark.parametrize("window", [(0, 5), (5, 5), (3, 300)])
def test_bad_windows(window):
    with pytest.raises(ValueError, match="window"):
        fit_power_law(jnp.ones(200), window=window)
