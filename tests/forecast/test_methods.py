"""Dynamics, estimators and rules as values: what keywords name, what they follow and refuse."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import predict_training_time, sweep
from jaxttp.forecast import (
    ClosedForm,
    Descent,
    Dynamics,
    GradientFlow,
    Hyperparameters,
    Linearizer,
    Noisy,
    Online,
    Problem,
    Recursion,
    Relinearized,
    Rule,
    WeightSpace,
    forecast_training,
    grid,
    sweep_kernel,
)
from jaxttp.forecast.methods import Path
from jaxttp.ntk.estimators import Exact, KernelEstimator, Sketched
from tests.draws import normal, split

KEYS = split(5, 3)
X = normal(KEYS[0], (10, 3))
Y = np.asarray(X[:, 0] > 0).astype(int)
W = normal(KEYS[1], (3, 2), 1 / 2)
KEY = jax.random.key(7)


def network(w, x):
    return jnp.tanh(x @ w)


def problem(**options):
    return Problem.of(network, W, X, Y, **options)


def same(left, right):
    np.testing.assert_array_equal(left.loss, right.loss)
    assert left.steps == right.steps
    assert left.steps_band == right.steps_band
    assert left.hyperparameters == right.hyperparameters
    assert (left.stable, left.dynamics, left.warnings) == (
        right.stable,
        right.dynamics,
        right.warnings,
    )
    assert (left.cost.kernels, left.rule) == (right.cost.kernels, right.rule)


PLAIN = {"learning_rate": 1.0, "momentum": 0.5, "steps": 12}
BATCHES = PLAIN | {"batch_size": 4, "key": KEY}


@pytest.mark.parametrize(
    ("keywords", "descent", "way", "kernel"),
    [
        ({}, PLAIN, Recursion(), None),
        ({"dynamics": "ode"}, PLAIN, GradientFlow(), None),
        pytest.param({"relinearize": 2, "sketch_dim": 20, "key": KEY}, PLAIN, Relinearized(2),
                     Sketched(20, KEY), marks=pytest.mark.slow),
        pytest.param({"dynamics": "sde", "paths": 3, "relinearize": 1}, BATCHES,
                     Noisy(paths=3, centre=Relinearized(1)), None, marks=pytest.mark.slow),
        ({"optimizer": optax.adam(0.1)}, {"steps": 12}, WeightSpace(), None),
    ],
    ids=["recursion", "flow", "sketched and rebuilt", "noisy", "weight space"],
)  # fmt: skip
def test_keywords_are_values(keywords, descent, way, kernel):
    rule = Rule((0.5,), kind="gap", smooth=3)
    reading = {"thresholds": (0.5,), "rule": "gap", "smooth": 3}
    given = {"relinearize": 0} | descent | keywords | reading
    named = predict_training_time(network, W, X, Y, **given)
    training = Descent.of(**descent | {k: v for k, v in keywords.items() if k == "optimizer"})
    found = forecast_training(problem(), training, dynamics=way, kernel=kernel, rule=rule)
    same(named, found)
    options = descent | {k: v for k, v in keywords.items() if k in ("optimizer", "key")}
    sketch = {k: v for k, v in keywords.items() if k == "sketch_dim"}
    same(predict_training_time(network, W, X, Y, dynamics=way, rule=rule, **options, **sketch),
         found)  # fmt: skip


class Frozen(Dynamics):
    """A dynamics of one's own: nothing moves. Adding one is one class."""

    name = "frozen"

    def follow(self, lines, descent):
        f0 = lines.problem.f0
        return Path.of(lines, jnp.broadcast_to(f0, (descent.steps + 1, *f0.shape)))


@dataclasses.dataclass(frozen=True)
class Multiplied(KernelEstimator):
    """A kernel estimator of one's own: a multiple of the exact one."""

    factor: float

    def between(self, problem, weights, x1, x2, progress=None):
        return self.factor * Exact().between(problem, weights, x1, x2)


def test_values_of_ones_own():
    training = Descent.of(learning_rate=0.5, steps=8)
    still = forecast_training(problem(), training, dynamics=Frozen(), rule=Rule((0.5,)))
    assert still.steps == {0.5: -1}
    assert still.dynamics == "frozen"
    double = forecast_training(problem(), training, kernel=Multiplied(2.0))
    faster = forecast_training(problem(), Descent.of(learning_rate=1.0, steps=8))
    np.testing.assert_allclose(double.loss, faster.loss, rtol=1e-12)  # eta Theta is what counts


@pytest.mark.slow
def test_a_noisy_path_lies_around_any_centre():
    training = Descent.of(**BATCHES)
    flow = forecast_training(problem(), training.full, dynamics=GradientFlow())
    around = forecast_training(problem(), training, dynamics=Noisy(paths=5, centre=GradientFlow()))
    np.testing.assert_array_equal(around.outputs, flow.outputs)
    assert around.loss_band is not None
    assert np.all(around.loss_band[0] <= around.loss_band[1])


def test_the_linearizer_builds_what_is_asked_for_once():
    lines = Linearizer(problem(x_test=X[:4], y_test=Y[:4]))
    assert lines.kernels == 0
    first = lines.first
    assert lines.at(lines.problem.weights) is first is lines.first
    assert lines.kernels == 1
    assert lines.cross["kernel_test"].shape == (4, 2, 10, 2)
    np.testing.assert_allclose(lines.cross["kernel_test"], first[:4], rtol=1e-12)
    lines.at(W + 1.0)
    assert lines.kernels == 3
    known = Linearizer(problem(), first=first)
    assert known.limit == lines.limit
    assert known.kernels == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Rule((2.0,)), "thresholds must be .* less than 1; got 2"),
        (lambda: Rule(kind="soon"), "rule='soon' is not known"),
        (lambda: Rule(window=3), "window=3 is for rule='plateau'"),
        (lambda: Rule.of((0.1,), Rule()), "rule is a Rule, which says thresholds"),
        (lambda: Rule(smooth=31).check(9), "smooth must be an integer between 1 and 10; got 31"),
        (lambda: Descent.of(), "exactly one of learning_rate and optimizer; got neither"),
        (lambda: Descent.of(learning_rate=1.0, optimizer=optax.sgd(1.0)), "optimizer; got both"),
        (lambda: Descent.of(learning_rate=0.1, steps=0), "steps must be an integer of at least 1"),
        (lambda: Descent.of(learning_rate=0.1, batch_size=3), "batch_size=3 needs key"),
        (lambda: Relinearized(0), "rebuilds must be an integer of at least 1; got 0"),
        (lambda: Relinearized(tolerance=-1.0), "tolerance must be greater than 0"),
        (lambda: Noisy("pink"), "noise='pink' is not known"),
        (lambda: Noisy(paths=0), "paths must be an integer of at least 1"),
        (lambda: Noisy(centre=Noisy()), "centre must be a single path .* got Noisy"),
        (lambda: Exact(batch_size=0), "kernel_batch_size must be an integer of at least 1"),
        (lambda: Exact(max_bytes=0), "max_bytes must be greater than 0"),
        (lambda: Sketched(9, None), "sketch_dim=9 needs key"),
        (lambda: Sketched(0, KEY), "sketch_dim must be an integer of at least 1"),
        (lambda: problem(x_test=X), "x_test and y_test belong together"),
        (lambda: Online(network, W, X, Y, Hyperparameters(0.1), rule=Rule(metric="error")),
         "only the loss"),
    ],
)  # fmt: skip
def test_values_check_themselves(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.parametrize(
    ("way", "training", "message"),
    [
        (GradientFlow(), BATCHES, "batch_size cannot be used with dynamics='ode'"),
        (ClosedForm(), PLAIN, "loss='cross_entropy' has no closed form"),
        (Noisy(), PLAIN, "dynamics='sde' is the noise of mini-batches"),
        (Noisy(centre=ClosedForm()), BATCHES, "loss='cross_entropy' has no closed form"),
        (Recursion(), {"optimizer": optax.adam(0.1)}, "not one linear scalar filter"),
        (Relinearized(1), {"optimizer": optax.adam(0.1)}, "not one linear scalar filter"),
        (Recursion(), BATCHES | {"batch_size": 11}, "between 1 and 10; got 11"),
    ],
)
def test_what_cannot_be_followed_is_refused_before_a_kernel(monkeypatch, way, training, message):
    monkeypatch.setattr("jaxttp.ntk.estimators.kernel_of", lambda *_, **__: pytest.fail("built"))
    with pytest.raises(ValueError, match=message):
        forecast_training(problem(), Descent.of(**training), dynamics=way)


@pytest.mark.parametrize(
    ("way", "kernels"), [(Recursion(), 2), (WeightSpace(), 1), (Relinearized(1), 4)]
)
def test_curves_of_the_training_samples_as_test_samples_are_their_own(way, kernels):
    """Every kernel along the path comes with its cross kernel."""
    found = forecast_training(problem(x_test=X, y_test=Y), Descent.of(**BATCHES), dynamics=way)
    np.testing.assert_allclose(found.test_loss, found.loss, rtol=1e-12)
    np.testing.assert_array_equal(found.test_error, found.error)
    assert found.cost.kernels == kernels


def test_noise_beyond_the_limit_is_no_exception():
    training = Descent.of(**BATCHES | {"learning_rate": 1e6})
    found = forecast_training(problem(), training, dynamics=Noisy(paths=4))
    assert not found.stable
    assert set(found.steps.values()) == {-1}
    assert found.steps_band is None
    assert bool(jnp.all(jnp.isfinite(found.loss)))


def test_a_value_leaves_no_room_for_keywords():
    common = {"learning_rate": 0.1, "dynamics": Recursion()}
    with pytest.raises(ValueError, match="relinearize=2 does nothing here"):
        predict_training_time(network, W, X, Y, relinearize=2, **common)
    with pytest.raises(ValueError, match="max_bytes=100 does nothing here: kernel is a value"):
        predict_training_time(network, W, X, Y, kernel=Exact(), max_bytes=100, learning_rate=0.1)
    with pytest.raises(TypeError, match="kernel"):
        sweep(network, W, X, Y, grid(learning_rate=1.0, steps=8), kernel=jnp.eye(10))
    with pytest.raises(ValueError, match="paths=2 does nothing here"):
        predict_training_time(network, W, X, Y, paths=2, **common)
    with pytest.raises(ValueError, match="rule is a Rule"):
        sweep_kernel(
            jnp.eye(2), jnp.zeros((2, 1)), jnp.ones((2, 1)), [Hyperparameters(0.1)],
            thresholds=(0.1,), rule=Rule(),
        )  # fmt: skip
