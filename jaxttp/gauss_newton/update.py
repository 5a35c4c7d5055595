"""The Gauss-Newton direction of a RevMLP: one backward sweep of its inverse, block by block.

    δ_l = ∂x_l/∂x_L · P⁺ε                                       one jvp of the inverse network
    Δ_{l,0} = δ1_l · s_{l,0}⁺                                   s_{l,0} = σ(V_{l,0} X2_{l-1})
    Δ_{l,1} = (δ2_l − ∂x2_l/∂w_{l,0}[Δ_{l,0}]) · s_{l,1}⁺       s_{l,1} = σ(V_{l,1} X1_l)
    W ← W − (α/L) Δ

The correction in Δ_{l,1} is what the change Δ_{l,0} s_{l,0}, as it is really made, does to the
second half. With exact pseudo-inverses it equals what the inverse's tangent holds already.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.arrays import root
from jaxttp._core.checks import check_array, check_finite, check_integer, check_number
from jaxttp._core.compile import full_precision
from jaxttp._core.results import RESULT
from jaxttp._core.xla_cpu.threads import after
from jaxttp.gauss_newton._network import (
    Activation,
    Couplings,
    check_activation,
    check_network,
    check_readout,
    check_states,
    features,
    pick,
    read,
    right_inverse,
    scan_activations,
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
    """How much of the wanted step was made.

    Attributes:
        ranks: directions kept (L, 2), of N; see `Solve.rank`.
        half_residuals: ‖Δ s − δ‖/‖δ‖ of every half-layer (L, 2).
        largest: largest singular value of the features (L, 2), see `Solve.largest`.
        residual: ‖J·Δ − P⁺ε‖/‖P⁺ε‖ at x_L, rounding for an exact step; None where it was not asked
            for.
        method: the route taken: "cholesky", "eigh" or "svd".
        dtype: the precision of the network's passes: float64 where it had to be promoted.
    """

    ranks: Array
    half_residuals: Array
    largest: Array
    residual: Array | None
    method: str = eqx.field(static=True)
    dtype: str = eqx.field(static=True)

    plot, _repr_html_, __repr__ = RESULT

    def __str__(self) -> str:
        missed = "" if self.residual is None else f", relative residual {self.residual:.2g}"
        return (
            f"Gauss-Newton step by {self.method} in {self.dtype}: ranks {jnp.min(self.ranks)} to "
            f"{jnp.max(self.ranks)}{missed}"
        )


@full_precision
def gauss_newton_direction(
    weights: ArrayLike,
    bottlenecks: ArrayLike | None,
    x: ArrayLike,
    epsilon: ArrayLike,
    *,
    activation: Activation | Sequence[Activation] = "relu",
    readout: ArrayLike | None = None,
    pseudoinverse: str = "truncate",
    rtol: ArrayLike = 0.01,
    atol: ArrayLike = 1e-5,
    key: Array | None = None,
    return_info: bool = False,
) -> Any:
    """J^⊣ ε: the change of the weights whose first-order effect on the outputs is ε.

        W ← W − learning_rate · direction

    By default it is truncated at 1 % as in the literature and makes a part of ε only; it is exact
    with pseudoinverse="exact" or rtol=1e-6 and m >= 2 N. `return_info=True` tells: `residual` is
    the fraction that is missed.

    Args:
        weights: W (L, 2, d/2, m); [:, 0] writes the first half. A column more is a bias.
        bottlenecks: V (L, 2, m, d/2), or None for the identity.
        x: inputs (N, d), the whole data or a mini-batch.
        epsilon: (N, C), gradient of the SUMMED loss with respect to the outputs, or H⁺ times it
            for a generalised step: see `output_change`.
        activation: relu, tanh, gelu, identity, an elementwise function, or one of these a block.
        readout: P (C, d) of full row rank, f = P x_L; None for the identity.
        pseudoinverse: of the features of every half-layer: "exact" (N <= m; J J^⊣ = 1), "truncate"
            (singular values s >= max(rtol·s_max, atol)), "damp" (1/(s + rtol·s_max)), "tikhonov"
            (s/(s² + rtol² s_max²)) or "noise" (exact, of disturbed features).
        rtol: relative tolerance. Below 1e-6 float32 does not resolve it: everything is then
            promoted to float64 and an SVD taken.
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
        XGN eqs (16)-(17). Errata: the inner reshape of eq (17) is the vectorisation of Δ_{l,0},
        column-major by its index; L counts blocks; the matrix inverted is m × n.
    """
    inverse = as_pseudoinverse(pseudoinverse, rtol=rtol, atol=atol, key=key)
    network, x, names = check_problem(weights, bottlenecks, x, activation, inverse)
    readout = check_readout(readout, 2 * network.half, network.weights.dtype)
    check_finite("epsilon", epsilon)
    wanted = check_array("epsilon", epsilon)
    outputs = (x.shape[0], x.shape[1] if readout is None else readout.shape[0])
    if wanted.shape != outputs:
        raise ValueError(
            f"epsilon must have the shape of the outputs, {outputs}; got {wanted.shape}."
        )
    direction, info, _ = direction_of(
        network, x, lambda _: wanted, names, readout, inverse, measure=return_info
    )
    return (direction, info) if return_info else direction


def check_problem(
    weights: ArrayLike,
    bottlenecks: ArrayLike | None,
    x: ArrayLike,
    activation: Activation | Sequence[Activation],
    inverse: PseudoInverse,
) -> tuple[Couplings, Array, tuple[Activation, ...]]:
    """The network, its inputs and its activations, checked together."""
    network = check_network(weights, bottlenecks)
    x = check_states("x", x, network)
    inverse.check(x.shape[0], network.width)
    return network, x, check_activation(activation, network.blocks)


def direction_of(
    network: Couplings,
    x: Array,
    wanted: Callable[[Array], Array],
    activations: tuple[Activation, ...],
    readout: Array | None,
    inverse: PseudoInverse,
    *,
    measure: bool,
) -> tuple[Array, StepInfo, Array]:
    """``(direction, info, outputs)`` of checked arrays; ε = wanted(outputs)."""
    dtype = network.weights.dtype
    promote = inverse.fine and dtype.itemsize < 8  # float32 does not resolve the tolerance
    with jax.enable_x64(True) if promote else contextlib.nullcontext():
        wide = jnp.float64 if promote else dtype
        network, x, readout = jax.tree.map(lambda a: a.astype(wide), (network, x, readout))
        final, states = _states(network, x, activations)
        outputs = read(readout, final)
        epsilon = jnp.asarray(wanted(outputs)).astype(wide)
        epsilon = eqx.error_if(
            epsilon, ~jnp.all(jnp.isfinite(epsilon)), "epsilon holds NaN or infinity"
        )
        direction, info = _sweep(
            network, final, states, epsilon, readout, inverse, activations, measure
        )
        direction = check_residual(direction, info.half_residuals, inverse)
        direction = eqx.error_if(
            direction,
            ~jnp.all(jnp.isfinite(direction)),
            "the Gauss-Newton direction holds NaN or infinity; check that x and the weights are "
            "finite and of moderate size, or raise rtol.",
        )
        floats = (direction, info.half_residuals, info.largest, info.residual, outputs)
        direction, halves, largest, residual, outputs = jax.tree.map(
            lambda a: a.astype(dtype), floats
        )
        info = StepInfo(info.ranks, halves, largest, residual, info.method, info.dtype)
        return direction, info, outputs


@functools.partial(jax.jit, static_argnums=2)
def _states(
    network: Couplings, x: Array, activations: tuple[Activation, ...]
) -> tuple[Array, Array]:
    return forward_states(network.weights, network.bottlenecks, x, activations)


@functools.partial(jax.jit, static_argnums=(6, 7))
def _sweep(
    network: Couplings,
    final: Array,
    states: Array,
    epsilon: Array,
    readout: Array | None,
    inverse: PseudoInverse,
    activations: tuple[Activation, ...],
    measure: bool,
) -> tuple[Array, StepInfo]:
    target = right_inverse(readout, epsilon)
    indices, function = scan_activations(activations)

    def block(tangents: tuple, parts: tuple) -> tuple[tuple, tuple]:
        w, v, index, x2, x1, inverses = parts
        t1, t2 = tangents

        def push(i: int, z: Array, dz: Array) -> tuple[Array, Array]:
            """The features of a half-layer, and what a change of its input writes."""
            s, ds = jax.jvp(
                lambda z: features(pick(v, i), z, w.shape[2], lambda a: function(index, a)),
                (z,),
                (dz,),
            )
            return s, ds @ w[i].T

        def invert(i: int, s: Array, change: Array) -> Solve:
            return jax.tree.map(lambda leaf: leaf[i], inverses).apply(s, change)

        s1, written = push(1, x1, t1)
        before2 = t2 - written
        s0, written = push(0, x2, before2)
        before1 = t1 - written
        first = invert(0, s0, t1)
        # Where the first half makes all that is asked of it, the correction is that of the inverse.
        rest = before2 if inverse.exact else t2 - push(1, x1, first.achieved)[1]
        second = invert(1, after(s1, first.residual), rest)
        both = jax.tree.map(lambda a, b: jnp.stack([a, b]), first, second)
        update = both.solution.swapaxes(1, 2) / network.blocks
        return (before1, before2), (update, both.rank, both.residual, both.largest)

    x2_before = split(states)[1]
    x1_after = split(jnp.concatenate([states[1:], final[None]]))[0]
    xs = (*network, indices, x2_before, x1_after, inverse.each((network.blocks, 2)))
    _, (direction, ranks, residuals, largest) = jax.lax.scan(block, split(target), xs, reverse=True)
    residual = None
    if measure:
        made = jax.jvp(
            lambda weights: forward_states(weights, network.bottlenecks, states[0], activations)[0],
            (network.weights,),
            (direction,),
        )[1]
        residual = relative(made - target, target)
    info = StepInfo(ranks, residuals, largest, residual, inverse.method, str(target.dtype))
    return direction, info


@full_precision
def flow_error(
    weights: ArrayLike,
    bottlenecks: ArrayLike | None,
    x: ArrayLike,
    targets: ArrayLike,
    *,
    learning_rate: float,
    steps: int,
    activation: Activation | Sequence[Activation] = "relu",
    readout: ArrayLike | None = None,
    pseudoinverse: str = "truncate",
    rtol: float = 0.01,
    atol: float = 1e-5,
    key: Array | None = None,
) -> Float[Array, ""]:
    """max_t ‖ε(t) − e^{−t} ε_0‖/‖ε_0‖ while the squared error is trained, t = α · step.

    Exact steps follow the flow to first order: halving the learning rate (and doubling the steps)
    halves this.

    Args:
        weights: as in `gauss_newton_direction`; they are not changed.
        bottlenecks: as there.
        x: as there.
        targets: y (N, C); ε = f − y.
        learning_rate: α.
        steps: how many.
        activation: as there.
        readout: as there.
        pseudoinverse: as there.
        rtol: as there.
        atol: as there.
        key: as there; noise draws anew in every step.

    Returns:
        A scalar.

    Raises:
        ValueError: as `gauss_newton_direction`; a learning rate that is not positive.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> weights, bottlenecks = jnp.zeros((1, 2, 1, 4)), jnp.ones((1, 2, 4, 1))
        >>> x = jnp.ones((1, 2))
        >>> error = flow_error(weights, bottlenecks, x, 2 * x, learning_rate=0.1, steps=3,
        ...                    pseudoinverse="exact")
        >>> round(float(error), 3)
        0.023

    Source:
        XGN eq (8).
    """
    check_number("learning_rate", learning_rate, above=0)
    check_integer("steps", steps, at_least=1)
    inverse = as_pseudoinverse(pseudoinverse, rtol=rtol, atol=atol, key=key)
    network, x, names = check_problem(weights, bottlenecks, x, activation, inverse)
    check_finite("targets", targets)
    y = check_array("targets", targets).astype(network.weights.dtype)
    p = check_readout(readout, 2 * network.half, network.weights.dtype)
    shape = (len(x), 2 * network.half if p is None else p.shape[0])
    if y.shape != shape:
        raise ValueError(f"targets must have the shape of the outputs, {shape}; got {y.shape}.")
    rate = jnp.asarray(learning_rate, network.weights.dtype)
    return _flow_error(names, steps, network, x, y, p, inverse, rate)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _flow_error(
    activations: tuple[Activation, ...],
    steps: int,
    network: Couplings,
    x: Array,
    y: Array,
    readout: Array | None,
    inverse: PseudoInverse,
    rate: Array,
) -> Array:
    first = _outputs(network, network.weights, x, activations, readout) - y

    def step(w: Array, k: Array) -> tuple[Array, Array]:
        epsilon = _outputs(network, w, x, activations, readout) - y
        wanted = jnp.exp(-rate * k.astype(rate.dtype)) * first
        off = root(jnp.sum((epsilon - wanted) ** 2))
        direction, _, _ = direction_of(
            network._replace(weights=w), x, lambda _: epsilon, activations, readout,
            inverse.at_step(k), measure=False,
        )  # fmt: skip
        return w - rate * direction, off

    w, errors = jax.lax.scan(step, network.weights, jnp.arange(steps))
    last = _outputs(network, w, x, activations, readout) - y - jnp.exp(-rate * steps) * first
    worst = jnp.maximum(jnp.max(errors), root(jnp.sum(last**2)))
    return worst / jnp.sqrt(jnp.sum(first**2))


def _outputs(
    network: Couplings,
    weights: Array,
    x: Array,
    activations: tuple[Activation, ...],
    readout: Array | None,
) -> Array:
    return read(readout, forward_states(weights, network.bottlenecks, x, activations)[0])
