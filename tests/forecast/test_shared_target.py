"""One target for all settings of a sweep, the race upwards in rate, and what it costs."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp import sweep
from jaxttp.forecast import Descent, Problem, grid, sweep_kernel
from jaxttp.forecast.cost import Price
from jaxttp.forecast.sweep import shared_target
from jaxttp.losses.rule import Target
from jaxttp.ntk.estimators import Exact
from tests.draws import normal, split
from tests.forecast.predictions import prediction

KEYS = split(17, 2)
X = normal(KEYS[0], (10, 3))
Y = jnp.asarray(np.asarray(X)[:, 0] > 0).astype(int)
W = normal(KEYS[1], (3, 2), 1 / 3)
RATES = (0.05, 0.8, 3.0)
SETTINGS = grid(learning_rate=RATES, momentum=(0.0, 0.5), steps=30)


def linear(w, x):
    return x @ w


def first_at(curve, value):
    there = np.flatnonzero(np.asarray(curve) <= value)
    return int(there[0]) if len(there) else -1


@pytest.fixture(scope="module")
def plain():
    return sweep(linear, W, X, Y, SETTINGS, relinearize=0)


def test_the_target_is_a_fraction_of_the_best_drop_rounded_up():
    curves = np.array([[2.0, 1.5, 1.4], [2.0, 1.0, 0.2]])
    assert shared_target(curves, 0.1) == Target(0.38)  # 0.2 + 0.1 * 1.8 exactly
    assert shared_target(curves, 0.1034) == Target(0.39)  # 0.3861
    assert shared_target(1e-3 * curves, 0.1) == Target(0.00038)
    assert shared_target(curves / 2, 0.5, "error") == Target(0.55, "error")
    assert shared_target(curves[:, ::-1], 0.1) is None  # nothing falls
    assert shared_target(curves[:0], 0.1) is None
    assert shared_target(np.array([[1.0, np.nan]]), 0.1) is None


def test_all_settings_are_measured_by_it(plain):
    (target,) = plain.targets
    best = min(plain.final_loss[plain.stable])
    start = plain.loss[0, 0]
    exact = best + 0.1 * (start - best)
    assert exact <= target.value <= exact * 1.1  # two digits
    assert plain.ranked_by == target
    assert plain.shared
    expected = [first_at(c, target.value) if ok else -1
                for c, ok in zip(plain.loss, plain.stable, strict=True)]  # fmt: skip
    assert plain.target_steps[:, 0].tolist() == expected
    assert plain.best() == min(
        (i for i, t in enumerate(expected) if t >= 0), key=lambda i: expected[i]
    )
    assert "a target that the sweep chose for all" in str(plain)


def test_where_no_target_is_for_all():
    """Some rules have the same targets already."""
    below = sweep(linear, W, X, Y, SETTINGS, relinearize=0, rule="absolute", thresholds=(0.5,))
    assert below.targets == ()
    given = sweep(linear, W, X, Y, SETTINGS, relinearize=0, target_loss=0.5)
    assert (given.targets, given.shared) == ((Target(0.5),), False)
    hopeless = sweep(linear, W, X, Y, grid(learning_rate=1e6, steps=5), relinearize=0)
    assert hopeless.targets == ()


def test_errors_have_a_target_of_their_own():
    found = sweep(linear, W, X, Y, SETTINGS, relinearize=0, metric="error")
    (target,) = found.targets
    assert target.metric == "error"
    assert found.times()[found.best()] == first_at(found.error[found.best()], target.value)


def test_a_linear_network_is_raced_to_its_true_winner(plain):
    """Its forecasts are exact, so the winner is that of the whole grid trained for real."""
    found = sweep(linear, W, X, Y, SETTINGS, relinearize=1)
    target, best = found.targets[0].value, found.best()
    targets, times = jnp.eye(2)[Y], []
    for one in SETTINGS:
        w, v, losses = np.asarray(W, np.float64), 0.0, []
        for _ in range(31):
            f = np.asarray(X, np.float64) @ w
            p = np.exp(f - f.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            losses.append(-np.mean(np.sum(np.asarray(targets) * np.log(p), axis=1)))
            v = one.momentum * v - np.asarray(X).T @ (p - targets) / len(X)
            w = w + one.learning_rate * v
        times.append(first_at(losses, target))
    reached = [t for t, ok in zip(times, found.stable, strict=True) if ok and t >= 0]
    assert times[best] == min(reached)
    assert found.times()[best] == times[best]
    assert best in found.relinearized
    assert found.trainings > plain.trainings


def test_what_oscillates_counts_twice(plain):
    order, times = plain.ranking(), plain.times()
    leader = order[0]
    one = prediction(doubted_from=0, targets=dict.fromkeys(plain.targets, 0))
    found = dataclasses.replace(plain, forecasts={leader: one}, relinearized=(leader,))
    weighed = {i: times[i] * (2 if i == leader else 1) for i in order}
    ranked = [weighed[i] for i in found.ranking()]
    assert ranked == sorted(ranked)
    assert found.times().tolist() == times.tolist()
    assert f"about {times[leader]}" in str(found)
    assert [row["oscillates"] for row in found.rows()] == [i == leader for i in range(len(times))]


def test_the_cost_is_counted(plain):
    problem = Problem.of(linear, W, X, Y)
    price = Price.of(problem, Descent.of(learning_rate=0.05, steps=30), Exact())
    screening = price.kernel + len(SETTINGS) * 30 * price.product
    assert plain.trainings == pytest.approx(screening / price.training)
    kernel = jnp.eye(4).reshape(2, 2, 2, 2)
    found = sweep_kernel(kernel, jnp.zeros((2, 2)), jnp.array([0, 1]), SETTINGS)
    assert found.trainings is None
