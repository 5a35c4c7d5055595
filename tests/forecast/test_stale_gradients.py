"""Stale gradients: the path against plain loops, the cost of noise against exact moments."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxttp import train
from jaxttp._core.traced import network_of
from jaxttp._core.types import take
from jaxttp.dynamics.optimizers import same_program
from jaxttp.forecast import stale_gradients as stale
from jaxttp.forecast.stale_gradients import (
    BY,
    FORWARD,
    StaleState,
    Training,
    affordable,
    follow_stale,
    line_weights,
    stale_gradient_forecast,
)
from jaxttp.losses import get_loss


def linear(params, x):
    return x @ params


@pytest.fixture
def samples():
    rng = np.random.default_rng(0)
    return rng.normal(size=(60, 3)), rng.normal(size=(60, 2))


@pytest.mark.parametrize("at", [3, 5, 9])
def test_a_fitted_line_keeps_lines(at):
    refreshes = np.arange(3, 10)
    weights = line_weights(refreshes, at)
    # Exact for a + b k, and nothing else is asked: 1e-12 is rounding.
    np.testing.assert_allclose(weights @ (2.0 - 0.7 * refreshes), 2.0 - 0.7 * at, atol=1e-12)


def stale_by_hand(x, y, refreshes, rows, rate, momentum, scale=1.0):
    """NumPy: squared error 1/2 |x w - y|^2, mean over the batch; heavy ball; stale gradients."""
    weights, velocity, path = np.zeros((3, 2)), np.zeros((3, 2)), [np.zeros((3, 2))]
    for k in range(len(refreshes) - 1):
        here, there = x[rows[k]], y[rows[k]]
        gradient = here.T @ (here @ weights - there) / len(here)
        for _ in range(refreshes[k + 1] - refreshes[k]):
            velocity = momentum * velocity + gradient
            weights = weights - scale * rate * velocity
        path.append(weights)
    return path


def follow(x, y, refreshes, rows, *, scale=1.0, looks=None):
    seen, optimizer, start = [], optax.sgd(0.05, momentum=0.5), jnp.zeros((3, 2))
    values = iter(looks or [0.0] * (len(refreshes) + 1))

    def look(weights):
        seen.append(np.asarray(weights))
        return next(values)

    training = Training(
        network_of(linear), get_loss("squared_error"), same_program(optimizer, start),
        lambda step, refresh: (jnp.asarray(x[rows[refresh]]), jnp.asarray(y[rows[refresh]])), look,
    )  # fmt: skip
    begin = StaleState(refreshes[0], start, optimizer.init(start), look(start))
    points = np.arange(len(refreshes))
    return *follow_stale(training, begin, np.asarray(refreshes), points, scale=scale), seen


@pytest.fixture
def smooth_over(monkeypatch):
    """Weights are smoothed over so many refreshes on either side."""
    return lambda window: monkeypatch.setattr(stale, "BY", dataclasses.replace(BY, window=window))


UNEVEN = [0, 1, 4, 9, 11, 20]


@pytest.mark.parametrize(("refreshes", "scale"), [([0, 1, 2, 3, 4, 5], 1.0), (UNEVEN, 0.25)])
def test_the_path_is_that_of_the_optimizer_fed_with_held_gradients(
    samples, smooth_over, refreshes, scale
):
    """A refresh at every step is the training itself."""
    x, y = samples
    smooth_over(0)
    rows = np.random.default_rng(1).integers(0, 60, (5, 8))
    by_hand = stale_by_hand(x, y, refreshes, rows, 0.05, 0.5, scale=scale)
    found, left, seen = follow(x, y, refreshes, rows, scale=scale)
    assert left is None
    np.testing.assert_allclose(np.array(seen), np.array(by_hand), rtol=1e-12, atol=1e-14)

    def loss(k, weights):
        return 0.5 * np.mean(np.sum((x[rows[k]] @ weights - y[rows[k]]) ** 2, axis=1))

    for k, refresh in enumerate(found[:-1]):
        np.testing.assert_allclose(refresh.before, loss(k, by_hand[k]), rtol=1e-10)
        assert (refresh.fall is not None) is (k % 2 == 0)
        if refresh.fall is not None:
            moved = by_hand[k + 1] - by_hand[k]
            gradient = x[rows[k]].T @ (x[rows[k]] @ by_hand[k] - y[rows[k]]) / 8
            np.testing.assert_allclose(
                refresh.fall, loss(k, by_hand[k + 1]) - refresh.before, rtol=1e-10
            )
            np.testing.assert_allclose(refresh.promised, np.sum(gradient * moved), rtol=1e-10)


def test_weights_are_smoothed_over_their_neighbors_and_the_start_is_not(samples, smooth_over):
    x, y = samples
    smooth_over(2)
    rows = np.random.default_rng(1).integers(0, 60, (5, 8))
    path = np.array(stale_by_hand(x, y, UNEVEN, rows, 0.05, 0.5))
    *_, seen = follow(x, y, UNEVEN, rows)
    assert np.all(seen[0] == 0)
    for k in range(1, 6):
        near = np.arange(max(0, k - 2), min(5, k + 2) + 1)
        mean = np.tensordot(line_weights(near, k), path[near], 1)
        np.testing.assert_allclose(seen[k], mean, rtol=1e-10, atol=1e-12)


def test_a_path_that_leaves_says_where_it_was_good_last(samples, smooth_over):
    """Watched losses 2, 1, 0.5, 9 and batches above the first: the third is where it left."""
    x, y = samples
    smooth_over(0)
    rows = np.random.default_rng(1).integers(0, 60, (5, 8))
    y = y * np.where(np.isin(np.arange(60), rows[0]), 0.0, 1.0)[:, None]
    found, good, seen = follow(x, y, UNEVEN, rows, looks=[2.0, 1.0, 0.5, 9.0])
    assert [refresh.loss for refresh in found] == [2.0, 1.0, 0.5, 9.0, None, None]
    assert [refresh.before is not None for refresh in found] == [True] * 3 + [False] * 3
    assert (good.step, good.loss) == (4, 0.5)
    np.testing.assert_array_equal(good.params, seen[2])


class Product:
    """y = x A B from a small A and B = 0, what LoRA does to a kernel of zeros."""

    steps, batch = 400, 20

    def __init__(self):
        rng = np.random.default_rng(0)
        self.x = rng.normal(size=(400, 6))
        self.y = self.x @ rng.normal(size=(6, 2)) + 0.3 * rng.normal(size=(400, 2))
        self.params = {"a": jnp.asarray(0.2 * rng.normal(size=(6, 2))), "b": jnp.zeros((2, 2))}
        schedule = optax.warmup_cosine_decay_schedule(0.0, 0.02, 20, self.steps)
        self.training = {
            "loss": "squared_error", "optimizer": optax.adam(schedule), "steps": self.steps,
            "batch_size": self.batch, "key": jax.random.key(0),
        }  # fmt: skip

    def apply(self, params, x):
        return x @ (params["a"] @ params["b"])


@pytest.fixture(scope="module")
def product():
    task = Product()
    run = train(task.apply, task.params, task.x, task.y, **task.training)
    return task, run


def test_held_gradients_forecast_factors_that_move_each_other(product):
    """A network linearized at B = 0 never moves the first factor."""
    task, run = product
    outputs = np.asarray(run.outputs)[:, :40]
    found = stale_gradient_forecast(
        task.apply, task.params, task.x, task.y, x_watched=task.x[:40], y_watched=task.y[:40],
        fraction=0.3, **task.training,
    )  # fmt: skip
    own = 0.5 * np.mean(np.sum((outputs - task.y[:40]) ** 2, axis=2), axis=1)
    assert np.max(np.abs(found.loss - own)) < 0.1 * (own[0] - own[-1])
    assert found.fraction <= 0.3
    assert found.warnings is None or "±" in found.warnings
    assert found.read(0.4)[0.4] > 0


def test_steps_too_long_to_be_held_are_said(product):
    task, _ = product
    options = task.training | {"optimizer": optax.sgd(50.0)}  # the training is unstable itself
    found = stale_gradient_forecast(
        lambda w, x: x @ w, jnp.zeros((6, 2)), task.x, task.y, x_watched=task.x[:20],
        y_watched=task.y[:20], **options,
    )  # fmt: skip
    assert found.diverged
    assert found.warnings is not None
    assert "left the path" in found.warnings
    assert found.read((0.1, 0.4)) == {0.1: -1, 0.4: -1}
    assert np.all(np.isfinite(found.loss))


def test_rates_too_high_to_be_held_are_followed_at_a_fraction_of_them():
    """A valley 40 times as steep across as along it: stable at every step, not stale for four.

    A steep direction settles within a few steps, so that only the slow one shows; the fraction of
    the
    rate makes that one late, and half of the lag is taken off again. The bound is wide: what is
    tested is that a path which was useless (above its start) is near the training's.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 2)) * np.array([1.0, np.sqrt(40.0)])
    y = x @ np.array([[1.0], [0.3]])
    training = {"loss": "squared_error", "optimizer": optax.sgd(0.0156), "steps": 200,
                "batch_size": 50, "key": jax.random.key(0)}  # fmt: skip
    start = jnp.zeros((2, 1))
    real = np.asarray(train(linear, start, x, y, **training).loss)
    watched = {"x_watched": x[:50], "y_watched": y[:50]}
    found = stale_gradient_forecast(linear, start, x, y, fraction=0.3, **watched, **training)
    assert not found.diverged
    assert found.rate_fraction < 1
    assert found.warnings is not None
    assert "too high for gradients" in found.warnings
    assert found.fraction <= 0.3
    late = slice(100, None)
    assert np.max(np.abs(found.loss - real)[late]) < 0.05 * (real[0] - real[-1])
    assert np.all(found.uncertainty >= 0)


def test_a_path_sees_a_sample_once_before_it_sees_any_of_it_twice(samples, monkeypatch):
    """Of 60 sequences six a refresh: ten see each once; a training's own draw does not."""
    x, seen = samples[0], []
    y = x @ np.ones((3, 2))

    def noted(samples, rows):
        if isinstance(rows, np.ndarray):
            seen.append(rows.tolist())
        return take(samples, rows)

    monkeypatch.setattr(stale, "take", noted)
    options = {"x_watched": x[:6], "y_watched": y[:6], "optimizer": optax.sgd(0.01), "steps": 200,
               "batch_size": 6, "key": jax.random.key(0), "loss": "squared_error"}  # fmt: skip
    firsts = {}
    for total in (None, 60, 5000):
        seen.clear()
        found = stale_gradient_forecast(
            linear, jnp.zeros((3, 2)), x, y, total_samples=total, **options
        )
        assert len(seen) == len(found.refresh_steps) > 10
        firsts[total] = [row for rows in seen[:10] for row in rows]
    assert len(set(firsts[None])) < 60
    assert sorted(firsts[60]) == sorted(firsts[5000]) == list(range(60))


def test_what_a_sample_learnt_by_heart_costs_is_taken_off():
    """Noise for labels, a weight for every feature: nothing is to be learnt but 24 samples.

    Of a corpus of such samples the loss of others stays where it begins; a path on 24 of them lies
    above that. What is taken off is an estimate (its factor was chosen on networks): a third is
    asked.
    """
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2024, 20)), rng.normal(size=(2024, 1))
    options = {"x_watched": x[24:], "y_watched": y[24:], "optimizer": optax.sgd(0.01),
               "steps": 4000, "batch_size": 12, "key": jax.random.key(0), "fraction": 0.4,
               "loss": "squared_error"}  # fmt: skip
    plain, taken = (
        stale_gradient_forecast(
            linear, jnp.zeros((20, 1)), x[:24], y[:24], total_samples=total, **options
        )
        for total in (None, 10_000)
    )
    above = plain.loss[-1] - plain.loss[0], taken.loss[-1] - taken.loss[0]
    assert above[0] > 0.1
    assert above[1] < 2 / 3 * above[0]
    assert taken.uncertainty[-1] > plain.uncertainty[-1]


@given(st.integers(100, 300), st.floats(0.3, 0.95), st.floats(0.0, 5.0))
def test_the_fraction_is_kept(steps, fraction, beside):
    """A gradient a refresh, and every second batch is looked at again: a third of one."""
    refreshes = affordable(fraction, steps, evaluations=beside, batch_size=4)
    assert refreshes + FORWARD * -(-refreshes // 2) + beside <= fraction * steps + 1e-9


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fraction": 0.05}, "fraction=0.05 of 200 steps affords"),
        ({"fraction": 1.5}, "fraction"),
        ({"steps": 0}, "steps"),
        ({"batch_size": 61}, "batch_size"),
        ({"protocol": "often"}, "protocol"),
        ({"loss": "hinge"}, "loss"),
        ({"y_watched": np.zeros((3, 2))}, "y"),
        ({"total_samples": 59}, "total_samples must be an integer of at least 60"),
        ({"optimizer": optax.lbfgs()}, "optimizer"),
        ({"params": jnp.full((3, 2), jnp.nan)}, "params"),
    ],
)
def test_what_cannot_be_foreseen_is_refused_by_name(samples, change, words):
    x, y = samples
    given = {
        "apply_fn": linear, "params": jnp.zeros((3, 2)), "x": x, "y": y, "x_watched": x[:4],
        "y_watched": y[:4], "optimizer": optax.sgd(0.01), "steps": 200, "batch_size": 10,
        "key": jax.random.key(0), "loss": "squared_error",
    }  # fmt: skip
    with pytest.raises(ValueError, match=words):
        stale_gradient_forecast(**(given | change))


@pytest.mark.parametrize(("z", "said"), [(0.4, False), (1.5, True)])
def test_holds_that_keep_too_little_of_their_promise_are_said(z, said):
    """A parabola: over a hold of z its loss falls by 1 - z/2 of what its gradient promises."""
    x, start, slope = np.ones((40, 1)), jnp.zeros((1, 1)), 1.0
    options = {"x_watched": x[:2], "y_watched": x[:2], "steps": 80, "batch_size": 20,
               "fraction": 0.5,
               "key": jax.random.key(0), "loss": "squared_error"}  # fmt: skip
    stride = stale_gradient_forecast(
        linear, start, x, x, optimizer=optax.sgd(1e-3), **options
    ).stride
    found = stale_gradient_forecast(
        linear, start, x, x, optimizer=optax.sgd(z / stride / slope), **options
    )
    # Holds are of two or three whole steps each, and the first ones, from far away, count most.
    assert found.kept == pytest.approx(1 - z / 2, abs=0.25)
    assert ("of what it promised" in (found.warnings or "")) is said
    assert not found.diverged
