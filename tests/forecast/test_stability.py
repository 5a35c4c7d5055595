"""The verdict on stability: every step's rate against its limit, and the predicted loss."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import predict_training_time
from jaxttp.forecast.stability import rises

RNG = np.random.default_rng(0)
X = RNG.standard_normal((20, 3))
Y = (X[:, 0] > 0).astype(int)
ZERO = jnp.zeros((3, 2))


def linear(params, x):
    return x @ params


def predict(**options):
    return predict_training_time(linear, ZERO, X, Y, relinearize=0, **{"steps": 40} | options)


def limit(momentum=0.0):
    return predict(learning_rate=0.1, momentum=momentum, steps=2).max_learning_rate


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_both_ways_to_give_a_rate_agree_on_stability(momentum):
    """`max_learning_rate` and the words included: the limit is the optimiser's own."""
    largest = limit(momentum)
    for fraction, stable in ((0.5, True), (2.0, False)):
        rate = fraction * largest
        one, other = (
            predict(steps=12, **way)
            for way in (
                {"learning_rate": rate, "momentum": momentum},
                {"optimizer": optax.sgd(rate, momentum or None)},
            )
        )
        np.testing.assert_allclose(one.loss, other.loss, rtol=1e-12)  # two programs
        assert one.stable is other.stable is stable
        assert one.steps == other.steps
        assert other.max_learning_rate == pytest.approx(largest, rel=2e-6)
        assert one.message == other.message


def test_a_rate_beyond_the_limit_whose_loss_comes_down_says_so():
    """Cross-entropy flattens on the way, so the limit at the start need not be the end of it."""
    forecast = predict(learning_rate=1.5 * limit(), steps=150)
    assert not forecast.stable
    assert forecast.loss[-1] < 0.2 * forecast.loss[0]
    assert "though the predicted loss comes down from" in forecast.message


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_a_schedule_that_begins_beyond_the_limit_is_not_stable(momentum):
    """Linearised, it comes down again: where it does, the real network may be lost already."""
    largest = limit(momentum or 0.0)
    schedule = optax.cosine_decay_schedule(3.0 * largest, 40)
    forecast = predict(optimizer=optax.sgd(schedule, momentum))
    assert forecast.loss[-1] < 0.1 * forecast.loss[0]
    assert forecast.stable is False
    assert set(forecast.steps.values()) == {-1}
    assert forecast.max_learning_rate == pytest.approx(largest, rel=1e-5)
    first = next(t for t in range(40) if float(schedule(t)) < largest)
    words = f"peak rate {3 * largest:.3g} is 3 times the limit {largest:.3g} until step {first}; "
    assert forecast.message.startswith(words + "the real network may not survive it")
    assert "comes down from" in forecast.message
    np.testing.assert_allclose(forecast.rates.rates, [schedule(t) for t in range(40)], atol=1e-5)


def test_optimizers_without_a_rate_of_their_own_are_judged_too():
    accumulated = optax.MultiSteps(optax.sgd(3 * limit()), 2).gradient_transformation()
    forecast = predict(optimizer=accumulated, steps=12)
    assert not forecast.stable
    assert forecast.message.startswith("its largest step is 3 times the largest stable one; ")
    assert predict(optimizer=optax.adam(0.1), steps=12).message == (
        "stable; no largest learning rate is known for this optimizer"
    )


def test_weight_space_forms_no_kernel_of_many_outputs_for_its_limit(monkeypatch):
    """32 products with an operator on 60 outputs: the largest eigenvalue to far below a percent."""
    x, params = RNG.standard_normal((30, 4)), jnp.asarray(RNG.standard_normal((4, 2)))
    y = (x[:, 0] > 0).astype(int)
    network = lambda w, x: jnp.tanh(x @ w)  # noqa: E731
    common = {"learning_rate": 0.1, "momentum": 0.5, "steps": 3, "dynamics": "weight_space"}
    formed = predict_training_time(network, params, x, y, **common)
    monkeypatch.setattr("jaxttp.forecast.methods.linear.FORMED", 10)
    found = predict_training_time(network, params, x, y, **common)
    assert found.max_learning_rate == pytest.approx(formed.max_learning_rate, rel=1e-6)
    assert (formed.cost.kernels, found.cost.kernels) == (1, 0)
    assert found.cost.gradient_evaluations > formed.cost.gradient_evaluations
    np.testing.assert_array_equal(found.loss, formed.loss)


def test_a_loss_that_doubles_on_the_way_is_said():
    """Also where it ends below its start again."""
    curve = np.array([1.0, 0.5, 2.5, 0.1])
    assert rises(curve)
    assert rises(np.stack([curve, curve[::-1] * 0 + 1.0])).tolist() == [True, False]
    assert rises(np.array([1.0, np.nan]))
