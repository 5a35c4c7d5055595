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
    target = float(curve[found.step]) + 0.01 * float(curve[0] - curve[found.step])
    assert first <= found.step <= last
    assert all(curve[t] <= target for t in range(first, last + 1))
    assert first == 0 or curve[first - 1] > target
    assert last == len(curve) - 1 or curve[last + 1] > target


def test_forecasts():
    """Where the forecast test loss is lowest; refused where there is none, or it diverges."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)), rng.integers(0, 2, 40)
    common = {"learning_rate": 0.5, "steps": 20, "relinearize": 0}
    network, train, test = (lambda w, x: x @ w, jnp.zeros((3, 2))), (x[:9], y[:9]), (x[9:], y[9:])
    beside = dict(zip(("x_test", "y_test"), test, strict=True))
    found = predict_training_time(*network, *train, **beside, **common)
    assert found.early_stopping() == early_stopping(found.test_loss)
    by_error = found.early_stopping(metric="error")
    assert by_error == early_stopping(found.test_error, metric="error")
    with pytest.raises(ValueError, match="give x_test and y_test"):
        predict_training_time(*network, *train, **common).early_stopping()
    wild = predict_training_time(*network, *train, **beside, **common | {"learning_rate": 1e4})
    assert not wild.stable
    with pytest.raises(ValueError, match="needs a training that is stable"):
        wild.early_stopping()
