"""The edge of stability of mini-batches, which lies below that of the full batch.

A batch's curvature differs from the mean one: where a few hard samples carry what curvature is
left, by multiples. A mode grows in the mean square where the noise that its own displacement makes
outweighs its contraction, for heavy-ball momentum where

    eta s (1 + sigma^2 (1 + m)/(1 - m)) > 2 (1 + m),

sigma^2 the relative variance of a batch's curvature s: long before the full batch's edge. Networks
trained so settle at a lower curvature ("edge of stochastic stability", arXiv 2412.20553); their
linearisations would not. So the force on modes is scaled down, as at the full batch's edge, to
where the very batches leave them stable. How far below the edge that is, is tried out in the space
of the stiffest modes, where a step is a matrix of their number: modes mix there as they do in
training, any linear optimiser is its own program, and batches are drawn as they are in training.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxttp._core.compile import jit
from jaxttp.dynamics._edge import DAMPED, FAR, TRIAL, Damping, growth, slow_down
from jaxttp.dynamics.optimizers import Optimizer, keep_dtypes
from jaxttp.dynamics.stability import curvature_modes
from jaxttp.losses import Loss
from jaxttp.ntk.kernels import Kernel

SHARES = tuple(2.0 ** (-k / 2) for k in range(15))
"""Shares of the full batch's edge that are tried, the largest first."""
DRAWS = 4
"""Trials at once, from other starts, by the batches from other steps on."""
CALM = 0.3
"""Displacements must have fallen to this share in half the trial: what only just decays is driven
high by the noise of its own and by the network's higher orders."""
SLOW = 1.1
"""Or to so many times what is left of them at best: slow modes are left at any share."""


def calm(
    optimizer: Optimizer,
    shares: tuple[float, ...],
    state: optax.OptState,
    kernel: Kernel,
    f: Array,
    targets: Array,
    loss: Loss,
    indices: Array,
    start: int,
    edge: Array,
) -> Damping:
    """The damping that keeps steps of mini-batches stable with this kernel at outputs f.

    Args:
        optimizer: see `same_program`.
        shares: of `start_shares`.
        state: the optimiser's state.
        kernel: Theta.
        f: outputs (N, C).
        targets: encoded.
        loss: the loss.
        indices: the batches (T, B).
        start: the step from which on they are tried.
        edge: the full batch's, of `find_edge`.
    """
    values, left, modes = curvature_modes(kernel, f, targets, loss)
    modes = modes.reshape(*f.shape, -1)
    ratio = _calm_share(optimizer, shares, state, values, modes, edge, indices, start)
    bound = slow_down(kernel, values, left, ratio * edge, f.shape[1])
    return bound._replace(largest=values[0] / edge)


@functools.partial(jit, static_argnames="shares")
def _calm_share(
    optimizer: Optimizer,
    shares: tuple[float, ...],
    state: optax.OptState,
    values: Array,
    modes: Array,
    edge: Array,
    indices: Array,
    start: Array,
) -> Array:
    """The largest of `SHARES` at which no displacement of the modes (N, C, k) grows."""
    n, batch, count = modes.shape[0], indices.shape[1], modes.shape[2]
    tried = jnp.asarray(SHARES, modes.dtype)[:, None, None]
    limit = tried * edge
    values = values[None, None]
    force = jnp.where(values > limit, DAMPED * limit, values)  # (R, 1, k)
    key = jax.random.key(0)
    weights = jax.random.normal(key, (DRAWS, count), modes.dtype)
    weights = jnp.broadcast_to(weights, (len(SHARES), DRAWS, count))
    begun = iter(shares)
    state = optax.tree_utils.tree_map_params(
        optimizer, lambda leaf: (next(begun) * weights).astype(leaf.dtype), state
    )
    rows = start + jnp.arange(DRAWS) * (indices.shape[0] // DRAWS)

    def step(carry: tuple, t: Array) -> tuple[tuple, Array]:
        weights, state = carry
        drawn = modes[indices[(rows + t) % indices.shape[0]]].reshape(DRAWS, -1, count)
        seen = jnp.einsum("dpk,rdk->rdp", drawn, weights)
        gradient = force * jnp.einsum("dpk,rdp->rdk", drawn, seen) * (n / batch)
        updates, after = optimizer.update(gradient, state, weights)
        new = jnp.clip(jnp.asarray(optax.apply_updates(weights, updates)), -FAR, FAR)
        return (new, keep_dtypes(after, state)), jnp.sqrt(jnp.mean(new**2, axis=(1, 2)))

    _, sizes = jax.lax.scan(step, (weights, state), jnp.arange(TRIAL))
    early, late = growth(sizes)
    left = late / jnp.maximum(early, jnp.finfo(early.dtype).tiny)
    is_calm = left <= jnp.maximum(CALM, SLOW * jnp.min(left))
    return tried[jnp.argmax(is_calm), 0, 0]
