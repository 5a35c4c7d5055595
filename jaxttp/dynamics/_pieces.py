"""The compiled pieces of a re-linearised walk: few programs, whatever the lengths of segments."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxttp._types import ApplyFn, Params
from jaxttp.dynamics._segment import Run, gram
from jaxttp.losses import Loss


@functools.lru_cache(maxsize=8)
def compile_survey(apply_fn: ApplyFn) -> Callable[..., tuple[Array, Array]]:
    @functools.partial(jax.jit, static_argnames="in_use")
    def survey(
        point: Params, x: Any, vectors: list[Params], f: Array, in_use: tuple[bool, ...]
    ) -> tuple[Array, Array]:
        def push(vector: Params) -> Array:
            return jax.jvp(lambda w: apply_fn(w, x), (point,), (vector,))[1]

        pairs = zip(in_use, vectors, strict=True)
        pushed = [push(v) if used else jnp.zeros_like(f) for used, v in pairs]
        return jnp.stack(pushed), gram(vectors, in_use, f.dtype)

    return survey


@functools.partial(jax.jit, static_argnums=1)
def no_vectors(f: Array, count: int) -> tuple[Array, Array]:
    return jnp.zeros((count, *f.shape), f.dtype), jnp.zeros((count, count), f.dtype)


@functools.lru_cache(maxsize=8)
def compile_combine(apply_fn: ApplyFn) -> Callable[..., tuple[Params, Array | None]]:
    @functools.partial(jax.jit, static_argnames="evaluate")
    def combine(
        points: list[Params], x: Any, vectors: list[Params], row: Array, f: Array, evaluate: bool
    ) -> tuple[Params, Array | None]:
        def pull(point: Params, cotangent: Array) -> Params:
            return jax.vjp(lambda w: apply_fn(w, x), point)[1](cotangent.reshape(f.shape))[0]

        size = f.size
        first, last, carried = row[:size], row[size : 2 * size], row[2 * size :]
        if len(points) == 1:
            total = pull(points[0], first + last)
        else:
            total = jax.tree.map(jnp.add, pull(points[0], first), pull(points[1], last))
        for weight, vector in zip(carried, vectors, strict=True):
            total = jax.tree.map(lambda a, b, w=weight: a + w.astype(a.dtype) * b, total, vector)
        return total, apply_fn(total, x) if evaluate else None

    return combine


@jax.jit
def scaled(params: Params, share: Any) -> Params:
    return jax.tree.map(lambda w: (share * w).astype(w.dtype), params)


@functools.partial(jax.jit, static_argnums=1)
def empty_path(f: Array, steps: int) -> Array:
    return jnp.zeros((steps + 1, *f.shape), f.dtype).at[0].set(f)


@jax.jit
def row_of(path: Array, index: Any) -> Array:
    return path[index]


@jax.jit
def is_finite(kernel: Array) -> Array:
    return jnp.all(jnp.isfinite(kernel))


@functools.partial(jax.jit, static_argnums=0)
def loss_curve(loss: Loss, path: Array, targets: Array) -> Array:
    """The loss (T + 1,) along outputs (T + 1, N, C)."""
    return jax.vmap(lambda f: loss.value(f, targets))(path)


@functools.partial(jax.jit, static_argnums=0)
def loss_values(loss: Loss, targets: Array, f: Array, here: Array, path: Array, end: Any) -> Array:
    """Losses: of outputs f, of the forecast at `end`, where the segment starts, at step 0."""
    return jnp.stack([loss.value(each, targets) for each in (f, path[end], here, path[0])])


@functools.partial(jax.jit, static_argnums=0)
def loss_drop(loss: Loss, targets: Array, path: Array) -> Array:
    return jnp.abs(loss.value(path[0], targets) - loss.value(path[-1], targets))


@jax.jit
def more_drift(drift: Array, f: Array, path: Array, start: Any, end: Any) -> Array:
    return drift + (f - path[end]) / (end - start)


@jax.jit
def better(
    before: tuple[Run, Params, Array], after: tuple[Run, Params, Array], end: Any
) -> tuple[Run, Params, Array]:
    """The one of two runs that the network contradicts less at the segment's end."""
    one, two = (jnp.linalg.norm(f - run.train[end]) for run, _, f in (before, after))
    return jax.tree.map(lambda a, b: jnp.where(two < one, a, b), after, before)


@jax.jit
def settle(
    provisional: Array,
    found: Array,
    diverged_at: Array,
    run: Run,
    f: Array,
    start: Any,
    end: Any,
) -> tuple[Array, Array, Array, Array]:
    """Train, provisional, diverged_at and the outputs at the end of an accepted segment.

    The outputs of the segment are brought to those of the network at its end without a jump: a
    jump at the horizon alone would move every training time that is near it. The defect is taken
    to come up evenly in time (measured: better than along the chord).
    """
    ts = jnp.arange(found.shape[0])
    inside = ((ts > start) & (ts <= end))[:, None, None]
    alive = diverged_at < 0
    diverged_at = jnp.where(alive & (run.diverged_at >= 0), run.diverged_at, diverged_at)
    good = (diverged_at < 0) & jnp.all(jnp.isfinite(f))
    f = jnp.where(good, f, run.train[end])
    part = (ts - start).astype(f.dtype)[:, None, None] / (end - start)
    train = jnp.where(inside, run.train + part * (f - run.train[end])[None], run.train)
    return train, jnp.where(inside, found, provisional), diverged_at, f


@jax.jit
def splice(
    train: Array, provisional: Array, plain: Array, abandoned: Array, start: Any, end: Any
) -> tuple[Array, Array]:
    """A held path: `plain` from step `start` on, and what was abandoned as its error estimate."""
    ts = jnp.arange(train.shape[0])[:, None, None]
    rest, doubted = ts > start, (ts > start) & (ts <= end)
    held = jnp.where(rest, plain, train)
    return held, jnp.where(doubted, abandoned, jnp.where(rest, plain, provisional))


@jax.jit
def freeze(
    train: Array, provisional: Array, diverged_at: Array, f: Array, start: Any
) -> tuple[Array, Array, Array]:
    rest = jnp.arange(train.shape[0])[:, None, None] > start
    train, provisional = (jnp.where(rest, f[None], path) for path in (train, provisional))
    return train, provisional, jnp.where(diverged_at < 0, start + 1, diverged_at)


@functools.partial(jax.jit, static_argnums=0)
def estimate(
    loss: Loss, targets: Array, train: Array, provisional: Array, is_end: Any
) -> tuple[Array, Array, Array, Array]:
    """Times, the loss, its uncertainty, and every segment's largest change as a share of the drop.

    Whatever the number of segments, of which there are at most as many as steps.
    """
    curve = loss_curve(loss, train, targets)
    change = jnp.abs(curve - loss_curve(loss, provisional, targets))
    drop = jnp.abs(curve[0] - curve[-1])
    drop = jnp.where(drop > 0, drop, 1.0)
    at_ends = jnp.where(is_end, change, 0.0)
    before = jnp.concatenate([jnp.zeros(1, curve.dtype), jnp.cumsum(at_ends)[:-1]])
    segment = jnp.cumsum(is_end) - is_end  # the ends before each step
    count = curve.shape[0]
    local = jax.ops.segment_max(change, segment, num_segments=count, indices_are_sorted=True)
    return jnp.arange(count, dtype=curve.dtype), curve, change + before, local / drop
