"""Plain convolutional networks: convolution, norm, activation, maximum, and again."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxttp._core.checks import check_integer
from jaxttp.models.activations import get_activation
from jaxttp.models.head import linear_head
from jaxttp.models.residual import apply_norm, conv, optional_norm


class VGGBlock(nnx.Module):
    """max(φ(norm(conv(x)))): a 3x3 convolution, then the maximum over 2x2 pixels.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        rngs: Flax's random streams.
        activation: relu, tanh, gelu, softplus or identity.
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
        self.norm = optional_norm(norm, out_channels, param_dtype, rngs)

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
        activation: relu, tanh, gelu, softplus or identity.
        norm: "batch" (frozen), "group" or None.
        head_scale: standard deviation of the initial outputs for features of unit second moment.
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
        head_scale: float = 1.0,
        param_dtype: DTypeLike = jnp.float32,
    ):
        if not widths:
            raise ValueError("widths must hold at least one width; got none.")
        for name, values in (("in_channels", (in_channels,)), ("widths", widths)):
            for value in values:
                check_integer(name, value, at_least=1)
        self.in_channels = in_channels
        self.blocks = nnx.List(
            VGGBlock(
                inputs, outputs, activation=activation, norm=norm, param_dtype=param_dtype,
                rngs=rngs,
            )
            for inputs, outputs in zip((in_channels, *widths), widths, strict=False)
        )  # fmt: skip
        self.head = linear_head(
            widths[-1], num_classes, rngs=rngs, scale=head_scale, param_dtype=param_dtype
        )

    def activations(self, x: Float[Array | np.ndarray, "n h w c"]) -> dict[str, Array]:
        """What every layer gives: "blocks.0" ... (N, H, W, D), "pool" (N, D), "head" (N, C)."""
        if x.ndim != 4 or x.shape[-1] != self.in_channels:
            raise ValueError(
                f"x of shape {x.shape} is not a batch of images (N, H, W, {self.in_channels})."
            )
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
