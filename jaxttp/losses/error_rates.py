"""What people report beside a loss: shares of outputs that are wrong, variance unexplained."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxttp._core.checks import check_array


def misclassified(
    outputs: Float[Array, "n c"],
    targets: Float[Array, "n c"],
    weights: Float[Array, "n c"] | None = None,
) -> Float[Array, ""]:
    """Share of samples whose largest output is not the largest target, in [0, 1]."""
    outputs, targets = _checked(outputs, targets)
    wrong = jnp.argmax(outputs, axis=-1) != jnp.argmax(targets, axis=-1)
    each = None if weights is None else jnp.sum(weights * targets, axis=-1)
    return _mean(wrong.astype(outputs.dtype), each)


def wrong_bits(
    outputs: Float[Array, "n c"],
    targets: Float[Array, "n c"],
    weights: Float[Array, "n c"] | None = None,
) -> Float[Array, ""]:
    """Share of (sample, output) pairs on the wrong side of zero, in [0, 1]."""
    outputs, targets = _checked(outputs, targets)
    return _mean(((outputs > 0) != (targets > 0.5)).astype(outputs.dtype), weights)


def unexplained_variance(
    outputs: Float[Array, "n c"],
    targets: Float[Array, "n c"],
    weights: Float[Array, "n c"] | None = None,
) -> Float[Array, ""]:
    """||f - y||^2 / ||y - mean(y)||^2, that is 1 - R^2; relative to ||y||^2 where y is constant."""
    outputs, targets = _checked(outputs, targets)
    w = jnp.ones_like(targets) if weights is None else weights
    first = jnp.take_along_axis(targets, jnp.argmax(w > 0, axis=0)[None], axis=0)
    total = jnp.sum(w, axis=0, keepdims=True)
    mean = jnp.sum(w * targets, axis=0, keepdims=True) / jnp.where(total > 0, total, 1.0)
    spread = jnp.sum(w * (targets - mean) ** 2)
    # The rounded mean of equal numbers is not always that number.
    spread = jnp.where(jnp.any((w > 0) & (targets != first)), spread, 0.0)
    size = jnp.sum(w * targets**2)
    scale = jnp.where(spread > 0, spread, jnp.where(size > 0, size, 1.0))
    return jnp.sum(w * (outputs - targets) ** 2) / scale


def _checked(outputs: Array, targets: Array) -> tuple[Array, Array]:
    """Both as arrays of real numbers of one shape (N, C)."""
    outputs = check_array("outputs", outputs, ndim=2, floating=True)
    targets = check_array("targets", targets, ndim=2)
    if outputs.shape != targets.shape or 0 in outputs.shape:
        raise ValueError(
            f"targets must have the shape of outputs, (N, C) and not empty; got {targets.shape} "
            f"and {outputs.shape}."
        )
    return outputs, targets


def _mean(values: Array, weights: Array | None) -> Array:
    if weights is None:
        return jnp.mean(values)
    return jnp.sum(weights * values) / jnp.sum(weights)
