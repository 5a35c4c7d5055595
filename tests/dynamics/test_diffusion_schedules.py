"""Schedules and velocities under mini-batch noise, against many real trainings."""

import jax
import numpy as np
import optax
import pytest

from jaxttp import dynamics
from jaxttp.dynamics.diffusion import diffusion
from tests.draws import normal, split

N, B, STEPS = 24, 4, 24
KEYS = split(3, 3)
X, Y = np.asarray(normal(KEYS[0], (N, 5))), np.asarray(normal(KEYS[1], (N, 2)))
KERNEL = np.einsum("nm,cd->ncmd", X @ X.T, np.eye(2))
LIMIT = 2 / float(np.linalg.eigvalsh(X.T @ X / N)[-1])
PROBLEM = {"loss": "squared_error", "batch_size": B, "steps": STEPS}


def schedule(peak):
    return optax.warmup_cosine_decay_schedule(0.0, peak, 8, STEPS)


def trained(rates, momentum, nesterov, protocol, runs):
    """Losses (R, T + 1) of a linear network trained for real in weight space, in plain NumPy."""
    draw, per_epoch = np.random.default_rng(1), N // B
    weights = np.zeros((runs, X.shape[1], Y.shape[1]))
    velocity, losses, order = np.zeros_like(weights), [], np.zeros((runs, N), int)
    for t in range(STEPS + 1):
        losses.append(0.5 * np.mean(np.sum((X @ weights - Y) ** 2, axis=2), axis=1))
        if t == STEPS:
            return np.array(losses).T
        place = t % per_epoch if protocol == "epochs" else 0
        if place == 0:
            order = np.argsort(draw.random((runs, N)), axis=1)
        rows = order[:, place * B : (place + 1) * B]
        if protocol == "replacement":
            rows = draw.integers(0, N, (runs, B))
        pull = np.swapaxes(X[rows], 1, 2) @ (X[rows] @ weights - Y[rows]) / B
        velocity = momentum * velocity + pull
        weights = weights - rates[t] * (pull + momentum * velocity if nesterov else velocity)
    return None


@pytest.mark.parametrize(
    ("protocol", "momentum", "nesterov"),
    [
        pytest.param("epochs", 0.9, False, marks=pytest.mark.slow),
        pytest.param("independent", 0.9, True, marks=pytest.mark.slow),
    ],
)
def test_warmup_and_cosine_scatter_as_real_trainings_do(protocol, momentum, nesterov):
    """Means, spreads and bands of the loss at every step, from the warm-up to the last one."""
    peak = 0.2 * LIMIT * (1 - momentum)
    optimizer = optax.sgd(schedule(peak), momentum or None, nesterov)
    rates = np.array([float(schedule(peak)(t)) for t in range(STEPS)])
    real = trained(rates, momentum, nesterov, protocol, runs=1000)
    found = diffusion(
        KERNEL, np.zeros((N, 2)), Y, optimizer=optimizer, protocol=protocol, paths=500,
        key=jax.random.key(0), save="curves", **PROBLEM,
    )  # fmt: skip
    draws = np.asarray(found.loss)
    late = slice(3, None)  # the rate of step 0 is 0, and next to nothing has happened before
    # Standard errors: of a mean 1 % of it; of a spread 4 %, and more where tails are long.
    np.testing.assert_allclose(draws.mean(axis=0), real.mean(axis=0), rtol=0.06)
    ratio = draws.std(axis=0)[late] / real.std(axis=0)[late]
    assert np.all((ratio > 0.75) & (ratio < 1.4)), ratio
    low, high = np.quantile(draws, [0.05, 0.95], axis=0)[:, late]
    held = np.mean((real[:, late] >= low) & (real[:, late] <= high), axis=0)
    assert abs(held.mean() - 0.9) < 0.05
    assert held.min() > 0.8


def test_without_noise_it_is_the_recursion():
    """A batch of all samples has no noise.
    For whatever is linear the map of every step is the optimiser's own, read in float64. The
    recursion runs optax's schedules and averages as they are, partly in float32: 1e-7 of 0.05.
    """
    for optimizer in (
        optax.sgd(schedule(0.1 * LIMIT), 0.8, nesterov=True),
        optax.MultiSteps(optax.sgd(0.1 * LIMIT, 0.5), 3).gradient_transformation(),
    ):
        found = diffusion(
            KERNEL, np.zeros((N, 2)), Y, optimizer=optimizer, key=jax.random.key(0),
            kernel_test=KERNEL[:3], f0_test=np.ones((3, 2)), protocol="independent",
            **PROBLEM | {"batch_size": N},
        )  # fmt: skip
        want = dynamics.recursion(
            KERNEL, np.zeros((N, 2)), Y, loss="squared_error", optimizer=optimizer, steps=STEPS,
            kernel_test=KERNEL[:3], f0_test=np.ones((3, 2)),
        )  # fmt: skip
        np.testing.assert_allclose(found.train, want.train, atol=1e-8)
        np.testing.assert_allclose(found.test, want.test, atol=1e-8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "exactly one of learning_rate and optimizer; got neither"),
        ({"learning_rate": 0.1, "optimizer": optax.sgd(0.1)}, "and optimizer; got both"),
        ({"optimizer": optax.sgd(0.1), "momentum": 0.5}, "momentum=0.5 does nothing here: put it"),
        ({"optimizer": optax.adam(0.1)}, "optimizer is not one linear scalar filter"),
        (
            {"optimizer": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1))},
            "optimizer decays the weights",
        ),
    ],
)
def test_what_is_not_followed(options, words):
    with pytest.raises(ValueError, match=words):
        diffusion(KERNEL, np.zeros((N, 2)), Y, key=jax.random.key(0), **PROBLEM, **options)
