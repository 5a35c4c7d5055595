"""The settings that lead a sweep are forecast again, as `predict_training_time` forecasts them."""

import dataclasses
import importlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import predict_training_time, sweep, train
from jaxttp.forecast import grid
from jaxttp.losses.rule import Target
from tests.draws import normal, split
from tests.forecast.predictions import prediction

module = importlib.import_module("jaxttp.forecast.sweep")  # its function has the same name

KEYS = split(3, 3)
X = normal(KEYS[0], (14, 3))
Y = jnp.asarray(np.sum(np.asarray(X)[:, :2] > [[0.0, 0.5]], axis=1))
W = {"in": normal(KEYS[1], (3, 8)), "out": normal(KEYS[2], (8, 3), 1 / 3)}
SETTINGS = grid(learning_rate=(0.01, 0.05, 0.1, 0.2, 1e3), steps=25)


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
    assert found.cheapest()[0] in found.relinearized
    for i in found.relinearized:
        one = predict_training_time(
            network, W, X, Y, learning_rate=SETTINGS[i].learning_rate, steps=25, relinearize=2,
            **options,
        )  # fmt: skip
        # the very computation: rounding of float64 at most
        np.testing.assert_allclose(found.loss[i], one.loss, rtol=1e-10)
        np.testing.assert_allclose(found.error[i], one.error, rtol=1e-10)
        assert dict(zip(found.thresholds, found.steps[i], strict=True)) == dict(one.steps)
        assert dict(zip(found.targets, found.target_steps[i], strict=True)) == dict(one.targets)
        assert (found.trust[i], bool(found.stable[i])) == (one.trust, one.stable)
        known = {**one.steps_uncertainty, **one.targets_uncertainty}
        assert {goal: found.off(i, goal) for goal in known} == known
    rest = sorted({*range(len(SETTINGS))} - {*found.relinearized})
    np.testing.assert_array_equal(found.loss[rest], plain.loss[rest])
    assert "leading settings along rebuilt kernels" in str(found)
    assert str(found).count("one kernel\n") == sum(i in rest for i in found.cheapest())
    assert [row["relinearized"] for row in found.rows()] == [
        i in found.relinearized for i in range(len(SETTINGS))
    ]


@pytest.mark.slow
def test_schedules_losses_and_batches_of_their_own():
    key = jax.random.key(5)
    settings = (
        *grid(learning_rate=0.3, schedule="cosine", momentum=0.5, batch_size=5, steps=20),
        *grid(learning_rate=0.02, loss="squared_error", steps=12),
    )
    found = sweep(network, W, X, Y, settings, relinearize=1, key=key, target_loss=0.9)
    for i, loss in ((0, "cross_entropy"), (1, "squared_error")):
        trained = {"optimizer": settings[i].optimizer(), "batch_size": 5, "key": key}
        one = predict_training_time(
            network, W, X, Y, loss=loss, steps=settings[i].steps, relinearize=1, target_loss=0.9,
            **(trained if i == 0 else {"learning_rate": 0.02}),
        )  # fmt: skip
        np.testing.assert_allclose(found.loss[i, : settings[i].steps + 1], one.loss, rtol=1e-9)
        assert found.target_steps[i, 0] == one.targets[Target(0.9)]


def test_nothing_stable_leaves_nothing_to_follow():
    found = sweep(network, W, X, Y, grid(learning_rate=1e4, steps=5))
    assert found.relinearized == ()
    assert "rebuilt" not in str(found)


def test_bad_numbers_of_kernels_are_refused_before_the_network_is_called():
    def never(w, x):
        raise AssertionError

    with pytest.raises(ValueError, match="relinearize must be an integer of at least 0"):
        sweep(never, W, X, Y, SETTINGS, relinearize=-1)


@pytest.mark.slow
def test_a_few_settings_are_all_followed():
    """Also those that come too late, so that every time is of one kind."""
    found = sweep(network, W, X, Y, SETTINGS[:4], relinearize=1, target_loss=0.9)
    assert sorted(found.relinearized) == [0, 1, 2, 3]
    assert len(found.ranking()) < 4
    assert found.depth == "all along rebuilt kernels"


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
def test_what_converges_along_rebuilt_kernels_is_stable_above_the_first_limit():
    """Momentum leads, so that the rate without it was not looked at and said to diverge."""
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
    monkeypatch.setattr("jaxttp.forecast.options.LONG", 0.0)
    said = r"forecasting up to 2 leading settings again may take minutes \(.* training itself costs"
    with pytest.warns(UserWarning, match=said) as seen:
        sweep(network, W, X, Y, settings)
    assert [str(one.message).rpartition("; ")[2] for one in seen] == ["jaxttp.race trains them"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sweep(network, W, X, Y, settings, relinearize=0)


def forecast_again(swept, off, unsure=()):
    """A sweep whose forecasts say that their times are off by so much, and may fail."""
    found = {
        i: prediction(
            unsure_from=3 if i in unsure else None, targets=dict.fromkeys(known, 0),
            targets_uncertainty=known,
        )
        for i, known in off.items()
    }  # fmt: skip
    return dataclasses.replace(swept, forecasts=found, relinearized=tuple(found))


def test_rivals_that_cannot_be_told_apart_are_named():
    plain = sweep(network, W, X, Y, SETTINGS[:4], relinearize=0, target_loss=0.9)
    assert (plain.tied(), plain.tie) == ((), "")
    first, second = plain.ranking()
    times, goal = plain.times(), plain.ranked_by
    gap = int(times[second] - times[first])
    assert gap > 0
    unsure = forecast_again(plain, {first: {goal: 1}, second: {goal: gap}})
    assert unsure.tied() == (second,)
    assert str(SETTINGS[second]) in unsure.tie
    assert f"{times[second]} ± {gap}" in str(unsure)
    assert "which is first is not sure" in str(unsure)
    row = unsure.rows()[second]
    assert row[f"uncertainty_{goal.column}"] == gap
    sure = forecast_again(plain, {first: {goal: 1}, second: {goal: gap - 2}})
    assert sure.tied() == ()


def test_what_may_not_train_comes_last():
    """Whatever its rule of thumb says of its time and its end."""
    plain = sweep(network, W, X, Y, SETTINGS[:4], relinearize=0, target_loss=0.9)
    first, second = plain.ranking()
    goal = plain.ranked_by
    off = {first: {goal: 1}, second: {goal: 1}}
    risky = forecast_again(plain, off, unsure=(first,))
    assert risky.ranking() == risky.cheapest() == (second, first)
    assert risky.pareto() == (second,)
    assert risky.best() == second
    assert risky.tied() == (first,)
    assert risky.tie == (
        f"which is first is not sure: sooner, if they train at all, may be {SETTINGS[first]}"
    )
    assert "may not train" in str(risky)
    assert [row["unsure"] for row in risky.rows()] == [i == first for i in range(4)]
    only = forecast_again(plain, off, unsure=(first, second))
    assert (only.ranking(), only.pareto()) == (plain.ranking(), plain.pareto())


@pytest.mark.slow
def test_a_goal_that_one_kernel_reaches_with_no_setting_is_looked_for_along_rebuilt_ones(
    monkeypatch,
):
    """The first kernel was late, so that the sweep said that no setting gets there."""
    monkeypatch.setattr(module, "FEW", 0)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(80, 6))
    labels = (x[:, 0] * x[:, 1] > 0).astype(int)
    first, second = split(4, 2)
    w = {"in": normal(first, (6, 48)) / 2.5, "out": normal(second, (48, 2)) / 7}
    settings = grid(learning_rate=(0.03, 0.1, 0.2), momentum=0.9, steps=60)
    options = {"target_loss": 0.3}
    plain = sweep(network, w, x, labels, settings, relinearize=0, **options)
    assert plain.ranking() == ()
    assert plain.nearest()[0] == 2  # the highest rate comes nearest
    assert "comes nearest, to a loss of" in plain.advice
    assert "try more steps, and that is the highest rate of its kind" in plain.advice
    found = sweep(network, w, x, labels, settings, **options)
    real = train(
        network, w, x, labels, loss="cross_entropy", optimizer=optax.sgd(0.2, 0.9), steps=60
    )
    (time,) = real.reach([0.3]).values()
    assert 0 < time < 60
    assert found.ranking()[0] == 2
    # four to nine kernels are off by a few per cent over so few steps
    assert abs(found.times()[2] - time) <= 2
