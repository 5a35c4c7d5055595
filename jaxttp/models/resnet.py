"""Residual networks without normalisation, so that a sample's outputs depend on it alone.

What normalisation does for the scale is done by the initialisation and by a fixed factor on the
residual branches. In a network of B blocks a block maps x to

    φ(S x + B^{-1/2} F(x)),    F(x) = conv(φ(conv(x))),

with S the identity, or a 1x1 convolution where the shape changes. Kernels have variance gain/fan_in
with gain = 1/E[φ(z)²] (He et al. 2015: 2 for the ReLU), so for the ReLU F doubles the second moment
of its input, and a block makes it grow at most by 1 + 2/B, all blocks together at most by e²,
whatever the depth. (The B^{-1/2} is that of Hayou et al. 2021, "Stable ResNet".)
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxttp._checks import check_integer, check_number
from jaxttp.models.activations import get_activation, kernel_init
from jaxttp.models.head import linear_head


class ResidualBlock(nnx.Module):
    """φ(shortcut(x) + branch_scale * conv(φ(conv(x)))), with 3x3 convolutions.

    The shortcut is the identity, or a 1x1 convolution where stride or width change the shape.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        stride: of the first convolution and of the shortcut.
        branch_scale: the fixed factor on the residual branch.
        rngs: Flax's random streams.
        activation: relu, tanh, gelu, softplus or identity.
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
        param_dtype: DTypeLike = jnp.float32,
    ):
        gain = get_activation(activation).gain
        self.activation = activation
        self.branch_scale = branch_scale
        self.conv1 = _conv(in_channels, out_channels, 3, stride, gain, param_dtype, rngs)
        self.conv2 = _conv(out_channels, out_channels, 3, 1, gain, param_dtype, rngs)
        same_shape = stride == 1 and in_channels == out_channels
        self.shortcut = (
            None
            if same_shape
            else _conv(in_channels, out_channels, 1, stride, gain, param_dtype, rngs)
        )

    def __call__(self, x: Float[Array, "n h w c"]) -> Float[Array, "n h2 w2 c2"]:
        """Features (N, H, W, C) to features (N, H/stride, W/stride, C2), rounded up."""
        function = get_activation(self.activation).function
        branch = self.conv2(function(self.conv1(x)))
        shortcut = x if self.shortcut is None else self.shortcut(x)
        return function(shortcut + self.branch_scale * branch)


class ResNet(nnx.Module):
    """Stem, residual blocks, global average pool, linear head; convolutions with bias, no norm.

    Args:
        num_classes: number of outputs.
        rngs: Flax's random streams.
        in_channels: channels of the images.
        stem_width: channels after the stem, a 3x3 convolution of stride 1.
        widths: channels of every stage.
        strides: stride of the first block of every stage.
        blocks: residual blocks of every stage; one number means the same everywhere.
        activation: relu, tanh, gelu, softplus or identity.
        branch_scale: factor on the residual branches; default 1/sqrt(number of blocks).
        head_scale: standard deviation of the initial outputs for features of unit second moment.
        param_dtype: dtype of the parameters.

    Raises:
        ValueError: a width, stride or number of blocks below 1, lengths that differ, a negative
            scale, an unknown activation.

    Example:
        >>> model = ResNet(10, stem_width=8, widths=(8,), strides=(2,), blocks=2, rngs=nnx.Rngs(0))
        >>> model(jnp.zeros((5, 8, 8, 1))).shape
        (5, 10)
    """

    def __init__(
        self,
        num_classes: int,
        *,
        rngs: nnx.Rngs,
        in_channels: int = 1,
        stem_width: int = 16,
        widths: Sequence[int] = (16, 32, 64),
        strides: Sequence[int] = (1, 2, 2),
        blocks: int | Sequence[int] = 1,
        activation: str = "relu",
        branch_scale: float | None = None,
        head_scale: float = 1.0,
        param_dtype: DTypeLike = jnp.float32,
    ):
        counts = (blocks,) * len(widths) if isinstance(blocks, int) else tuple(blocks)
        if not len(widths) == len(strides) == len(counts) > 0:
            raise ValueError(
                f"widths, strides and blocks describe the same stages, one entry each; got "
                f"widths={tuple(widths)!r}, strides={tuple(strides)!r}, blocks={counts!r}."
            )
        check_integer("in_channels", in_channels, at_least=1)
        check_integer("stem_width", stem_width, at_least=1)
        for name, values in (("widths", widths), ("strides", strides), ("blocks", counts)):
            for value in values:
                check_integer(name, value, at_least=1)
        if branch_scale is None:
            branch_scale = 1 / math.sqrt(sum(counts))
        check_number("branch_scale", branch_scale, at_least=0)
        gain = get_activation(activation).gain
        self.activation = activation
        self.stem = _conv(in_channels, stem_width, 3, 1, gain, param_dtype, rngs)
        inner, channels = [], stem_width
        for width, stride, count in zip(widths, strides, counts, strict=True):
            for index in range(count):
                inner.append(
                    ResidualBlock(
                        channels,
                        width,
                        stride=stride if index == 0 else 1,
                        branch_scale=branch_scale,
                        activation=activation,
                        param_dtype=param_dtype,
                        rngs=rngs,
                    )
                )
                channels = width
        self.blocks = nnx.List(inner)
        self.head = linear_head(
            channels, num_classes, rngs=rngs, scale=head_scale, param_dtype=param_dtype
        )

    def activations(self, x: Float[Array | np.ndarray, "n h w c"]) -> dict[str, Array]:
        """What every layer gives: "stem", "blocks.0" ... (N, H, W, D), "pool" (N, D), "head".

        The last block's features averaged over the image, "pool", are what the head sees.
        """
        if x.ndim != 4 or x.shape[-1] != self.stem.in_features:
            raise ValueError(
                f"x of shape {x.shape} is not a batch of images (N, H, W, {self.stem.in_features})."
            )
        h = get_activation(self.activation).function(self.stem(jnp.asarray(x)))
        layers = {"stem": h}
        for index, block in enumerate(self.blocks):
            h = layers[f"blocks.{index}"] = block(h)
        pool = jnp.mean(h, axis=(1, 2))
        return layers | {"pool": pool, "head": self.head(pool)}

    def features(self, x: Float[Array | np.ndarray, "n h w c"]) -> Float[Array, "n d"]:
        """What the head sees: (N, D), the last block's features averaged over the image."""
        return self.activations(x)["pool"]

    def __call__(self, x: Float[Array | np.ndarray, "n h w c"]) -> Float[Array, "n k"]:
        """Outputs (N, C) of images (N, H, W, channels)."""
        return self.activations(x)["head"]


def digits_resnet(num_classes: int = 5, *, rngs: nnx.Rngs) -> ResNet:
    """The network of the shipped checkpoint, for 8x8 images with one channel.

    A stem of width 16 and three residual blocks of widths 16, 32, 64 with strides 1, 2, 2 and the
    (smooth) GELU: 77,093 parameters with five outputs.

    Args:
        num_classes: number of outputs.
        rngs: Flax's random streams.

    Returns:
        The network with random weights; `load_pretrained` gives the trained ones.

    Example:
        >>> digits_resnet(10, rngs=nnx.Rngs(0)).head.kernel.shape
        (64, 10)
    """
    return ResNet(num_classes, activation="gelu", rngs=rngs)


def _conv(
    in_channels: int,
    out_channels: int,
    size: int,
    stride: int,
    gain: float,
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
        kernel_init=kernel_init(gain),
        param_dtype=param_dtype,
        rngs=rngs,
    )
