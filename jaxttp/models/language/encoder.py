"""Encoders: BERT and RoBERTa are one network, whose files call its parts differently."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxttp._core.checks import check_choice
from jaxttp.models.head import linear_head
from jaxttp.models.language.architecture import Architecture
from jaxttp.models.language.decoder import HEADS, at, or_nan
from jaxttp.models.language.layers import FUNCTIONS, Block, embedding, linear, norm
from jaxttp.models.language.tokens import read_tokens


class Encoder(nnx.Module):
    """Tokens that see each other, and a head.

        h = blocks(norm(E[ids] + P[positions] + S[types]))
        classification: tanh(h_first W + b) W_c + b_c
        language model: norm(φ(h W + b)) Eᵀ + b_v

    "classification" reads the first token (N, C), "language_model" gives logits at every position
    (N, T, V), "states" what the last block gives (N, T, D). Padding changes nothing; what stands
    at padded positions means nothing.

    Args:
        shape: the architecture.
        rngs: Flax's random streams.
        head: one of `jaxttp.models.language.decoder.HEADS`.
        outputs: C; that of the architecture when None.
        head_scale: standard deviation of the initial outputs for features of unit second moment.
        param_dtype: dtype of the parameters.

    Raises:
        ValueError: an unknown head; when called, see `jaxttp.models.language.tokens.read_tokens`.

    Example:
        >>> shape = Architecture("bert", 50, width=8, depth=1, heads=2, hidden=12, length=16)
        >>> build = lambda: Encoder(shape, outputs=3, rngs=nnx.Rngs(0))
        >>> jax.eval_shape(lambda: build()(jnp.ones((5, 3), int))).shape
        (5, 3)

    Source:
        Devlin et al. 2019, "BERT"; Liu et al. 2019, "RoBERTa".
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
        width = shape.width

        def table(rows: int) -> nnx.Param:
            return nnx.Param(0.02 * jax.random.normal(rngs.params(), (rows, width), param_dtype))

        self.embed = embedding(shape, param_dtype, rngs)
        self.positions = table(shape.first_position + shape.length)
        if shape.types:
            self.segments = table(shape.types)
        self.embed_norm = norm(shape, param_dtype, rngs)
        self.blocks = nnx.List(
            Block(shape, param_dtype=param_dtype, rngs=rngs) for _ in range(shape.depth)
        )
        if head == "classification":
            self.pooler = linear(width, width, True, param_dtype, rngs)
            classes = shape.outputs if outputs is None else outputs
            self.head = linear_head(
                width, classes, rngs=rngs, scale=head_scale, param_dtype=param_dtype
            )
        elif head == "language_model":
            self.transform = linear(width, width, True, param_dtype, rngs)
            self.transform_norm = norm(shape, param_dtype, rngs)
            if shape.tied:
                self.head_bias = nnx.Param(jnp.zeros(shape.vocabulary, param_dtype))
            else:
                self.head = linear_head(width, shape.vocabulary, rngs=rngs, param_dtype=param_dtype)

    def activations(self, ids: Any, mask: Any = None, types: Any = None) -> dict[str, Array]:
        """What every layer gives: "embed", "blocks.0" ... (N, T, D), "head" by its kind."""
        shape = self.shape
        tokens = read_tokens(
            ids, mask, types, vocabulary=shape.vocabulary, length=shape.length,
            segments=shape.types,
        )  # fmt: skip
        h = self.embed(tokens.ids) + self.positions[...][tokens.positions + shape.first_position]
        if shape.types:
            table = self.segments[...]
            h = h + (table[0][None, None] if tokens.types is None else table[tokens.types])
        h = self.embed_norm(h)
        layers = {"embed": h}
        n, t = tokens.seen.shape
        sees = jnp.broadcast_to(tokens.seen[:, None], (n, t, t))
        for index, block in enumerate(self.blocks):
            h = layers[f"blocks.{index}"] = block(h, sees, None)
        if self.kind == "classification":
            pooled = layers["pooler"] = jnp.tanh(self.pooler(at(h, tokens.first)))
            outputs = self.head(pooled)
        else:
            outputs = h if self.kind == "states" else self._logits(h)
        return layers | {"head": or_nan(outputs, tokens.seen)}

    def _logits(self, h: Array) -> Array:
        h = self.transform_norm(FUNCTIONS[self.shape.activation](self.transform(h)))
        if not self.shape.tied:
            return self.head(h)
        return self.embed.attend(h) + self.head_bias[...][None, None]

    def __call__(self, ids: Any, mask: Any = None, types: Any = None) -> Array:
        """Outputs of tokens (N, T) with a mask (N, T); also of a mapping with both."""
        return self.activations(ids, mask, types)["head"]
