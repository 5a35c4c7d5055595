"""The network at weights that a forecast predicts."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp._core.compile import jit
from jaxttp._core.types import Params, take
from jaxttp.dynamics._kernels import apply_kernel, block_of
from jaxttp.dynamics._pieces import add_vectors
from jaxttp.dynamics._trajectory import Trajectory
from jaxttp.losses import Loss
from jaxttp.ntk.kernels import Kernel

POINTS = 64
"""Points on a way that are looked at."""
SHARE, LEAST = 5, 32
"""The network is asked about a fifth of the samples, and about so many where there are."""


class Subset(NamedTuple):
    """Some of the samples, and their kernel.

    Attributes:
        kernel: Theta of theirs.
        x: samples (n, ...).
        targets: encoded.
        start: their outputs before training (n, C).
        rows: which they are; None for all.
    """

    kernel: Kernel
    x: Any
    targets: Any
    start: Array
    rows: np.ndarray | None = None

    @property
    def size(self) -> int:
        """How many there are."""
        return self.start.shape[0]

    def some(self) -> "Subset":
        """As many as the network is asked about, drawn by lot, the same ones every time."""
        size = sampled(self.size)
        if size >= self.size:
            return self
        rows = np.sort(np.random.default_rng(0).permutation(self.size)[:size])
        kernel = block_of(self.kernel, rows, rows)
        return Subset(kernel, take(self.x, rows), take(self.targets, rows), self.start[rows], rows)


def sampled(samples: int) -> int:
    """How many of so many samples the network is asked about.

    Example:
        >>> sampled(20), sampled(100), sampled(1000)
        (20, 32, 200)
    """
    return max(min(samples, LEAST), samples // SHARE)


def see_in_batches(
    see: Any, weights: Params, x: Any, cotangent: Array, size: int
) -> tuple[Array, Params]:
    """The outputs (N, C) at these weights and J^T of a cotangent, `size` samples at once."""
    n = cotangent.shape[0]
    if size == n:
        return see(weights, x, cotangent)
    total, outputs = None, []
    for start in range(0, n, size):
        found, part = see(weights, *batch_of(x, cotangent, start, size))
        outputs.append(found[: n - start])
        total = part if total is None else add_vectors(total, [part], np.ones(1, cotangent.dtype))
    return jnp.concatenate(outputs), total  # type: ignore[return-value]


@functools.partial(jit, static_argnums=3)
def batch_of(x: Any, cotangent: Array, start: Any, size: int) -> tuple[Any, Array]:
    """Samples and cotangents from `start` on; the last batch is filled up with nothing."""
    n = cotangent.shape[0]
    places = start + jnp.arange(size)
    rows = jnp.minimum(places, n - 1)
    return take(x, rows), jnp.where((places < n)[:, None], cotangent[rows], 0.0)


@jit
def _moved(params: Params, step: Params, scale: Array) -> Params:
    """C w_0 + the displacement."""
    return jax.tree.map(lambda w, m: scale.astype(w.dtype) * w + m, params, step)


@functools.partial(jit, static_argnums=3)
def loss_and_square(
    outputs: Array, pulled: Params, targets: Any, loss: Loss
) -> tuple[Array, Array]:
    """The loss of outputs, and the squared norm of all leaves of J^T g."""
    found = sum((jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(pulled)), start=jnp.zeros(()))
    return loss.value(outputs, targets), found


class Waypoint(NamedTuple):
    """A point w_0 + s (w_t - w_0) on the way to the weights w_t = c_t w_0 + J_0^T a_t of a step.

    Attributes:
        dual: s a_t (N, C), so that its weights are scale w_0 + J_0^T dual.
        scale: 1 + s (c_t - 1).
        gradient: of the loss by the outputs f_0 + s (f_t - f_0) that the linearised network has
            there (N, C).
        expected: g^T Theta g, the speed at which the kernel has the loss fall there.
        loss: of those outputs.
    """

    dual: Array
    scale: Array
    gradient: Array
    expected: Array
    loss: Array


def weights_at(see: Any, params: Params, part: Subset, point: Waypoint, size: int) -> Params:
    """The weights of a point, for one product with J_0^T.

    Args:
        see: (weights, x, cotangent) -> outputs and J^T cotangent.
        params: w_0, the part that is trained.
        part: the samples.
        point: of theirs.
        size: samples at once.
    """
    moved = see_in_batches(see, params, part.x, point.dual, size)[1]
    return _moved(params, moved, point.scale)


def point_on_the_way(
    part: Subset, loss: Loss, path: Trajectory, step: int, level: float
) -> Waypoint:
    """The first of `POINTS` points on the way to the weights of a step whose loss is low enough.

    Args:
        part: samples and their kernel.
        loss: exact.
        path: of their training, of `recursion`, which knows a_t and c_t.
        step: t.
        level: what the loss is to fall to; where it does not, the point is the end of the way.
    """
    where = np.asarray(step), np.asarray(level, part.start.dtype)
    return _point(
        part.kernel, part.start, part.targets, path.train, path.dual, path.scale, *where, loss
    )


@functools.partial(jit, static_argnums=8)
def _point(
    kernel: Kernel,
    start: Array,
    targets: Any,
    train: Array,
    dual: Array,
    scale: Array,
    step: Array,
    level: Array,
    loss: Loss,
) -> Waypoint:
    moved = train[step] - start
    ways = jnp.arange(1, POINTS + 1, dtype=moved.dtype) / POINTS
    losses = jax.vmap(lambda s: loss.value(start + s * moved, targets))(ways)
    found = jnp.where(jnp.any(losses <= level), jnp.argmax(losses <= level), POINTS - 1)
    way = ways[found]
    gradient = loss.gradient(start + way * moved, targets)
    expected = jnp.sum(gradient * apply_kernel(kernel, gradient))
    return Waypoint(
        way * dual[step], 1 + way * (scale[step] - 1), gradient, expected, losses[found]
    )
