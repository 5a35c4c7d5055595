"""A transformer on sequences of vectors: outputs at every position, to be selected from."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxttp._core.checks import check_integer
from jaxttp.models.attention import TransformerBlock, dense, layer_norm
from jaxttp.models.head import linear_head


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
        causal: whether a position sees only itself and what is before it.
        head_scale: standard deviation of the initial outputs for features of unit second moment.
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
        head_scale: float = 1.0,
        param_dtype: DTypeLike = jnp.float32,
    ):
        sizes = {"inputs": inputs, "length": length, "width": width, "depth": depth}
        for name, value in sizes.items():
            check_integer(name, value, at_least=1)
        self.length = length
        self.embed = dense(inputs, width, 1.0, param_dtype, rngs)
        self.positions = nnx.Param(
            0.02 * jax.random.normal(rngs.params(), (1, length, width), param_dtype)
        )
        self.blocks = nnx.List(
            TransformerBlock(width, heads, causal=causal, param_dtype=param_dtype, rngs=rngs)
            for _ in range(depth)
        )
        self.norm = layer_norm(width, 1e-6, param_dtype, rngs)
        self.head = linear_head(
            width, outputs, rngs=rngs, scale=head_scale, param_dtype=param_dtype
        )

    def activations(self, x: Float[Array | np.ndarray, "n t d"]) -> dict[str, Array]:
        """What every layer gives: "embed", "blocks.0" ..., "norm" (N, T, D), "head" (N, T, V)."""
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
