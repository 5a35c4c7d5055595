"""The Gauss-Newton direction of a RevMLP: one backward pass of its inverse, block by block.

    δ_l = ∂x_l/∂x_L · P⁺ε                                       one jvp of the inverse network
    Δ_{l,0} = δ1_l · s_{l,0}⁺                                   s_{l,0} = σ(V_{l,0} X2_{l-1})
    Δ_{l,1} = (δ2_l − ∂x2_l/∂w_{l,0}[Δ_{l,0}]) · s_{l,1}⁺       s_{l,1} = σ(V_{l,1} X1_l)
    W ← W − (α/L) Δ

The correction in Δ_{l,1} is the effect of the achieved change Δ_{l,0} s_{l,0} on the second half.
With exact pseudo-inverses it equals that of the inverse's tangent.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxttp._core.checks import check_array, check_finite
from jaxttp._core.compile import full_precision
from jaxttp._core.results import RESULT
from jaxttp._core.xla_cpu.threads import after
from jaxttp.gauss_newton._network import (
    Activation,
    Couplings,
    check_inputs,
    check_readout,
    features,
    pick,
    read,
    right_inverse,
    split,
)
from jaxttp.gauss_newton.pseudoinverse import (
    PseudoInverse,
    Solve,
    as_pseudoinverse,
    check_residual,
    relative,
)
from jaxttp.gauss_newton.reversible import forward_states


class StepInfo(eqx.Module):
    """The accuracy of a step.

    Attributes:
        ranks: directions kept (L, 2), of N; see `Solve.rank`.
        half_residuals: ‖Δ s − δ‖/‖δ‖ of every half-layer (L, 2).
        largest: largest singular value of the features (L, 2), see `Solve.largest`.
        residual: ‖J·Δ − P⁺ε‖/‖P⁺ε‖ at x_L, rounding for an exact step; None where it was not
            computed.
        method: of the pseudo-inverse: "cholesky", "eigh" or "svd".
        dtype: of the forward and tangent passes: float64 where they had to be promoted.
    """

    ranks: Array
    half_residuals: Array
    largest: Array
    residual: Array | None
    method: str = eqx.field(static=True)
    dtype: str = eqx.field(static=True)

    plot, _repr_html_, __repr__ = RESULT

    def __str__(self) -> str:
        residual = "" if self.residual is None else f", relative residual {self.residual:.2g}"
        return (
            f"Gauss-Newton step by {self.method} in {self.dtype}: ranks {jnp.min(self.ranks)} to "
            f"{jnp.max(self.ranks)}{residual}"
        )


@full_precision
def gauss_newton_direction(
    weights: ArrayLike,
    bottlenecks: ArrayLike | None,
    x: ArrayLike,
    epsilon: ArrayLike,
    *,
    activation: Activation = "relu",
    readout: ArrayLike | None = None,
    pseudoinverse: str = "truncate",
    rtol: ArrayLike = 0.01,
    atol: ArrayLike = 1e-5,
    key: Array | None = None,
    return_info: bool = False,
) -> Any:
    """J^⊣ ε: the change of the weights whose first-order effect on the outputs is ε.

        W ← W − learning_rate · direction

    By default it is truncated at 1 % as in the literature and achieves a part of ε only; it is
    exact with pseudoinverse="exact" or rtol=1e-6 and m >= 2 N. With `return_info=True` the relative
    error is `residual`.

    Args:
        weights: W (L, 2, d/2, m); [:, 0] writes the first half. A column more is a bias.
        bottlenecks: V (L, 2, m, d/2), or None for the identity.
        x: inputs (N, d), the whole data or a mini-batch.
        epsilon: (N, C), gradient of the SUMMED loss with respect to the outputs, or H⁺ times it
            for a generalized step: see `output_change`.
        activation: relu, tanh, gelu, identity, or an elementwise function.
        readout: P (C, d) of full row rank, f = P x_L; None for the identity.
        pseudoinverse: of the features of every half-layer: "exact" (N <= m; J J^⊣ = 1), "truncate"
            (singular values s >= max(rtol·s_max, atol)), "damp" (1/(s + rtol·s_max)), "tikhonov"
            (s/(s² + rtol² s_max²)) or "noise" (exact, of disturbed features).
        rtol: relative tolerance. Below 1e-6, which float32 does not resolve, everything is promoted
            to float64 and an SVD is used.
        atol: absolute tolerance of the truncation.
        key: a `jax.random.key`, needed by "noise".
        return_info: whether to return a `StepInfo` too (one more forward tangent pass).

    Returns:
        The direction (L, 2, d/2, m), 1/L included; with `return_info` the pair
        ``(direction, StepInfo)``.

    Raises:
        ValueError: "exact" with N > m; a readout without full row rank; an ε that is not finite;
            an odd width; shapes or options that do not fit.
        equinox.EquinoxRuntimeError: rank-deficient features in "exact" mode; a traced ε, or a
            direction, that is not finite.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> keys = jax.random.split(jax.random.key(0), 3)
        >>> weights = 0.1 * jax.random.normal(keys[0], (2, 2, 2, 16))
        >>> bottlenecks = jax.random.normal(keys[1], (2, 2, 16, 2)) / 4
        >>> x = jax.random.normal(keys[2], (3, 4))
        >>> step = gauss_newton_direction(weights, bottlenecks, x, x, pseudoinverse="exact")
        >>> step.shape
        (2, 2, 2, 16)

    Source:
        XGN eqs (16)-(17). Errata: the inner reshape of eq (17) is the vectorization of Δ_{l,0},
        column-major by its index; L counts blocks; the matrix inverted is m × n.
    """
    inverse = as_pseudoinverse(pseudoinverse, rtol=rtol, atol=atol, key=key)
    network, x, function = check_inputs(weights, bottlenecks, x, activation)
    inverse.check(len(x), network.width)
    readout = check_readout(readout, 2 * network.half, network.weights.dtype)
    check_finite("epsilon", epsilon)
    change = check_array("epsilon", epsilon)
    shape = (len(x), x.shape[1] if readout is None else readout.shape[0])
    if change.shape != shape:
        raise ValueError(
            f"epsilon must have the shape of the outputs, {shape}; got {change.shape}."
        )
    direction, info, _ = direction_of(
        network, x, lambda _: change, function, readout, inverse, measure=return_info
    )
    return (direction, info) if return_info else direction


def direction_of(
    network: Couplings,
    x: Array,
    epsilon_of: Callable[[Array], Array],
    function: Callable[[Array], Array],
    readout: Array | None,
    inverse: PseudoInverse,
    *,
    measure: bool,
) -> tuple[Array, StepInfo, Array]:
    """``(direction, info, outputs)`` of checked arrays; ε = epsilon_of(outputs)."""
    dtype = network.weights.dtype
    promote = inverse.fine and dtype.itemsize < 8  # float32 does not resolve the tolerance
    with jax.enable_x64(True) if promote else contextlib.nullcontext():
        wide = jnp.float64 if promote else dtype
        network, x, readout = jax.tree.map(lambda a: a.astype(wide), (network, x, readout))
        final, states = _states(*network, x, function)
        outputs = read(readout, final)
        epsilon = jnp.asarray(epsilon_of(outputs)).astype(wide)
        is_bad = ~jnp.all(jnp.isfinite(epsilon))
        epsilon = eqx.error_if(epsilon, is_bad, "epsilon holds NaN or infinity")
        direction, ranks, *floats = _solve_blocks(
            network, final, states, epsilon, readout, inverse, function, measure
        )
        direction = check_residual(direction, floats[0], inverse)
        direction = eqx.error_if(
            direction,
            ~jnp.all(jnp.isfinite(direction)),
            "the Gauss-Newton direction holds NaN or infinity; check that x and the weights are "
            "finite and of moderate size, or raise rtol.",
        )
        direction, outputs, floats = jax.tree.map(
            lambda a: a.astype(dtype), (direction, outputs, floats)
        )
        info = StepInfo(ranks, *floats, method=inverse.method, dtype=str(jnp.dtype(wide)))
        return direction, info, outputs


_states = jax.jit(forward_states, static_argnums=3)


@functools.partial(jax.jit, static_argnums=(6, 7))
def _solve_blocks(
    network: Couplings,
    final: Array,
    states: Array,
    epsilon: Array,
    readout: Array | None,
    inverse: PseudoInverse,
    function: Callable[[Array], Array],
    measure: bool,
) -> tuple[Array, Array, Array, Array, Array | None]:
    """The direction, and ranks, half residuals, largest and residual of its `StepInfo`."""
    target = right_inverse(readout, epsilon)

    def block(tangents: tuple, parts: tuple) -> tuple[tuple, tuple]:
        w, v, x2, x1, inverses = parts
        t1, t2 = tangents

        def push(i: int, z: Array, dz: Array) -> tuple[Array, Array]:
            """The features of a half-layer, and its change by a change of its input."""

            def features_of(z: Array) -> Array:
                return features(pick(v, i), z, w.shape[2], function)

            s, ds = jax.jvp(features_of, (z,), (dz,))
            return s, ds @ w[i].T

        def invert(i: int, s: Array, change: Array) -> Solve:
            return jax.tree.map(lambda leaf: leaf[i], inverses).apply(s, change)

        s1, written = push(1, x1, t1)
        before2 = t2 - written
        s0, written = push(0, x2, before2)
        before1 = t1 - written
        first = invert(0, s0, t1)
        # Where the first half achieves its whole target, the correction is that of the inverse.
        target2 = before2 if inverse.exact else t2 - push(1, x1, first.achieved)[1]
        second = invert(1, after(s1, first.residual), target2)
        both = jax.tree.map(lambda a, b: jnp.stack([a, b]), first, second)
        update = both.solution.swapaxes(1, 2) / network.blocks
        return (before1, before2), (update, both.rank, both.residual, both.largest)

    x2_before = split(states)[1]
    x1_after = split(jnp.concatenate([states[1:], final[None]]))[0]
    xs = (*network, x2_before, x1_after, inverse.for_layers((network.blocks, 2)))
    _, (direction, ranks, residuals, largest) = jax.lax.scan(block, split(target), xs, reverse=True)
    residual = None
    if measure:

        def final_states(weights: Array) -> Array:
            return forward_states(weights, network.bottlenecks, states[0], function)[0]

        achieved = jax.jvp(final_states, (network.weights,), (direction,))[1]
        residual = relative(achieved - target, target)
    return direction, ranks, residuals, largest, residual
