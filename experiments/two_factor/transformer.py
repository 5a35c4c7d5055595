"""A small decoder in Flax NNX whose last linear map is the unembedding W of the theory."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); positions see what is before them."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, h: Array, mask: Array) -> Array:
        """States (N, T, width) to states."""
        h = h + self.attention(self.norm1(h), mask=mask)
        return h + self.down(nnx.gelu(self.up(self.norm2(h))))


class Transformer(nnx.Module):
    """Tokens (N, T) to logits of the next token.

    Args:
        vocabulary: V.
        context: largest T.
        width: h.
        depth: blocks.
        heads: of the attention.
        rngs: Flax's random streams.
    """

    def __init__(
        self, vocabulary: int, *, context: int, width: int, depth: int, heads: int, rngs: nnx.Rngs
    ):
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.position = nnx.Param(0.02 * rngs.params.normal((context, width)))
        self.blocks = nnx.List(Block(width, heads, rngs=rngs) for _ in range(depth))
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocabulary, use_bias=False, rngs=rngs)

    def states(self, tokens: Int[Array | np.ndarray, "n t"]) -> dict[str, Array]:
        """What every layer gives at every position: "blocks.0" ..., "features", "head"."""
        length = tokens.shape[1]
        h = self.embed(jnp.asarray(tokens)) + self.position[:length][None]
        mask = jnp.tril(jnp.ones((length, length), bool))[None, None]
        layers = {}
        for index, block in enumerate(self.blocks):
            h = layers[f"blocks.{index}"] = block(h, mask)
        features = self.norm(h)
        return layers | {"features": features, "head": self.head(features)}

    def activations(self, tokens: Int[Array | np.ndarray, "n t"]) -> dict[str, Array]:
        """The same at the last position, (N, ...): what `jaxttp.models.LayerOutput` asks for."""
        return {name: values[:, -1] for name, values in self.states(tokens).items()}

    def __call__(self, tokens: Int[Array | np.ndarray, "n t"]) -> Array:
        """Logits (N, V) of the token that follows."""
        return self.activations(tokens)["head"]
