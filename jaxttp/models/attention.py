"""The block of a transformer: attention and a two-layer network, each after a layer norm."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxttp.models.activations import get_activation, kernel_init


class Attention(nnx.Module):
    """Multi-head self-attention, queries, keys and values from one linear layer.

        A_h = softmax(Q_h K_hᵀ / √(D/H)),    out = concat_h(A_h V_h) W + b

    Args:
        width: D.
        heads: H, a divisor of D.
        rngs: Flax's random streams.
        causal: whether a position sees only itself and what is before it.
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
        self.qkv = dense(width, 3 * width, 1.0, param_dtype, rngs)
        self.proj = dense(width, width, 1.0, param_dtype, rngs)

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
        norm_epsilon: ε of the layer norms.
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
        norm_epsilon: float = 1e-6,
        param_dtype: DTypeLike = jnp.float32,
    ):
        hidden = 4 * width if hidden is None else hidden
        gelu = get_activation("gelu").gain
        self.norm1 = layer_norm(width, norm_epsilon, param_dtype, rngs)
        self.attention = Attention(width, heads, causal=causal, param_dtype=param_dtype, rngs=rngs)
        self.norm2 = layer_norm(width, norm_epsilon, param_dtype, rngs)
        self.fc1 = dense(width, hidden, 1.0, param_dtype, rngs)
        self.fc2 = dense(hidden, width, gelu, param_dtype, rngs)

    def __call__(self, x: Float[Array, "n t d"]) -> Float[Array, "n t d"]:
        """States (N, T, D) to states."""
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(get_activation("gelu").function(self.fc1(self.norm2(x))))


def layer_norm(width: int, epsilon: float, param_dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Layer norm over the last axis."""
    return nnx.LayerNorm(
        width, epsilon=epsilon, use_fast_variance=False, param_dtype=param_dtype, rngs=rngs
    )


def dense(
    inputs: int, outputs: int, gain: float, param_dtype: DTypeLike, rngs: nnx.Rngs
) -> nnx.Linear:
    """A linear layer with kernel ~ N(0, gain/inputs) and bias 0."""
    return nnx.Linear(
        inputs, outputs, kernel_init=kernel_init(gain), param_dtype=param_dtype, rngs=rngs
    )
