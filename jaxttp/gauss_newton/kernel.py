"""The tangent kernel of a RevMLP in closed form: no Jacobian is formed.

A half-layer writes W s, so the gradient of output a of sample i in W is an outer product,
∂f_ia/∂W = g_i^a s_iᵀ, with g the cotangent of the half-layer's output. Hence

    Θ[(i,a),(j,b)] = Σ_half-layers ⟨s_i, s_j⟩ ⟨g_i^a, g_j^b⟩
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxttp._core.checks import check_choice
from jaxttp._core.compile import full_precision
from jaxttp.gauss_newton._network import (
    Activation,
    Couplings,
    check_inputs,
    check_readout,
    check_states,
    features,
    pick,
    split,
)
from jaxttp.gauss_newton.reversible import forward_states


@full_precision
def revmlp_kernel(
    weights: ArrayLike,
    bottlenecks: ArrayLike | None,
    x1: ArrayLike,
    x2: ArrayLike | None = None,
    *,
    activation: Activation = "relu",
    readout: ArrayLike | None = None,
    output: str = "full",
) -> Array:
    """Θ = J Jᵀ of a RevMLP with respect to its weights, from Grams of features and cotangents.

        Θ[(i,a),(j,b)] = Σ_{l,k} ⟨s_i, s_j⟩ ⟨g_i^a, g_j^b⟩

    Args:
        weights: W (L, 2, d/2, m), as in `revmlp_forward`.
        bottlenecks: V (L, 2, m, d/2), or None.
        x1: inputs (N, d).
        x2: inputs (M, d); x1 itself when None.
        activation: as in `revmlp_forward`.
        readout: P (C, d), or None for the identity.
        output: "full" (N, C, M, C), "trace" (N, M), the mean over c of Θ[n,c,m,c], or "diagonal"
            (N, M, C).

    Returns:
        The kernel, in the dtype of the weights.

    Raises:
        ValueError: shapes or options that do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> weights, bottlenecks = jnp.ones((2, 2, 1, 3)), jnp.ones((2, 2, 3, 1))
        >>> revmlp_kernel(weights, bottlenecks, jnp.ones((4, 2)), readout=jnp.eye(1, 2)).shape
        (4, 1, 4, 1)

    Source:
        Derived; XGN measures it by an explicit Jacobian.
    """
    network, x, function = check_inputs(weights, bottlenecks, x1, activation, "x1")
    rows = None
    check_choice("output", output, ("full", "trace", "diagonal"))
    readout = check_readout(readout, 2 * network.half, network.weights.dtype)
    if x2 is not None:
        rows = len(x)
        x = jnp.concatenate([x, check_states("x2", x2, network)])
    return _kernel(network, x, readout, function, rows, output)


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _kernel(
    network: Couplings,
    x: Array,
    readout: Array | None,
    function: Callable[[Array], Array],
    rows: int | None,
    output: str,
) -> Array:
    n, d = x.shape
    p = jnp.eye(d, dtype=x.dtype) if readout is None else readout
    final, states = forward_states(*network, x, function)
    after = jnp.concatenate([states[1:], final[None]])
    left, right = slice(rows), slice(rows, None)

    def contribution(s: Array, g: Array) -> Array:
        inner = s[left] @ s[right].T  # (N, M)
        if output == "full":
            pairs = jnp.einsum("aih,bjh->iajb", g[:, left], g[:, right])
            return inner[:, None, :, None] * pairs
        diagonal = inner[:, :, None] * jnp.einsum("aih,ajh->ija", g[:, left], g[:, right])
        return diagonal if output == "diagonal" else jnp.mean(diagonal, axis=2)

    def block(carry: tuple, parts: tuple) -> tuple[tuple, None]:
        total, g1, g2 = carry  # g: (C, N, h)
        w, v, before, behind = parts

        def pulled(i: int, z: Array, g: Array) -> tuple[Array, Array]:
            s, pull = jax.vjp(lambda z: features(pick(v, i), z, w.shape[2], function), z)
            return s, jax.vmap(lambda c: pull(c @ w[i])[0])(g)

        s, back = pulled(1, split(behind)[0], g2)
        total, g1 = total + contribution(s, g2), g1 + back
        s, back = pulled(0, split(before)[1], g1)
        return (total + contribution(s, g1), g1, g2 + back), None

    cotangents = jnp.broadcast_to(p[:, None, :], (p.shape[0], n, d))
    half = d // 2
    zeros = jax.eval_shape(contribution, x, cotangents)
    start = (jnp.zeros(zeros.shape, zeros.dtype), cotangents[..., :half], cotangents[..., half:])
    return jax.lax.scan(block, start, (*network, states, after), reverse=True)[0][0]
