"""Several starting points side by side."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import Model, predict_training_time
from jaxttp.forecast import Candidate, Descent, Problem, compare
from jaxttp.forecast.cost import Price
from jaxttp.losses import get_loss
from jaxttp.models import lora
from jaxttp.ntk import Exact
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
    times = [tuple(t if t >= 0 else np.inf for t in row) for row in found.steps]
    assert times == sorted(times)
    assert found.thresholds[0] < found.thresholds[1]  # a tenth and a half of the largest loss
    assert found.thresholds[1] == pytest.approx(5 * found.thresholds[0])
    for i in range(3):
        for threshold, t in zip(found.thresholds, found.steps[i], strict=True):
            below = np.flatnonzero(found.loss[i] < threshold)
            assert t == (below[0] if below.size else -1)
    np.testing.assert_allclose(found.final_loss, found.loss[:, -1])
    assert np.all(found.step_seconds > 0)
    assert np.all(found.seconds()[found.steps < 0] == np.inf)


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
        share = np.sum((vectors[:, leading].T @ g) ** 2) / (g @ g)
        assert why.alignment == pytest.approx(share, rel=1e-9)
        assert why.rank == np.linalg.matrix_rank(matrix)
        assert why.condition_number == pytest.approx(values[-1] / values[-why.rank], rel=1e-6)
        assert why.largest == pytest.approx(values[-1] / 16)


def test_what_has_no_eigenvalue_does_not_lead():
    """Of a kernel of rank 4: the share within its range, whatever order rounding gives zeros."""
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
def test_a_given_rate_and_the_relative_rule_are_the_forecast_of_each():
    got = compare(
        CANDIDATES, X, Y, learning_rate=0.2, momentum=0.5, steps=40, rule="relative",
        time_steps=False, relinearize=0,
    )  # fmt: skip
    assert np.all(np.isnan(got.step_seconds))
    assert "seconds" not in str(got.rows())
    for i, name in enumerate(got.names):
        one = CANDIDATES[name]
        single = predict_training_time(
            one.apply_fn, one.params, X, Y, relinearize=0, learning_rate=0.2, momentum=0.5,
            steps=40, trainable=one.trainable,
        )  # fmt: skip
        np.testing.assert_allclose(got.loss[i], single.loss, rtol=1e-9)
        assert dict(zip(got.thresholds, got.steps[i].tolist(), strict=True)) == single.steps


@pytest.mark.slow
def test_along_rebuilt_kernels_each_is_what_a_forecast_of_its_own_says():
    got = compare(
        CANDIDATES, X, Y, learning_rate=0.2, steps=30, target_loss=0.9, time_steps=False,
        relinearize=2,
    )  # fmt: skip
    for i, name in enumerate(got.names):
        one = CANDIDATES[name]
        single = predict_training_time(
            one.apply_fn, one.params, X, Y, learning_rate=0.2, steps=30, target_loss=0.9,
            trainable=one.trainable, relinearize=2,
        )  # fmt: skip
        np.testing.assert_allclose(got.loss[i], single.loss, rtol=1e-9)  # rounding of float64
        assert got.target_steps[i].tolist() == list(single.targets.values())
        assert got.trust[i] == single.trust
    with pytest.raises(ValueError, match="relinearize must be an integer of at least 0"):
        compare(CANDIDATES, X, Y, relinearize=-2)


def test_what_its_network_denied_comes_last(monkeypatch):
    """Between candidates, and between the rates of one: forecasts whose kernel was held."""
    options = {"steps": 30, "time_steps": False, "relinearize": 0}
    plain = compare(CANDIDATES, X, Y, **options)
    first = CANDIDATES[plain.names[0]].apply_fn
    alike = {name for name, one in CANDIDATES.items() if one.apply_fn is first}
    chosen = {name: s.learning_rate for name, s in zip(plain.names, plain.settings, strict=True)}

    def follow(only_best, swept, lines, *_, **options):
        every = range(len(swept.settings))
        found = {i: prediction() for i in every}
        swept = dataclasses.replace(swept, relinearized=tuple(every), forecasts=found)
        if lines.problem.apply_fn.apply_fn is first:
            held = [module._best(swept)] if only_best else every
            found |= dict.fromkeys(held, prediction(held_from=3))
        return dataclasses.replace(swept, forecasts=found)

    monkeypatch.setattr(module, "forecast_leaders", functools.partial(follow, False))
    found = compare(CANDIDATES, X, Y, **options)
    assert {*found.names[-len(alike) :]} == alike
    assert found.names[0] not in alike
    for name, setting in zip(found.names, found.settings, strict=True):
        assert setting.learning_rate == chosen[name]  # none stands before another
    monkeypatch.setattr(module, "forecast_leaders", functools.partial(follow, True))
    found = compare(CANDIDATES, X, Y, **options)
    for name, setting in zip(found.names, found.settings, strict=True):
        assert (setting.learning_rate == chosen[name]) == (name not in alike)


def test_what_it_cost_is_counted():
    """One kernel each, and no training: by hand from the price of every part."""
    options = {"learning_rate": 0.2, "steps": 30, "time_steps": False, "relinearize": 0}
    found = compare(CANDIDATES, X, Y, **options)
    total = 0.0
    for one in CANDIDATES.values():
        problem = Problem.of(one.apply_fn, one.params, X, Y, trainable=one.trainable)
        price = Price.of(problem, Descent.of(learning_rate=0.2, steps=30), Exact())
        total += price.forecast(1, 0, 30) / price.training  # a product with it a step
    assert found.trainings == pytest.approx(total, rel=1e-12)
    assert f"by count this cost {found.trainings:.2g} trainings of one start" in str(found)


def test_samples_of_their_own_and_error_rates():
    """A candidate that wants its inputs doubled is another one on half of them."""
    halved = {"in": PARAMS["in"] / 2, "out": PARAMS["out"]}
    frozen = {"in": False, "out": True}  # the same function of the head, whatever the input's scale
    got = compare(
        {"a": Candidate(apply_fn, PARAMS, frozen), "b": Candidate(apply_fn, halved, frozen, 2 * X)},
        X, Y, steps=30, metric="error", time_steps=False, relinearize=0,
    )  # fmt: skip
    np.testing.assert_allclose(got.loss[0], got.loss[1], rtol=1e-9)
    assert got.metric == "error"
    first = np.mean(np.argmax(apply_fn(PARAMS, X), axis=1) != Y)
    np.testing.assert_allclose(got.thresholds, [0.1 * first, 0.5 * first])
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


def test_one_rate_does_not_suit_adapters_of_another_scale():
    """With alpha at an eighth 64 times slower by descent, 8 by Adam; and what a real step takes."""
    base = Model(apply_fn, PARAMS)
    starts = {
        name: Candidate(*lora(base, rank=2, alpha=alpha, key=jax.random.key(2)))
        for name, alpha in (("weak", 0.5), ("strong", 4.0))
    }
    options = {"steps": 5, "time_steps": False, "relinearize": 0}
    found = compare(starts, X, Y, **options)
    (sentence,) = found.gaps()
    assert sentence == (
        "weak: at the learning rate of strong its loss falls 64 times slower by gradient descent, "
        "8 times slower by Adam."
    )
    assert "64 times slower" in " ".join(str(found).split())
    for name, why in zip(found.names, found.explanations, strict=True):
        model = starts[name]

        def value(params, model=model):
            return get_loss("cross_entropy").value(model.apply_fn(params, X), jax.nn.one_hot(Y, 3))

        for told, optimizer in (
            (why.sgd, optax.sgd(1e-6)),
            (why.adam, optax.adam(1e-6, eps=1e-30)),
        ):
            gradient = jax.grad(value)(model.params)
            step, _ = optimizer.update(gradient, optimizer.init(model.params), model.params)
            falls = value(model.params) - value(optax.apply_updates(model.params, step))
            # The loss is a parabola near here: second order is 1e-6 of the first, times curvature.
            np.testing.assert_allclose(falls / 1e-6, told, rtol=1e-3)
    alike = compare({"strong": starts["strong"]}, X, Y, **options)
    assert alike.gaps() == ()
    assert "Adam" not in str(alike)


def test_unstable_ones_come_last():
    got = compare(
        CANDIDATES, X, np.eye(3)[Y], loss="squared_error", learning_rate=1.5, steps=40,
        time_steps=False, relinearize=0,
    )  # fmt: skip
    gone = [bool(np.all(row < 0)) for row in got.steps]
    assert gone == sorted(gone)
    assert any(gone)
