"""Building blocks of networks: activations with their gains, norms, convolutions, and a last layer.

A layer with kernel ~ N(0, gain/fan_in) that is fed by activations φ keeps the second moment of its
input when

    gain = 1 / E[φ(z)²],    z ~ N(0, 1),

which for the ReLU is the 2 of He et al. 2015. Norms leave a sample's outputs to that sample: group
norm, or batch norm with its running averages as constants,

    y = (x - mean) / sqrt(variance + 1e-5) * scale + bias,

whose `scale` and `bias` are parameters; the averages are none. They come from a checkpoint, or from
one pass over data by `calibrate_batch_norm`. Every model keeps its last layer, an `nnx.Linear`, in
the attribute ``head``; that is all that `fresh_head` asks of a module.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxttp._core.checks import (
    check_array,
    check_choice,
    check_finite,
    check_instance,
    check_integer,
    check_key,
    check_known,
    check_number,
)


class Activation(NamedTuple):
    """A function of one number and the gain of the layers around it.

    Attributes:
        function: the activation, elementwise.
        gain: 1 / E[φ(z)²] for a standard normal z.
    """

    function: Callable[[Array], Array]
    gain: float


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(jax.nn.relu, 2.0),
    "tanh": Activation(jax.nn.tanh, 2.536175433),
    "gelu": Activation(functools.partial(jax.nn.gelu, approximate=False), 2.351715613),
    "identity": Activation(jax.nn.identity, 1.0),
}
"""The activations of the models. ``gelu`` is the exact one, with the error function."""


def get_activation(name: str) -> Activation:
    """The activation of that name.

    Args:
        name: one of relu, tanh, gelu, identity.

    Returns:
        The function with its gain.

    Raises:
        ValueError: for an unknown name.

    Example:
        >>> get_activation("relu").gain
        2.0
    """
    return ACTIVATIONS[check_choice("activation", name, ACTIVATIONS)]


def kernel_init(gain: float) -> nnx.Initializer:
    """Kernels ~ N(0, gain/fan_in), not truncated.

    Args:
        gain: variance of a kernel entry times fan_in; 0 gives zeros.

    Returns:
        An initializer ``(key, shape, dtype) -> array`` whose fan_in is all but the last axis.

    Example:
        >>> kernel_init(2.0)(jax.random.key(0), (3, 3, 16, 32)).shape
        (3, 3, 16, 32)
    """
    if gain == 0:
        return nnx.initializers.zeros
    return nnx.initializers.variance_scaling(gain, "fan_in", "normal")


M = TypeVar("M", bound=nnx.Module)


def norm_layer(
    norm: str | None, channels: int, param_dtype: DTypeLike, rngs: nnx.Rngs
) -> nnx.BatchNorm | nnx.GroupNorm | None:
    """Frozen batch norm, or group norm with as many of 32 groups as divide the channels.

    Args:
        norm: "batch", "group" or None.
        channels: of the input's last axis.
        param_dtype: dtype of scale, bias and running averages.
        rngs: Flax's random streams (nothing is drawn).

    Returns:
        The layer: scale 1 and bias 0, running averages 0 and 1; None for None.

    Raises:
        ValueError: an unknown norm.

    Example:
        >>> norm_layer("group", 48, jnp.float32, nnx.Rngs(0)).num_groups
        16
    """
    check_choice("norm", norm, ("batch", "group", None))
    if norm is None:
        return None
    options: dict[str, Any] = {"epsilon": 1e-5, "use_fast_variance": False}
    options |= {"param_dtype": param_dtype, "rngs": rngs}
    if norm == "group":
        return nnx.GroupNorm(channels, math.gcd(32, channels), **options)
    layer = nnx.BatchNorm(channels, use_running_average=True, **options)
    layer.mean = nnx.BatchStat(jnp.zeros(channels, param_dtype))
    layer.var = nnx.BatchStat(jnp.ones(channels, param_dtype))
    return layer


def calibrate_batch_norm(module: M, x: Any) -> M:
    """A copy whose running averages are the means and variances of these samples.

    One forward pass in training mode: the inputs of every batch norm are normalized by those before
    it. This gives a network with random weights a sensible scale. The averages are constants then,
    and a sample's outputs depend on that sample alone.

    Args:
        module: a network with `nnx.BatchNorm` layers.
        x: samples (N, ...), preferably the training set or a large part of it.

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

    x = check_array("x", x)
    check_finite("x", x)
    if x.ndim < 2 or 0 in x.shape:
        raise ValueError(f"x must be samples (N, ...), not empty; got shape {x.shape}.")
    nnx.jit(lambda model, x: model(x))(copy, x.astype(layers[0].mean.dtype))
    for layer, (frozen, momentum) in zip(layers, before, strict=True):
        layer.use_running_average, layer.momentum = frozen, momentum
    return copy


def apply_norm(norm: nnx.BatchNorm | nnx.GroupNorm | None, x: Array) -> Array:
    """The normalised features; the features themselves without a norm."""
    return x if norm is None else norm(x)


def conv(
    inputs: int, outputs: int, size: int, stride: int, *, gain: float, bias: bool, **options: Any
) -> nnx.Conv:
    """A square convolution, padded by (size - 1)/2 on either side for any stride."""
    options |= {"strides": stride, "padding": size // 2, "use_bias": bias}
    return nnx.Conv(inputs, outputs, (size, size), kernel_init=kernel_init(gain), **options)


def layer_norm(width: int, param_dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Layer norm over the last axis, with timm's ε."""
    return nnx.LayerNorm(
        width, epsilon=1e-6, use_fast_variance=False, param_dtype=param_dtype, rngs=rngs
    )


def dense(
    inputs: int,
    outputs: int,
    param_dtype: DTypeLike,
    rngs: nnx.Rngs,
    *,
    gain: float = 1.0,
    use_bias: bool = True,
) -> nnx.Linear:
    """A linear layer with kernel ~ N(0, gain/inputs) and bias 0, if any."""
    return nnx.Linear(
        inputs, outputs, use_bias=use_bias, kernel_init=kernel_init(gain), param_dtype=param_dtype,
        rngs=rngs,
    )  # fmt: skip


def linear_head(
    features: int,
    outputs: int,
    *,
    rngs: nnx.Rngs,
    scale: float = 1.0,
    use_bias: bool = True,
    param_dtype: DTypeLike = jnp.float32,
) -> nnx.Linear:
    """A linear layer with kernel ~ N(0, scale²/features) and bias 0.

    Features of unit second moment then give outputs of standard deviation `scale`.

    Args:
        features: width of the input, the fan-in.
        outputs: number of outputs.
        rngs: Flax's random streams; draws one key of ``params``.
        scale: standard deviation of an output; 0 gives a kernel of zeros.
        use_bias: whether there is a bias.
        param_dtype: dtype of the parameters.

    Returns:
        The layer, kernel (features, outputs) and bias (outputs,).

    Raises:
        ValueError: `outputs` is below 1 or `scale` negative.

    Example:
        >>> linear_head(64, 5, rngs=nnx.Rngs(0)).kernel.shape
        (64, 5)
    """
    check_integer("features", features, at_least=1)
    check_integer("outputs", outputs, at_least=1)
    check_instance("rngs", rngs, nnx.Rngs, "flax.nnx, such as nnx.Rngs(0)")
    check_known(scale=scale)
    check_number("scale", scale, at_least=0)
    return dense(features, outputs, param_dtype, rngs, gain=scale**2, use_bias=use_bias)


def fresh_head(module: M, num_classes: int, *, key: Array, scale: float = 1.0) -> M:
    """A copy of the module whose last linear layer is new: the start of fine-tuning.

    The new head has kernel ~ N(0, scale²/fan_in) and bias 0 (no bias where the old one had none),
    in the old head's dtype. Everything else is copied; the module given stays as it is.

    Args:
        module: a model with its last layer, an `nnx.Linear`, in the attribute ``head``.
        num_classes: number of outputs of the new head.
        key: a JAX random key; the same key gives the same head.
        scale: standard deviation of an output for features of unit second moment.

    Returns:
        A new module of the same type.

    Raises:
        TypeError: `module` has no `nnx.Linear` called ``head``.
        ValueError: `num_classes` is below 1 or `scale` negative.

    Example:
        >>> import jax
        >>> from jaxttp.models import MLP
        >>> old = MLP((4, 8, 3), rngs=nnx.Rngs(0))
        >>> new = fresh_head(old, 2, key=jax.random.key(1))
        >>> old.head.kernel.shape, new.head.kernel.shape
        ((8, 3), (8, 2))
    """
    check_integer("num_classes", num_classes, at_least=1)
    check_key(key, optional=False)
    old = getattr(module, "head", None)
    if not isinstance(old, nnx.Linear):
        kind = "no such attribute" if old is None else f"a {type(old).__name__}"
        raise TypeError(
            f"fresh_head needs a module whose last layer is an nnx.Linear called 'head'; "
            f"{type(module).__name__} has {kind}."
        )
    options: dict[str, Any] = {"use_bias": old.use_bias, "param_dtype": old.kernel.dtype}
    rngs = nnx.Rngs(params=key)
    head = linear_head(old.in_features, num_classes, rngs=rngs, scale=scale, **options)
    copy = nnx.clone(module)
    setattr(copy, "head", head)  # noqa: B010  (M promises no attribute to the type checker)
    return copy
