"""Where the test loss is lowest, and whether it rises again."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxttp import early_stopping, predict_training_time


def test_a_curve_that_rises_again():
    found = early_stopping([2.0, 1.0, 0.505, 0.5, 0.51, 0.6, 1.0])
    assert (found.step, found.value, found.end, found.horizon) == (3, 0.5, 1.0, 6)
    assert found.near == (2, 4)  # within 0.015 of 0.5
    assert found.overfits
    assert str(found._replace(unsure=2)) == (
        "test loss is lowest, 0.5, at step 3 ± 2; as good from 2 to 4; then it rises to 1: "
        "stop early"
    )


def test_a_curve_that_never_falls_is_best_at_its_start():
    found = early_stopping([1.0, 1.5, 2.0], metric="error")
    assert (found.step, found.near, found.overfits) == (0, (0, 0), True)
    assert str(found).startswith("test error is lowest, 1, at step 0; then it rises to 2")
    still = early_stopping(np.ones(5))
    assert (still.step, still.near, still.overfits) == (0, (0, 4), False)


curves = st.lists(st.floats(0.015625, 10.0, width=32), min_size=2, max_size=30).map(np.array)


@given(curves)
def test_by_brute_force(curve):
    found = early_stopping(curve)
    curve = np.asarray(curve, jnp.result_type(float))
    assert found.step == min(range(len(curve)), key=lambda t: curve[t])
    first, last = found.near
    goal = float(curve[found.step]) + 0.01 * float(curve[0] - curve[found.step])
    assert first <= found.step <= last
    assert all(curve[t] <= goal for t in range(first, last + 1))
    assert first == 0 or curve[first - 1] > goal
    assert last == len(curve) - 1 or curve[last + 1] > goal


STEPS, RATE = 80, 0.5


@pytest.fixture(scope="module")
def forecast():
    """Logistic regression on labels of which a third are drawn by lot, and the data."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 12))
    y = (x[:, 0] > 0).astype(int)
    noise = rng.random(120) < 0.35
    y = np.where(noise, rng.integers(0, 2, 120), y)
    data = (x[:30], y[:30], x[30:], y[30:])
    found = predict_training_time(
        lambda w, x: x @ w, jnp.zeros((12, 2)), *data[:2], x_test=data[2], y_test=data[3],
        learning_rate=RATE, steps=STEPS, relinearize=0,
    )  # fmt: skip
    return found, data


def test_the_forecast_of_a_linear_network_is_that_of_its_training(forecast):
    prediction, (x, y, x_test, y_test) = forecast
    w, losses, errors = np.zeros((12, 2)), [], []
    for _ in range(STEPS + 1):
        logits = x_test @ w
        logits = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        losses.append(-np.mean(logits[np.arange(len(y_test)), y_test]))
        errors.append(np.mean(logits.argmax(axis=1) != y_test))
        probabilities = np.exp(x @ w)
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        w = w - RATE * x.T @ (probabilities - np.eye(2)[y]) / len(x)
    found, real = prediction.early_stopping(), early_stopping(losses)
    assert real.overfits
    assert 2 < real.step < STEPS // 2
    assert (found.step, found.near, found.overfits) == (real.step, real.near, True)
    np.testing.assert_allclose(found.value, real.value, rtol=1e-9)  # float64 on both sides
    assert found.unsure is None  # one kernel, and the network is linear: no estimate
    by_error = prediction.early_stopping(metric="error")
    assert by_error.step == early_stopping(errors, metric="error").step
    assert str(found) in " ".join(str(prediction).split())


def test_forecasts_without_an_answer(forecast):
    _, (x, y, x_test, y_test) = forecast
    common = {"learning_rate": RATE, "steps": 5, "relinearize": 0}
    network = (lambda w, x: x @ w, jnp.zeros((12, 2)))
    with pytest.raises(ValueError, match="give x_test and y_test"):
        predict_training_time(*network, x, y, **common).early_stopping()
    wild = predict_training_time(
        *network, x, 100.0 * np.eye(2)[y], loss="squared_error", x_test=x_test,
        y_test=100.0 * np.eye(2)[y_test], **(common | {"learning_rate": 50.0}),
    )  # fmt: skip
    assert not wild.stable
    with pytest.raises(ValueError, match="needs a training that is stable"):
        wild.early_stopping()
    assert "stop early" not in str(wild)
