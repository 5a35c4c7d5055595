"""Reversible coupling networks: forward, inverse, the inverse's tangents, a frugal backward pass.

    x1_l = x1_{l-1} + W_{l,0} σ(V_{l,0} x2_{l-1}),      x2_l = x2_{l-1} + W_{l,1} σ(V_{l,1} x1_l)

Blocks are stacked and scanned: compile time does not grow with the depth. The backward pass keeps
the outputs only and rebuilds every block's input by inverting it, so its temporary memory does not
grow with the depth either. It is attached as the transpose of a linear solve, so forward mode, vmap
and higher derivatives work as for any other function (`jax.custom_vjp` would forbid forward mode).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.compile import full_precision
from jaxttp.gauss_newton._network import (
    Activation,
    check_inputs,
    half_layer,
    join,
    pick,
    split,
)


@full_precision
def revmlp_forward(
    weights: ArrayLike,
    bottlenecks: ArrayLike | None,
    x: ArrayLike,
    *,
    activation: Activation = "relu",
    reversible: bool = True,
) -> Float[Array, "n d"]:
    """Outputs x_L (N, d) of a reversible network.

        x1_l = x1_{l-1} + W_{l,0} σ(V_{l,0} x2_{l-1}),   x2_l = x2_{l-1} + W_{l,1} σ(V_{l,1} x1_l)

    Args:
        weights: W (L, 2, d/2, m); [:, 0] is the half-layer that writes the first half. With a
            column more than the bottleneck has units, the last column is a bias.
        bottlenecks: V (L, 2, m, d/2), or None for the identity (then m = d/2).
        x: inputs (N, d).
        activation: relu, tanh, gelu, identity, or an elementwise function.
        reversible: whether reverse-mode derivatives rebuild the states from the outputs, in
            temporary memory that does not grow with L, instead of storing them. The states are then
            rebuilt with rounding errors (about 5e-5 in float32 at 64 blocks).

    Returns:
        The outputs (N, d), in the dtype of the weights.

    Raises:
        ValueError: shapes that do not fit, an odd width, an unknown activation, values not finite.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> weights, bottlenecks = jnp.ones((3, 2, 2, 4)), jnp.ones((3, 2, 4, 2))
        >>> revmlp_forward(weights, bottlenecks, jnp.ones((5, 4))).shape
        (5, 4)

    Source:
        XGN eq (14).
    """
    network, x, function = check_inputs(weights, bottlenecks, x, activation)
    forward = _reversible if reversible else _forward
    return forward(network.weights, network.bottlenecks, x, function)


@full_precision
def revmlp_inverse(
    weights: ArrayLike,
    bottlenecks: ArrayLike | None,
    outputs: ArrayLike,
    *,
    activation: Activation = "relu",
) -> Float[Array, "n d"]:
    """The inputs (N, d) of these outputs: the couplings inverted in reverse order.

    Args:
        weights: as in `revmlp_forward`.
        bottlenecks: as in `revmlp_forward`.
        outputs: x_L (N, d), before any readout.
        activation: as in `revmlp_forward`.

    Returns:
        The inputs (N, d), up to rounding that grows with the depth.

    Raises:
        ValueError: as `revmlp_forward`.

    Example:
        >>> import jax.numpy as jnp
        >>> weights, bottlenecks = jnp.ones((3, 2, 1, 4)), jnp.ones((3, 2, 4, 1))
        >>> x = jnp.array([[1.0, -2.0]])
        >>> outputs = revmlp_forward(weights, bottlenecks, x)
        >>> revmlp_inverse(weights, bottlenecks, outputs).tolist()
        [[1.0, -2.0]]

    Source:
        XGN eq (15).
    """
    network, outputs, function = check_inputs(weights, bottlenecks, outputs, activation, "outputs")
    return _inverse(network.weights, network.bottlenecks, outputs, function)


def forward_states(
    weights: Array, bottlenecks: Array | None, x: Array, function: Callable[[Array], Array]
) -> tuple[Array, Array]:
    """``(x_L (N, d), states (L, N, d))``: the outputs, and the input of every block."""

    def block(halves: tuple, parts: tuple) -> tuple[tuple, Array]:
        w, v = parts
        x1, x2 = halves
        x1 = x1 + half_layer(w[0], pick(v, 0), x2, function)
        x2 = x2 + half_layer(w[1], pick(v, 1), x1, function)
        return (x1, x2), join(halves)

    halves, states = jax.lax.scan(block, split(x), (weights, bottlenecks))
    return join(halves), states


@functools.partial(jax.jit, static_argnums=3)
def _forward(
    weights: Array, bottlenecks: Array | None, x: Array, function: Callable[[Array], Array]
) -> Array:
    return forward_states(weights, bottlenecks, x, function)[0]


@functools.partial(jax.jit, static_argnums=3)
def _inverse(
    weights: Array, bottlenecks: Array | None, outputs: Array, function: Callable[[Array], Array]
) -> Array:

    def block(halves: tuple, parts: tuple) -> tuple[tuple, None]:
        w, v = parts
        x1, x2 = halves
        x2 = x2 - half_layer(w[1], pick(v, 1), x1, function)
        x1 = x1 - half_layer(w[0], pick(v, 0), x2, function)
        return (x1, x2), None

    xs = (weights, bottlenecks)
    return join(jax.lax.scan(block, split(outputs), xs, reverse=True)[0])


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _reversible(
    weights: Array, bottlenecks: Array | None, x: Array, function: Callable[[Array], Array]
) -> Array:
    return _forward(weights, bottlenecks, x, function)


@full_precision
def _reversible_jvp(function: Callable[[Array], Array], primals: tuple, tangents: tuple):
    """The tangent map T of the forward pass, with a transpose that rebuilds the states.

    JAX lets a *square* linear solve carry its own transpose, so T is embedded in one: the solution
    of [[1, 0], [-T, 1]] u = (dp, 0) is u = (dp, T dp), and the transposed solve of (0, ȳ) gives
    (Tᵀ ȳ, ȳ), for which `_pull_back` is used.
    """
    outputs = _forward(*primals, function)
    moving = [i for i, t in enumerate(tangents) if t is not None and type(t) is not SymbolicZero]
    if not moving:
        return outputs, jnp.zeros_like(outputs)

    def push(directions: list[Array]) -> Array:
        def outputs_of(*args: Array) -> Array:
            full = list(primals)
            for i, value in zip(moving, args, strict=True):
                full[i] = value
            return _forward(*full, function)

        return jax.jvp(outputs_of, tuple(primals[i] for i in moving), tuple(directions))[1]

    def matvec(u: tuple) -> tuple:
        return u[0], u[1] - push(u[0])

    def solve(_, b: tuple) -> tuple:
        return b[0], b[1] + push(b[0])

    def transpose_solve(_, b: tuple) -> tuple:
        pulled = _pull_back(primals[0], primals[1], outputs, b[1], function)
        return [g + pulled[i] for i, g in zip(moving, b[0], strict=True)], b[1]

    def zero_of(arrays: list[Array]) -> Array:
        """A zero that depends linearly on all of them."""
        empty = [jax.lax.slice_in_dim(jnp.ravel(array), 0, 0) for array in arrays]
        return jnp.sum(jnp.stack([jnp.sum(part) for part in empty]))

    # The transpose of a solve requires that all of its right-hand side depends on its linear
    # inputs: (dp, 0) on dp, and (0, ȳ) on ȳ where the transpose is transposed again (Jv by Jᵀu).
    directions = [tangents[i] for i in moving]
    right = (directions, jnp.zeros_like(outputs) + zero_of(directions))
    same, moved = jax.lax.custom_linear_solve(matvec, right, solve, transpose_solve)
    return outputs, moved + zero_of(same)


_reversible.defjvp(_reversible_jvp, symbolic_zeros=True)


@full_precision
def _pull_back(
    weights: Array,
    bottlenecks: Array | None,
    outputs: Array,
    cotangents: Array,
    function: Callable[[Array], Array],
) -> tuple[Array, Array | None, Array]:
    """Cotangents of (weights, bottlenecks, x), from the outputs alone."""

    def block(carry: tuple, parts: tuple) -> tuple[tuple, tuple]:
        x1, x2, g1, g2 = carry
        w, v = parts

        def half(weight: Array, bottleneck: Array | None, z: Array) -> Array:
            return half_layer(weight, bottleneck, z, function)

        written, pull = jax.vjp(half, w[1], pick(v, 1), x1)
        dw1, dv1, dx1 = pull(g2)
        x2, g1 = x2 - written, g1 + dx1
        written, pull = jax.vjp(half, w[0], pick(v, 0), x2)
        dw0, dv0, dx2 = pull(g1)
        x1, g2 = x1 - written, g2 + dx2
        dv = None if v is None else jnp.stack([dv0, dv1])
        return (x1, x2, g1, g2), (jnp.stack([dw0, dw1]), dv)

    carry = (*split(outputs), *split(cotangents))
    xs = (weights, bottlenecks)
    (_, _, g1, g2), (dw, dv) = jax.lax.scan(block, carry, xs, reverse=True)
    return dw, dv, join([g1, g2])
