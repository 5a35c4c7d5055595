"""Training in the dual space: what an optimiser is given there, and where its weights are."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from jaxttp.losses import Loss


class Coefficients(NamedTuple):
    """Where the weights are: w = weights w_0 + J^T dual."""

    dual: Array
    weights: Array


def start(f0: Array) -> Coefficients:
    """Before training."""
    return Coefficients(jnp.zeros_like(f0), jnp.ones((), f0.dtype))


def dual_gradient(loss: Loss, f: Array, targets: Array, batch: Array | None) -> Array:
    """The gradient of the (batch) mean loss with respect to f (N, C), zero outside the batch."""
    if batch is None:
        return loss.gradient(f, targets) / f.shape[0]
    picked = loss.gradient(f[batch], targets[batch]) / batch.shape[0]
    return jnp.zeros_like(f).at[batch].add(picked)


def output_limit(dtype: Any) -> float:
    """Outputs beyond this size count as diverged: their squares would soon overflow."""
    return 1e-3 * float(jnp.finfo(dtype).max) ** 0.5
