"""Decoders: GPT-2, Llama, Mistral, Qwen2 and SmolLM are one network with other settings."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool

from jaxttp._core.checks import check_choice
from jaxttp.models.head import linear_head
from jaxttp.models.language.architecture import Architecture
from jaxttp.models.language.layers import Angles, Block, embedding, norm
from jaxttp.models.language.tokens import Tokens, read_tokens

HEADS = ("classification", "language_model", "states")
"""What a language model gives: (N, C) of a sequence, (N, T, V) of its tokens, (N, T, D)."""


class Decoder(nnx.Module):
    """Tokens that see themselves and what is before them, and a head.

    "classification" reads the last token that is not padding (N, C), "language_model" gives the
    logits of the next token at every position (N, T, V), "states" what the last norm gives
    (N, T, D). Padding on either side changes nothing; what stands at padded positions means
    nothing.

    Args:
        shape: the architecture.
        rngs: Flax's random streams.
        head: one of `HEADS`.
        outputs: C; that of the architecture when None.
        head_scale: standard deviation of the initial outputs for features of unit second moment.
        param_dtype: dtype of the parameters.

    Raises:
        ValueError: an unknown head; when called, see `jaxttp.models.language.tokens.read_tokens`.

    Example:
        >>> shape = Architecture("gpt2", 50, width=8, depth=1, heads=2, hidden=12, length=16)
        >>> build = lambda: Decoder(shape, head="language_model", rngs=nnx.Rngs(0))
        >>> jax.eval_shape(lambda: build()(jnp.ones((5, 3), int))).shape
        (5, 3, 50)

    Source:
        Radford et al. 2019; Touvron et al. 2023, "Llama"; Jiang et al. 2023, "Mistral 7B".
    """

    def __init__(
        self,
        shape: Architecture,
        *,
        rngs: nnx.Rngs,
        head: str = "classification",
        outputs: int | None = None,
        head_scale: float = 1.0,
        param_dtype: DTypeLike = jnp.float32,
    ):
        self.shape = shape
        self.kind = check_choice("head", head, HEADS)
        self.embed = embedding(shape, param_dtype, rngs)
        if shape.rotary is None:
            drawn = jax.random.normal(rngs.params(), (shape.length, shape.width), param_dtype)
            self.positions = nnx.Param(0.02 * drawn)
        self.blocks = nnx.List(
            Block(shape, param_dtype=param_dtype, rngs=rngs) for _ in range(shape.depth)
        )
        self.norm = norm(shape, param_dtype, rngs)
        units = {"classification": shape.outputs if outputs is None else outputs}
        if not shape.tied:
            units["language_model"] = shape.vocabulary
        if head in units:
            self.head = linear_head(
                shape.width, units[head], rngs=rngs, scale=head_scale, use_bias=False,
                param_dtype=param_dtype,
            )  # fmt: skip

    def activations(self, ids: Any, mask: Any = None) -> dict[str, Array]:
        """What every layer gives: "embed", "blocks.0" ..., "norm" (N, T, D), "head" by its kind."""
        shape = self.shape
        tokens = read_tokens(
            ids, mask, vocabulary=shape.vocabulary, length=shape.length, segments=0
        )
        h = self.embed(tokens.ids)
        angles = None
        if shape.rotary is None:
            h = h + self.positions[...][tokens.positions]
        else:
            angles = self._angles(tokens, h.dtype)
        layers = {"embed": h}
        for index, (block, window) in enumerate(zip(self.blocks, shape.windows or (), strict=True)):
            h = layers[f"blocks.{index}"] = block(h, causal(tokens.seen, window), angles)
        h = layers["norm"] = self.norm(h)
        return layers | {"head": or_nan(self._head(h, tokens), tokens.seen)}

    def _head(self, h: Array, tokens: Tokens) -> Array:
        if self.kind == "states":
            return h
        if self.kind == "classification":
            return self.head(at(h, tokens.last))
        return self.embed.attend(h) if self.shape.tied else self.head(h)

    def _angles(self, tokens: Tokens, dtype: Any) -> Angles:
        assert self.shape.rotary is not None
        cosines, sines = self.shape.rotary.tables(tokens.ids.shape[1], dtype)
        return cosines[tokens.positions], sines[tokens.positions]

    def __call__(self, ids: Any, mask: Any = None) -> Array:
        """Outputs of tokens (N, T) with a mask (N, T); also of a mapping with both."""
        return self.activations(ids, mask)["head"]


def causal(seen: Bool[Array, "n t"], window: int | None) -> Bool[Array, "n t t"]:
    """[n, q, k]: whether q sees k, a token not behind it and less than a window before it.

    Example:
        >>> causal(jnp.ones((1, 3), bool), 2)[0].astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    t = seen.shape[1]
    back = jnp.arange(t)[:, None] - jnp.arange(t)[None]
    near = (back >= 0) if window is None else (back >= 0) & (back < window)
    return near[None] & seen[:, None]


def at(h: Array, positions: Array) -> Array:
    """The states (N, D) at one position (N,) of each sequence."""
    return jnp.take_along_axis(h, positions[:, None, None], axis=1)[:, 0]


def or_nan(outputs: Array, seen: Bool[Array, "n t"]) -> Array:
    """Outputs, NaN for samples without a token: what only is known at run time must not pass."""
    empty = ~seen.any(axis=1).reshape(-1, *(1,) * (outputs.ndim - 1))
    return jnp.where(empty, jnp.full((), jnp.nan, outputs.dtype), outputs)
