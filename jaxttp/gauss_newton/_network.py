"""What a RevMLP is made of: half-layers, activations by name, and the checks of their shapes.

A half-layer adds ``W σ(V z)`` to one half of the state, z being the other half. Everything here is
row-wise: a state is (N, h), a sample a row. A W with one column more than V has rows carries a bias
in that last column: it multiplies the constant feature 1.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxttp._core.checks import check_array, check_choice, check_finite
from jaxttp._core.traced import Keyed

Activation: TypeAlias = str | Callable[[Array], Array]

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "gelu": lambda z: jax.nn.gelu(z, approximate=False),
    "identity": lambda z: z,
}
"""The activations that a RevMLP knows by name; any elementwise function will do beside them."""


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
        """How many features a half-layer has, the constant of the bias included."""
        return self.weights.shape[3]


def check_network(weights: ArrayLike, bottlenecks: ArrayLike | None) -> Couplings:
    """The network's arrays, or a `ValueError` that says which shape does not fit."""
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
        given = "None (the identity)" if bottlenecks is None else str(bottlenecks.shape)
        raise ValueError(
            "bottlenecks must be (L, 2, m, d/2) for weights (L, 2, d/2, m), or (L, 2, d/2, m + 1) "
            f"with a bias column, or None where m = d/2; got bottlenecks {given} for weights "
            f"{weights.shape}."
        )
    return Couplings(weights, bottlenecks)


def check_states(name: str, x: ArrayLike, network: Couplings) -> Array:
    """Rows (N, d) in the network's dtype, or a `ValueError`."""
    check_finite(name, x)
    x = check_array(name, x)
    d = 2 * network.half
    if x.ndim != 2 or x.shape[0] == 0 or x.shape[1] != d:
        remedy = (
            f"; pad odd inputs with one zero column: jnp.pad(x, ((0, 0), (0, {d - x.shape[1]})))"
            if x.ndim == 2 and x.shape[1] == d - 1
            else ""
        )
        raise ValueError(
            f"{name} must be (N, d) with N >= 1 and d = {d}, twice the rows of a weight; got "
            f"{x.shape}{remedy}."
        )
    return x.astype(network.weights.dtype)


def check_activation(
    activation: Activation | Sequence[Activation], blocks: int
) -> tuple[Activation, ...]:
    """One activation a block, as a hashable tuple.

    Raises:
        ValueError: an unknown name, or a sequence of another length than the blocks.
    """
    if isinstance(activation, str) or callable(activation):
        names: tuple[Activation, ...] = (activation,) * blocks
    else:
        names = tuple(activation)
    if len(names) != blocks:
        raise ValueError(
            f"activation must be one for all blocks or one for each of the {blocks}; got "
            f"{len(names)}."
        )
    for name in names:
        if not callable(name):
            check_choice("activation", name, ACTIVATIONS)
    # What a function of the user's reads is read now (see `jaxttp._core.traced`).
    one = jax.ShapeDtypeStruct((2,), jnp.float32)
    return tuple(Keyed(name, one) if callable(name) else name for name in names)


def scan_activations(activations: tuple[Activation, ...]) -> tuple[Array | None, Callable]:
    """``(indices, function)``: inside a scan over blocks, ``function(index, z)`` is σ of the block.

    The indices are None where every block has the same activation.
    """
    functions = [ACTIVATIONS[name] if isinstance(name, str) else name for name in activations]
    distinct = list(dict.fromkeys(functions))
    if len(distinct) == 1:
        return None, lambda _, z: distinct[0](z)
    indices = jnp.array([distinct.index(function) for function in functions], jnp.int32)
    return indices, lambda index, z: jax.lax.switch(index, distinct, z)


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
    """The two halves of a state (N, d)."""
    half = x.shape[1] // 2
    return x[:, :half], x[:, half:]


def join(halves: Any) -> Array:
    """A state (N, d) from its two halves."""
    return jnp.concatenate(halves, axis=1)
