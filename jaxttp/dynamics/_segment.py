"""One segment of the re-linearised recursion: the network at its ends, and the steps between.

Everything in weight space is a combination of known vectors: rows of the Jacobians at both ends of
a segment, the weights at its start, and the optimiser's accumulators (velocities) carried into it.
A linear optimiser acts on the coefficients of these combinations as it would act on weights, so
optax itself does the book-keeping (see `filters`).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxttp._core.compile import jit
from jaxttp._core.types import Params
from jaxttp.dynamics._central import Guard, hold_back
from jaxttp.dynamics._dual import dual_gradient, output_limit
from jaxttp.dynamics._edge import Damping
from jaxttp.dynamics._kernels import apply_kernel
from jaxttp.dynamics._network import compile_network as compile_network
from jaxttp.dynamics._network import inner
from jaxttp.dynamics.optimizers import Optimizer, keep_dtypes, slots
from jaxttp.losses import Loss
from jaxttp.ntk.kernels import Kernel


class Start(NamedTuple):
    """Where a segment starts.

    Attributes:
        point: the point of linearisation.
        kernel: Theta there.
        vectors: the weight-space vectors that coefficients refer to: the weights, then one
            accumulator for every parameter-like leaf of the optimiser's state.
        f: outputs (N, C).
        state: the optimiser's state.
        duals: what each accumulator holds beside its vector, as J^T of this (N, C) at `point`.
        shares: how much of its vector an accumulator holds (k,).
    """

    point: Params
    kernel: Kernel
    vectors: list[Params]
    f: Array
    state: optax.OptState
    duals: list[Array]
    shares: Array


class Knot(NamedTuple):
    """A point of linearisation: its kernel, J v there for the vectors of the start, the damping."""

    kernel: Kernel
    pushed: Array
    damping: Damping | None = None


class Chord(NamedTuple):
    """The straight line from the start of a segment to its provisional end, D in weight space.

    Attributes:
        dual: J_s D (N, C).
        carried: the products of D with the vectors of the start (k,).
        size: D · D.
    """

    dual: Array
    carried: Array
    size: Array


class Run(NamedTuple):
    """A finished segment.

    Attributes:
        train: outputs (T + 1, N, C), filled up to the segment's end.
        rows: coefficients of the weights and of the accumulators.
        state: the optimiser's state in these coefficients.
        diverged_at: first step whose outputs could not be represented, or -1.
        length: ||w_t - w_{t-1}|| by the kernel at the segment's start, (T + 1,); zeros with two
            knots.
        shares: tau at each step from the segment's start to its end (T + 1,), zero outside.
        moves: coefficients of the updates (T + 1, 2 N C + k), row t that from step t to t + 1, zero
            outside the segment; None where no other samples are followed.
        curvatures: S_i at the end of the modes that a guard holds back (k,); None without one.
    """

    train: Array
    rows: list[Array]
    state: optax.OptState
    diverged_at: Array
    length: Array
    shares: Array
    moves: Array | None = None
    curvatures: Array | None = None


@functools.partial(jit, static_argnames=("in_use", "dtype"))
def gram(vectors: list[Params], in_use: tuple[bool, ...], dtype: Any) -> Array:
    """Products of vectors with each other (k, k), zero where one is not in use."""
    k = len(in_use)
    out = jnp.zeros((k, k), dtype)
    for i in range(k):
        for j in range(i, k):
            if in_use[i] and in_use[j]:
                value = inner(vectors[i], vectors[j]).astype(dtype)
                out = out.at[i, j].set(value).at[j, i].set(value)
    return out


@jit
def chord(knot: Knot, products: Array, row: Array) -> Chord:
    """The chord of a segment from the coefficients `row` of its provisional end."""
    size = knot.pushed[0].size
    both = (row[:size] + row[size : 2 * size]).reshape(knot.pushed.shape[1:])
    carried = row[2 * size :].at[0].add(-1.0)  # the weights themselves are the start
    dual = apply_kernel(knot.kernel, both) + jnp.tensordot(carried, knot.pushed, 1)
    along = jnp.einsum("nc,knc->k", both, knot.pushed) + products @ carried
    return Chord(dual, along, jnp.vdot(both, dual) + jnp.vdot(carried, along))


@jit
def gathered(knots: list[Knot], products: Array, row: Array) -> tuple[Array, Array]:
    """The part J^T a of a vector in weight space, with J at the last knot, and what is beside it.

    Args:
        knots: both.
        products: of the vectors of the start with each other (k, k).
        row: coefficients of the vector.

    Returns:
        a (N, C), with the coefficients at the first knot as if they were at the last; and lengths
        (1 + k,) as shares of that of the part at the last: of the part at the first, and of those
        along the vectors of the start.
    """
    near, far = knots[0], knots[-1]
    size, shape = near.pushed[0].size, near.pushed.shape[1:]
    first, last = row[:size].reshape(shape), row[size : 2 * size].reshape(shape)
    here = jnp.vdot(first, apply_kernel(near.kernel, first))
    there = jnp.vdot(last, apply_kernel(far.kernel, last))
    along = row[2 * size :] ** 2 * jnp.diagonal(products)
    squares = jnp.maximum(jnp.append(here[None], along), 0.0)
    shares = jnp.sqrt(squares / jnp.where(there > 0, there, 1.0))
    return first + last, jnp.where(there > 0, shares, jnp.inf)


@functools.partial(jit, static_argnames=("loss", "record"))
def run_segment(
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
    indices: Array | None,
    defect: Array,
    record: bool = False,
    guard: Guard | None = None,
) -> Run:
    """One segment of the recursion, from step `start` to `end`, compiled once for all segments.

    With two knots the kernel is interpolated along the chord of the provisional path: an update
    made at weights w enters through J(tau) = (1 - tau) J_s + tau J_e with tau = (w - w_s) · D /
    D · D, the share of the chord D that the weights have come (linear in time would do for the
    order; the chord is truer on a long segment, of which most is covered in the first steps).
    `line` may be the shares themselves (T + 1,), of another path between the same knots. An update
    made at tau of gradients met earlier moves the outputs by J(tau) J(earlier)^T, for which the
    mean of both kernels stands, exact to second order in its symmetric part. `defect` (N, C) is
    what the linearisation was found to miss at the segment's end; it comes up on the way there (see
    `risen`), so that the steps feel it. With `record` the updates are kept, for `follow_beside`. A
    `guard` holds its modes back from the edge of stability.
    """
    ends = (knots[0], knots[-1])
    shape, count, dtype = here.f.shape, len(here.vectors), train.dtype
    size = math.prod(shape)
    weights, state = begin(optimizer, here)

    def step(t: Array, carry: tuple) -> tuple:
        weights, state, f, train, length, diverged_at, shares, moves, curvatures = carry
        tau = shares[t]
        batch = None if indices is None else indices[t]
        gradient = dual_gradient(loss, f, targets, batch).reshape(-1)
        near, far = (gradient if k.damping is None else k.damping(gradient) for k in ends)
        split = [(1 - tau) * near, tau * far, jnp.zeros(count, dtype)]
        updates, after = optimizer.update(jnp.concatenate(split), state, weights)
        updates, state = jnp.asarray(updates, dtype), keep_dtypes(after, state)
        if guard is not None:
            k = guard.modes
            change = _along(ends, products, updates, k)
            xi, curvatures = hold_back(guard, curvatures, change, products[-k:, -k:])
            updates = updates.at[-k:].add(-xi)
        new_f = f + _move(knots, updates, tau, shape)
        if len(knots) == 1:  # it is asked for ahead only, and shares the product of the move
            length = length.at[t + 1].set(_length(knots[0], products, updates, shape))
        weights = jnp.asarray(optax.apply_updates(weights, updates))
        come = share(line, weights, size, t + 1, start, end)
        shares = shares.at[t + 1].set(come)
        new_f = new_f + (risen(come) - risen(tau)) * defect
        if guard is not None:
            curvatures = curvatures + (risen(come) - risen(tau)) * guard.missed
        good = (diverged_at < 0) & jnp.all(jnp.abs(new_f) < output_limit(dtype))
        diverged_at = jnp.where(good | (diverged_at >= 0), diverged_at, t + 1)
        f = jnp.where(good, new_f, f)
        if record:
            moves = moves.at[t].set(jnp.where(good, updates, 0.0))
        train = train.at[t + 1].set(f)
        return weights, state, f, train, length, diverged_at, shares, moves, curvatures

    zeros = jnp.zeros(train.shape[0], dtype)
    moves = jnp.zeros((len(zeros), len(weights)), dtype) if record else None
    curvatures = None if guard is None else guard.curvatures
    first = (weights, state, here.f, train, zeros, jnp.asarray(-1), zeros, moves, curvatures)
    out = jax.lax.fori_loop(start, end, step, first)
    weights, state, _, train, length, diverged_at, shares, moves, curvatures = out
    rows = [weights, *(row.astype(dtype) for row in slots(optimizer, state))]
    return Run(train, rows, state, diverged_at, length, shares, moves, curvatures)


def _along(ends: tuple[Knot, Knot], products: Array, updates: Array, k: int) -> Array:
    """Products of an update with the last k vectors (k,)."""
    size = ends[0].pushed[0].size
    first, last = (end.pushed[-k:].reshape(k, size) for end in ends)
    moved = first @ updates[:size] + last @ updates[size : 2 * size]
    return moved + products[-k:] @ updates[2 * size :]


def begin(
    optimizer: Optimizer, here: Start, images: Callable[[Array], Array] | None = None
) -> tuple[Array, optax.OptState]:
    """The coefficients of the weights where a segment starts, and the optimiser's state in them.

    Args:
        optimizer: see `same_program`.
        here: the start.
        images: coefficients of J^T at the start (N C,) -> further numbers that the optimiser is to
            act on, beside them.
    """
    count, dtype = len(here.vectors), here.f.dtype
    unit, zero = jnp.eye(count, dtype=dtype), jnp.zeros(here.f.size, dtype)

    def row(dual: Array, vectors: Array) -> Array:
        rest = [] if images is None else [images(dual)]
        return jnp.concatenate([dual, zero, vectors, *rest])

    held = zip(here.duals, here.shares, unit[1:], strict=False)  # a guard's vectors come after them
    carried = iter([row(dual.reshape(-1), share * vector) for dual, share, vector in held])
    state = optax.tree_utils.tree_map_params(
        optimizer, lambda leaf: next(carried).astype(leaf.dtype), here.state
    )
    return row(zero, unit[0]), state


def share(
    line: Chord | Array | None, weights: Array, size: int, t: Array, start: Array, end: Array
) -> Array:
    """The share of the chord that weights of these coefficients have come at step t."""
    timed = ((t - start) / (end - start)).astype(weights.dtype)
    if line is None:
        return timed
    if not isinstance(line, Chord):
        return line[t]
    both = weights[:size] + weights[size : 2 * size]
    carried = weights[2 * size :].at[0].add(-1.0)  # the weights themselves are the start
    come = jnp.vdot(both, line.dual.reshape(-1)) + jnp.vdot(carried, line.carried)
    safe = jnp.where(line.size > 0, line.size, 1.0)
    return jnp.where(line.size > 0, jnp.clip(come / safe, *OVERSHOOT), timed)


def risen(come: Array) -> Array:
    """How much of a segment's defect there is where weights have come a share of the chord.

    What a linearisation misses grows as the square of the way, not of the time: on a long segment
    most of the way is covered in the first steps, and later ones contract what came up early.
    """
    return jnp.clip(come, 0.0, 1.0) ** 2


def settled(shares: Array, ts: Array, start: Array, end: Array) -> Array:
    """The same at steps of a segment as a share of that at its end, so that nothing jumps there.

    Args:
        shares: as in `Run`.
        ts: the steps (T + 1,).
        start: the segment's first.
        end: its last.

    Returns:
        (T + 1, 1, 1); by time where the weights end nearer to the start than to the chord's end.
    """
    part, timed = risen(shares), risen(((ts - start) / (end - start)).astype(shares.dtype))
    came = part[end] > risen(jnp.asarray(0.5))
    return jnp.where(came, part / jnp.where(came, part[end], 1.0), timed)[:, None, None]


@jit
def follow_beside(
    knots: list[Knot],
    run: Run,
    f: Array,
    path: Array,
    start: Array,
    end: Array,
    arrived: Array | None,
) -> Array:
    """Outputs on other samples (T + 1, M, C) along a segment, moved by the updates of its run.

    Args:
        knots: of the run, with cross kernels (M, C, N, C) and products with the Jacobian there.
        run: of `run_segment`, recorded.
        f: outputs where the segment starts (M, C).
        path: outputs up to there (T + 1, M, C).
        start: the segment's first step.
        end: its last.
        arrived: what the network says at its end (M, C); what the kernels miss of it comes up as
            for the training samples. None where that is not known.
    """
    assert run.moves is not None  # it was recorded
    ts, limit = jnp.arange(path.shape[0]), output_limit(path.dtype)
    each = jax.vmap(lambda update, tau: _move(knots, update, tau, run.train.shape[1:]))
    moved = jnp.cumsum(each(run.moves, run.shares), axis=0)
    begun = f[None]
    moved = begun + jnp.concatenate([jnp.zeros_like(moved[:1]), moved[:-1]])
    moved = jnp.where(jnp.isnan(moved), begun, jnp.clip(moved, -limit, limit))
    if arrived is not None:
        arrived = jnp.where(jnp.all(jnp.isfinite(arrived)), arrived, moved[end])
        part = settled(run.shares, ts, start, end)
        moved = moved + part * (arrived - moved[end])[None]
    return jnp.where(((ts > start) & (ts <= end))[:, None, None], moved, path)


OVERSHOOT = (-0.5, 1.5)
"""Bounds of tau: oscillating weights may pass an end of the chord, but not leave its region."""


def _move(knots: list[Knot], updates: Array, tau: Array, shape: tuple[int, ...]) -> Array:
    """How far one update moves the outputs."""
    size = math.prod(shape)
    first, last = updates[:size].reshape(shape), updates[size : 2 * size].reshape(shape)
    carried = updates[2 * size :]
    both = first + last
    if len(knots) == 1:
        return apply_kernel(knots[0].kernel, both) + jnp.tensordot(carried, knots[0].pushed, 1)
    left, right = knots
    at_left = 0.5 * ((1 - tau) * both + first)
    at_right = 0.5 * (tau * both + last)
    pushed = (1 - tau) * left.pushed + tau * right.pushed
    return (
        apply_kernel(left.kernel, at_left)
        + apply_kernel(right.kernel, at_right)
        + jnp.tensordot(carried, pushed, 1)
    )


def _length(knot: Knot, products: Array, updates: Array, shape: tuple[int, ...]) -> Array:
    """The length of one update in weight space, by the kernel at the segment's start."""
    size = math.prod(shape)
    both = (updates[:size] + updates[size : 2 * size]).reshape(shape)
    carried = updates[2 * size :]
    square = jnp.vdot(both, apply_kernel(knot.kernel, both))
    square = square + 2 * jnp.einsum("k,nc,knc->", carried, both, knot.pushed)
    square = square + jnp.vdot(carried, products @ carried)
    return jnp.sqrt(jnp.maximum(square, 0.0))
