"""The parts of a RevMLP: half-layers, activations, a readout, and the checks of their shapes.

A half-layer adds ``W σ(V z)`` to one half of the state, z being the other half. All functions are
row-wise: a state is (N, h), a sample a row. A W with one column more than V has rows carries a bias
in that last column: it multiplies the constant feature 1. The readout f = P x_L is fixed: a
selection of coordinates, orthonormal rows, or any P of full row rank.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.checks import (
    check_array,
    check_choice,
    check_finite,
    check_integer,
    check_key,
    is_concrete,
)
from jaxttp._core.compile import full_precision
from jaxttp._core.traced import Keyed
from jaxttp._core.xla_cpu.threads import decompose

Activation: TypeAlias = str | Callable[[Array], Array]

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "gelu": lambda z: jax.nn.gelu(z, approximate=False),
    "identity": lambda z: z,
}
"""The named activations of a RevMLP; any other elementwise function works as well."""


class Couplings(NamedTuple):
    """Checked arrays of a RevMLP, all of the dtype of the weights.

    Attributes:
        weights: W (L, 2, h, m), trained; m + 1 columns with biases.
        bottlenecks: V (L, 2, m, h), fixed; None for the identity (then m = h).
    """

    weights: Array
    bottlenecks: Array | None

    @property
    def blocks(self) -> int:
        """L."""
        return self.weights.shape[0]

    @property
    def half(self) -> int:
        """Rows of a weight, h = d/2."""
        return self.weights.shape[2]

    @property
    def width(self) -> int:
        """The number of features of a half-layer, the constant of the bias included."""
        return self.weights.shape[3]


def check_network(weights: ArrayLike, bottlenecks: ArrayLike | None) -> Couplings:
    """The network's arrays, or a `ValueError` that names the shape that does not fit."""
    for name, value in (("weights", weights), ("bottlenecks", bottlenecks)):
        check_finite(name, value)
    weights = check_array("weights", weights)
    if weights.ndim != 4 or weights.shape[1] != 2 or 0 in weights.shape:
        raise ValueError(
            "weights must be (L, 2, d/2, m): L blocks of two half-layers, each h = d/2 rows by m "
            f"bottleneck units; got {weights.shape}."
        )
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise ValueError(f"weights must be floating-point; got {weights.dtype}.")
    if bottlenecks is not None:
        bottlenecks = check_array("bottlenecks", bottlenecks).astype(weights.dtype)
    blocks, _, half, width = weights.shape
    rows = half if bottlenecks is None else bottlenecks.shape[-2] if bottlenecks.ndim > 1 else -1
    fits = bottlenecks is None or bottlenecks.shape == (blocks, 2, rows, half)
    if not fits or width not in (rows, rows + 1):
        shape = "None (the identity)" if bottlenecks is None else str(bottlenecks.shape)
        raise ValueError(
            "bottlenecks must be (L, 2, m, d/2) for weights (L, 2, d/2, m), or (L, 2, d/2, m + 1) "
            f"with a bias column, or None where m = d/2; got bottlenecks {shape} for weights "
            f"{weights.shape}."
        )
    return Couplings(weights, bottlenecks)


def check_states(name: str, x: ArrayLike, network: Couplings) -> Array:
    """Rows (N, d) in the network's dtype, or a `ValueError`."""
    check_finite(name, x)
    x = check_array(name, x)
    d = 2 * network.half
    if x.ndim != 2 or x.shape[0] == 0 or x.shape[1] != d:
        hint = ""
        if x.ndim == 2 and x.shape[1] == d - 1:
            hint = "; pad odd inputs with one zero column: jnp.pad(x, ((0, 0), (0, 1)))"
        raise ValueError(
            f"{name} must be (N, d) with N >= 1 and d = {d}, twice the rows of a weight; got "
            f"{x.shape}{hint}."
        )
    return x.astype(network.weights.dtype)


def check_inputs(
    weights: ArrayLike,
    bottlenecks: ArrayLike | None,
    x: ArrayLike,
    activation: Activation,
    name: str = "x",
) -> tuple[Couplings, Array, Callable[[Array], Array]]:
    """The network, its states `x` (N, d) and its activation, checked together."""
    network = check_network(weights, bottlenecks)
    return network, check_states(name, x, network), check_activation(activation)


def check_activation(activation: Activation) -> Callable[[Array], Array]:
    """The function of an activation, equal to others of the same equations.

    Raises:
        ValueError: an unknown name.
    """
    if not callable(activation):
        return ACTIVATIONS[check_choice("activation", activation, ACTIVATIONS)]
    # A function of the user's is traced now (see `jaxttp._core.traced`).
    return Keyed(activation, jax.ShapeDtypeStruct((2,), jnp.float32))


def features(bottleneck: Array | None, z: Array, width: int, function: Callable) -> Array:
    """σ(V z), (N, m), with a column of ones where the weights have a bias."""
    a = function(z if bottleneck is None else z @ bottleneck.T)
    if a.shape[1] == width:
        return a
    return jnp.concatenate([a, jnp.ones((a.shape[0], 1), a.dtype)], axis=1)


def half_layer(weight: Array, bottleneck: Array | None, z: Array, function: Callable) -> Array:
    """W σ(V z), (N, h)."""
    return features(bottleneck, z, weight.shape[1], function) @ weight.T


def pick(bottleneck: Array | None, index: int) -> Array | None:
    """V of one half-layer of a block."""
    return None if bottleneck is None else bottleneck[index]


def split(x: Array) -> tuple[Array, Array]:
    """The two halves of a state (N, d), or of several (L, N, d)."""
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def join(halves: Any) -> Array:
    """A state (N, d) from its two halves."""
    return jnp.concatenate(halves, axis=1)


def selection_readout(outputs: int, width: int) -> Float[Array, "c d"]:
    """P that reads the first coordinates of the state.

    Args:
        outputs: rows of P, at most `width`.
        width: d, the width of the network.

    Returns:
        The first rows of the identity (outputs, width), float32 or the default float.

    Raises:
        ValueError: more outputs than the network is wide.

    Example:
        >>> selection_readout(1, 3).tolist()
        [[1.0, 0.0, 0.0]]

    Source:
        XGN section 5: the first d_y coordinates.
    """
    check_integer("width", width, at_least=1)
    check_integer("outputs", outputs, at_least=1, at_most=width, hint="Widen the network.")
    return jnp.eye(outputs, width)


def orthonormal_readout(key: Array, outputs: int, width: int) -> Float[Array, "c d"]:
    """P with random orthonormal rows, uniformly distributed.

    Args:
        key: a `jax.random.key`.
        outputs: rows of P, at most `width`.
        width: d, the width of the network.

    Returns:
        P (outputs, width) with P Pᵀ = 1.

    Raises:
        ValueError: more outputs than the network is wide.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> p = orthonormal_readout(jax.random.key(0), 2, 5)
        >>> bool(jnp.allclose(p @ p.T, jnp.eye(2), atol=1e-6))
        True

    Source:
        XGN section 5.
    """
    check_integer("width", width, at_least=1)
    check_integer("outputs", outputs, at_least=1, at_most=width, hint="Widen the network.")
    check_key(key, optional=False)
    return jax.random.orthogonal(key, width)[:outputs]


def check_readout(readout: ArrayLike | None, width: int, dtype: jnp.dtype) -> Array | None:
    """P (C, d) in this dtype.

    A rank below C is a `ValueError`, or of a traced P a run-time error.
    """
    if readout is None:
        return None
    check_finite("readout", readout)
    p = check_array("readout", readout).astype(dtype)
    if p.ndim != 2 or p.shape[1] != width or not 1 <= p.shape[0] <= width:
        raise ValueError(
            f"readout must be (C, d) with d = {width} and 1 <= C <= d; got {p.shape}. Give None "
            "for the identity."
        )
    message = (
        "readout must have full row rank: one of its rows is a combination of the others, so some "
        "changes of the outputs cannot be made. Remove dependent rows, or use orthonormal ones "
        "(orthonormal_readout)."
    )
    # The numerical rank of the dtype in which P is used.
    tolerance = max(p.shape) * float(jnp.finfo(dtype).eps)
    if is_concrete(readout):
        values = np.linalg.svd(np.asarray(readout, np.float64), compute_uv=False)
        if not values[-1] > tolerance * values[0]:
            raise ValueError(message)
        return p
    values = decompose(jnp.linalg.svd, p, compute_uv=False)
    return eqx.error_if(p, ~(values[-1] > tolerance * values[0]), message)


def right_inverse(readout: Array | None, changes: Array) -> Array:
    """P⁺ applied to rows (N, C): the smallest changes of the state with P x = changes."""
    if readout is None:
        return changes
    with jax.enable_x64(True):
        p = readout.astype(jnp.float64)
        solved = decompose(jnp.linalg.solve, p @ p.T, changes.astype(jnp.float64).T)
        return (solved.T @ p).astype(changes.dtype)


@full_precision
def read(readout: Array | None, states: Array) -> Array:
    """Outputs P x_L of states (N, d)."""
    return states if readout is None else states @ readout.T
