"""Forecasts corrected by the first real steps.

A network that is linear in its weights obeys its forecast exactly, so that every correction must
leave it as it is (float64: 1e-9 after 40 steps); one whose kernel is wrong by a factor, or that
bends, must be forecast better than before.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxttp
from jaxttp.forecast import Hyperparameters, Online, training_time
from tests import oracles
from tests.draws import normal, split

KEYS = split(5, 4)
X = normal(KEYS[0], (14, 5))
Y = np.argmax(np.asarray(X) @ np.asarray(normal(KEYS[1], (5, 3))), axis=1)
PARAMS = {
    "in": normal(KEYS[2], (5, 10), 1 / 2),
    "out": normal(KEYS[3], (10, 3), 1 / 3),
}
SETTING = Hyperparameters(0.3, momentum=0.7, schedule="cosine", steps=40)


def bent(w, x):
    return jnp.tanh(x @ w["in"]) @ w["out"]


def linear(w, x):
    tangent = jax.tree.map(jnp.subtract, w, PARAMS)
    return sum(jax.jvp(lambda v: bent(v, x), (PARAMS,), (tangent,)))


KERNEL = oracles.kernel(bent, PARAMS, X)


def watched(network, setting, k, **options):
    """A real training, and what watched its first k steps."""
    watch = Online(network, PARAMS, X, Y, setting, **options)
    jaxttp.train(
        network, PARAMS, X, Y, loss=setting.loss, optimizer=setting.optimizer(), steps=k,
        callback=watch,
    )  # fmt: skip
    whole = jaxttp.train(
        network, PARAMS, X, Y, loss=setting.loss, optimizer=setting.optimizer(),
        steps=setting.steps,
    )  # fmt: skip
    return watch, whole


@pytest.mark.slow
def test_a_linear_network_needs_no_correction():
    watch, whole = watched(linear, SETTING, 12)
    found = watch.forecast()
    np.testing.assert_allclose(found.loss, whole.loss, atol=1e-9)
    np.testing.assert_allclose(found.open_loop, whole.loss, atol=1e-9)
    assert found.steps == {e: int(training_time(whole.loss, e)) for e in found.steps}
    assert (found.at, found.left_at, found.stable) == (12, -1, True)
    assert found.departure.shape == (13,)
    assert "linear regime so far" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_the_error_of_a_network_that_bends_is_a_fifth(momentum):
    setting = Hyperparameters(0.6 * (1 - momentum), momentum=momentum, steps=80)
    watch, whole = watched(bent, setting, 8)
    real = np.asarray(whole.loss)
    found = watch.forecast()
    before, after = (np.abs(c - real).mean() for c in (found.open_loop, found.loss))
    assert after < 0.2 * before
    np.testing.assert_allclose(found.loss[:9], real[:9], atol=1e-12)
    assert found.kernels > 1
    assert (found.left_at >= 0) == (found.departure.max() > 0.05) == ("left at" in found.message)


@pytest.mark.slow
def test_only_what_trains_is_linearised():
    setting = Hyperparameters(0.5, momentum=0.5, steps=20)
    chosen = {"in": False, "out": True}
    watch = Online(bent, PARAMS, X, Y, setting, trainable=chosen)
    part = lambda w, x: bent(PARAMS | w, x)  # noqa: E731
    head = {"out": PARAMS["out"]}
    run = jaxttp.train(
        part, head, X, Y, loss=setting.loss, optimizer=setting.optimizer(), steps=20,
        callback=lambda t, w, loss: watch(t, PARAMS | w, loss) if t <= 5 else None,
    )  # fmt: skip
    # The head alone is linear.
    np.testing.assert_allclose(watch.forecast().loss, run.loss, atol=1e-9)


def test_bad_input():
    for options, message in (
        ({"rule": "soon"}, "rule='soon' is not known"),
        ({"thresholds": (2.0,)}, "thresholds must be"),
    ):
        with pytest.raises(ValueError, match=message):
            Online(linear, PARAMS, X, Y, SETTING, **options)
    setting = dataclasses.replace(SETTING, steps=2)
    watch = Online(linear, PARAMS, X, Y, setting)
    with pytest.raises(ValueError, match="step must be 0"):
        watch(1, PARAMS, 1.0)
    for seen in range(5):
        if seen not in (2, 3):
            with pytest.raises(ValueError, match=f"one step and no more than 2 steps; {seen} "):
                watch.forecast()
        watch(seen, PARAMS, 1.0)
    watch = Online(linear, PARAMS, X, Y, setting)
    watch(0, PARAMS, 1.0)
    watch(1, PARAMS, np.nan)
    with pytest.raises(ValueError, match="losses holds 1 value"):
        watch.forecast()


@pytest.mark.slow
def test_steps_of_no_rate_leave_no_nan():
    """A warm-up begins with a rate of 0; for a linear network the rest is known exactly."""
    setting = Hyperparameters(0.3, momentum=0.7, schedule="warmup_cosine", steps=12)
    watch, whole = watched(linear, setting, 5)
    assert setting.rates()[0] == 0
    np.testing.assert_allclose(watch.forecast().loss, whole.loss, atol=1e-9)  # float64, 12 steps
    first, _ = watched(linear, setting, 1)
    assert np.all(np.isfinite(first.forecast().loss))
