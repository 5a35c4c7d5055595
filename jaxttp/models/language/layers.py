"""The block of a language model: attention with grouped queries, then a small network."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxttp.models.activations import kernel_init
from jaxttp.models.language.architecture import Architecture
from jaxttp.models.language.rotary import rotate

FUNCTIONS = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
}
"""Activations by name; "gelu" is the exact one."""

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
            self.qkv_proj = linear(shape.width, own + 2 * shared, biased, param_dtype, rngs)
        else:
            self.q_proj = linear(shape.width, own, biased, param_dtype, rngs)
            self.k_proj = linear(shape.width, shared, biased, param_dtype, rngs)
            self.v_proj = linear(shape.width, shared, biased, param_dtype, rngs)
        self.o_proj = linear(own, shape.width, "o" in shape.biases, param_dtype, rngs)

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
        # A finite number: a padded position may see none, and must not make NaN of gradients.
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
            self.gate_proj = linear(shape.width, shape.hidden, biased, param_dtype, rngs)
        self.up_proj = linear(shape.width, shape.hidden, biased, param_dtype, rngs)
        self.down_proj = linear(shape.hidden, shape.width, biased, param_dtype, rngs)

    def __call__(self, x: Float[Array, "n t d"]) -> Float[Array, "n t d"]:
        """States (N, T, D) to states."""
        function = FUNCTIONS[self.activation]
        if self.gated:
            return self.down_proj(function(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(function(self.up_proj(x)))


class Block(nnx.Module):
    """Attention and a small network, each beside a skip connection.

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


def linear(
    inputs: int, outputs: int, biased: bool, param_dtype: DTypeLike, rngs: nnx.Rngs
) -> nnx.Linear:
    """A linear layer with kernel ~ N(0, 1/inputs) and bias 0, if any."""
    return nnx.Linear(
        inputs, outputs, use_bias=biased, kernel_init=kernel_init(1.0), param_dtype=param_dtype,
        rngs=rngs,
    )  # fmt: skip


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
