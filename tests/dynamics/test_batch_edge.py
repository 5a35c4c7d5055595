"""The edge of stability of mini-batches against brute force: the very steps, in outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp.dynamics import batch_indices, same_program
from jaxttp.dynamics._batch_edge import calm
from jaxttp.dynamics._edge import find_edge
from jaxttp.dynamics.filters import start_shares
from jaxttp.losses import squared_error

N, C, STEPS = 12, 2, 400
RATE, MOMENTUM = 0.05, 0.9
EDGE = 2 * (1 + MOMENTUM) / RATE


def problem(top):
    """A kernel whose curvatures fall by 0.7 from `top`, a share of the full batch's edge."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(N * C, N * C)))[0]
    values = top * EDGE * 0.7 ** np.arange(N * C)
    return N * (basis * values) @ basis.T


def damping(kernel, indices, start=0):
    optimizer = optax.sgd(RATE, MOMENTUM)
    how = same_program(optimizer), start_shares(optimizer), optimizer.init(jnp.zeros(1))
    f = jnp.zeros((N, C))
    return calm(
        *how, jnp.asarray(kernel).reshape(N, C, N, C), f, jnp.zeros((N, C)), squared_error,
        indices, start, find_edge(*how, f.dtype),
    )  # fmt: skip


def run(kernel, indices, damp=None):
    """Sizes of outputs under heavy-ball steps on batches: f' = f + Theta v, v' = m v - eta g."""
    rng = np.random.default_rng(1)
    f, velocity, sizes = kernel @ rng.normal(size=N * C), np.zeros(N * C), []
    damp = (lambda g: g) if damp is None else damp
    for batch in np.asarray(indices):
        gradient = np.zeros((N, C))
        for i in batch:
            gradient[i] += f.reshape(N, C)[i] / len(batch)
        velocity = MOMENTUM * velocity - RATE * damp(gradient.reshape(-1))
        f = f + kernel @ velocity
        sizes.append(np.linalg.norm(f))
    return np.array(sizes)


def drawn(size, protocol="independent"):
    return batch_indices(jax.random.key(3), N, size, STEPS, protocol=protocol)


@pytest.mark.parametrize("protocol", ["independent", "epochs", "replacement"])
def test_batches_that_would_run_apart_are_held(protocol):
    """At 0.6 of the full batch's edge, which is stable, batches of 3 are not; damped they are."""
    kernel, indices = problem(0.6), drawn(3, protocol)
    everything = np.tile(np.arange(N), (STEPS, 1))
    assert run(kernel, everything)[-1] < 1e-3 * run(kernel, everything)[0]
    free = run(kernel, indices)
    assert free[-1] > 1e3 * free[0]
    bound = damping(kernel, indices)
    np.testing.assert_allclose(bound.largest, 0.6, rtol=5e-3)  # the edge is found on a grid
    held = run(kernel, indices, lambda g: np.asarray(bound(jnp.asarray(g))))
    assert held.max() < 30 * held[0]  # momentum overshoots before it falls
    assert held[-1] < 0.1 * held[0]


def test_what_is_stable_is_left_alone():
    """Full batches, and small batches of a kernel far below the edge."""
    everything = jnp.tile(jnp.arange(N), (STEPS, 1))
    for kernel, indices in ((problem(0.3), everything), (problem(1e-3), drawn(3))):
        bound = damping(kernel, indices)
        assert float(jnp.abs(bound.right).max()) == 0


def test_smaller_batches_are_damped_more():
    """More noise, and a lower edge: 1/(1 + sigma^2 (1 + m)/(1 - m)) of the full batch's."""
    kernel = problem(0.5)
    counts = [
        int(jnp.sum(jnp.any(damping(kernel, drawn(size)).right != 0, axis=0)))
        for size in (1, 3, 11)
    ]
    assert counts[0] > counts[1] > counts[2]


def test_it_can_be_anywhere_on_the_way():
    """Batches are tried from a step on, beyond the horizon from the first again."""
    for start in (0, STEPS - 1):
        bound = damping(problem(0.6), drawn(3), start)
        assert bool(jnp.all(jnp.isfinite(bound.right)))
