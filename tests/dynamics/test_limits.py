"""Every step against the largest stable one, in closed form."""

import numpy as np
import optax
import pytest

from jaxttp.dynamics.optimizers import HeavyBall
from jaxttp.dynamics.stability import curvature_limits, step_fractions, step_maps, step_rates


@pytest.mark.parametrize(
    ("optimizer", "limit"),
    [
        (optax.sgd(0.1), 2.0),
        (optax.sgd(0.1, 0.9), 2 * 1.9),
        (optax.sgd(0.1, 0.9, nesterov=True), 2 * 1.9 / 2.8),
        (optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)), 1.99),  # 2 - eta decay
        (optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), 2.0),
    ],
    ids=["plain", "heavy ball", "nesterov", "decay", "injected"],
)
def test_limits_of_constant_optimizers(optimizer, limit):
    maps = step_maps(optimizer, 5)
    np.testing.assert_allclose(step_rates(maps), 0.1, rtol=1e-6)  # optax's numbers are float32
    np.testing.assert_allclose(0.1 / step_fractions(maps, 4.0), limit / 4, rtol=2e-6)


def test_every_step_of_a_schedule_has_its_own_fraction():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.3, 4, 12)
    maps = step_maps(optax.sgd(schedule, 0.5), 12)
    rates = np.array([float(schedule(t)) for t in range(12)])
    np.testing.assert_allclose(step_rates(maps), rates, atol=1e-7)
    np.testing.assert_allclose(step_fractions(maps, 5.0), rates / (2 * 1.5 / 5.0), atol=1e-6)


def test_accumulated_gradients_move_every_third_step():
    optimizer = optax.MultiSteps(optax.sgd(0.1, 0.9), 3).gradient_transformation()
    maps = step_maps(optimizer, 9)
    np.testing.assert_allclose(step_fractions(maps, 1.0), 0.1 / 3.8, rtol=2e-6)
    assert np.all(np.isnan(step_rates(maps)))  # of which step?


def test_a_pause_is_no_rhythm_and_a_wrong_sign_never_stable():
    pause = optax.sgd(optax.join_schedules([lambda t: 0.1, lambda t: 0.0, lambda t: 0.1], [3, 6]))
    fractions = step_fractions(step_maps(pause, 9), 1.0)
    np.testing.assert_allclose(fractions, [0.05] * 3 + [0.0] * 3 + [0.05] * 3, rtol=2e-6)
    assert np.all(step_fractions(step_maps(optax.scale(0.1), 3), 1.0) > 1e3)


def late(rate):
    """Gradient descent whose gradients come one step late."""

    def update(updates, state, params=None):
        return -rate * state.trace, optax.TraceState(updates)

    return optax.GradientTransformation(
        lambda params: optax.TraceState(optax.tree.zeros_like(params)), update
    )


def test_instability_may_begin_by_turning():
    """w'' - w' + x w = 0 has roots of modulus sqrt(x): 1 is the limit, not 2 / |sum (-1)^s k_s|."""
    np.testing.assert_allclose(curvature_limits(late(1.0), 3), 1.0, rtol=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_numbers_of_a_heavy_ball_tell_its_limits(nesterov):
    rates = np.array([0.1, 0.2])
    ball = HeavyBall(rates, 0.9, nesterov)
    want = [curvature_limits(optax.sgd(rate, 0.9, nesterov), 1)[0] for rate in rates]
    np.testing.assert_allclose(curvature_limits(ball, 2), want, rtol=1e-5)
