"""Fully connected networks."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxttp._core.checks import check_integers
from jaxttp.models.layers import dense, get_activation, linear_head


class MLP(nnx.Module):
    """Linear layers with an activation between them; inputs of any shape are flattened.

        h_0 = x,   h_l = φ(h_{l-1} W_l + b_l),   f = h_{L-1} W_L + b_L

    Initial biases are 0 and W_l ~ N(0, gain/fan_in). The gain is 1 for the first layer, then
    1/E[φ(z)²] (2 for the ReLU), which keeps the signal's size through the depth. The head has
    ``head_scale``² in its place.

    Args:
        sizes: widths (inputs, hidden..., outputs), at least the two outer ones.
        rngs: Flax's random streams.
        activation: relu, tanh, gelu or identity.
        use_bias: whether the layers have biases.
        head_scale: standard deviation of the initial outputs for hidden features of unit second
            moment.
        param_dtype: dtype of the parameters.

    Raises:
        ValueError: fewer than two sizes, a size below 1, an unknown activation.

    Example:
        >>> model = MLP((64, 32, 10), activation="tanh", rngs=nnx.Rngs(0))
        >>> model(jnp.zeros((5, 8, 8, 1))).shape
        (5, 10)
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        rngs: nnx.Rngs,
        activation: str = "relu",
        use_bias: bool = True,
        head_scale: float = 1.0,
        param_dtype: DTypeLike = jnp.float32,
    ):
        if len(sizes) < 2:
            raise ValueError(
                f"sizes={tuple(sizes)!r} must hold at least the number of inputs and of outputs."
            )
        check_integers("sizes", sizes)
        gains = [1.0] + [get_activation(activation).gain] * (len(sizes) - 2)
        self.activation = activation
        self.hidden = nnx.List(
            dense(inputs, outputs, param_dtype, rngs, gain=gain, use_bias=use_bias)
            for inputs, outputs, gain in zip(sizes[:-2], sizes[1:-1], gains[:-1], strict=True)
        )
        self.head = linear_head(
            *sizes[-2:], rngs=rngs, scale=head_scale, use_bias=use_bias, param_dtype=param_dtype
        )

    def __call__(self, x: Float[Array | np.ndarray, "n ..."]) -> Float[Array, "n c"]:
        """Outputs (N, C) of inputs (N, ...), flattened to (N, -1)."""
        *_, h = self.activations(x).values()
        return h

    def activations(self, x: Float[Array | np.ndarray, "n ..."]) -> dict[str, Array]:
        """The outputs of every layer, in order: "hidden.0" ... (N, width), "head" (N, C)."""
        function = get_activation(self.activation).function
        h = jnp.reshape(x, (x.shape[0], -1))
        first = self.hidden[0] if len(self.hidden) else self.head
        if h.shape[1] != first.in_features:
            raise ValueError(
                f"x of shape {x.shape} flattens to {h.shape[1]} features a sample; this MLP takes "
                f"{first.in_features}."
            )
        layers = {}
        for index, layer in enumerate(self.hidden):
            h = layers[f"hidden.{index}"] = function(layer(h))
        return layers | {"head": self.head(h)}
