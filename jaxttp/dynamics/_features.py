"""Mini-batches in the space of a kernel's factors: steps that touch the batch's rows alone.

With Theta = A B^T a step of mini-batches needs B^T g, to which the batch's rows contribute, and
outputs on the next batch, A's rows there. So the optimiser, linear as it is, acts on vectors of the
factors' width k beside its dual coefficients: a step costs B C k in place of N C k, and what all
samples do follows afterwards, for many steps as one product of matrices. It is the dual recursion
in other words: the same numbers to rounding.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxttp._core.compile import jit
from jaxttp.dynamics._dual import output_limit
from jaxttp.dynamics._edge import Damping
from jaxttp.dynamics._segment import Chord, Knot, Run, Start, begin, risen, share
from jaxttp.dynamics.optimizers import Optimizer, keep_dtypes, slots
from jaxttp.losses import Loss
from jaxttp.ntk.kernels import Factored

CHUNK = 32
"""Steps whose outputs are computed at once."""


@functools.partial(jit, static_argnames=("loss", "record"))
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
    defect: Array,
    record: bool = False,
) -> Run:
    """`run_segment` where there are batches and all kernels are factored."""
    ends = (knots[0], knots[-1])
    folded = [[_fold(_factors(knot), end.damping) for end in ends] for knot in knots]
    space = _Space(knots, folded, here.f, defect, start)
    shape, count, dtype = here.f.shape, len(here.vectors), train.dtype
    size, rows = here.f.size, 2 * here.f.size + len(here.vectors)
    # One kernel sees what both knots' gradients came to; two see each of them.
    many, width = len(knots) ** 2, _factors(knots[0]).columns.shape[1]
    weights, state = begin(optimizer, here, space.begun)
    limit = output_limit(dtype)

    def step(t: Array, carry: tuple) -> tuple:
        weights, state, moved, carried, is_alive, length, shares, moves, path = carry
        tau, batch = shares[t], indices[t]
        there = space.outputs(tau[None], [each[None] for each in moved + carried], batch)
        f = there.reshape(batch.shape[0], -1)
        is_alive = is_alive & jnp.all(jnp.abs(f) < limit)
        gradient = loss.gradient(f, targets[batch]) / batch.shape[0]
        whole = jnp.zeros(shape, dtype).at[batch].add(gradient).reshape(-1)
        near, far = (whole if end.damping is None else end.damping(whole) for end in ends)
        split = [(1 - tau) * near, tau * far, jnp.zeros(count, dtype)]
        split += space.images(gradient.reshape(-1), batch, tau)
        updates, after = optimizer.update(jnp.concatenate(split), state, weights)
        updates = jnp.where(is_alive, jnp.asarray(updates, dtype), 0.0)
        state = keep_dtypes(after, state)
        weights = jnp.asarray(optax.apply_updates(weights, updates))
        come, push = _displaced(updates[rows:].reshape(many, width), updates[2 * size : rows], tau)
        shares = shares.at[t + 1].set(share(line, weights[:rows], size, t + 1, start, end))
        moved = [q + more for q, more in zip(moved, come, strict=True)]
        carried = [c + more for c, more in zip(carried, push, strict=True)]
        if len(knots) == 1:
            length = length.at[t + 1].set(_length(knots[0], products, updates, rows))
        if record:
            moves = moves.at[t].set(updates[:rows])
        path = [whole.at[t + 1].set(now) for whole, now in zip(path, moved + carried, strict=True)]
        return weights, state, moved, carried, is_alive, length, shares, moves, path

    horizon = train.shape[0]
    moved, carried = ([jnp.zeros(n, dtype) for _ in knots] for n in (width, count))
    path = [jnp.zeros((horizon + CHUNK, each.shape[0]), dtype) for each in moved + carried]
    zeros = jnp.zeros(horizon, dtype)
    moves = jnp.zeros((horizon, rows), dtype) if record else None
    first = (weights, state, moved, carried, jnp.asarray(True), zeros, zeros, moves, path)
    weights, state, _, _, _, length, shares, moves, path = jax.lax.fori_loop(
        start, end, step, first
    )
    train, diverged_at = _held(space.fill(train, path, shares, end), start, end, limit)
    kept = [row.astype(dtype)[:rows] for row in (weights, *slots(optimizer, state))]
    state = optax.tree_utils.tree_map_params(optimizer, lambda leaf: leaf[:rows], state)
    return Run(train, kept, state, diverged_at, length, shares, moves)


class _Space(NamedTuple):
    """A segment in its kernels' factors.

    Attributes:
        knots: with factored kernels.
        folded: by knot and by the knot whose damping it is, see `_fold`.
        f: outputs where the segment starts (N, C).
        defect: what comes up of them by the segment's end, see `risen`.
        start: the step.
    """

    knots: list[Knot]
    folded: list[list[Array | None]]
    f: Array
    defect: Array
    start: Array

    def outputs(self, come: Array, at: list[Array], batch: Array | None) -> Array:
        """Outputs (S, B C) on a batch or, with None, on all samples.

        Args:
            come: the shares of the chord (S,).
            at: displacement then, of every knot's factors (S, k) and then of its vectors.
            batch: indices (B,).
        """
        shape = self.f.shape

        def of(values: Array) -> Array:
            return values if batch is None else _picked(values, batch, shape[1])

        f = of(self.f.reshape(-1))[None] + risen(come)[:, None] * of(self.defect.reshape(-1))[None]
        count = len(self.knots)
        for knot, moved, carried in zip(self.knots, at[:count], at[count:], strict=True):
            f = f + jnp.dot(moved, of(_factors(knot).rows).T, precision="highest")
            pushed = of(knot.pushed.reshape(len(knot.pushed), -1).T)
            f = f + jnp.dot(carried, pushed.T, precision="highest")
        return f

    def images(self, gradient: Array, batch: Array, tau: Array) -> list[Array]:
        """B^T of what a batch's gradient (B C,) becomes at both knots, by all kernels' factors."""
        ends, images, classes = (self.knots[0], self.knots[-1]), [], self.f.shape[1]
        for knot, each in zip(self.knots, self.folded, strict=True):
            columns = _picked(_factors(knot).columns, batch, classes)
            image, seen = jnp.dot(gradient, columns, precision="highest"), []
            for end, fold, part in zip(ends, each, (1 - tau, tau), strict=True):
                damped = image
                if end.damping is not None and fold is not None:
                    right = _picked(end.damping.right, batch, classes)
                    along = jnp.dot(gradient, right, precision="highest")
                    damped = image - jnp.dot(fold, along, precision="highest")
                seen.append(part * damped)
            images += [seen[0] + seen[1]] if len(self.knots) == 1 else seen
        return images

    def begun(self, dual: Array) -> Array:
        """The same of what an accumulator holds at the first knot (N C,), in the order of steps."""
        seen = [jnp.dot(dual, _factors(knot).columns, precision="highest") for knot in self.knots]
        if len(self.knots) == 1:
            return seen[0]
        return jnp.concatenate([part for each in seen for part in (each, jnp.zeros_like(each))])

    def fill(self, train: Array, path: list[Array], shares: Array, end: Array) -> Array:
        """Outputs (T + 1, N, C) with those of the segment.

        Args:
            train: up to its start.
            path: displacements (T + 1 + CHUNK, ...) as in `outputs`.
            shares: as in `Run`.
            end: its end.
        """
        shares = jnp.concatenate([shares, jnp.zeros(CHUNK, shares.dtype)])

        def chunk(number: Array, train: Array) -> Array:
            low = self.start + 1 + number * CHUNK
            steps = low + jnp.arange(CHUNK)
            some = [jax.lax.dynamic_slice_in_dim(each, low, CHUNK) for each in path]
            come = jax.lax.dynamic_slice_in_dim(shares, low, CHUNK)
            found = self.outputs(come, some, None).reshape(CHUNK, *self.f.shape)
            old = jax.lax.dynamic_slice_in_dim(train, low, CHUNK)
            found = jnp.where((steps <= end)[:, None, None], found, old)
            return jax.lax.dynamic_update_slice_in_dim(train, found, low, 0)

        horizon = train.shape[0]
        padded = jnp.concatenate([train, jnp.zeros((CHUNK, *self.f.shape), train.dtype)])
        chunks = (end - self.start + CHUNK - 1) // CHUNK
        return jax.lax.fori_loop(0, chunks, chunk, padded)[:horizon]


def _picked(values: Array, batch: Array, classes: int) -> Array:
    """A batch's rows (B C, ...) of (N C, ...)."""
    return values[(batch[:, None] * classes + jnp.arange(classes)[None]).reshape(-1)]


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
