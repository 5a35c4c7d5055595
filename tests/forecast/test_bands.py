"""Bands of mini-batch training around a re-linearised path."""

from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import predict_training_time, sketch_jacobian, training_time
from jaxttp.forecast.uncertainty import (
    SPREAD,
    jackknife,
    loss_band,
    recentred,
    widened,
    with_error,
)
from jaxttp.ntk.estimators import delete_groups
from tests.draws import normal, split

KEYS = split(9, 4)
X = normal(KEYS[0], (16, 4))
Y = np.argmax(np.asarray(X) @ np.asarray(normal(KEYS[1], (4, 2))), axis=1)
PARAMS = {
    "a": normal(KEYS[2], (4, 8), 1 / 2),
    "b": normal(KEYS[3], (8, 2), 1 / 3),
}


def apply_fn(w, x):
    return jnp.tanh(x @ w["a"]) @ w["b"]


def predict(**options):
    options = {"learning_rate": 0.5, "steps": 20, "batch_size": 4, "relinearize": 0} | options
    return predict_training_time(
        apply_fn,
        PARAMS,
        X,
        Y,
        dynamics="sde",
        paths=6,
        key=jax.random.key(0),
        **options,
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


def descent(kernel, residual, rate=0.1, steps=25):
    """Squared-error losses by brute force."""
    n, c = residual.shape
    matrix, flat, out = np.asarray(kernel).reshape(n * c, n * c), residual.reshape(-1), []
    for _ in range(steps + 1):
        out.append(0.5 * flat @ flat / n)
        flat = flat - rate / n * matrix @ flat
    return np.array(out)


def test_the_error_of_a_sketch_from_its_parts():
    """Against the spread of many projections: the jackknife of four groups is right on average."""
    rng = np.random.default_rng(0)
    jacobian, residual = rng.standard_normal((24, 60)) / 2, rng.standard_normal((12, 2))
    curves, told = [], []
    for _ in range(60):
        sketch = (jacobian @ rng.standard_normal((60, 160)) / np.sqrt(160)).reshape(12, 2, 160)
        curves.append(descent(np.einsum("ncd,med->ncme", sketch, sketch), residual))
        parts = [descent(part, residual) for part in delete_groups(jnp.asarray(sketch))]
        told.append(jackknife(parts))
    spread, told = np.std(curves, axis=0), np.sqrt(np.mean(np.square(told), axis=0))
    # Late losses are not linear in the kernel, so their error comes out up to 1.3 too large (of
    # a sketch narrower than its rows 1.8); the rest is the noise of 60 projections, some 15 %.
    ratio = told[3:] / spread[3:]
    assert 0.8 < ratio[0] < 1.3
    assert np.all((ratio > 0.8) & (ratio < 1.45))


@pytest.mark.slow
def test_a_forecast_carries_the_error_of_its_sketch():
    rng, key = np.random.default_rng(0), jax.random.key(3)
    x, y = rng.standard_normal((12, 30)), rng.standard_normal((12, 2))
    linear, zero = lambda w, x: x @ w, jnp.zeros((30, 2))
    options = {"learning_rate": 0.1, "loss": "squared_error", "steps": 25}
    found = predict_training_time(
        linear, zero, x, y, key=key, sketch_dim=20, relinearize=0, **options
    )
    sketch = sketch_jacobian(linear, zero, x, key=jax.random.fold_in(key, 1), dim=20)
    parts = [descent(part, -y) for part in delete_groups(sketch)]
    middle = descent(np.einsum("ncd,med->ncme", sketch, sketch), -y)
    reach = NormalDist().inv_cdf(0.95) * jackknife(parts)
    np.testing.assert_allclose(found.loss, middle, rtol=1e-9)
    np.testing.assert_allclose(found.loss_band[1], middle + reach, rtol=1e-9)
    np.testing.assert_allclose(found.loss_band[0], np.maximum(middle - reach, 0), rtol=1e-9)
    for threshold, (low, high) in found.steps_band.items():
        reads = [int(training_time(part, threshold)) for part in parts]
        reach = NormalDist().inv_cdf(0.95) * jackknife(reads)
        assert low == max(0, np.floor(found.steps[threshold] - reach))
        assert high == min(25, np.ceil(found.steps[threshold] + reach))
    exact = predict_training_time(linear, zero, x, y, relinearize=0, **options)
    assert exact.loss_band is None
    assert exact.steps_band is None
    column = predict_training_time(
        linear, zero, x, y, key=key, sketch_dim=1, relinearize=0, **options
    )
    assert column.loss_band is None  # no parts to tell its error from
    assert column.steps_band is None


@pytest.mark.slow
def test_a_sketch_goes_with_weight_decay():
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((6, 9)), rng.standard_normal((6, 1))
    decayed = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1))
    found = predict_training_time(
        lambda w, x: x @ w, jnp.ones((9, 1)), x, y, relinearize=0, loss="squared_error",
        optimizer=decayed, steps=15, key=jax.random.key(0), sketch_dim=64,
    )  # fmt: skip
    assert np.all(found.loss_band[0] <= found.loss)
    assert np.all(found.loss_band[1] >= found.loss)
    assert float(found.loss_band[1][-1] - found.loss_band[0][-1]) > 0


@pytest.mark.slow
def test_a_sketch_widens_the_bands_of_the_noise():
    rough = predict(sketch_dim=12)
    plain = predict(sketch_dim=12, level=0.5)
    assert bool(jnp.all(rough.loss_band[1] - rough.loss_band[0] >= 0))
    assert float(jnp.sum(rough.loss_band[1])) > float(jnp.sum(plain.loss_band[1]))
    for threshold, (low, high) in rough.steps_band.items():
        assert 0 <= low <= rough.steps[threshold] <= high <= 20


def test_half_widths_add_in_squares():
    band = with_error(np.array([[6.0], [14.0]]), np.array([10.0]), np.array([0.0]), 0.9)
    np.testing.assert_allclose(band[:, 0], [6.0, 14.0])
    values = np.array([1.0, 2.0, 4.0, 5.0])
    # For a mean the jackknife is the standard error of the mean.
    without = (values.sum() - values) / 3
    np.testing.assert_allclose(jackknife(without), values.std(ddof=1) / 2)
