"""The network at weights that a forecast predicts."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp._jit import jit
from jaxttp._samples import take
from jaxttp._types import Params
from jaxttp.dynamics._kernels import apply_kernel, some_samples
from jaxttp.dynamics._pieces import add_vectors
from jaxttp.dynamics._trajectory import Trajectory
from jaxttp.losses import Loss
from jaxttp.ntk.factored import Kernel

Network = Callable[[Params, Any], Array]
MOST = 2
"""Steps that are asked about together."""
SHARE, LEAST = 4, 32
"""The network is asked about a fourth of the samples, and about so many where there are."""


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
        """As many as the network is asked about, drawn by lot, the same ones every time.

        All of them where the kernel lies on many devices or on a disk.
        """
        size = sampled(self.size)
        rows = np.sort(np.random.default_rng(0).permutation(self.size)[:size])
        kernel = some_samples(self.kernel, jnp.asarray(rows)) if size < self.size else None
        if kernel is None:
            return self
        return Subset(kernel, take(self.x, rows), take(self.targets, rows), self.start[rows], rows)


def sampled(samples: int) -> int:
    """How many of so many samples the network is asked about.

    Example:
        >>> sampled(20), sampled(100), sampled(1000)
        (20, 32, 250)
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


class Predicted(NamedTuple):
    """A step of a predicted path.

    Attributes:
        step: t.
        weights: w_t = c_t w_0 + J_0^T a_t.
        gradient: of the loss by the predicted outputs (N, C).
        expected: g^T Theta g, the speed at which the kernel has the loss fall.
    """

    step: int
    weights: Params
    gradient: Array
    expected: float


def places_of(
    see: Any,
    params: Params,
    part: Subset,
    loss: Loss,
    path: Trajectory,
    steps: Sequence[int],
    size: int,
) -> Iterator[Predicted]:
    """The predicted weights of some steps, one after the other; w_0 itself at step 0.

    Args:
        see: (weights, x, cotangent) -> outputs and J^T cotangent.
        params: w_0, the part that is trained.
        part: the samples.
        loss: exact.
        path: of their training, of `recursion`, which knows a_t and c_t.
        steps: at most `MOST`.
        size: samples at once.
    """
    assert path.dual is not None
    assert path.scale is not None
    if not steps:
        return
    asked = jnp.asarray(np.resize(np.asarray(steps), MOST))  # one shape for all
    duals, scales, gradients, expected = _ask(
        part.kernel, path.train, path.dual, path.scale, asked, part.targets, loss
    )
    for i, step in enumerate(steps):
        weights = params
        if step > 0:
            moved = see_in_batches(see, params, part.x, duals[i], size)[1]
            weights = _moved(params, moved, scales[i])
        yield Predicted(step, weights, gradients[i], float(expected[i]))


@functools.partial(jit, static_argnums=6)
def _ask(
    kernel: Kernel,
    train: Array,
    dual: Array,
    scale: Array,
    steps: Array,
    targets: Array,
    loss: Loss,
) -> tuple[list[Array], list[Array], list[Array], list[Array]]:
    """At some steps a_t, c_t, the gradients g, and g^T Theta g."""
    gradients = jax.vmap(lambda f: loss.gradient(f, targets))(train[steps])
    expected = jnp.sum(gradients * apply_kernel(kernel, gradients), axis=(1, 2))
    return list(dual[steps]), list(scale[steps]), list(gradients), list(expected)
