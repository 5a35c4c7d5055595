"""Bands of mini-batch training around a re-linearised path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp import predict_training_time
from jaxttp.forecast.bands import SPREAD, loss_band, recentred, widened

KEYS = jax.random.split(jax.random.key(9), 4)
X = jax.random.normal(KEYS[0], (16, 4))
Y = np.asarray(jnp.argmax(X @ jax.random.normal(KEYS[1], (4, 2)), axis=1))
PARAMS = {
    "a": jax.random.normal(KEYS[2], (4, 8)) / 2,
    "b": jax.random.normal(KEYS[3], (8, 2)) / 3,
}


def apply_fn(w, x):
    return jnp.tanh(x @ w["a"]) @ w["b"]


def predict(**options):
    options = {"learning_rate": 0.5, "steps": 20, "batch_size": 4} | options
    return predict_training_time(
        apply_fn, PARAMS, X, Y, dynamics="sde", paths=6, key=jax.random.key(0), **options
    )


def test_paths_move_with_their_centre():
    plain, centre = np.array([1.0, 0.5, 0.2]), np.array([1.0, 0.4, 0.1])
    paths = np.stack([plain, 2 * plain, plain / 2])
    moved = recentred(*map(jnp.asarray, (paths, plain, centre)))
    factors = np.array([1.0, 2**SPREAD, 2**-SPREAD])
    np.testing.assert_allclose(moved, factors[:, None] * centre[None], rtol=1e-12)
    # Losses of zero stay where they are, and are no NaN.
    none = jnp.zeros(3)
    assert bool(jnp.all(jnp.isfinite(recentred(none[None], none, jnp.asarray(centre)))))


def test_bands_leave_room_for_the_centre():
    paths = jnp.linspace(0.0, 1.0, 101)[:, None]
    np.testing.assert_allclose(loss_band(paths, 0.9)[:, 0], [0.05, 0.95], atol=1e-12)
    low, high = loss_band(paths, 0.9, jnp.array([1.0]))[:, 0]
    assert low == 0.0  # a loss is not negative
    assert high > 0.95
    assert widened((10, 20), 4, 22) == (6, 22)
    assert widened((1, 2), None, 22) == (1, 2)
    assert widened((-1, 5), 3, 22) == (-1, 5)


@pytest.mark.slow
def test_the_forecast_lies_around_the_re_linearised_one():
    full = predict_training_time(
        apply_fn, PARAMS, X, Y, learning_rate=0.5, steps=20, relinearize=2
    )  # fmt: skip
    found, one = predict(relinearize=2, level=0.8), predict(level=0.8)
    np.testing.assert_allclose(found.outputs, full.outputs, atol=1e-10)
    assert found.cost.kernels == full.cost.kernels == 3
    assert found.dynamics == "sde"
    assert bool(jnp.all(found.loss_band[0] <= found.loss))
    assert bool(jnp.all(found.loss <= found.loss_band[1]))
    for threshold, (low, high) in found.steps_band.items():
        extra = found.steps_uncertainty[threshold]
        assert low + extra <= found.steps[threshold] + 1
        assert found.steps[threshold] - 1 <= high - extra or high == 20
    # The noise is that of one kernel's paths, moved: medians differ by the shift.
    assert float(jnp.abs(found.loss - one.loss).max()) > 1e-3


def test_bad_levels_are_refused():
    for level in (0.0, 1.0, 90):
        with pytest.raises(ValueError, match=r"level must be .* 90 % is 0\.9"):
            predict(level=level)
