"""The paper's power law for more samples, against spectra that follow one."""

import numpy as np
import pytest

from experiments.training_time.power_law import extrapolate_spectrum, mode_curve
from jaxttp.forecast import Hyperparameters


def test_a_power_law_is_continued_to_its_known_size():
    values = 10.0 / np.arange(1.0, 41) ** 1.5
    kernel = np.diag(40 * values).reshape(40, 1, 40, 1)
    residual = np.arange(1.0, 41)[:, None] ** -0.6
    found = extrapolate_spectrum(kernel, residual, samples=80, size=0.2, method="power_law")
    assert found.feasible
    assert found.exponent == pytest.approx(1.5)
    np.testing.assert_allclose(found.values[:40], values)
    np.testing.assert_allclose(found.values, 10.0 / np.arange(1.0, 81) ** 1.5)
    assert found.residual.sum() == pytest.approx(0.2)
    same = extrapolate_spectrum(kernel, residual, samples=40)
    np.testing.assert_allclose(same.values, values)


def test_the_resolvent_foresees_a_random_kernels_curve():
    features = np.random.default_rng(0).normal(size=(400, 60)) / np.arange(1, 61)
    residual = features @ np.random.default_rng(1).normal(size=(60, 1))
    few, size = 120, float(np.sum(residual**2)) / 400
    kernel = (features[:few] @ features[:few].T).reshape(few, 1, few, 1)
    found = extrapolate_spectrum(kernel, residual[:few], samples=400, size=size)
    values, vectors = np.linalg.eigh(features @ features.T / 400)
    setting = Hyperparameters(0.5, loss="squared_error", steps=100)
    real = mode_curve(values, (vectors.T @ residual)[:, 0] ** 2 / 400, setting)
    curve = mode_curve(found.values, found.residual, setting)
    np.testing.assert_allclose(curve[0], real[0], rtol=1e-6)
    np.testing.assert_allclose(curve[30], real[30], rtol=0.25)
