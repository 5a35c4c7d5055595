"""Class sketches by which a predicted loss jumps are given up; held against real training."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxttp import predict_training_time, train
from jaxttp.forecast import Descent, Problem, Relinearized, cost, predict
from jaxttp.forecast.cost import GIVEN_UP, JUMP, is_rebuilt, jump_of, plan_again, plan_forecast
from jaxttp.ntk import ClassSketched, Exact
from tests.draws import normal, split

KEYS = split(0, 4)
X = normal(KEYS[0], (24, 6))
Y = np.argmax(np.asarray(X)[:, :4] + 0.3 * np.asarray(normal(KEYS[3], (24, 4))), axis=1)
MIXED = normal(KEYS[1], (4, 3))  # outputs share three directions: no kernel of theirs is K ⊗ I
W = {"in": normal(KEYS[2], (6, 16), 1 / 2), "mid": jnp.zeros((16, 3))}
RATE, STEPS = 0.3, 60


def network(w, x):
    return jnp.tanh(x @ w["in"]) @ w["mid"] @ MIXED.T


@pytest.fixture
def by_class(monkeypatch):
    """Plans know class sketches alone."""
    sketch = ClassSketched(jax.random.key(0))
    monkeypatch.setattr(cost, "_kernels", lambda *_: [sketch])
    return sketch


def forecast(**options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it may take minutes
        return predict_training_time(network, W, X, Y, learning_rate=RATE, steps=STEPS, **options)


def off(found):
    real = np.asarray(
        train(network, W, X, Y, loss="cross_entropy", optimizer=optax.sgd(RATE), steps=STEPS).loss
    )
    assert jump_of(real) == 0.0
    return np.max(np.abs(np.asarray(found.loss) - real)) / (real[0] - real.min())


@pytest.mark.slow
def test_what_jumps_is_forecast_again_by_exact_kernels(by_class, monkeypatch):
    found = forecast()
    monkeypatch.setattr(predict, "plan_again", lambda *_, **__: None)
    first = forecast()
    assert first.plan is None or GIVEN_UP not in first.plan
    assert jump_of(first.loss) > JUMP
    assert off(first) > 0.1
    assert off(found) < 0.02
    assert jump_of(found.loss) < JUMP
    assert found.plan.endswith(GIVEN_UP)
    assert found.cost.kernels > first.cost.kernels
    assert found.cost.operations > first.cost.operations
    assert found.cost.gradient_evaluations > first.cost.gradient_evaluations
    exact = forecast(kernel=Exact())
    np.testing.assert_allclose(found.loss, exact.loss, rtol=1e-9)
    together = first.cost.operations + exact.cost.operations
    assert found.cost.operations == pytest.approx(together, rel=1e-9)


@pytest.mark.slow
def test_a_budget_without_room_for_an_exact_kernel_keeps_the_first_sketch(by_class, monkeypatch):
    monkeypatch.setattr(cost, "fits", lambda *_: False)
    found = forecast(budget=100.0)
    assert found.plan.startswith("one kernel, a class sketch: ")
    assert found.plan.endswith(GIVEN_UP)
    alone = forecast(kernel=by_class, relinearize=0)
    np.testing.assert_allclose(found.loss, alone.loss, rtol=1e-9)
    assert found.trust == alone.trust


@pytest.mark.parametrize("held_from", [None, 7])
@pytest.mark.parametrize("budget", [100.0, 1e-4])
def test_a_held_kernel_is_forecast_again_where_rebuilt_ones_have_room(held_from, budget):
    problem = Problem.of(network, W, X, Y)
    descent, way = Descent.of(learning_rate=RATE, steps=STEPS), Relinearized()
    sketch = ClassSketched(jax.random.key(0))
    plan = plan_forecast(way, problem, descent, sketch, budget=100.0)
    plan = dataclasses.replace(plan, budget=budget * plan.training)
    calm = forecast(kernel=sketch, relinearize=0)
    assert jump_of(calm.loss) == 0.0
    found = {"loss": calm.loss, "held_from": held_from, "spent": calm.cost.operations}
    other = plan_again(plan, way, problem, descent, **found)
    if held_from is None or budget < 1:
        assert other is None
    else:
        assert is_rebuilt(other.dynamics)
        assert not isinstance(other.kernel, ClassSketched)
        assert other.operations <= plan.budget - calm.cost.operations
    in_batches = dataclasses.replace(descent, batch_size=8)
    assert plan_again(plan, way, problem, in_batches, **found) is None


@pytest.mark.slow
def test_what_was_asked_for_stays():
    """A class sketch that was named is followed, whatever the network says."""
    found = forecast(kernel=ClassSketched(jax.random.key(0)))
    assert jump_of(found.loss) > JUMP
    assert found.plan is None or GIVEN_UP not in found.plan


@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=8))
def test_a_jump_is_the_largest_rise_above_what_was_reached(values):
    curve = np.array(values)
    rise = max(b - a for i, a in enumerate(curve) for b in curve[i:])
    drop = curve[0] - curve.min()
    assert jump_of(curve) == pytest.approx(rise / drop if drop > 0 else 0.0)
    assert jump_of(np.sort(curve)[::-1]) == 0.0
