"""Reversible coupling networks with fixed inverted bottlenecks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxttp._core.checks import check_choice, check_integer, check_number
from jaxttp.gauss_newton import orthonormal_readout, revmlp_forward, selection_readout
from jaxttp.gauss_newton._network import read

READOUTS = ("selection", "orthonormal", None)
SCALES = ("xavier", "he")


class Fixed(nnx.Variable):
    """An array of a model that is not trained."""


class RevMLP(nnx.Module):
    """A reversible MLP, on which exact Gauss-Newton steps are tractable.

        x1_l = x1_{l-1} + W_{l,0} σ(V_{l,0} x2_{l-1}),   x2_l = x2_{l-1} + W_{l,1} σ(V_{l,1} x1_l)
        f = P x_L

    Inputs of any shape are flattened and padded with zeros to the even width d. The W are the only
    `nnx.Param`; V ~ N(0, 1/m) and P are drawn once and fixed.

    Args:
        inputs: features of a sample.
        outputs: C, needed with a readout; at most d.
        rngs: Flax's random streams.
        blocks: L, each of two half-layers.
        bottleneck: m, units of the inverted bottleneck; None for none (V the identity). Exact
            steps for N samples need m >= N, and m >= 2 N to be well conditioned.
        width: d, even; by default the inputs, padded by one zero where they are odd.
        activation: relu, tanh, gelu or identity.
        readout: "selection" (the first coordinates), "orthonormal" (random orthonormal rows) or
            None (f = x_L, C = d).
        use_bias: whether every half-layer has a bias, zero at first, in the last column of W.
        scale: W ~ N(0, scale²), or "xavier" (variance 2/(m + h)) or "he" (2/m). Small weights start
            close to the identity map.
        param_dtype: dtype of all arrays.

    Raises:
        ValueError: an odd width, a width below the inputs or the outputs, unknown names, sizes
            below 1.

    Example:
        >>> model = RevMLP(63, 10, rngs=nnx.Rngs(0), blocks=2, bottleneck=128)
        >>> model(jnp.zeros((5, 63))).shape, model.weights.shape
        ((5, 10), (2, 2, 32, 128))

    Source:
        XGN eq (14) and section 5. V has variance 1/m: with 1/h training by Gauss-Newton diverged.
        The default scale is Appendix F's; Appendix L's Xavier contradicts it.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int | None = None,
        *,
        rngs: nnx.Rngs,
        blocks: int = 3,
        bottleneck: int | None = 512,
        width: int | None = None,
        activation: str = "relu",
        readout: str | None = "selection",
        use_bias: bool = False,
        scale: str | float = 1e-3,
        param_dtype: DTypeLike = jnp.float32,
    ):
        check_integer("inputs", inputs, at_least=1)
        check_integer("blocks", blocks, at_least=1)
        check_choice("readout", readout, READOUTS)
        width = inputs + inputs % 2 if width is None else check_integer("width", width, at_least=2)
        if width % 2 or width < inputs:
            raise ValueError(
                f"width must be even and at least inputs={inputs}; got {width}. The inputs are "
                "padded with zeros to it."
            )
        half = width // 2
        units = half if bottleneck is None else check_integer("bottleneck", bottleneck, at_least=1)
        if (outputs is None) != (readout is None):
            raise ValueError(
                f"outputs={outputs} with readout={readout!r}: give outputs with a readout, and "
                "none without (f is then the whole state)."
            )
        self.inputs, self.width = inputs, width
        self.activation = activation
        shape = (blocks, 2, half, units)
        std = _standard_deviation(scale, units, half)
        weights = std * jax.random.normal(rngs.params(), shape, param_dtype)
        if use_bias:
            weights = jnp.pad(weights, ((0, 0), (0, 0), (0, 0), (0, 1)))
        self.weights = nnx.Param(weights)
        if bottleneck is None:
            self.bottlenecks = None
        else:
            drawn = jax.random.normal(rngs.params(), (blocks, 2, units, half), param_dtype)
            self.bottlenecks = Fixed(drawn / jnp.asarray(units, param_dtype) ** 0.5)
        if outputs is None:
            self.readout = None
        else:
            check_integer("outputs", outputs, at_least=1, at_most=width, hint="Raise width.")
            p = selection_readout(outputs, width)
            if readout == "orthonormal":
                p = orthonormal_readout(rngs.params(), outputs, width)
            self.readout = Fixed(p.astype(param_dtype))

    def embed(self, x: Float[Array | np.ndarray, "n ..."]) -> Float[Array, "n d"]:
        """The network's input x_0 (N, d): flattened, padded with zeros, in the weights' dtype."""
        flat = jnp.reshape(jnp.asarray(x, self.weights.dtype), (x.shape[0], -1))
        if flat.shape[1] != self.inputs:
            raise ValueError(
                f"x of shape {x.shape} flattens to {flat.shape[1]} features a sample; this RevMLP "
                f"takes {self.inputs}."
            )
        return jnp.pad(flat, ((0, 0), (0, self.width - self.inputs)))

    def __call__(self, x: Float[Array | np.ndarray, "n ..."]) -> Float[Array, "n c"]:
        """Outputs (N, C) of inputs (N, ...)."""
        states = revmlp_forward(
            self.weights[...], self.fixed_bottlenecks, self.embed(x), activation=self.activation
        )
        return self._read(states)

    def activations(self, x: Float[Array | np.ndarray, "n ..."]) -> dict[str, Array]:
        """The states x_1 ... x_L after the blocks, "blocks.0" ... (N, d), and "head" (N, C)."""
        states, layers = self.embed(x), {}
        fixed, activation = self.fixed_bottlenecks, self.activation
        for index in range(self.weights.shape[0]):
            block = slice(index, index + 1)
            bottlenecks = None if fixed is None else fixed[block]
            states = revmlp_forward(self.weights[block], bottlenecks, states, activation=activation)
            layers[f"blocks.{index}"] = states
        return layers | {"head": self._read(states)}

    def _read(self, states: Array) -> Array:
        return read(None if self.readout is None else self.readout[...], states)

    @property
    def fixed_bottlenecks(self) -> Array | None:
        """V (L, 2, m, d/2), or None; the argument `bottlenecks` of `gauss_newton`."""
        return None if self.bottlenecks is None else self.bottlenecks[...]

    @property
    def fixed_readout(self) -> Array | None:
        """P (C, d), or None; the argument `readout` of `gauss_newton`."""
        return None if self.readout is None else self.readout[...]

    @property
    def parts(self) -> dict[str, Any]:
        """The keywords of `gauss_newton` for this network.

        Example:
            >>> from jaxttp.gauss_newton import gauss_newton
            >>> model = RevMLP(3, 2, rngs=nnx.Rngs(0), bottleneck=16)
            >>> optimizer = gauss_newton(0.5, **model.parts)  # to train *from_nnx(model)
        """
        return {
            "activation": self.activation,
            "bottlenecks": self.fixed_bottlenecks,
            "readout": self.fixed_readout,
            "embed": self.embed,
        }


def _standard_deviation(scale: str | float, units: int, half: int) -> float:
    if isinstance(scale, str):
        check_choice("scale", scale, SCALES)
        return (2 / (units + half)) ** 0.5 if scale == "xavier" else (2 / units) ** 0.5
    return check_number("scale", scale, at_least=0)
