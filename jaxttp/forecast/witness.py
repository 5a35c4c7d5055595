"""The network as a witness of a forecast with one kernel: how it fares at predicted weights."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp._core.compile import jit
from jaxttp._core.types import ApplyFn, Params, take
from jaxttp.dynamics._kernels import apply_kernel, block_of
from jaxttp.dynamics._network import add_vectors, outputs_and_pull
from jaxttp.dynamics._trajectory import Trajectory
from jaxttp.forecast.curves import loss_and_error
from jaxttp.losses import Loss
from jaxttp.losses.rule import training_time
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


TOWARDS, ASKED = 0.1, 0.2
"""On the straight way to the weights where the first share of the predicted drop is left, the
network is asked where the second is: of places on this way and on the path itself, one or two, it
told right forecasts from wrong ones best in `experiments.bench.trust`, for one of two ways back.
"""
WAYS = 2
"""On and back through the network, of those that are asked about: to the place, and there."""
NOTHING = 1e-6
"""A share of the first loss below which losses are alike."""


class Witness(NamedTuple):
    """What the network says of a forecast with one kernel.

    Attributes:
        step: on the way to whose weights it was asked; -1 where nobody was.
        speed: how fast its loss falls there over how fast the forecast has it fall.
        loss: its loss over the predicted one; 1 where one of them is negative.
        samples: how many it was asked about.
        share: which of all that is.
    """

    step: int = -1
    speed: float = 1.0
    loss: float = 1.0
    samples: int = 0
    share: float = 1.0

    @property
    def passes(self) -> float:
        """Ways on and back through the network with all samples, as they are counted."""
        return WAYS * self.share if self.step >= 0 else 0.0


NOBODY = Witness()


def passes_asked(samples: int) -> float:
    """The same before anybody is asked, with so many samples.

    Example:
        >>> passes_asked(20), passes_asked(1000)
        (2.0, 0.4)
    """
    return WAYS * sampled(samples) / samples


def batch_of_questions(samples: int, batch_size: int | None) -> int:
    """How many of so many samples the network is asked about at once.

    Example:
        >>> batch_of_questions(37, 32), batch_of_questions(37, None)
        (19, 37)
    """
    return math.ceil(samples / math.ceil(samples / (batch_size or samples)))


def ask_network(
    network: ApplyFn,
    params: Params,
    whole: Subset,
    loss: Loss,
    follow: Callable[[Subset], Trajectory],
    batch_size: int | None,
) -> Witness:
    """How fast the network learns, and what its loss is, at weights that one kernel predicts.

    At outputs f with gradient g the loss falls by g^T Theta g, which is |J^T g|^2: with the J of
    weights w on the way from w_0 to w_t = c_t w_0 + J_0^T a_t, over that with J_0, at the outputs
    that the linearised network has there, f_0 + s (f_t - f_0). It costs two products with J^T.
    The weights are those of a training on a part of the samples alone, with the same optimiser and
    full batches: its kernel is a part of the kernel, so that nothing but those products is to be
    paid for.

    Args:
        network: ``(params, x) -> outputs (N, C)``.
        params: w_0, the part that is trained.
        whole: all samples and their kernel.
        loss: exact.
        follow: the training of some samples, of `recursion`, which knows a_t and c_t.
        batch_size: samples at once at most; all of them when None.

    Returns:
        Speed and loss 1 for a linear network; infinite where the network is not finite. `NOBODY`
        where the loss does not change, the forecast diverges or there is no gradient.
    """
    part = whole.some()
    path = follow(part)
    if _diverges(path) and part is not whole:  # a part may be stiffer than the whole
        part, path = whole, follow(whole)
    if _diverges(path):
        return NOBODY
    curve = np.asarray(loss_and_error(loss, path.train, part.targets)[0])
    step, least = int(training_time(curve, TOWARDS)), float(curve.min())
    if step <= 0:
        return NOBODY
    level = least + ASKED * (float(curve[0]) - least)
    point = point_on_the_way(part, loss, path, step, level)
    expected = float(point.expected)
    if expected <= 0:
        return NOBODY
    size = batch_of_questions(part.size, batch_size)
    see = outputs_and_pull(network)
    weights = weights_at(see, params, part, point, size)
    outputs, pulled = see_in_batches(see, weights, part.x, point.gradient, size)
    real, found = map(float, loss_and_square(outputs, pulled, part.targets, loss))
    return Witness(
        step=step,
        speed=found / expected if np.isfinite(found) else np.inf,
        loss=_over(real, float(point.loss), float(curve[0])),
        samples=part.size,
        share=part.size / whole.size,
    )


def _diverges(path: Trajectory) -> bool:
    assert path.diverged_at is not None
    return int(path.diverged_at) >= 0


def _over(real: float, predicted: float, first: float) -> float:
    """A loss over what was predicted, where that means something."""
    if not np.isfinite(real):
        return np.inf
    if min(real, predicted) < 0 or first <= 0:
        return 1.0
    return (real + NOTHING * first) / (predicted + NOTHING * first)
