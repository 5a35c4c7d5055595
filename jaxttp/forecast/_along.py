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
from jaxttp.dynamics._kernels import apply_kernel
from jaxttp.dynamics._pieces import add_vectors
from jaxttp.dynamics._trajectory import Trajectory
from jaxttp.losses import Loss
from jaxttp.ntk.factored import Kernel

Network = Callable[[Params, Any], Array]
MOST = 3
"""Steps that are asked about together."""


def pull_in_batches(pull: Any, weights: Params, x: Any, cotangent: Array, size: int) -> Params:
    """J^T of outputs (N, C) at these weights, `size` samples at once."""
    n = cotangent.shape[0]
    if size == n:
        return pull(weights, x, cotangent)
    total = None
    for start in range(0, n, size):
        part = pull(weights, *batch_of(x, cotangent, start, size))
        total = part if total is None else add_vectors(total, [part], np.ones(1, cotangent.dtype))
    return total


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


@jit
def square(tree: Params) -> Array:
    """The squared norm of all leaves."""
    return sum((jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree)), start=jnp.zeros(()))


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
    pull: Any,
    params: Params,
    x: Any,
    targets: Array,
    loss: Loss,
    kernel: Kernel,
    path: Trajectory,
    steps: Sequence[int],
    size: int,
) -> Iterator[Predicted]:
    """The predicted weights of some steps, one after the other; w_0 itself at step 0.

    Args:
        pull: (weights, x, cotangent) -> J^T cotangent.
        params: w_0, the part that is trained.
        x: samples (N, ...).
        targets: encoded.
        loss: exact.
        kernel: Theta.
        path: of `recursion`, which knows a_t and c_t.
        steps: at most `MOST`.
        size: samples at once.
    """
    assert path.dual is not None
    assert path.scale is not None
    if not steps:
        return
    asked = jnp.asarray(np.resize(np.asarray(steps), MOST))  # one shape for all
    duals, scales, gradients, expected = _ask(
        kernel, path.train, path.dual, path.scale, asked, targets, loss
    )
    for i, step in enumerate(steps):
        weights = params
        if step > 0:
            weights = _moved(params, pull_in_batches(pull, params, x, duals[i], size), scales[i])
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
