"""Several starting points side by side."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp import predict_training_time
from jaxttp.forecast import Candidate, compare
from tests import oracles
from tests.draws import normal, split
from tests.forecast.predictions import prediction

module = importlib.import_module("jaxttp.forecast.compare")  # its function has the same name
KEYS = split(2, 5)
X = normal(KEYS[0], (16, 4))
Y = np.argmax(np.asarray(X) @ np.asarray(normal(KEYS[1], (4, 3))), axis=1)
PARAMS = {
    "in": normal(KEYS[2], (4, 12), 1 / 2),
    "out": normal(KEYS[3], (12, 3), 1 / 4),
}


def apply_fn(w, x):
    return jnp.tanh(x @ w["in"]) @ w["out"]


def wide(w, x):
    return x @ w


CANDIDATES = {
    "head only": Candidate(apply_fn, PARAMS, {"in": False, "out": True}),
    "all": Candidate(apply_fn, PARAMS),
    "linear": Candidate(wide, jnp.zeros((4, 3))),
}


@pytest.fixture(scope="module")
def found():
    return compare(CANDIDATES, X, Y, steps=60, relinearize=0)


@pytest.mark.slow
def test_ranked_by_steps_then_loss(found):
    assert set(found.names) == set(CANDIDATES)
    sweep = found.sweep
    times = [tuple(t if t >= 0 else np.inf for t in row) for row in sweep.steps]
    assert times == sorted(times)
    assert sweep.thresholds[1] == pytest.approx(5 * sweep.thresholds[0])  # 0.5 and 0.1 of the loss
    for i in range(3):
        for threshold, t in zip(sweep.thresholds, sweep.steps[i], strict=True):
            below = np.flatnonzero(sweep.loss[i] < threshold)
            assert t == (below[0] if below.size else -1)
    assert np.all(sweep.step_seconds > 0)
    assert np.all(np.isinf(sweep.cost(sweep.thresholds[0])) == (sweep.steps[:, 0] < 0))


@pytest.mark.slow
def test_explanations_by_hand(found):
    for name, why in zip(found.names, found.explanations, strict=True):
        one = CANDIDATES[name]
        if name == "head only":
            kernel = oracles.kernel(lambda w, x: apply_fn(PARAMS | w, x), {"out": PARAMS["out"]}, X)
        else:
            kernel = oracles.kernel(one.apply_fn, one.params, X)
        f0 = np.asarray(one.apply_fn(one.params, X))
        g = (oracles.softmax(f0) - np.eye(3)[Y]).reshape(-1)
        matrix = kernel.reshape(48, 48)
        values, vectors = np.linalg.eigh(matrix)
        assert why.speed == pytest.approx(g @ matrix @ g / (values[-1] * g @ g), rel=1e-9)
        leading = values > values[-10] * (1 - 1e-5)  # a linear network has them in threes
        fraction = np.sum((vectors[:, leading].T @ g) ** 2) / (g @ g)
        assert why.alignment == pytest.approx(fraction, rel=1e-9)
        assert why.rank == np.linalg.matrix_rank(matrix)
        assert why.condition_number == pytest.approx(values[-1] / values[-why.rank], rel=1e-6)


def test_what_has_no_eigenvalue_does_not_lead():
    """Of a kernel of rank 4: the fraction within its range, whatever order rounding gives zeros."""
    draw = np.random.default_rng(3)
    x, y = draw.normal(size=(14, 4)), draw.normal(size=(14, 1))
    weights = draw.normal(size=(4, 1))
    (why,) = compare(
        {"linear": Candidate(lambda w, x: x @ w, weights)}, x, y, loss="squared_error", steps=5,
        relinearize=0,
    ).explanations  # fmt: skip
    g = x @ weights - y
    within = x @ np.linalg.lstsq(x, g)[0]
    assert why.rank == 4
    assert why.alignment == pytest.approx(np.sum(within**2) / np.sum(g**2), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("rebuilt", [0, 2])
def test_each_is_what_a_forecast_of_its_own_says(rebuilt):
    options = {"learning_rate": 0.2, "steps": 30, "target_loss": 0.9, "relinearize": rebuilt}
    got = compare(CANDIDATES, X, Y, momentum=0.5, rule="relative", time_steps=False, **options)
    assert "seconds" not in str(got.rows())
    for i, name in enumerate(got.names):
        one = CANDIDATES[name]
        single = predict_training_time(
            one.apply_fn, one.params, X, Y, momentum=0.5, trainable=one.trainable, **options
        )
        np.testing.assert_allclose(got.sweep.loss[i], single.loss, rtol=1e-9)  # float64
        assert got.sweep.steps[i].tolist() == list(single.steps.values())
        assert got.sweep.target_steps[i].tolist() == list(single.targets.values())
        assert got.sweep.warnings[i] == single.warnings
    assert f"the FLOPs of {got.sweep.trainings:.2g} training runs of one start" in str(got)


def test_what_follows_a_held_kernel_comes_last(found):
    """Whatever its times: of candidates, as of the rates of one."""
    last = len(found.names) - 1
    held = {0: prediction(frozen_from=3), last: prediction()}
    sweep = dataclasses.replace(found.sweep, forecasts=held, relinearized=(0, last))
    assert min(range(3), key=lambda i: module._rank(found.sweep, i)) == 0
    assert max(range(3), key=lambda i: module._rank(sweep, i)) == 0


def test_samples_of_their_own_and_error_rates():
    """A candidate that wants its inputs doubled is another one on half of them."""
    halved = {"in": PARAMS["in"] / 2, "out": PARAMS["out"]}
    frozen = {"in": False, "out": True}  # the same function of the head, whatever the input's scale
    got = compare(
        {"a": Candidate(apply_fn, PARAMS, frozen), "b": Candidate(apply_fn, halved, frozen, 2 * X)},
        X, Y, steps=30, metric="error", time_steps=False, relinearize=0,
    )  # fmt: skip
    np.testing.assert_allclose(got.sweep.loss[0], got.sweep.loss[1], rtol=1e-9)
    first = np.mean(np.argmax(apply_fn(PARAMS, X), axis=1) != Y)
    np.testing.assert_allclose(got.sweep.thresholds, [0.1 * first, 0.5 * first])
    assert "error below" in str(got)
    with pytest.raises(ValueError, match=r"candidates\['a'\]\.x must hold the 16 samples of x"):
        compare({"a": Candidate(apply_fn, PARAMS, None, X[:3])}, X, Y)


def test_bad_input():
    with pytest.raises(ValueError, match="candidates must hold at least one"):
        compare({}, X, Y)
    with pytest.raises(ValueError, match="rule='soon' is not known"):
        compare(CANDIDATES, X, Y, rule="soon")
    with pytest.raises(ValueError, match="metric='f1' is not known"):
        compare(CANDIDATES, X, Y, metric="f1")
    with pytest.raises(ValueError, match="learning_rate must be"):
        compare(CANDIDATES, X, Y, learning_rate=-1.0)
    with pytest.raises(ValueError, match="batch_size"):
        compare(CANDIDATES, X, Y, batch_size=40, key=jax.random.key(0))
    with pytest.raises(ValueError, match="key must be a jax"):
        compare(CANDIDATES, X, Y, batch_size=4, key=jnp.zeros(3))
    bad = {"bad": Candidate(wide, jnp.full((4, 3), jnp.nan))}
    with pytest.raises(ValueError, match=r"candidates\['bad'\].params holds 12"):
        compare(bad, X, Y)


def test_unstable_ones_come_last():
    got = compare(
        CANDIDATES, X, np.eye(3)[Y], loss="squared_error", learning_rate=1.5, steps=40,
        time_steps=False, relinearize=0,
    )  # fmt: skip
    gone = [bool(np.all(row < 0)) for row in got.sweep.steps]
    assert gone == sorted(gone)
    assert any(gone)
