"""The network at weights that a forecast predicts."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp._samples import take
from jaxttp._types import Params
from jaxttp.dynamics._kernels import apply_kernel
from jaxttp.dynamics._pieces import add_vectors
from jaxttp.losses import Loss
from jaxttp.ntk.factored import Kernel

Network = Callable[[Params, Any], Array]


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


@functools.partial(jax.jit, static_argnums=3)
def batch_of(x: Any, cotangent: Array, start: Any, size: int) -> tuple[Any, Array]:
    """Samples and cotangents from `start` on; the last batch is filled up with nothing."""
    n = cotangent.shape[0]
    places = start + jnp.arange(size)
    rows = jnp.minimum(places, n - 1)
    return take(x, rows), jnp.where((places < n)[:, None], cotangent[rows], 0.0)


@jax.jit
def moved(params: Params, step: Params, scale: Array) -> Params:
    """C w_0 + the displacement."""
    return jax.tree.map(lambda w, m: scale.astype(w.dtype) * w + m, params, step)


@jax.jit
def square(tree: Params) -> Array:
    """The squared norm of all leaves."""
    return sum((jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree)), start=jnp.zeros(()))


@functools.partial(jax.jit, static_argnums=6)
def ask(
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
