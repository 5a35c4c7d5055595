"""Normalisation that leaves a sample's outputs to that sample: frozen batch norm, group norm.

Batch norm is evaluated with its running averages, as constants:

    y = (x - mean) / sqrt(variance + 1e-5) * scale + bias

`scale` and `bias` are parameters; the averages are none. They come from a checkpoint, or from one
pass over data by `calibrate_batch_norm`.
"""

import math
from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxttp._core.checks import check_array, check_choice, check_finite

M = TypeVar("M", bound=nnx.Module)

NORMS = ("batch", "group")
EPSILON = 1e-5


def norm_layer(
    norm: str, channels: int, *, rngs: nnx.Rngs, param_dtype: DTypeLike = jnp.float32
) -> nnx.BatchNorm | nnx.GroupNorm:
    """Frozen batch norm, or group norm with as many of 32 groups as divide the channels.

    Args:
        norm: "batch" or "group".
        channels: of the input's last axis.
        rngs: Flax's random streams (nothing is drawn).
        param_dtype: dtype of scale, bias and running averages.

    Returns:
        The layer: scale 1 and bias 0, running averages 0 and 1.

    Raises:
        ValueError: an unknown norm.

    Example:
        >>> norm_layer("group", 48, rngs=nnx.Rngs(0)).num_groups
        16
    """
    check_choice("norm", norm, NORMS)
    if norm == "group":
        groups = math.gcd(32, channels)
        return nnx.GroupNorm(
            channels, groups, epsilon=EPSILON, use_fast_variance=False,
            param_dtype=param_dtype, rngs=rngs,
        )  # fmt: skip
    layer = nnx.BatchNorm(
        channels, use_running_average=True, epsilon=EPSILON, use_fast_variance=False,
        param_dtype=param_dtype, rngs=rngs,
    )  # fmt: skip
    layer.mean = nnx.BatchStat(jnp.zeros(channels, param_dtype))
    layer.var = nnx.BatchStat(jnp.ones(channels, param_dtype))
    return layer


def calibrate_batch_norm(module: M, x: Any) -> M:
    """A copy whose running averages are the means and variances of these samples.

    One forward pass in training mode: every batch norm sees inputs that those before it have
    normalised. That is how a network with random weights gets a sensible scale; afterwards the
    averages are constants again, and every sample is on its own.

    Args:
        module: a network with `nnx.BatchNorm` layers.
        x: samples (N, ...), best the training set or a good part of it.

    Returns:
        A new module; the one given stays as it is.

    Raises:
        ValueError: the module has no batch norm.

    Example:
        >>> import jax
        >>> layer = nnx.BatchNorm(1, rngs=nnx.Rngs(0))
        >>> calibrate_batch_norm(layer, jnp.array([[3.0], [5.0]])).mean[...].tolist()
        [4.0]
    """
    copy = nnx.clone(module)
    layers = [part for _, part in nnx.iter_modules(copy) if isinstance(part, nnx.BatchNorm)]
    if not layers:
        raise ValueError(f"module: this {type(module).__name__} has no nnx.BatchNorm to calibrate.")
    before = [(layer.use_running_average, layer.momentum) for layer in layers]
    for layer in layers:
        layer.use_running_average, layer.momentum = False, 0.0

    @nnx.jit
    def run(model: Any, x: Any) -> Any:
        return model(x)

    x = check_array("x", x)
    check_finite("x", x)
    if x.ndim < 2 or 0 in x.shape:
        raise ValueError(f"x must be samples (N, ...), not empty; got shape {x.shape}.")
    run(copy, x.astype(layers[0].mean.dtype))
    for layer, (frozen, momentum) in zip(layers, before, strict=True):
        layer.use_running_average, layer.momentum = frozen, momentum
    return copy
