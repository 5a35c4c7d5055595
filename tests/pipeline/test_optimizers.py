"""One optimiser for forecast, training and timing; schedules as in sweeps; targets."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp.forecast.training_setup import SCHEDULES, Hyperparameters
from jaxttp.pipeline import Settings, build_task, hyperparameters
from tests import tiny


def path(transformation, gradients, start=1.0):
    """Weights under an optax transformation whose gradients are given."""
    weights, state = jnp.asarray(start), None
    state = transformation.init(weights)
    out = []
    for gradient in gradients:
        step, state = transformation.update(jnp.asarray(gradient), state, weights)
        weights = optax.apply_updates(weights, step)
        out.append(float(weights))
    return np.array(out)


GRADIENTS = np.random.default_rng(0).normal(size=8)
BASE = Settings(learning_rate=0.1, steps=8)


def by_hand(settings, rates):
    """PyTorch's SGD: decay into the gradient, then momentum, then the rate; in float64."""
    weight, velocity, out = 1.0, 0.0, []
    for gradient, rate in zip(GRADIENTS, rates, strict=True):
        gradient = gradient + (settings.weight_decay or 0.0) * weight
        velocity = settings.momentum * velocity + gradient
        nesterov = gradient + settings.momentum * velocity
        weight -= rate * (nesterov if settings.nesterov else velocity)
        out.append(weight)
    return np.array(out)


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.3},
     {"momentum": 0.5, "weight_decay": 0.3, "schedule": "cosine", "warmup": 3}],
)  # fmt: skip
def test_gradient_descent_is_what_pytorch_does(options):
    settings = dataclasses.replace(BASE, **options)
    chosen = hyperparameters(settings)
    # optax computes the schedule in float32: rtol 1e-6
    found = path(chosen.optimizer(), GRADIENTS)
    np.testing.assert_allclose(found, by_hand(settings, chosen.rates()), rtol=1e-6)


@pytest.mark.parametrize(("decay", "known"), [(None, 0.01), (0.0, 0.0), (0.2, 0.2)])
def test_adamw_decays_as_in_pytorch_unless_told(decay, known):
    settings = dataclasses.replace(BASE, optimizer="adamw", weight_decay=decay, schedule="linear")
    made = hyperparameters(settings).optimizer()
    # With gradients of one size and sign Adam's step is the rate; the decay is beside it.
    weight, expected = 1.0, []
    for rate in 0.1 * (1 - np.arange(8) / 8):
        weight -= rate * (1 + known * weight)
        expected.append(weight)
    np.testing.assert_allclose(path(made, np.ones(8)), expected, rtol=1e-5)


def test_schedules_are_those_of_sweeps():
    for name in SCHEDULES:
        settings = dataclasses.replace(BASE, schedule=name, steps=40)
        expected = Hyperparameters(0.1, schedule=name, steps=40).rates()
        np.testing.assert_array_equal(hyperparameters(settings).rates(), expected)
    warm = dataclasses.replace(BASE, schedule="cosine", warmup=4, steps=40)
    same = dataclasses.replace(warm, schedule="warmup_cosine", warmup=0)  # warms up for a tenth
    np.testing.assert_allclose(
        hyperparameters(warm).rates(), hyperparameters(same).rates(), rtol=1e-6, atol=1e-9
    )
    rates = hyperparameters(dataclasses.replace(warm, schedule="constant")).rates()
    np.testing.assert_allclose(rates, 0.1 * np.minimum(1, np.arange(40) / 4), rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "lion"}, "^optimizer='lion' is not known; choose one of 'sgd', 'adamw'"),
        ({"optimizer": "adam", "momentum": 0.9}, "^momentum=0.9 does nothing here: .*'sgd'"),
        ({"optimizer": "adamw", "nesterov": True}, "^nesterov=True does nothing here"),
        ({"nesterov": True}, "^nesterov=True does nothing here: it is about momentum"),
        ({"optimizer": "adam", "weight_decay": 0.1}, "^weight_decay=0.1 does nothing.*'adamw'"),
        ({"warmup": 150}, "^warmup must be an integer between 0 and 149; got 150"),
        ({"target_loss": (0.1, 0.0)}, "^target_loss must be greater than 0; got 0"),
        ({"metric": "speed"}, "^metric='speed' is not known"),
    ],
)
def test_training_that_does_not_fit_is_refused_before_data_are_loaded(options, message):
    with pytest.raises(ValueError, match=message):
        build_task(Settings(**({"data": "wine"} | options)))


def test_targets_beside_the_thresholds():
    shown = tiny.verified()
    targets = shown.prediction.reach([float(shown.run.loss[5]), float(shown.prediction.loss[3])])
    prediction = dataclasses.replace(shown.prediction, targets=targets)
    found = dataclasses.replace(shown, prediction=prediction)
    for target in targets:
        one = found.arrivals[target]
        assert one.words == f"loss below {target.value:.4g}"
        for steps, curve in ((one.steps, shown.prediction.loss), (one.real_steps, shown.run.loss)):
            under = np.flatnonzero(np.asarray(curve) < target.value)
            assert steps == (under[0] if len(under) else -1)
        assert one.seconds == one.steps * shown.step_time.seconds
    plain = json.loads(json.dumps(found.to_json()))
    assert [one["steps"] for one in plain["targets"]] == list(targets.values())
