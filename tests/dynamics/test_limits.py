"""Every step against the largest stable one: closed forms, and second moments by brute force."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp.dynamics.optimizers import HeavyBall
from jaxttp.dynamics.stability import (
    batch_modes,
    batch_variance,
    curvature_limits,
    map_of,
    mean_square_factor,
    step_maps,
    step_rates,
    step_shares,
)
from jaxttp.losses import squared_error


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
    np.testing.assert_allclose(0.1 / step_shares(maps, 4.0), limit / 4, rtol=2e-6)


def test_every_step_of_a_schedule_has_its_own_share():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.3, 4, 12)
    maps = step_maps(optax.sgd(schedule, 0.5), 12)
    rates = np.array([float(schedule(t)) for t in range(12)])
    np.testing.assert_allclose(step_rates(maps), rates, atol=1e-7)
    np.testing.assert_allclose(step_shares(maps, 5.0), rates / (2 * 1.5 / 5.0), atol=1e-6)


def test_accumulated_gradients_move_every_third_step():
    optimizer = optax.MultiSteps(optax.sgd(0.1, 0.9), 3).gradient_transformation()
    maps = step_maps(optimizer, 9)
    np.testing.assert_allclose(step_shares(maps, 1.0), 0.1 / 3.8, rtol=2e-6)
    assert np.all(np.isnan(step_rates(maps)))  # of which step?


def test_a_pause_is_no_rhythm_and_a_wrong_sign_never_stable():
    pause = optax.sgd(optax.join_schedules([lambda t: 0.1, lambda t: 0.0, lambda t: 0.1], [3, 6]))
    shares = step_shares(step_maps(pause, 9), 1.0)
    np.testing.assert_allclose(shares, [0.05] * 3 + [0.0] * 3 + [0.05] * 3, rtol=2e-6)
    assert np.all(step_shares(step_maps(optax.scale(0.1), 3), 1.0) > 1e3)


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


def growth(kernel, c, rate, momentum, q):
    """The spectral radius of the second moments of (outputs, velocity), as one dense matrix."""
    n = len(kernel)
    mean = kernel * (c / n)  # A = Theta / N
    step = np.block([
        [np.eye(n) - rate * mean, -rate * momentum * np.eye(n)], [mean, momentum * np.eye(n)]
    ])  # fmt: skip
    force = np.concatenate([-rate * np.eye(n), np.eye(n)])
    whole = (1 - q) * np.kron(step, step)
    rest = step - force @ np.concatenate([mean, np.zeros((n, n))], axis=1)
    for i in range(n // c):  # one sample's own step, as often as it is drawn
        own = np.zeros((n, 2 * n))
        own[:, i * c : (i + 1) * c] = kernel[:, i * c : (i + 1) * c]
        single = rest + force @ own
        whole += q * np.kron(single, single) / (n // c)
    return np.abs(np.linalg.eigvals(whole)).max()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("samples", "c", "common"), [(4, 1, 0.0), (4, 1, 2.0), (2, 2, 0.5)])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_mean_square_limit_parts_growth_from_decay(momentum, samples, c, common, batch_size):
    if batch_size > samples:
        batch_size = samples
    rng = np.random.default_rng(samples + c)
    j = rng.standard_normal((samples * c, 9)) + common * rng.standard_normal((1, 9))
    kernel = j @ j.T
    q = batch_variance(samples, batch_size, "replacement")
    modes = batch_modes(
        jnp.asarray(kernel).reshape(samples, c, samples, c), jnp.zeros((samples, c)),
        jnp.ones((samples, c)), squared_error,
    )  # fmt: skip
    full = 2 * (1 + momentum) / np.linalg.eigvalsh(kernel / samples)[-1]
    limit = full * mean_square_factor(map_of(1.0, momentum), modes, q)
    assert limit < full
    assert growth(kernel, c, 0.995 * limit, momentum, q) < 1
    assert growth(kernel, c, 1.005 * limit, momentum, q) > 1


def test_variance_of_a_batch():
    assert batch_variance(10, 2, "replacement") == 0.5
    assert batch_variance(10, 2, "epochs") == pytest.approx(8 / 18)
    assert batch_variance(10, 10, "independent") == 0.0
    modes = batch_modes(
        jnp.eye(2).reshape(2, 1, 2, 1), jnp.zeros((2, 1)), jnp.ones((2, 1)), squared_error
    )
    assert mean_square_factor(map_of(1.0, 0.9), modes, 0.0) == 1.0
