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


def curve_of(one, params, x, y, loss="cross_entropy", indices=None):
    """The loss on all samples before every step and after the last."""
    found = get_loss(loss)
    targets = jax.nn.one_hot(y, 2) if loss == "cross_entropy" else y
    optimizer = one.optimizer()
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, x, targets):
        gradient = jax.grad(lambda p: found.value(network(p, x), targets))(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    losses = []
    for t in range(one.steps):
        losses.append(float(found.value(network(params, x), targets)))
        rows = slice(None) if indices is None else indices[t]
        params, state = step(params, state, x[rows], targets[rows])
    return np.array([*losses, float(found.value(network(params, x), targets))]), params


@pytest.fixture(scope="module")
def brute():
    return np.stack([curve_of(one, *problem())[0] for one in SETTINGS])


def first(curve, goal):
    there = np.flatnonzero(curve <= goal)
    return int(there[0]) if len(there) else math.inf


@pytest.mark.parametrize("goal", [0.6, 0.4, 0.2])
def test_the_first_at_the_goal_is_the_first_of_the_whole_grid(brute, goal):
    found = race(network, *problem(), SETTINGS, target_loss=goal)
    times = np.array([first(curve, goal) for curve in brute])
    assert found.times[found.best()] == times.min() == times[found.best()]
    assert found.trainings < len(SETTINGS) / 2
    # What was trained is what brute force trained, to rounding of float64 over 40 steps.
    for curve, whole in zip(found.losses, brute, strict=True):
        np.testing.assert_allclose(curve, whole[: len(curve)], rtol=1e-9)
    assert all(time in (-1, whole) for time, whole in zip(found.times, times, strict=True))


def test_the_weights_are_those_at_the_goal():
    params, x, y = problem()
    found = race(network, params, x, y, SETTINGS, target_loss=0.3)
    targets = jax.nn.one_hot(y, 2)
    loss = float(get_loss("cross_entropy").value(network(found.params, x), targets))
    assert loss == pytest.approx(found.losses[found.best()][-1], rel=1e-12)
    assert loss <= 0.3


def test_rungs_leave_out_the_slow_ones_and_their_cost_is_counted():
    found = race(network, *problem(), SETTINGS)
    ends = RUNGS.ends(STEPS)
    assert ends[0] == RUNGS.first
    assert ends[1] == math.ceil(RUNGS.growth * RUNGS.first)
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


def test_batches_are_the_same_for_all_and_looked_at_now_and_then():
    params, x, y = problem()
    settings = grid(learning_rate=(0.1, 0.5, 1.0), batch_size=2, steps=20)
    key = jax.random.key(3)
    found = race(network, params, x, y, settings, target_loss=1e-9, key=key)
    indices = batch_indices(key, 24, 2, 20)
    for i, one in enumerate(settings):
        assert found.at[i].tolist() == [0, *RUNGS.ends(20)]  # no batch comes near that goal
        whole, _ = curve_of(one, params, x, y, indices=indices)
        np.testing.assert_allclose(found.losses[i], whole[found.at[i]], rtol=1e-9)
    assert found.ranking() == ()
    assert "no setting got to" in found.advice
    with pytest.raises(ValueError, match="no setting got to loss below"):
        found.best()


def test_a_part_of_the_weights():
    params, x, y = problem()
    settings = grid(learning_rate=1.0, schedule="cosine", steps=10)
    found = race(
        network, params, x, y, settings, trainable={"in": False, "out": True}, target_loss=1e-9
    )
    np.testing.assert_array_equal(found.params["in"], params["in"])
    features, targets = np.tanh(x @ params["in"]), jax.nn.one_hot(y, 2)
    w, losses = np.asarray(params["out"]), []
    for rate in settings[0].rates():
        odds = np.exp(features @ w)
        shares = odds / odds.sum(axis=1, keepdims=True)
        losses.append(-np.mean(np.log(np.sum(shares * targets, axis=1))))
        w = w - rate * features.T @ (shares - targets) / len(x)
    np.testing.assert_allclose(found.losses[0][:10], losses, rtol=1e-9)


def test_what_diverges_is_out_of_the_race():
    x, y = jnp.eye(3), jnp.array([[1.0], [2.0], [3.0]])
    settings = grid(learning_rate=(1.0, 1e200), loss="squared_error", steps=30)
    found = race(lambda w, x: x @ w, jnp.zeros((3, 1)), x, y, settings, target_loss=0.5)
    assert found.finite.tolist() == [True, False]
    assert found.best() == 0
    assert found.trained[1] < 30
    alone = race(lambda w, x: x @ w, jnp.zeros((3, 1)), x, y, settings[1:], target_loss=0.5)
    assert alone.params is None
    assert alone.advice == ("no setting got to loss below 0.5: try other rates")


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


def starts():
    """All weights, the last layer alone, and other weights of half the size."""
    params, _, _ = problem()
    half = jax.tree.map(lambda leaf: leaf / 2, params)
    head = {"in": False, "out": True}
    return {
        "all": Candidate(network, params),
        "head": Candidate(network, params, head),
        "half": Candidate(network, half),
    }


@pytest.mark.parametrize("goal", [0.4, None])
def test_starts_race_as_one_grid_of_all_pairs(brute, goal):
    _, x, y = problem()
    candidates = {name: starts()[name] for name in ("half", "all")}
    found = race_starts(candidates, x, y, SETTINGS, target_loss=goal)
    half = np.stack([curve_of(one, candidates["half"].params, x, y)[0] for one in SETTINGS])
    curves = np.concatenate([half, brute])
    assert found.starts == ("half",) * 10 + ("all",) * 10
    assert found.settings == SETTINGS * 2
    for curve, whole in zip(found.losses, curves, strict=True):
        np.testing.assert_allclose(curve, whole[: len(curve)], rtol=1e-9)
    best = found.best()
    if goal is None:
        assert best == int(np.argmin(curves[:, -1]))
    else:
        times = [first(curve, goal) for curve in curves]
        assert found.times[best] == min(times) == times[best]
    assert found.order[0] == found.starts[best]
    assert sorted(found.order) == ["all", "half"]
    assert f"use {found.starts[best]}, {found.settings[best]}: " in found.advice
    assert "Race of 20 settings of 2 starting points to " in str(found)
    assert {row["start"] for row in found.rows()} == {"all", "half"}
    assert found.to_json()["order"] == list(found.order)
    targets = jax.nn.one_hot(y, 2)
    loss = float(get_loss("cross_entropy").value(network(found.params, x), targets))
    assert loss == pytest.approx(found.losses[best][-1], rel=1e-12)


def test_starts_that_were_left_out_come_by_how_far_they_got():
    params, x, y = problem()
    settings = grid(learning_rate=(0.1, 1.0), steps=10)
    found = race_starts(starts(), x, y, settings, target_loss=1e-9)
    assert found.starts == ("all", "all", "head", "head", "half", "half")
    alone = race(network, params, x, y, settings, trainable={"in": False, "out": True})
    for curve, whole in zip(found.losses[2:4], alone.losses, strict=True):
        seen = min(len(curve), len(whole))
        np.testing.assert_allclose(curve[:seen], whole[:seen])
    assert found.ranking() == ()
    furthest = [i for i in range(6) if found.trained[i] == found.trained.max()]
    assert found.order[0] == found.starts[min(furthest, key=lambda i: found.losses[i][-1])]
    np.testing.assert_array_equal(alone.params["in"], params["in"])


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"candidates": {}}, ValueError, "candidates must hold at least one"),
        ({"candidates": [1]}, TypeError, "candidates"),
        ({"candidates": {"all": 3}}, TypeError, "candidates"),
        ({"target_loss": -1.0}, ValueError, "target_loss must be"),
        ({"x": jnp.ones((3, 4))}, ValueError, "y "),
    ],
)
def test_bad_starts_are_named(change, error, words):
    params, x, y = problem()
    asked = {"candidates": {"all": Candidate(network, params)}, "x": x, "y": y,
             "settings": SETTINGS}  # fmt: skip
    with pytest.raises(error, match=words):
        race_starts(**(asked | change))


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
)  # fmt: skip
def test_bad_input_is_named(change, error, words):
    params, x, y = problem()
    asked = {"params": params, "x": x, "y": y, "settings": SETTINGS, "target_loss": 0.3} | change
    with pytest.raises(error, match=words):
        race(network, **asked)


def test_near_the_goal_batches_are_looked_at_more_often():
    """From where a batch's own loss is at twice the goal, every 24 / (3 * 2) = 4 steps."""
    params, x, y = problem()
    settings = grid(learning_rate=(0.1, 0.5, 1.0), batch_size=2, steps=20)
    key = jax.random.key(3)
    indices = batch_indices(key, 24, 2, 20)
    curves = [curve_of(one, params, x, y, indices=indices)[0] for one in settings]
    goal = 0.999 * min(float(curve.min()) for curve in curves)  # near to all, and never reached
    found = race(network, params, x, y, settings, target_loss=goal, key=key)
    for i, one in enumerate(settings):
        far = race(network, params, x, y, [one], target_loss=1e-9, key=key)
        assert {*far.at[0]} <= {*found.at[i]} <= {*range(0, 20, 4), *RUNGS.ends(20)}
        np.testing.assert_allclose(found.losses[i], curves[i][found.at[i]], rtol=1e-9)
    assert any(len(at) > len(RUNGS.ends(20)) + 1 for at in found.at)
    assert all(np.all(np.diff(at) > 0) for at in found.at)
    reached = race(network, params, x, y, settings, target_loss=1.2 * goal, key=key)
    first = reached.best()
    looked = reached.at[first]
    below = [t for t in looked if curves[first][t] <= 1.2 * goal]
    assert reached.times[first] == below[0] == looked[-1]
