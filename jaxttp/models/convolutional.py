"""Residual and plain convolutional networks in which a sample's outputs depend on it alone.

The ImageNet and CIFAR networks (`resnet18` ... `resnet20`) have frozen batch norm or group norm.
Without a norm, the initialization and a fixed factor on the residual branches control the scale. In
a network of B blocks a block maps x to

    φ(S x + B^{-1/2} F(x)),    F(x) = conv(φ(conv(x))),

with S the identity, or a 1x1 convolution where the shape changes. Kernels have variance gain/fan_in
with gain = 1/E[φ(z)²] (He et al. 2015: 2 for the ReLU), so for the ReLU F doubles the second moment
of its input, and a block makes it grow at most by 1 + 2/B, all blocks together at most by e²,
whatever the depth. (The B^{-1/2} is that of Hayou et al. 2021, "Stable ResNet".)
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxttp._core.checks import check_choice, check_integer, check_integers
from jaxttp.models.layers import apply_norm, conv, get_activation, linear_head, norm_layer


class ResidualBlock(nnx.Module):
    """φ(shortcut(x) + branch_scale * F(x)), F of two 3x3 convolutions, or of 1x1, 3x3 and 1x1.

    The shortcut is the identity, or a 1x1 convolution where stride or width change the shape. With
    a norm, every convolution is followed by one and has no bias. The middle of a bottleneck has a
    quarter of the channels and, as in torchvision and timm ("version 1.5"), the stride.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output; of a bottleneck a multiple of 4.
        stride: of the first 3x3 convolution and of the shortcut.
        branch_scale: the fixed factor on the residual branch.
        rngs: Flax's random streams.
        activation: relu, tanh, gelu or identity.
        norm: "batch" (frozen), "group" or None.
        bottleneck: whether F has three convolutions.
        param_dtype: dtype of the parameters.

    Raises:
        ValueError: `out_channels` of a bottleneck is not a multiple of 4.

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
        bottleneck: bool = False,
        param_dtype: DTypeLike = jnp.float32,
    ):
        if bottleneck and out_channels % 4:
            raise ValueError(f"widths of bottlenecks must be multiples of 4; got {out_channels}.")
        self.activation = activation
        self.branch_scale = branch_scale
        options = {"gain": get_activation(activation).gain, "bias": norm is None}
        options |= {"param_dtype": param_dtype, "rngs": rngs}
        sides = [(in_channels, out_channels, 3, stride), (out_channels, out_channels, 3, 1)]
        if bottleneck:
            middle = out_channels // 4
            sides = [(in_channels, middle, 1, 1), (middle, middle, 3, stride)]
            sides += [(middle, out_channels, 1, 1)]
        self.convolutions = len(sides)
        for index, (inputs, outputs, size, step) in enumerate(sides, start=1):
            setattr(self, f"conv{index}", conv(inputs, outputs, size, step, **options))
            setattr(self, f"norm{index}", norm_layer(norm, outputs, param_dtype, rngs))
        same = stride == 1 and in_channels == out_channels
        self.shortcut = None if same else conv(in_channels, out_channels, 1, stride, **options)
        self.shortcut_norm = norm_layer(None if same else norm, out_channels, param_dtype, rngs)

    def __call__(self, x: Float[Array, "n h w c"]) -> Float[Array, "n h2 w2 c2"]:
        """Features (N, H, W, C) to features (N, H/stride, W/stride, C2), rounded up."""
        function = get_activation(self.activation).function
        h = x
        for index in range(1, self.convolutions + 1):
            h = apply_norm(getattr(self, f"norm{index}"), getattr(self, f"conv{index}")(h))
            h = function(h) if index < self.convolutions else h
        shortcut = x if self.shortcut is None else apply_norm(self.shortcut_norm, self.shortcut(x))
        return function(shortcut + self.branch_scale * h)


class ResNet(nnx.Module):
    """Stem, residual blocks, global average pool, linear head.

    Convolutions have a bias where there is no norm, and none where a norm follows.

    Args:
        num_classes: number of outputs.
        rngs: Flax's random streams.
        in_channels: channels of the images.
        stem_width: channels after the stem.
        widths: channels of every stage.
        strides: stride of the first block of every stage.
        blocks: residual blocks of every stage; one number means the same everywhere.
        activation: relu, tanh, gelu or identity.
        block: "basic" or "bottleneck", see `ResidualBlock`.
        norm: "batch" (frozen, see `jaxttp.models.calibrate_batch_norm`), "group" or None.
        stem: "small", a 3x3 convolution of stride 1, or "imagenet", a 7x7 convolution of stride 2
            and a 3x3 maximum of stride 2.
        param_dtype: dtype of the parameters.

    Raises:
        ValueError: a width, stride or number of blocks below 1, lengths that differ, a negative
            scale, an unknown activation, block, norm or stem.

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
        block: str = "basic",
        norm: str | None = None,
        stem: str = "small",
        param_dtype: DTypeLike = jnp.float32,
    ):
        check_choice("block", block, ("basic", "bottleneck"))
        check_choice("stem", stem, ("small", "imagenet"))
        counts = (blocks,) * len(widths) if isinstance(blocks, int) else tuple(blocks)
        if not len(widths) == len(strides) == len(counts) > 0:
            raise ValueError(
                f"widths, strides and blocks describe the same stages, one entry each; got "
                f"widths={tuple(widths)!r}, strides={tuple(strides)!r}, blocks={counts!r}."
            )
        check_integer("in_channels", in_channels, at_least=1)
        check_integer("stem_width", stem_width, at_least=1)
        for name, values in (("widths", widths), ("strides", strides), ("blocks", counts)):
            check_integers(name, values)
        branch_scale = 1 / math.sqrt(sum(counts)) if norm is None else 1.0
        gain = get_activation(activation).gain
        self.activation = activation
        self.stage_sizes = counts
        self.stem_kind = stem
        size, stride = (7, 2) if stem == "imagenet" else (3, 1)
        self.stem = conv(
            in_channels, stem_width, size, stride, gain=gain, bias=norm is None,
            param_dtype=param_dtype, rngs=rngs,
        )  # fmt: skip
        self.stem_norm = norm_layer(norm, stem_width, param_dtype, rngs)
        options: dict[str, Any] = {"activation": activation, "norm": norm, "rngs": rngs}
        options |= {"branch_scale": branch_scale, "param_dtype": param_dtype}
        options |= {"bottleneck": block == "bottleneck"}
        self.blocks, channels = nnx.List(), stem_width
        for width, first, count in zip(widths, strides, counts, strict=True):
            for stride in (first, *(1,) * (count - 1)):
                self.blocks.append(ResidualBlock(channels, width, stride=stride, **options))
                channels = width
        self.head = linear_head(channels, num_classes, rngs=rngs, param_dtype=param_dtype)

    def activations(self, x: Float[Array | np.ndarray, "n h w c"]) -> dict[str, Array]:
        """The outputs of every layer: "stem", "blocks.0" ... (N, H, W, D), "pool" (N, D), "head".

        The last block's features averaged over the image, "pool", are the inputs of the head.
        """
        _check_images(x, self.stem.in_features)
        function = get_activation(self.activation).function
        h = function(apply_norm(self.stem_norm, self.stem(jnp.asarray(x))))
        if self.stem_kind == "imagenet":
            around = ((1, 1), (1, 1))
            h = nnx.max_pool(h, (3, 3), (2, 2), around)  # pyright: ignore[reportArgumentType]
        layers = {"stem": h}
        for index, block in enumerate(self.blocks):
            h = layers[f"blocks.{index}"] = block(h)
        pool = jnp.mean(h, axis=(1, 2))
        return layers | {"pool": pool, "head": self.head(pool)}

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


def resnet18(num_classes: int = 1000, *, rngs: nnx.Rngs, **options: Any) -> ResNet:
    """ResNet-18 for ImageNet: 11,689,512 parameters with 1000 outputs.

    Args:
        num_classes: number of outputs.
        rngs: Flax's random streams.
        **options: any of `ResNet`; here batch norm, three channels and the ImageNet stem are the
            defaults.

    Returns:
        The network with random weights: give its batch norm averages by `load_weights` or
        `calibrate_batch_norm`.

    Example:
        >>> nnx.eval_shape(lambda: resnet18(5, norm="group", rngs=nnx.Rngs(0))).head.kernel.shape
        (512, 5)

    Source:
        He et al. 2016, "Deep residual learning for image recognition", Table 1.
    """
    return ResNet(num_classes, blocks=(2, 2, 2, 2), rngs=rngs, **(_IMAGENET | options))


def resnet34(num_classes: int = 1000, *, rngs: nnx.Rngs, **options: Any) -> ResNet:
    """ResNet-34 for ImageNet, 21,797,672 parameters; see `resnet18`.

    Args:
        num_classes: number of outputs.
        rngs: Flax's random streams.
        **options: any of `ResNet`.

    Returns:
        The network with random weights.
    """
    return ResNet(num_classes, blocks=(3, 4, 6, 3), rngs=rngs, **(_IMAGENET | options))


def resnet50(num_classes: int = 1000, *, rngs: nnx.Rngs, **options: Any) -> ResNet:
    """ResNet-50 for ImageNet, 25,557,032 parameters, stride in the 3x3 convolution.

    Args:
        num_classes: number of outputs.
        rngs: Flax's random streams.
        **options: any of `ResNet`.

    Returns:
        The network with random weights.
    """
    shape = {"block": "bottleneck", "widths": (256, 512, 1024, 2048)}
    return ResNet(num_classes, blocks=(3, 4, 6, 3), rngs=rngs, **(_IMAGENET | shape | options))


def resnet20(num_classes: int = 10, *, rngs: nnx.Rngs, **options: Any) -> ResNet:
    """ResNet-20 for CIFAR: three stages of three blocks, 272,474 parameters.

    Where the shape changes the shortcut is a 1x1 convolution with a norm (as in the networks of GNC
    Appendix I), not the parameter-free one of He et al.

    Args:
        num_classes: number of outputs.
        rngs: Flax's random streams.
        **options: any of `ResNet`.

    Returns:
        The network with random weights.

    Example:
        >>> len(nnx.eval_shape(lambda: resnet20(10, rngs=nnx.Rngs(0))).blocks)
        9
    """
    return ResNet(num_classes, blocks=3, rngs=rngs, **(_CIFAR | options))


def resnet32(num_classes: int = 10, *, rngs: nnx.Rngs, **options: Any) -> ResNet:
    """ResNet-32 for CIFAR: three stages of five blocks, 466,906 parameters; see `resnet20`.

    Args:
        num_classes: number of outputs.
        rngs: Flax's random streams.
        **options: any of `ResNet`.

    Returns:
        The network with random weights.
    """
    return ResNet(num_classes, blocks=5, rngs=rngs, **(_CIFAR | options))


_CIFAR: dict[str, Any] = {"in_channels": 3, "norm": "batch"}
_IMAGENET: dict[str, Any] = _CIFAR | {
    "stem": "imagenet",
    "stem_width": 64,
    "widths": (64, 128, 256, 512),
    "strides": (1, 2, 2, 2),
}


def _check_images(x: Array | np.ndarray, channels: int) -> None:
    if x.ndim != 4 or x.shape[-1] != channels:
        raise ValueError(f"x of shape {x.shape} is not a batch of images (N, H, W, {channels}).")


class VGGBlock(nnx.Module):
    """max(φ(norm(conv(x)))): a 3x3 convolution, then the maximum over 2x2 pixels.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        rngs: Flax's random streams.
        activation: relu, tanh, gelu or identity.
        norm: "batch" (frozen), "group" or None.
        param_dtype: dtype of the parameters.

    Example:
        >>> VGGBlock(3, 8, rngs=nnx.Rngs(0))(jnp.zeros((2, 8, 8, 3))).shape
        (2, 4, 4, 8)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        rngs: nnx.Rngs,
        activation: str = "relu",
        norm: str | None = None,
        param_dtype: DTypeLike = jnp.float32,
    ):
        self.activation = activation
        self.conv = conv(
            in_channels, out_channels, 3, 1, gain=get_activation(activation).gain, bias=True,
            param_dtype=param_dtype, rngs=rngs,
        )  # fmt: skip
        self.norm = norm_layer(norm, out_channels, param_dtype, rngs)

    def __call__(self, x: Float[Array, "n h w c"]) -> Float[Array, "n h2 w2 c2"]:
        """Features (N, H, W, C) to features (N, H/2, W/2, C2), rounded down."""
        h = get_activation(self.activation).function(apply_norm(self.norm, self.conv(x)))
        return nnx.max_pool(h, (2, 2), strides=(2, 2))


class VGG(nnx.Module):
    """Blocks of convolution and 2x2 maximum, global average pool, linear head.

    Args:
        num_classes: number of outputs.
        rngs: Flax's random streams.
        in_channels: channels of the images.
        widths: channels of every block.
        activation: relu, tanh, gelu or identity.
        norm: "batch" (frozen), "group" or None.
        param_dtype: dtype of the parameters.

    Raises:
        ValueError: no width or one below 1, an unknown activation or norm; when called, images too
            small for the number of blocks.

    Example:
        >>> VGG(10, in_channels=1, widths=(4, 8), rngs=nnx.Rngs(0))(jnp.zeros((2, 8, 8, 1))).shape
        (2, 10)
    """

    def __init__(
        self,
        num_classes: int,
        *,
        rngs: nnx.Rngs,
        in_channels: int = 3,
        widths: Sequence[int] = (64, 128, 256, 512),
        activation: str = "relu",
        norm: str | None = "batch",
        param_dtype: DTypeLike = jnp.float32,
    ):
        if not widths:
            raise ValueError("widths must hold at least one width; got none.")
        check_integer("in_channels", in_channels, at_least=1)
        check_integers("widths", widths)
        self.in_channels = in_channels
        options: dict[str, Any] = {"activation": activation, "norm": norm, "rngs": rngs}
        self.blocks = nnx.List(
            VGGBlock(inputs, outputs, param_dtype=param_dtype, **options)
            for inputs, outputs in itertools.pairwise((in_channels, *widths))
        )
        self.head = linear_head(widths[-1], num_classes, rngs=rngs, param_dtype=param_dtype)

    def activations(self, x: Float[Array | np.ndarray, "n h w c"]) -> dict[str, Array]:
        """The outputs of every layer: "blocks.0" ... (N, H, W, D), "pool" (N, D), "head" (N, C)."""
        _check_images(x, self.in_channels)
        smallest = 2 ** len(self.blocks)
        if min(x.shape[1:3]) < smallest:
            raise ValueError(
                f"x of shape {x.shape}: {len(self.blocks)} blocks halve the images, which must "
                f"have at least {smallest} pixels a side."
            )
        h, layers = jnp.asarray(x), {}
        for index, block in enumerate(self.blocks):
            h = layers[f"blocks.{index}"] = block(h)
        pool = jnp.mean(h, axis=(1, 2))
        return layers | {"pool": pool, "head": self.head(pool)}

    def __call__(self, x: Float[Array | np.ndarray, "n h w c"]) -> Float[Array, "n k"]:
        """Outputs (N, C) of images (N, H, W, channels)."""
        return self.activations(x)["head"]


def vgg5(num_classes: int = 10, *, rngs: nnx.Rngs, **options: Any) -> VGG:
    """VGG5 for CIFAR: convolutions of 64, 128, 256 and 512 channels and the head.

    GNC Appendix I prunes a VGG5 whose widths it does not give; these are those of VGG11's stages.

    Args:
        num_classes: number of outputs.
        rngs: Flax's random streams.
        **options: any of `VGG`.

    Returns:
        The network with random weights, 1,558,026 parameters with ten outputs.

    Example:
        >>> nnx.eval_shape(lambda: vgg5(5, rngs=nnx.Rngs(0))).head.kernel.shape
        (512, 5)

    Source:
        Simonyan and Zisserman 2015, "Very deep convolutional networks", with batch norm.
    """
    return VGG(num_classes, rngs=rngs, **options)
