"""The compiled pieces of a re-linearised walk: few programs, whatever the lengths of segments."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp._core.checks import all_finite, is_concrete
from jaxttp._core.compile import jit
from jaxttp._core.types import Params
from jaxttp.dynamics._segment import Run, gram, settled
from jaxttp.losses import Loss
from jaxttp.ntk.kernels import Kernel

MOST_LEFT = 0.5
"""No larger share of what is missed is said to be left after another run."""


@functools.partial(jit, static_argnums=3)
def surveyed(
    pushed: list[Array | None], vectors: list[Params], f: Array, in_use: tuple[bool, ...]
) -> tuple[Array, Array]:
    """J v of some vectors (k, N, C), and the products of the vectors with each other (k, k).

    Both are zero for a vector that is not in use.
    """
    parts = [jnp.zeros_like(f) if part is None else part for part in pushed]
    return jnp.stack(parts), gram(vectors, in_use, f.dtype)


@jit
def split_row(row: Array, f: Array, joined: Any) -> tuple[Array, Array, Array]:
    """Coefficients of the Jacobians at both ends (N, C), and of all other vectors (1 + k,).

    The first of those vectors is J^T of the second coefficients. With `joined` both Jacobians are
    one, the first coefficients are those of both, and that vector does not count.
    """
    size = f.size
    first, last = (row[part * size :][:size].reshape(f.shape) for part in range(2))
    ones = jnp.where(joined, 0.0, jnp.ones(1, row.dtype))
    return jnp.where(joined, first + last, first), last, jnp.concatenate([ones, row[2 * size :]])


@jit
def add_vectors(total: Params, vectors: list[Params], weights: Array) -> Params:
    """Total + sum_k weights_k vectors_k."""
    for weight, vector in zip(weights, vectors, strict=True):
        total = jax.tree.map(lambda a, b, w=weight: a + w.astype(a.dtype) * b, total, vector)
    return total


def zeros(shape: tuple[int, ...], dtype: Any) -> Array:
    """Zeros for which no program is compiled."""
    return jax.device_put(np.zeros(shape, dtype))


def as_shares(values: list[float], f: Array) -> Array:
    """Numbers as an array (k,) like outputs, for which no program is compiled."""
    return jax.device_put(np.asarray(values, f.dtype))


@functools.partial(jit, static_argnums=(2, 3))
def blank(
    params: Params, f: Array, shares: tuple[float, ...], steps: int
) -> tuple[list[Params], Array, Array]:
    """Accumulators that hold shares of the weights, a path of outputs f alone, empty coefficients.

    The path is (T + 1, N, C), the coefficients (2 N C + 1 + k,).
    """
    begun = [jax.tree.map(lambda w, s=s: (s * w).astype(w.dtype), params) for s in shares]
    rows = jnp.zeros(2 * f.size + 1 + len(shares), f.dtype)
    return begun, empty_path(f, steps), rows


@functools.partial(jit, static_argnums=1)
def empty_path(f: Array, steps: int) -> Array:
    return jnp.zeros((steps + 1, *f.shape), f.dtype).at[0].set(f)


@jit
def row_of(path: Array, index: Any) -> Array:
    return path[index]


@jit
def is_finite(kernel: Kernel) -> Array:
    return all_finite(kernel)


@functools.partial(jit, static_argnums=2)
def curves(path: Array, targets: Array, loss: Loss) -> tuple[Array, Array]:
    """Loss and error (T + 1,) along outputs (T + 1, N, C)."""
    return jax.vmap(lambda f: (loss.value(f, targets), loss.error(f, targets)))(path)


def loss_curve(loss: Loss, path: Array, targets: Array) -> Array:
    """The loss (T + 1,) along outputs (T + 1, N, C), by the program that `curves` is."""
    return curves(path, targets, loss)[0]


@functools.partial(jit, static_argnums=0)
def loss_value(loss: Loss, f: Array, targets: Array) -> Array:
    return loss.value(f, targets)


@functools.partial(jit, static_argnums=5)
def more_defect(
    defect: Array, f: Array, path: Array, end: Any, before: Array | None, loss: Loss
) -> tuple[Array, Array]:
    """A defect to run a segment again with, and what was missed with the one that it has.

    What is missed falls by about the same share in every run, which two of them tell (Aitken).
    """
    missed = f - path[end]
    if before is None:
        return defect + missed, missed
    now, then = (_seen(each, loss) for each in (missed, before))
    share = jnp.vdot(now, then) / jnp.maximum(jnp.vdot(then, then), 1e-30)
    return defect + missed / (1 - jnp.clip(share, 0.0, MOST_LEFT)), missed


Confirmed = tuple[Run, Params, Array, Array]
"""A run, weights and outputs at its end, and the defect that it was run with."""


def _seen(outputs: Any, loss: Loss) -> Any:
    """Outputs without what the loss does not see of them, as contrasts have them."""
    return outputs - outputs.mean(axis=-1, keepdims=True) if loss.shift_invariant else outputs


def better(
    before: Confirmed, after: Confirmed, end: Any, loss: Loss, done: Any = False
) -> tuple[Confirmed, Any]:
    """The one of two runs that the network contradicts less, and whether that is the second.

    Args:
        before: the first.
        after: the second.
        end: of the segment.
        loss: by which it is judged.
        done: whether it is the first in any case.
    """
    pairs = [(f, row_of(run.train, end)) for run, _, f, _ in (before, after)]
    if all(is_concrete(each) for pair in pairs for each in pair):  # no program for it
        # In double precision squares of what has nearly diverged are finite; what has is not seen.
        apart = (np.subtract(*(np.asarray(each, np.float64) for each in pair)) for pair in pairs)
        with np.errstate(over="ignore", invalid="ignore"):
            one, two = (np.linalg.norm(_seen(each, loss)) for each in apart)
        return (after if two < one else before), np.bool_(two < one)
    one, two = (jnp.linalg.norm(_seen(f - there, loss)) for f, there in pairs)
    is_better = (two < one) & ~jnp.asarray(done)
    return jax.tree.map(lambda a, b: jnp.where(is_better, a, b), after, before), is_better


@jit
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
    jump at the horizon alone would move every training time that is near it.
    """
    ts = jnp.arange(found.shape[0])
    inside = ((ts > start) & (ts <= end))[:, None, None]
    alive = diverged_at < 0
    diverged_at = jnp.where(alive & (run.diverged_at >= 0), run.diverged_at, diverged_at)
    good = (diverged_at < 0) & jnp.all(jnp.isfinite(f))
    f = jnp.where(good, f, run.train[end])
    part = settled(run.shares, ts, start, end)
    train = jnp.where(inside, run.train + part * (f - run.train[end])[None], run.train)
    return train, jnp.where(inside, found, provisional), diverged_at, f


@jit
def splice(
    train: Array, provisional: Array, plain: Array, abandoned: Array, start: Any, end: Any
) -> tuple[Array, Array]:
    """A held path: `plain` from step `start` on, and what was abandoned as its error estimate."""
    ts = jnp.arange(train.shape[0])[:, None, None]
    rest, doubted = ts > start, (ts > start) & (ts <= end)
    held = jnp.where(rest, plain, train)
    return held, jnp.where(doubted, abandoned, jnp.where(rest, plain, provisional))


@jit
def freeze(
    train: Array, provisional: Array, diverged_at: Array, f: Array, start: Any
) -> tuple[Array, Array, Array]:
    rest = jnp.arange(train.shape[0])[:, None, None] > start
    train, provisional = (jnp.where(rest, f[None], path) for path in (train, provisional))
    return train, provisional, jnp.where(diverged_at < 0, start + 1, diverged_at)


@jit
def estimate(curve: Array, provisional: Array, is_end: Any) -> tuple[Array, Array, Array]:
    """Times, the loss's uncertainty, and every segment's largest change as a share of the drop.

    What a correction changed at a segment's end displaces the path along itself for the most part:
    later it counts as the same share of the loss, which falls. Whatever the number of segments, of
    which there are at most as many as steps.
    """
    change = jnp.abs(curve - provisional)
    drop = jnp.abs(curve[0] - curve[-1])
    drop = jnp.where(drop > 0, drop, 1.0)
    least = jnp.maximum(jax.lax.cummin(curve), jnp.finfo(curve.dtype).tiny)
    shares = jnp.cumsum(jnp.where(is_end, change / least, 0.0))
    before = least * jnp.concatenate([jnp.zeros(1, curve.dtype), shares[:-1]])
    segment = jnp.cumsum(is_end) - is_end  # the ends before each step
    count = curve.shape[0]
    local = jax.ops.segment_max(change, segment, num_segments=count, indices_are_sorted=True)
    return jnp.arange(count, dtype=curve.dtype), change + before, local / drop
