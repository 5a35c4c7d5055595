"""The settings that lead a sweep are forecast again, as `predict_training_time` forecasts them."""

import dataclasses
import importlib
import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import predict_training_time, sweep, train
from jaxttp.forecast import cost, grid
from jaxttp.forecast.sweep_result import REBUILT
from jaxttp.losses.rule import Target
from tests.draws import normal, split

module = importlib.import_module("jaxttp.forecast.sweep")  # its function has the same name

KEYS = split(3, 3)
X = normal(KEYS[0], (14, 3))
Y = jnp.asarray(np.sum(np.asarray(X)[:, :2] > [[0.0, 0.5]], axis=1))
W = {"in": normal(KEYS[1], (3, 8)), "out": normal(KEYS[2], (8, 3), 1 / 3)}
SETTINGS = grid(learning_rate=(0.01, 0.1, 0.2, 1e3), steps=15)


def network(w, x):
    return jnp.tanh(x @ w["in"]) @ w["out"]


@pytest.mark.slow
def test_what_leads_is_what_a_forecast_of_its_own_says(monkeypatch):
    monkeypatch.setattr(module, "FEW", 0)
    options = {"target_loss": (0.9, 0.7), "target_error": 0.2}
    found = sweep(network, W, X, Y, SETTINGS, relinearize=2, **options)
    plain = sweep(network, W, X, Y, SETTINGS, relinearize=0, **options)
    assert plain.relinearized == ()
    assert module.LEAST <= len(found.relinearized) <= module.MOST
    assert found.ranking()[0] in found.relinearized
    assert found.ranking(by_cost=True)[0] in found.relinearized
    for i in found.relinearized:
        one = predict_training_time(
            network, W, X, Y, learning_rate=SETTINGS[i].learning_rate, steps=15, relinearize=2,
            **options,
        )  # fmt: skip
        # the very computation: rounding of float64 at most
        np.testing.assert_allclose(found.loss[i], one.loss, rtol=1e-10)
        np.testing.assert_allclose(found.error[i], one.error, rtol=1e-10)
        assert dict(zip(found.thresholds, found.steps[i], strict=True)) == dict(one.steps)
        assert dict(zip(found.targets, found.target_steps[i], strict=True)) == dict(one.targets)
        assert (found.warnings[i], bool(found.stable[i])) == (one.warnings, one.stable)
        known = {**one.steps_uncertainty, **one.targets_uncertainty}
        assert {target: found.off(i, target) for target in known} == known
    rest = sorted({*range(len(SETTINGS))} - {*found.relinearized})
    np.testing.assert_array_equal(found.loss[rest], plain.loss[rest])
    assert f"{len(found.relinearized)} along rebuilt kernels" in str(found)
    rebuilt = [i for i, row in enumerate(found.rows()) if row["forecast"] == REBUILT]
    assert rebuilt == sorted(found.relinearized)


def test_bad_numbers_of_kernels_are_refused_before_the_network_is_called():
    def never(w, x):
        raise AssertionError

    with pytest.raises(ValueError, match="relinearize must be an integer of at least 0"):
        sweep(never, W, X, Y, SETTINGS, relinearize=-1)


def separable():
    """Two classes apart, a small network, and the limit of its first kernel without momentum."""
    rng, keys = np.random.default_rng(0), split(0, 3)
    x = rng.normal(size=(16, 12))
    y = (x[:, :3].sum(1) > 0).astype(int)
    x[:, :6] += (2 * y - 1)[:, None]
    w = {"in": 1.4 * normal(keys[1], (12, 8), 12**-0.5), "out": normal(keys[2], (8, 2), 8**-0.5)}
    network = lambda w, x: jnp.maximum(x @ w["in"], 0) @ w["out"]  # noqa: E731
    plain = sweep(network, w, x, y, grid(learning_rate=0.1, steps=1), relinearize=0)
    return (network, w, x, y), float(plain.max_learning_rate[0])


@pytest.mark.slow
def test_what_converges_along_rebuilt_kernels_is_stable_above_the_first_limit(monkeypatch):
    """Momentum leads, so that the rate without it was not looked at and said to diverge."""
    monkeypatch.setattr(cost, "MODEL", dataclasses.replace(cost.MODEL, fraction=1e6))
    task, limit = separable()
    settings = grid(learning_rate=(0.5 * limit, 1.3 * limit), momentum=(0.0, 0.9), steps=20)
    alone = sweep(*task, settings, relinearize=0, target_loss=0.1)
    assert alone.stable.tolist() == [True, True, False, True]  # 0.9 has 1.9 times the limit
    words = f"learning rate {1.3 * limit:.3g} is 1.3 times the limit {limit:.3g}; "
    assert alone.message(2).startswith(words + "the real network may not survive it, though")
    real = train(*task, loss="cross_entropy", optimizer=optax.sgd(1.3 * limit), steps=20).reach(
        [0.1]
    )[Target(0.1)]
    assert real > 0
    found = sweep(*task, settings, target_loss=0.1)
    assert found.stable.all()
    assert found.warning is None
    assert abs(found.times()[2] - real) <= 1  # of 5 steps
    assert found.message(2).startswith("stable with kernels rebuilt, though learning rate")


def test_what_may_take_minutes_is_announced_once(monkeypatch):
    settings = grid(learning_rate=(0.05, 0.1), steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sweep(network, W, X, Y, settings)
    monkeypatch.setattr("jaxttp.forecast.seconds.SHORT", 0.0)
    monkeypatch.setattr("jaxttp.forecast.seconds.timeit.repeat", lambda *_, **__: [1e-6])
    with pytest.warns(UserWarning, match="^training about .* training costs less: relin") as seen:
        sweep(network, W, X, Y, settings)
    words = ["jaxttp.race trains settings"]
    assert [str(one.message).rpartition("; ")[2] for one in seen] == words
    told = []
    sweep(network, W, X, Y, settings, progress=lambda *call: told.append(call))
    assert [call[0].startswith("training about") for call in told if call[2] == 0] == [True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sweep(network, W, X, Y, settings, relinearize=0)
