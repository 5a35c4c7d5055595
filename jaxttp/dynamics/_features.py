"""Mini-batches in the space of a kernel's factors: steps that touch the batch's rows alone.

With Theta = A B^T a step of mini-batches needs B^T g, to which the batch's rows contribute, and
outputs on the next batch, A's rows there. So the optimiser, linear as it is, acts on vectors of the
factors' width k beside its dual coefficients: a step costs B C k in place of N C k, and what all
samples do follows afterwards, for many steps as one product of matrices. It is the dual recursion
in other words: the same numbers to rounding.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxttp.dynamics._edge import Damping
from jaxttp.dynamics._segment import Chord, Knot, Run, Start, begin, share
from jaxttp.dynamics.optimizers import Optimizer, keep_dtypes, slots
from jaxttp.dynamics.recursion import output_limit
from jaxttp.losses import Loss
from jaxttp.ntk.factored import Factored

CHUNK = 32
"""Steps whose outputs are computed at once."""


@functools.partial(jax.jit, static_argnames=("loss", "record"))
def run_batches(
    optimizer: Optimizer,
    loss: Loss,
    knots: list[Knot],
    here: Start,
    products: Array,
    line: Chord | Array | None,
    start: Array,
    end: Array,
    train: Array,
    targets: Array,
    indices: Array,
    drift: Array,
    record: bool = False,
) -> Run:
    """`run_segment` where there are batches and all kernels are factored."""
    ends = (knots[0], knots[-1])
    shape, count, dtype = here.f.shape, len(here.vectors), train.dtype
    size, rows = here.f.size, 2 * here.f.size + len(here.vectors)
    # One kernel sees what both knots' gradients came to; two see each of them.
    many, width = len(knots) ** 2, _factors(knots[0]).columns.shape[1]
    weights, state = begin(optimizer, here, many * width)
    folded = [[_fold(_factors(knot), end.damping) for end in ends] for knot in knots]
    limit = output_limit(dtype)

    def picked(values: Array, batch: Array) -> Array:
        """The batch's rows (B C, ...) of (N C, ...)."""
        return values[(batch[:, None] * shape[1] + jnp.arange(shape[1])[None]).reshape(-1)]

    def outputs(steps: Array, moved: list[Array], carried: list[Array], batch: Any) -> Array:
        """Outputs (S, B C) after many steps, on the batch or, with None, on all samples."""

        def of(values: Array) -> Array:
            return values if batch is None else picked(values, batch)

        since = (steps - start).astype(dtype)[:, None]
        f = of(here.f.reshape(-1))[None] + since * of(drift.reshape(-1))[None]
        for knot, q, c in zip(knots, moved, carried, strict=True):
            f = f + jnp.dot(q, of(_factors(knot).rows).T, precision="highest")
            pushed = of(knot.pushed.reshape(count, size).T)
            f = f + jnp.dot(c, pushed.T, precision="highest")
        return f

    def step(t: Array, carry: tuple) -> tuple:
        weights, state, moved, carried, is_alive, length, shares, moves, path = carry
        tau, batch = share(line, weights[:rows], size, t, start, end), indices[t]
        there = outputs(t[None], [q[None] for q in moved], [c[None] for c in carried], batch)
        f = there.reshape(batch.shape[0], -1)
        is_alive = is_alive & jnp.all(jnp.abs(f) < limit)
        gradient = loss.gradient(f, targets[batch]) / batch.shape[0]
        whole = jnp.zeros(shape, dtype).at[batch].add(gradient).reshape(-1)
        near, far = (whole if end.damping is None else end.damping(whole) for end in ends)
        split = [(1 - tau) * near, tau * far, jnp.zeros(count, dtype)]
        flat, parts = gradient.reshape(-1), (1 - tau, tau)
        for knot, each in zip(knots, folded, strict=True):
            image = jnp.dot(flat, picked(_factors(knot).columns, batch), precision="highest")
            seen = []
            for knot_, fold, part in zip(ends, each, parts, strict=True):
                damped = image
                if knot_.damping is not None and fold is not None:
                    along = jnp.dot(flat, picked(knot_.damping.right, batch), precision="highest")
                    damped = image - jnp.dot(fold, along, precision="highest")
                seen.append(part * damped)
            split += [seen[0] + seen[1]] if len(knots) == 1 else seen
        updates, after = optimizer.update(jnp.concatenate(split), state, weights)
        updates = jnp.where(is_alive, jnp.asarray(updates, dtype), 0.0)
        state = keep_dtypes(after, state)
        weights = jnp.asarray(optax.apply_updates(weights, updates))
        come, push = _displaced(updates[rows:].reshape(many, width), updates[2 * size : rows], tau)
        moved = [q + more for q, more in zip(moved, come, strict=True)]
        carried = [c + more for c, more in zip(carried, push, strict=True)]
        if len(knots) == 1:
            length = length.at[t + 1].set(_length(knots[0], products, updates, rows))
        if record:
            moves = moves.at[t].set(updates[:rows])
        path = [whole.at[t + 1].set(now) for whole, now in zip(path, moved + carried, strict=True)]
        return weights, state, moved, carried, is_alive, length, shares.at[t].set(tau), moves, path

    horizon = train.shape[0]
    moved, carried = ([jnp.zeros(n, dtype) for _ in knots] for n in (width, count))
    path = [jnp.zeros((horizon + CHUNK, each.shape[0]), dtype) for each in moved + carried]
    zeros = jnp.zeros(horizon, dtype)
    moves = jnp.zeros((horizon, rows), dtype) if record else None
    first = (weights, state, moved, carried, jnp.asarray(True), zeros, zeros, moves, path)
    weights, state, _, _, _, length, shares, moves, path = jax.lax.fori_loop(
        start, end, step, first
    )

    def fill(chunk: Array, train: Array) -> Array:
        low = start + 1 + chunk * CHUNK
        steps = low + jnp.arange(CHUNK)
        some = [jax.lax.dynamic_slice_in_dim(each, low, CHUNK) for each in path]
        found = outputs(steps, some[: len(knots)], some[len(knots) :], None)
        old = jax.lax.dynamic_slice_in_dim(train, low, CHUNK)
        found = jnp.where((steps <= end)[:, None, None], found.reshape(CHUNK, *shape), old)
        return jax.lax.dynamic_update_slice_in_dim(train, found, low, 0)

    padded = jnp.concatenate([train, jnp.zeros((CHUNK, *shape), dtype)])
    chunks = (end - start + CHUNK - 1) // CHUNK
    train, diverged_at = _held(
        jax.lax.fori_loop(0, chunks, fill, padded)[:horizon], start, end, limit
    )
    kept = [row.astype(dtype)[:rows] for row in (weights, *slots(optimizer, state))]
    state = optax.tree_utils.tree_map_params(optimizer, lambda leaf: leaf[:rows], state)
    return Run(train, kept, state, diverged_at, length, shares, moves)


def _factors(knot: Knot) -> Factored:
    assert isinstance(knot.kernel, Factored)  # what this module is for
    return knot.kernel


def _fold(kernel: Factored, damping: Damping | None) -> Array | None:
    """B^T left (k, m) of what a damping subtracts."""
    if damping is None:
        return None
    columns, left, right = kernel.columns, damping.left, damping.right
    none = jnp.zeros((columns.shape[1], left.shape[1]), left.dtype)
    return jax.lax.cond(  # as much work as many steps, and most dampings hold nothing back
        jnp.any(right != 0), lambda: jnp.dot(columns.T, left, precision="highest"), lambda: none
    )


def _displaced(seen: Array, carried: Array, tau: Array) -> tuple[list[Array], list[Array]]:
    """What an update adds to every knot's factors (k,) and to its carried vectors.

    Args:
        seen: B^T of both gradients' updates with one knot (1, k); of each with two (4, k).
        carried: coefficients of the update.
        tau: as in `run_segment`, whose rule this is.
    """
    if len(seen) == 1:
        return [seen[0]], [carried]
    near_first, near_last, far_first, far_last = seen
    near = 0.5 * ((1 - tau) * (near_first + near_last) + near_first)
    far = 0.5 * (tau * (far_first + far_last) + far_last)
    return [near, far], [(1 - tau) * carried, tau * carried]


def _length(knot: Knot, products: Array, updates: Array, rows: int) -> Array:
    """The length of one update in weight space."""
    count, size = knot.pushed.shape[0], knot.pushed[0].size
    both, carried = updates[:size] + updates[size : 2 * size], updates[2 * size : rows]
    seen = updates[rows:]
    square = jnp.vdot(seen, seen)
    square = square + 2 * jnp.vdot(carried, knot.pushed.reshape(count, size) @ both)
    return jnp.sqrt(jnp.maximum(square + jnp.vdot(carried, products @ carried), 0.0))


def _held(train: Array, start: Array, end: Array, limit: float) -> tuple[Array, Array]:
    """Outputs held from the first step of a segment on at which they are too large; that step."""
    ts = jnp.arange(train.shape[0])
    bad = ~jnp.all(jnp.abs(train) < limit, axis=(1, 2)) & (ts > start) & (ts <= end)
    first = jnp.argmax(bad)
    lost = jnp.any(bad) & (ts >= first) & (ts <= end)
    held = jnp.where(lost[:, None, None], train[jnp.maximum(first - 1, 0)][None], train)
    return held, jnp.where(jnp.any(bad), first, -1)
