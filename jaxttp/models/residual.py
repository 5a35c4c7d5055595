"""The blocks of residual networks: two 3x3 convolutions, or a bottleneck of 1x1, 3x3, 1x1."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxttp.models.activations import get_activation, kernel_init
from jaxttp.models.normalization import norm_layer


class ResidualBlock(nnx.Module):
    """φ(shortcut(x) + branch_scale * conv(φ(conv(x)))), with 3x3 convolutions.

    The shortcut is the identity, or a 1x1 convolution where stride or width change the shape. With
    a norm, every convolution is followed by one and has no bias.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        stride: of the first convolution and of the shortcut.
        branch_scale: the fixed factor on the residual branch.
        rngs: Flax's random streams.
        activation: relu, tanh, gelu, softplus or identity.
        norm: "batch" (frozen), "group" or None.
        param_dtype: dtype of the parameters.

    Example:
        >>> block = ResidualBlock(16, 32, stride=2, branch_scale=1.0, rngs=nnx.Rngs(0))
        >>> block(jnp.zeros((5, 8, 8, 16))).shape
        (5, 4, 4, 32)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        stride: int,
        branch_scale: float,
        rngs: nnx.Rngs,
        activation: str = "relu",
        norm: str | None = None,
        param_dtype: DTypeLike = jnp.float32,
    ):
        self.activation = activation
        self.branch_scale = branch_scale
        options = {"gain": get_activation(activation).gain, "bias": norm is None}
        options |= {"param_dtype": param_dtype, "rngs": rngs}
        self.conv1 = conv(in_channels, out_channels, 3, stride, **options)
        self.norm1 = optional_norm(norm, out_channels, param_dtype, rngs)
        self.conv2 = conv(out_channels, out_channels, 3, 1, **options)
        self.norm2 = optional_norm(norm, out_channels, param_dtype, rngs)
        same = stride == 1 and in_channels == out_channels
        self.shortcut = None if same else conv(in_channels, out_channels, 1, stride, **options)
        self.shortcut_norm = optional_norm(None if same else norm, out_channels, param_dtype, rngs)

    def __call__(self, x: Float[Array, "n h w c"]) -> Float[Array, "n h2 w2 c2"]:
        """Features (N, H, W, C) to features (N, H/stride, W/stride, C2), rounded up."""
        function = get_activation(self.activation).function
        h = function(apply_norm(self.norm1, self.conv1(x)))
        branch = apply_norm(self.norm2, self.conv2(h))
        return function(_shortcut(self, x) + self.branch_scale * branch)


class BottleneckBlock(nnx.Module):
    """φ(shortcut(x) + branch_scale * F(x)), F of 1x1, 3x3 and 1x1 convolutions.

    The middle has a quarter of the channels and, as in torchvision and timm ("version 1.5"), the
    stride. Options are those of `ResidualBlock`.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output, a multiple of 4.
        stride: of the 3x3 convolution and of the shortcut.
        branch_scale: the fixed factor on the residual branch.
        rngs: Flax's random streams.
        activation: relu, tanh, gelu, softplus or identity.
        norm: "batch" (frozen), "group" or None.
        param_dtype: dtype of the parameters.

    Raises:
        ValueError: `out_channels` is not a multiple of 4.

    Example:
        >>> block = BottleneckBlock(16, 32, stride=2, branch_scale=1.0, rngs=nnx.Rngs(0))
        >>> block.conv2.kernel.shape, block(jnp.zeros((5, 8, 8, 16))).shape
        ((3, 3, 8, 8), (5, 4, 4, 32))
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        stride: int,
        branch_scale: float,
        rngs: nnx.Rngs,
        activation: str = "relu",
        norm: str | None = None,
        param_dtype: DTypeLike = jnp.float32,
    ):
        if out_channels % 4:
            raise ValueError(f"widths of bottlenecks must be multiples of 4; got {out_channels}.")
        middle = out_channels // 4
        self.activation = activation
        self.branch_scale = branch_scale
        options = {"gain": get_activation(activation).gain, "bias": norm is None}
        options |= {"param_dtype": param_dtype, "rngs": rngs}
        self.conv1 = conv(in_channels, middle, 1, 1, **options)
        self.norm1 = optional_norm(norm, middle, param_dtype, rngs)
        self.conv2 = conv(middle, middle, 3, stride, **options)
        self.norm2 = optional_norm(norm, middle, param_dtype, rngs)
        self.conv3 = conv(middle, out_channels, 1, 1, **options)
        self.norm3 = optional_norm(norm, out_channels, param_dtype, rngs)
        same = stride == 1 and in_channels == out_channels
        self.shortcut = None if same else conv(in_channels, out_channels, 1, stride, **options)
        self.shortcut_norm = optional_norm(None if same else norm, out_channels, param_dtype, rngs)

    def __call__(self, x: Float[Array, "n h w c"]) -> Float[Array, "n h2 w2 c2"]:
        """Features (N, H, W, C) to features (N, H/stride, W/stride, C2), rounded up."""
        function = get_activation(self.activation).function
        h = function(apply_norm(self.norm1, self.conv1(x)))
        h = function(apply_norm(self.norm2, self.conv2(h)))
        branch = apply_norm(self.norm3, self.conv3(h))
        return function(_shortcut(self, x) + self.branch_scale * branch)


BLOCKS = {"basic": ResidualBlock, "bottleneck": BottleneckBlock}


def _shortcut(block: ResidualBlock | BottleneckBlock, x: Array) -> Array:
    return x if block.shortcut is None else apply_norm(block.shortcut_norm, block.shortcut(x))


def optional_norm(
    norm: str | None, channels: int, param_dtype: DTypeLike, rngs: nnx.Rngs
) -> nnx.BatchNorm | nnx.GroupNorm | None:
    """The norm of that name, None for None."""
    return None if norm is None else norm_layer(norm, channels, param_dtype=param_dtype, rngs=rngs)


def apply_norm(norm: nnx.BatchNorm | nnx.GroupNorm | None, x: Array) -> Array:
    """The normalised features; the features themselves without a norm."""
    return x if norm is None else norm(x)


def conv(
    in_channels: int,
    out_channels: int,
    size: int,
    stride: int,
    *,
    gain: float,
    bias: bool,
    param_dtype: DTypeLike,
    rngs: nnx.Rngs,
) -> nnx.Conv:
    """A square convolution, padded by (size - 1)/2 on either side whatever the stride."""
    return nnx.Conv(
        in_channels,
        out_channels,
        (size, size),
        strides=stride,
        padding=size // 2,
        use_bias=bias,
        kernel_init=kernel_init(gain),
        param_dtype=param_dtype,
        rngs=rngs,
    )
