"""Transformers with pre-norm blocks: on sequences of vectors, and on patches of images (ViT)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxttp._core.checks import check_integer
from jaxttp.models.layers import dense, get_activation, kernel_init, layer_norm, linear_head


class Attention(nnx.Module):
    """Multi-head self-attention, queries, keys and values from one linear layer.

        A_h = softmax(Q_h K_hᵀ / √(D/H)),    out = concat_h(A_h V_h) W + b

    Args:
        width: D.
        heads: H, a divisor of D.
        rngs: Flax's random streams.
        causal: whether a position attends only to itself and earlier ones.
        param_dtype: dtype of the parameters.

    Raises:
        ValueError: heads that do not divide the width.

    Example:
        >>> Attention(8, 2, rngs=nnx.Rngs(0))(jnp.zeros((5, 3, 8))).shape
        (5, 3, 8)
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        rngs: nnx.Rngs,
        causal: bool = False,
        param_dtype: DTypeLike = jnp.float32,
    ):
        if heads < 1 or width % heads:
            raise ValueError(f"heads={heads} must divide width={width}.")
        self.heads = heads
        self.causal = causal
        self.qkv = dense(width, 3 * width, param_dtype, rngs)
        self.proj = dense(width, width, param_dtype, rngs)

    def __call__(self, x: Float[Array, "n t d"]) -> Float[Array, "n t d"]:
        """States (N, T, D) to states."""
        n, t, d = x.shape
        q, k, v = jnp.unstack(self.qkv(x).reshape(n, t, 3, self.heads, d // self.heads), axis=2)
        scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) * (d // self.heads) ** -0.5
        if self.causal:
            seen = jnp.tril(jnp.ones((t, t), bool))
            scores = jnp.where(seen[None, None], scores, -jnp.inf)
        mixed = jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores, axis=-1), v)
        return self.proj(mixed.reshape(n, t, d))


class TransformerBlock(nnx.Module):
    """x + attention(norm(x)), then x + fc2(gelu(fc1(norm(x)))).

    Args:
        width: D.
        heads: of the attention.
        rngs: Flax's random streams.
        hidden: units of fc1; 4 D when None.
        causal: see `Attention`.
        param_dtype: dtype of the parameters.

    Example:
        >>> TransformerBlock(8, 2, rngs=nnx.Rngs(0))(jnp.zeros((5, 3, 8))).shape
        (5, 3, 8)
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        rngs: nnx.Rngs,
        hidden: int | None = None,
        causal: bool = False,
        param_dtype: DTypeLike = jnp.float32,
    ):
        hidden = 4 * width if hidden is None else hidden
        gelu = get_activation("gelu").gain
        self.norm1 = layer_norm(width, param_dtype, rngs)
        self.attention = Attention(width, heads, causal=causal, param_dtype=param_dtype, rngs=rngs)
        self.norm2 = layer_norm(width, param_dtype, rngs)
        self.fc1 = dense(width, hidden, param_dtype, rngs)
        self.fc2 = dense(hidden, width, param_dtype, rngs, gain=gelu)

    def __call__(self, x: Float[Array, "n t d"]) -> Float[Array, "n t d"]:
        """States (N, T, D) to states."""
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(get_activation("gelu").function(self.fc1(self.norm2(x))))


class Transformer(nnx.Module):
    """Embedded sequences (N, T, D_in) to outputs (N, T, V) at every position.

    The kernel wants outputs (N, C): choose them with `jaxttp.models.map_outputs`, for instance
    ``lambda f: f[:, -1]`` for the last position, or ``lambda f: f[:, -1, words]`` for the logits
    of a few label words of a language model.

    Args:
        inputs: D_in, of the vectors of a sequence.
        outputs: V, such as the size of a vocabulary.
        rngs: Flax's random streams.
        length: largest T.
        width: D, of the states.
        depth: number of blocks.
        heads: of the attention, a divisor of D.
        causal: whether a position attends only to itself and earlier ones.
        param_dtype: dtype of the parameters.

    Raises:
        ValueError: a size below 1, heads that do not divide the width; when called, sequences that
            are too long or of other vectors.

    Example:
        >>> from jaxttp import empirical_ntk, from_nnx
        >>> from jaxttp.models import map_outputs
        >>> language_model = Transformer(8, 50, length=6, width=8, depth=1, rngs=nnx.Rngs(0))
        >>> model = map_outputs(from_nnx(language_model), lambda f: f[:, -1, jnp.array([3, 7])])
        >>> empirical_ntk(*model, jnp.ones((4, 6, 8))).shape
        (4, 2, 4, 2)
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        rngs: nnx.Rngs,
        length: int,
        width: int = 32,
        depth: int = 2,
        heads: int = 2,
        causal: bool = True,
        param_dtype: DTypeLike = jnp.float32,
    ):
        sizes = {"inputs": inputs, "length": length, "width": width, "depth": depth}
        for name, value in sizes.items():
            check_integer(name, value, at_least=1)
        self.length = length
        self.embed = dense(inputs, width, param_dtype, rngs)
        self.positions = nnx.Param(
            0.02 * jax.random.normal(rngs.params(), (1, length, width), param_dtype)
        )
        self.blocks = nnx.List(
            TransformerBlock(width, heads, causal=causal, param_dtype=param_dtype, rngs=rngs)
            for _ in range(depth)
        )
        self.norm = layer_norm(width, param_dtype, rngs)
        self.head = linear_head(width, outputs, rngs=rngs, param_dtype=param_dtype)

    def activations(self, x: Float[Array | np.ndarray, "n t d"]) -> dict[str, Array]:
        """Outputs of every layer: "embed", "blocks.0" ..., "norm" (N, T, D), "head" (N, T, V)."""
        if x.ndim != 3 or x.shape[1] > self.length or x.shape[2] != self.embed.in_features:
            raise ValueError(
                f"x of shape {x.shape} is not a batch of sequences (N, T, "
                f"{self.embed.in_features}) with T at most {self.length}."
            )
        h = self.embed(jnp.asarray(x)) + self.positions[...][:, : x.shape[1]]
        layers = {"embed": h}
        for index, block in enumerate(self.blocks):
            h = layers[f"blocks.{index}"] = block(h)
        features = self.norm(h)
        return layers | {"norm": features, "head": self.head(features)}

    def __call__(self, x: Float[Array | np.ndarray, "n t d"]) -> Float[Array, "n t v"]:
        """Outputs (N, T, V) of sequences (N, T, D_in)."""
        return self.activations(x)["head"]


class ViT(nnx.Module):
    """Patches, class token and learned positions, transformer blocks, norm, head on the token.

    Args:
        num_classes: number of outputs.
        rngs: Flax's random streams.
        image_size: pixels a side of the (square) images, a multiple of the patch size.
        patch_size: pixels a side of a patch.
        in_channels: channels of the images.
        width: D, of the states.
        depth: number of blocks.
        heads: of the attention, a divisor of D.
        hidden: units inside a block; 4 D when None.
        param_dtype: dtype of the parameters.

    Raises:
        ValueError: a size below 1, patches that do not tile the image, heads that do not divide
            the width; when called, images of another size.

    Example:
        >>> model = ViT(10, image_size=8, patch_size=4, width=16, depth=2, heads=4,
        ...             rngs=nnx.Rngs(0))
        >>> model(jnp.zeros((5, 8, 8, 3))).shape
        (5, 10)

    Source:
        Dosovitskiy et al. 2021, "An image is worth 16x16 words".
    """

    def __init__(
        self,
        num_classes: int,
        *,
        rngs: nnx.Rngs,
        image_size: int = 224,
        patch_size: int = 16,
        in_channels: int = 3,
        width: int = 384,
        depth: int = 12,
        heads: int = 6,
        hidden: int | None = None,
        param_dtype: DTypeLike = jnp.float32,
    ):
        sizes = {"image_size": image_size, "patch_size": patch_size, "in_channels": in_channels}
        sizes |= {"width": width, "depth": depth, "heads": heads}
        for name, value in sizes.items():
            check_integer(name, value, at_least=1)
        if image_size % patch_size:
            raise ValueError(
                f"image_size={image_size} must be a multiple of patch_size={patch_size}."
            )
        self.image_size = image_size
        self.patch_embed = nnx.Conv(
            in_channels, width, (patch_size, patch_size), strides=patch_size, padding="VALID",
            kernel_init=kernel_init(1.0), param_dtype=param_dtype, rngs=rngs,
        )  # fmt: skip
        tokens = (image_size // patch_size) ** 2 + 1
        draw = lambda *shape: 0.02 * jax.random.normal(rngs.params(), shape, param_dtype)  # noqa: E731
        self.cls_token = nnx.Param(draw(1, 1, width))
        self.positions = nnx.Param(draw(1, tokens, width))
        self.blocks = nnx.List(
            TransformerBlock(width, heads, hidden=hidden, param_dtype=param_dtype, rngs=rngs)
            for _ in range(depth)
        )  # fmt: skip
        self.norm = layer_norm(width, param_dtype, rngs)
        self.head = linear_head(width, num_classes, rngs=rngs, param_dtype=param_dtype)

    def activations(self, x: Float[Array | np.ndarray, "n h w c"]) -> dict[str, Array]:
        """Outputs of every layer: "patches", "blocks.0" ... (N, T, D), "token" (N, D), "head".

        The first of the T positions is the class token; "token" is it after the last norm.
        """
        shape = (self.image_size, self.image_size, self.patch_embed.in_features)
        if x.shape[1:] != shape:
            raise ValueError(
                f"x of shape {x.shape} is not a batch of images {('N', *shape)}: the positions "
                "fix the size. Resize the images, or give image_size."
            )
        patches = self.patch_embed(jnp.asarray(x))
        n, _, _, width = patches.shape
        token = jnp.broadcast_to(self.cls_token[...], (n, 1, width))
        h = jnp.concatenate([token, patches.reshape(n, -1, width)], axis=1) + self.positions[...]
        layers = {"patches": h}
        for index, block in enumerate(self.blocks):
            h = layers[f"blocks.{index}"] = block(h)
        features = self.norm(h)[:, 0]
        return layers | {"token": features, "head": self.head(features)}

    def __call__(self, x: Float[Array | np.ndarray, "n h w c"]) -> Float[Array, "n k"]:
        """Outputs (N, C) of images (N, H, W, channels)."""
        return self.activations(x)["head"]


def vit_tiny(num_classes: int = 1000, *, rngs: nnx.Rngs, **options: Any) -> ViT:
    """ViT-Ti/16: width 192, 12 blocks of 3 heads, 5,717,416 parameters at 224 pixels.

    Args:
        num_classes: number of outputs.
        rngs: Flax's random streams.
        **options: any of `ViT`.

    Returns:
        The network with random weights.

    Example:
        >>> model = vit_tiny(5, image_size=32, depth=1, rngs=nnx.Rngs(0))
        >>> model.positions.shape
        (1, 5, 192)
    """
    sizes: dict[str, Any] = {"width": 192, "heads": 3}
    return ViT(num_classes, rngs=rngs, **(sizes | options))


def vit_small(num_classes: int = 1000, *, rngs: nnx.Rngs, **options: Any) -> ViT:
    """ViT-S/16: width 384, 12 blocks of 6 heads, 22,050,664 parameters at 224 pixels.

    Args:
        num_classes: number of outputs.
        rngs: Flax's random streams.
        **options: any of `ViT`.

    Returns:
        The network with random weights.
    """
    sizes: dict[str, Any] = {"width": 384, "heads": 6}
    return ViT(num_classes, rngs=rngs, **(sizes | options))


def vit_base(num_classes: int = 1000, *, rngs: nnx.Rngs, **options: Any) -> ViT:
    """ViT-B/16: width 768, 12 blocks of 12 heads, 86,567,656 parameters at 224 pixels.

    Args:
        num_classes: number of outputs.
        rngs: Flax's random streams.
        **options: any of `ViT`.

    Returns:
        The network with random weights.
    """
    sizes: dict[str, Any] = {"width": 768, "heads": 12}
    return ViT(num_classes, rngs=rngs, **(sizes | options))
