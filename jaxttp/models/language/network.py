"""Language models: encoders (BERT, RoBERTa) and decoders (GPT-2, Llama, Mistral, Qwen2, SmolLM).

All are one block, attention with grouped queries and a small network, with other settings.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxttp._core.checks import check_choice
from jaxttp.models.language.architecture import ACTIVATIONS, Architecture, rotary_tables, rotate
from jaxttp.models.language.tokens import Tokens, read_tokens
from jaxttp.models.layers import dense, linear_head

Angles = tuple[Float[Array, "n t e"], Float[Array, "n t e"]]


class SelfAttention(nnx.Module):
    """Attention in which several heads of queries share a head of keys and values.

        A_h = softmax(Q_h K_gᵀ / √d),  g = h // (H/K),    out = concat_h(A_h V_g) W_o

    Layers are called as in Llama: ``q_proj, k_proj, v_proj, o_proj``, and ``qkv_proj`` where one
    kernel makes all three (GPT-2's ``c_attn``).

    Args:
        shape: the architecture.
        rngs: Flax's random streams.
        param_dtype: dtype of the parameters.

    Example:
        >>> shape = Architecture("gpt2", 50, width=8, depth=1, heads=2, hidden=8, length=16)
        >>> inputs = jnp.zeros((5, 3, 8)), jnp.ones((5, 3, 3), bool), None
        >>> jax.eval_shape(lambda: SelfAttention(shape, rngs=nnx.Rngs(0))(*inputs)).shape
        (5, 3, 8)
    """

    def __init__(
        self, shape: Architecture, *, rngs: nnx.Rngs, param_dtype: DTypeLike = jnp.float32
    ):
        head = shape.head_width or 1
        self.heads, self.groups, self.head_width = shape.heads, shape.key_heads, head
        own, shared = shape.heads * head, shape.key_heads * head
        biased = "qkv" in shape.biases
        if shape.fused:
            self.qkv_proj = dense(shape.width, own + 2 * shared, param_dtype, rngs, use_bias=biased)
        else:
            self.q_proj = dense(shape.width, own, param_dtype, rngs, use_bias=biased)
            self.k_proj = dense(shape.width, shared, param_dtype, rngs, use_bias=biased)
            self.v_proj = dense(shape.width, shared, param_dtype, rngs, use_bias=biased)
        self.o_proj = dense(own, shape.width, param_dtype, rngs, use_bias="o" in shape.biases)

    def __call__(
        self, x: Float[Array, "n t d"], sees: Bool[Array, "n t t"], angles: Angles | None
    ) -> Float[Array, "n t d"]:
        """States (N, T, D) to states.

        Args:
            x: states.
            sees: [n, q, k] whether position q sees position k.
            angles: cosines and sines of rotary positions, or None.
        """
        n, t, _ = x.shape
        d, k = self.head_width, self.groups
        if hasattr(self, "qkv_proj"):
            cuts = (self.heads * d, (self.heads + k) * d)
            queries, keys, values = jnp.split(self.qkv_proj(x), cuts, axis=-1)
        else:
            queries, keys, values = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        queries = queries.reshape(n, t, k, self.heads // k, d)
        keys, values = keys.reshape(n, t, k, d), values.reshape(n, t, k, d)
        if angles is not None:
            queries, keys = rotate(queries, *angles), rotate(keys, *angles)
        scores = jnp.einsum("nqkgd,nskd->nkgqs", queries, keys) * d**-0.5
        # A finite number: a padded position may see none, and must not make gradients NaN.
        scores = jnp.where(sees[:, None, None], scores, jnp.finfo(scores.dtype).min)
        mixed = jnp.einsum("nkgqs,nskd->nqkgd", jax.nn.softmax(scores, axis=-1), values)
        return self.o_proj(mixed.reshape(n, t, self.heads * d))


class FeedForward(nnx.Module):
    """down(φ(up(x))), or down(φ(gate(x)) up(x)) where it is gated.

    Args:
        shape: the architecture.
        rngs: Flax's random streams.
        param_dtype: dtype of the parameters.

    Example:
        >>> shape = Architecture("gpt2", 50, width=8, depth=1, heads=2, hidden=12, length=16)
        >>> build = lambda: FeedForward(shape, rngs=nnx.Rngs(0))
        >>> jax.eval_shape(lambda: build()(jnp.zeros((5, 3, 8)))).shape
        (5, 3, 8)
    """

    def __init__(
        self, shape: Architecture, *, rngs: nnx.Rngs, param_dtype: DTypeLike = jnp.float32
    ):
        self.activation, self.gated = shape.activation, shape.gated
        biased = "mlp" in shape.biases
        if shape.gated:
            self.gate_proj = dense(shape.width, shape.hidden, param_dtype, rngs, use_bias=biased)
        self.up_proj = dense(shape.width, shape.hidden, param_dtype, rngs, use_bias=biased)
        self.down_proj = dense(shape.hidden, shape.width, param_dtype, rngs, use_bias=biased)

    def __call__(self, x: Float[Array, "n t d"]) -> Float[Array, "n t d"]:
        """States (N, T, D) to states."""
        function = ACTIVATIONS[self.activation]
        if self.gated:
            return self.down_proj(function(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(function(self.up_proj(x)))


class Block(nnx.Module):
    """Attention and a small network, each with a skip connection.

        decoders: x + attention(norm1(x)), then x + mlp(norm2(x))
        encoders: norm1(x + attention(x)), then norm2(x + mlp(x))

    Args:
        shape: the architecture.
        rngs: Flax's random streams.
        param_dtype: dtype of the parameters.

    Example:
        >>> shape = Architecture("bert", 50, width=8, depth=1, heads=2, hidden=12, length=16)
        >>> inputs = jnp.zeros((5, 3, 8)), jnp.ones((5, 3, 3), bool), None
        >>> jax.eval_shape(lambda: Block(shape, rngs=nnx.Rngs(0))(*inputs)).shape
        (5, 3, 8)
    """

    def __init__(
        self, shape: Architecture, *, rngs: nnx.Rngs, param_dtype: DTypeLike = jnp.float32
    ):
        self.norm_first = not shape.encoder
        self.norm1 = norm(shape, param_dtype, rngs)
        self.attention = SelfAttention(shape, param_dtype=param_dtype, rngs=rngs)
        self.norm2 = norm(shape, param_dtype, rngs)
        self.mlp = FeedForward(shape, param_dtype=param_dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "n t d"], sees: Bool[Array, "n t t"], angles: Angles | None
    ) -> Float[Array, "n t d"]:
        """States (N, T, D) to states; the other arguments are those of `SelfAttention`."""
        if self.norm_first:
            x = x + self.attention(self.norm1(x), sees, angles)
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attention(x, sees, angles))
        return self.norm2(x + self.mlp(x))


def norm(shape: Architecture, param_dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Module:
    """RMS norm or layer norm over the last axis."""
    kind = nnx.RMSNorm if shape.rms_norm else nnx.LayerNorm
    return kind(
        shape.width, epsilon=shape.norm_epsilon, use_fast_variance=False, param_dtype=param_dtype,
        rngs=rngs,
    )  # fmt: skip


def embedding(shape: Architecture, param_dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Embed:
    """A table (V, D) with entries ~ N(0, 0.02²)."""
    draw = nnx.initializers.normal(0.02)
    return nnx.Embed(
        shape.vocabulary, shape.width, embedding_init=draw, param_dtype=param_dtype, rngs=rngs
    )


HEADS = ("classification", "language_model", "states")
"""Outputs of a language model: (N, C) of a sequence, (N, T, V) of its tokens, (N, T, D)."""
ENCODER_HEADS = ("classification", "states")


class Decoder(nnx.Module):
    """A network whose tokens attend to themselves and earlier ones, and a head.

    "classification" reads the last token that is not padding (N, C), "language_model" gives the
    logits of the next token at every position (N, T, V), "states" those of the last norm
    (N, T, D). Padding may be on either side; outputs at padded positions have no meaning.

    Args:
        shape: the architecture.
        rngs: Flax's random streams.
        head: one of `HEADS`.
        outputs: C; that of the architecture when None.
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
                shape.width, units[head], rngs=rngs, use_bias=False, param_dtype=param_dtype
            )

    def activations(self, ids: Any, mask: Any = None) -> dict[str, Array]:
        """Outputs of every layer: "embed", "blocks.0" ..., "norm" (N, T, D), "head" by its kind."""
        shape = self.shape
        tokens = read_tokens(
            ids, mask, vocabulary=shape.vocabulary, length=shape.length, segments=0
        )
        h, t = self.embed(tokens.ids), tokens.ids.shape[1]
        angles = None
        if shape.rotary is None:
            h = h + self.positions[...][tokens.positions]
        else:
            tables = rotary_tables(shape.rotary, t, h.dtype)
            angles = tables[0][tokens.positions], tables[1][tokens.positions]
        layers = {"embed": h}
        sees = jnp.tril(jnp.ones((t, t), bool))[None] & tokens.seen[:, None]  # [n, q, k]
        for index, block in enumerate(self.blocks):
            h = layers[f"blocks.{index}"] = block(h, sees, angles)
        h = layers["norm"] = self.norm(h)
        return layers | {"head": or_nan(self._head(h, tokens), tokens.seen)}

    def _head(self, h: Array, tokens: Tokens) -> Array:
        if self.kind == "states":
            return h
        if self.kind == "classification":
            return self.head(at(h, tokens.last))
        return self.embed.attend(h) if self.shape.tied else self.head(h)

    def __call__(self, ids: Any, mask: Any = None) -> Array:
        """Outputs of tokens (N, T) with a mask (N, T); also of a mapping with both."""
        return self.activations(ids, mask)["head"]


def at(h: Array, positions: Array) -> Array:
    """The states (N, D) at one position (N,) of each sequence."""
    return jnp.take_along_axis(h, positions[:, None, None], axis=1)[:, 0]


def or_nan(outputs: Array, seen: Bool[Array, "n t"]) -> Array:
    """Outputs, NaN for samples without a token, which traced masks may contain."""
    empty = ~seen.any(axis=1).reshape(-1, *(1,) * (outputs.ndim - 1))
    return jnp.where(empty, jnp.full((), jnp.nan, outputs.dtype), outputs)


class Encoder(nnx.Module):
    """A network whose tokens attend to each other, and a head.

        h = blocks(norm(E[ids] + P[positions] + S[types]))
        classification: tanh(h_first W + b) W_c + b_c

    "classification" reads the first token (N, C), "states" are those of the last block
    (N, T, D). Outputs at padded positions have no meaning.

    Args:
        shape: the architecture.
        rngs: Flax's random streams.
        head: one of `jaxttp.models.language.network.ENCODER_HEADS`.
        outputs: C; that of the architecture when None.
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
        param_dtype: DTypeLike = jnp.float32,
    ):
        self.shape = shape
        self.kind = check_choice(
            "head", head, ENCODER_HEADS, hint="An encoder sees what it would have to predict; "
            "next-token loss needs a decoder, such as GPT-2 or Llama.",
        )  # fmt: skip
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
            self.pooler = dense(width, width, param_dtype, rngs, use_bias=True)
            classes = shape.outputs if outputs is None else outputs
            self.head = linear_head(width, classes, rngs=rngs, param_dtype=param_dtype)

    def activations(self, ids: Any, mask: Any = None, types: Any = None) -> dict[str, Array]:
        """Outputs of every layer: "embed", "blocks.0" ... (N, T, D), "head" by its kind."""
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
            h = self.head(pooled)
        return layers | {"head": or_nan(h, tokens.seen)}

    def __call__(self, ids: Any, mask: Any = None, types: Any = None) -> Array:
        """Outputs of tokens (N, T) with a mask (N, T); also of a mapping with both."""
        return self.activations(ids, mask, types)["head"]
