"""Races against brute force: every setting trained to its end by optax, one after the other."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp.dynamics.batches import batch_indices
from jaxttp.forecast import Candidate, Hyperparameters, grid, race, race_starts
from jaxttp.forecast.race import RUNGS
from jaxttp.losses import get_loss

STEPS = 40
SETTINGS = grid(learning_rate=(0.01, 0.1, 0.5, 1.0, 2.0), momentum=(0.0, 0.9), steps=STEPS)
LOSS = get_loss("cross_entropy")


def network(params, x):
    return jnp.tanh(x @ params["in"]) @ params["out"]


def problem():
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (24, 4), jnp.float64)
    y = (x[:, 0] * x[:, 1] > 0).astype(int)
    params = {
        "in": jax.random.normal(keys[1], (4, 8), jnp.float64) / 2,
        "out": jax.random.normal(keys[2], (8, 2), jnp.float64) / 3,
    }
    return params, x, y


def curve_of(one, params, x, y, indices=None, network=network):
    """The loss on all samples before every step and after the last."""
    targets, optimizer = jax.nn.one_hot(y, 2), one.optimizer()
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, x, targets):
        gradient = jax.grad(lambda p: LOSS.value(network(p, x), targets))(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    losses = []
    for t in range(one.steps):
        losses.append(float(LOSS.value(network(params, x), targets)))
        rows = slice(None) if indices is None else indices[t]
        params, state = step(params, state, x[rows], targets[rows])
    return np.array([*losses, float(LOSS.value(network(params, x), targets))])


def same(found, curves):
    """What was trained is what brute force trained, to rounding of float64 over 40 steps."""
    for curve, whole in zip(found.losses, curves, strict=True):
        np.testing.assert_allclose(curve, whole[: len(curve)], rtol=1e-9)


@pytest.fixture(scope="module")
def brute():
    return np.stack([curve_of(one, *problem()) for one in SETTINGS])


def first(curve, target):
    there = np.flatnonzero(curve <= target)
    return int(there[0]) if len(there) else math.inf


@pytest.mark.parametrize("target", [0.6, 0.2])
def test_the_first_at_the_target_is_the_first_of_the_whole_grid(brute, target):
    params, x, y = problem()
    found = race(network, params, x, y, SETTINGS, target_loss=target)
    times = np.array([first(curve, target) for curve in brute])
    best = found.best()
    assert found.times[best] == times.min() == times[best]
    assert found.trainings < len(SETTINGS) / 2
    same(found, brute)
    assert all(time in (-1, whole) for time, whole in zip(found.times, times, strict=True))
    # The weights are those at the target.
    loss = float(LOSS.value(network(found.params, x), jax.nn.one_hot(y, 2)))
    assert loss == pytest.approx(found.losses[best][-1], rel=1e-12)
    assert loss <= target


def test_rungs_leave_out_the_slow_ones_and_their_cost_is_counted():
    found = race(network, *problem(), SETTINGS)
    ends = RUNGS.ends(STEPS)
    assert ends[:2] == [RUNGS.first, math.ceil(RUNGS.growth * RUNGS.first)]
    assert ends[-1] == STEPS
    left, expected, looks = len(SETTINGS), [], 0
    for end in ends:
        after = max(RUNGS.least, math.ceil(RUNGS.keep * left)) if end < STEPS else 0
        looks += left
        expected += [end] * (left - after)
        left = after
    assert sorted(found.trained.tolist()) == sorted(expected)
    # A look is one way forward, a third of a step.
    assert found.trainings == pytest.approx((sum(expected) + looks / 3) / STEPS)


def test_batches_are_the_same_for_all_and_looked_at_more_often_near_the_target():
    """From where a batch's own loss is at twice the target, every 24 / (3 * 2) = 4 steps."""
    params, x, y = problem()
    settings = grid(learning_rate=(0.1, 0.5, 1.0), batch_size=2, steps=20)
    key = jax.random.key(3)
    indices = batch_indices(key, 24, 2, 20)
    curves = [curve_of(one, params, x, y, indices) for one in settings]
    target = 0.999 * min(float(curve.min()) for curve in curves)  # near to all, and never reached
    found = race(network, params, x, y, settings, target_loss=target, key=key)
    far = race(network, params, x, y, settings, target_loss=1e-9, key=key)
    for i in range(3):
        assert far.at[i].tolist() == [0, *RUNGS.ends(20)]  # no batch comes near that target
        assert {*far.at[i]} <= {*found.at[i]} <= {*range(0, 20, 4), *RUNGS.ends(20)}
        np.testing.assert_allclose(found.losses[i], curves[i][found.at[i]], rtol=1e-9)
        assert np.all(np.diff(found.at[i]) > 0)
    assert any(len(at) > len(RUNGS.ends(20)) + 1 for at in found.at)
    assert found.ranking() == ()
    with pytest.raises(ValueError, match="no setting got to loss below"):
        found.best()
    reached = race(network, params, x, y, settings, target_loss=1.2 * target, key=key)
    best = reached.best()
    below = [t for t in reached.at[best] if curves[best][t] <= 1.2 * target]
    assert reached.times[best] == below[0] == reached.at[best][-1]


def test_what_diverges_is_out_of_the_race():
    x, y = jnp.eye(3), jnp.array([[1.0], [2.0], [3.0]])
    settings = grid(learning_rate=(1.0, 1e200), loss="squared_error", steps=30)
    found = race(lambda w, x: x @ w, jnp.zeros((3, 1)), x, y, settings, target_loss=0.5)
    assert found.finite.tolist() == [True, False]
    assert found.best() == 0
    assert found.trained[1] < 30
    alone = race(lambda w, x: x @ w, jnp.zeros((3, 1)), x, y, settings[1:], target_loss=0.5)
    assert alone.params is None
    assert alone.advice == "no setting got to loss below 0.5: try other rates"


def test_one_that_begins_late_can_be_left_out():
    """A counter-example: the first rungs do not see what a rate that rises later would do."""

    def late(t):
        return jnp.where(t < 12, 1e-3, 1.0)

    x, y = jnp.eye(3), jnp.array([[1.0], [2.0], [3.0]])
    common = {"loss": "squared_error", "steps": 60}
    slow = [Hyperparameters(0.05 + 0.001 * i, **common) for i in range(5)]
    settings = [*slow, Hyperparameters(2.0, schedule=late, **common)]
    arguments = (lambda w, x: x @ w, jnp.zeros((3, 1)), x, y)
    found = race(*arguments, settings, target_loss=0.5)
    alone = race(*arguments, settings[-1:], target_loss=0.5)
    assert alone.times[0] < found.times[found.best()]
    assert found.times[-1] == -1


@pytest.mark.parametrize("target", [0.4, None])
def test_starts_race_as_one_grid_of_all_pairs(brute, target):
    """All weights, and the last layer alone."""
    params, x, y = problem()
    starts = {
        "head": Candidate(network, params, {"in": False, "out": True}),
        "all": Candidate(network, params),
    }
    found = race_starts(starts, x, y, SETTINGS, target_loss=target)
    last = lambda out, x: network(params | {"out": out}, x)  # noqa: E731
    head = np.stack([curve_of(one, params["out"], x, y, network=last) for one in SETTINGS])
    curves = np.concatenate([head, brute])
    assert found.starts == ("head",) * 10 + ("all",) * 10
    assert found.settings == SETTINGS * 2
    same(found, curves)
    best = found.best()
    times = [first(curve, target or 0.0) for curve in curves]
    assert best == (np.argmin(curves[:, -1]) if target is None else np.argmin(times))
    assert found.order[0] == found.starts[best]
    assert sorted(found.order) == ["all", "head"]
    assert f"use {found.starts[best]}, {found.settings[best]}: " in found.advice
    assert "Race of 20 settings of 2 starting points to " in str(found)
    assert {row["start"] for row in found.rows()} == {"all", "head"}
    assert found.to_json()["order"] == list(found.order)
    if found.starts[best] == "head":
        np.testing.assert_array_equal(found.params["in"], params["in"])


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"settings": []}, ValueError, "settings must hold at least one"),
        ({"settings": SETTINGS[0]}, TypeError, "settings"),
        ({"settings": [0.1]}, TypeError, "settings"),
        ({"settings": [*SETTINGS, Hyperparameters(0.1, steps=3)]}, ValueError, "share loss, batch"),
        ({"settings": grid(learning_rate=0.1, batch_size=(None, 3))}, ValueError, "share loss"),
        ({"target_loss": 0.0}, ValueError, "target_loss must be"),
        ({"target_loss": math.nan}, ValueError, "target_loss must be"),
        ({"settings": grid(learning_rate=0.1, batch_size=3)}, ValueError, "needs key"),
        ({"protocol": "epochs"}, ValueError, "protocol"),
        ({"x": jnp.full((24, 4), jnp.nan)}, ValueError, "x "),
        ({"y": jnp.full(24, 7)}, ValueError, "y "),
    ],
)
def test_bad_input_is_named(change, error, words):
    params, x, y = problem()
    asked = {"params": params, "x": x, "y": y, "settings": SETTINGS, "target_loss": 0.3} | change
    with pytest.raises(error, match=words):
        race(network, **asked)


@pytest.mark.parametrize(
    ("candidates", "error", "words"),
    [
        ({}, ValueError, "candidates must hold at least one"),
        ([1], TypeError, "candidates"),
        ({"all": 3}, TypeError, "candidates"),
    ],
)
def test_bad_starts_are_named(candidates, error, words):
    with pytest.raises(error, match=words):
        race_starts(candidates, *problem()[1:], SETTINGS)
