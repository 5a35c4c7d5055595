"""Targets, from keywords to results: read off the curves of the thresholds, as sure as these."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp import compare, predict_training_time, sweep
from jaxttp.forecast import (
    Candidate,
    Target,
    grid,
)
from jaxttp.forecast.methods import Path
from jaxttp.forecast.methods.base import Draws
from jaxttp.forecast.uncertainty import read_targets, read_times
from tests.draws import normal, split

KEYS = split(11, 4)
X, X_TEST = normal(KEYS[0], (12, 3)), normal(KEYS[1], (6, 3))
Y, Y_TEST = (np.asarray(x[:, 0] > 0).astype(int) for x in (X, X_TEST))
W = normal(KEYS[2], (3, 2), 1 / 4)


def network(w, x):
    return jnp.tanh(x @ w)


def first_below(curve, value):
    below = np.flatnonzero(np.asarray(curve) < value)
    return int(below[0]) if len(below) else -1


def predicted(learning_rate=1.0, **options):
    return predict_training_time(
        network, W, X, Y, learning_rate=learning_rate, steps=25, relinearize=0,
        x_test=X_TEST, y_test=Y_TEST, **options,
    )  # fmt: skip


ASKED = {
    "target_loss": (0.5, 1e-3), "target_error": 0.2, "target_test_loss": 0.55,
    "target_test_error": [0.3],
}  # fmt: skip


def test_predictions_read_every_curve():
    found = predicted(**ASKED)
    curves = {
        Target(0.5): found.loss, Target(1e-3): found.loss, Target(0.2, "error"): found.error,
        Target(0.55, on="test"): found.test_loss, Target(0.3, "error", "test"): found.test_error,
    }  # fmt: skip
    assert found.targets == {t: first_below(c, t.value) for t, c in curves.items()}
    assert list(found.targets) == list(curves)
    assert found.targets[Target(0.5)] > 0  # it says something
    assert found.targets[Target(1e-3)] == -1
    assert found.reach(found.targets) == found.targets
    table = [row.split() for row in str(found).splitlines()]
    assert ["loss", "below", "0.001", "not", "reached"] in table
    # What diverges reaches nothing, though its loss is below the target on the way.
    beyond = predicted(1.01 * found.max_learning_rate, **ASKED)
    assert not beyond.stable
    assert set(beyond.targets.values()) == set(beyond.reach(ASKED_TARGETS).values()) == {-1}


ASKED_TARGETS = (Target(0.5), Target(0.3, "error", "test"))


def test_smoothing_is_the_rules():
    found = predicted(target_loss=0.5, thresholds=(0.5,), rule="absolute", smooth=5)
    assert found.targets[Target(0.5)] == found.steps[0.5]
    assert found.reach([Target(0.5)], smooth=5) == found.targets


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_loss": 0.0}, "target_loss must be greater than 0"),
        ({"target_error": 1.5}, "target_error must be at most 1"),
        ({"target_test_loss": 0.3}, r"target_test_loss=0\.3 cannot be read here\. Give x_test"),
        ({"target_test_error": 0.3}, r"target_test_error=0\.3 cannot be read here"),
    ],
)
def test_bad_targets_are_refused_before_any_work(options, words):
    def never(w, x):
        raise AssertionError("the network was called")

    for door in (
        lambda: predict_training_time(never, W, X, Y, learning_rate=1.0, relinearize=0, **options),
        lambda: sweep(never, W, X, Y, grid(learning_rate=0.1), **options),
        lambda: compare({"one": Candidate(never, W)}, X, Y, **options),
    ):
        if "test" in words and door.__code__.co_names[0] != "predict_training_time":
            continue  # these have no such keyword
        with pytest.raises(ValueError, match=words):
            door()


def test_targets_are_as_sure_as_thresholds():
    # Oracle: the absolute rule of the same number, with all that widens its times.
    rng = np.random.default_rng(0)
    loss = np.exp(-np.linspace(0.0, 3.0, 31))
    draws = loss * np.exp(0.1 * rng.standard_normal((7, 1)))
    path = Path(
        jnp.zeros((31, 1, 1)), jnp.asarray(loss), jnp.asarray(loss / 2), jnp.asarray(loss + 0.1),
        jnp.asarray(loss), uncertainty=jnp.asarray(0.1 * loss),
        draws=Draws(jnp.asarray(draws), jnp.asarray(draws / 2)),
    )  # fmt: skip
    parts = loss * np.linspace(0.97, 1.03, 4)[:, None]
    sketched = (jnp.asarray(parts), jnp.asarray(parts / 2))
    on_train = [Target(0.3), Target(0.01), Target(0.2, "error")]
    on_test = Target(0.3, on="test")
    found = read_targets(path, [*on_train, on_test], 1, stable=True, sketched=sketched)
    for target in on_train:
        alone = read_times(path, target.rule(), stable=True, sketched=sketched)
        assert found.steps[target] == alone.steps[target.value]
        assert found.bands[target] == alone.bands[target.value]
        assert found.errors[target] == alone.errors[target.value]
    assert found.steps[on_test] == first_below(loss + 0.1, 0.3)
    assert on_test not in found.bands
    assert set(found.errors) == set(on_train)
    # An error moves in time as the loss of that step: by 10 % up or down it comes to the level
    # of that step as much later or earlier.
    level = loss[found.steps[Target(0.2, "error")]]
    moves = [first_below(loss * factor, level) for factor in (1.0, 0.9, 1.1)]
    want = max(abs(moves[0] - moves[1]), abs(moves[0] - moves[2]))
    assert found.errors[Target(0.2, "error")] == want
    low, high = found.bands[Target(0.3)]
    assert low < found.steps[Target(0.3)] < high


def test_starts_without_errors_have_no_targets_of_their_own():
    x = jnp.eye(2)
    with pytest.raises(ValueError, match="candidates begin with error 0"):
        compare(
            {"solved": Candidate(lambda w, x: x @ w, jnp.eye(2))}, x, jnp.array([0, 1]), steps=5,
            metric="error", time_steps=False,
        )  # fmt: skip
