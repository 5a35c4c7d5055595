"""Gauges of exactness: is J J^⊣ the identity, and does training follow ε(t) = e^{−t} ε_0?"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.checks import check_array, check_finite, check_integer, check_key, check_number
from jaxttp._core.compile import full_precision
from jaxttp._core.roots import root
from jaxttp.gauss_newton._network import Activation, Couplings
from jaxttp.gauss_newton.modes import Mode
from jaxttp.gauss_newton.readout import check_readout, read
from jaxttp.gauss_newton.reversible import forward_states
from jaxttp.gauss_newton.shorthands import PseudoInverse, to_mode
from jaxttp.gauss_newton.update import check_problem, direction_of


@full_precision
def inverse_error(
    weights: ArrayLike,
    bottlenecks: ArrayLike | None,
    x: ArrayLike,
    *,
    key: Array,
    probes: int = 4,
    activation: Activation | Sequence[Activation] = "relu",
    readout: ArrayLike | None = None,
    pseudoinverse: PseudoInverse = "truncate",
    **options: Any,
) -> Float[Array, ""]:
    """‖(J J^⊣ − 1) v‖/‖v‖, the largest over random probes v.

    Args:
        weights: as in `gauss_newton_direction`.
        bottlenecks: as there.
        x: as there.
        key: a `jax.random.key` for the probes.
        probes: how many normal probes.
        activation: as there.
        readout: as there.
        pseudoinverse: a mode or its shorthand, as there. `Noise(key)` draws anew for every probe.
        **options: `rtol`, `atol`, `method` and `noise` of a shorthand, as there.

    Returns:
        A scalar: rounding for "exact", the share of a random change that is lost otherwise.

    Raises:
        ValueError: as `gauss_newton_direction`; no probes.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> keys = jax.random.split(jax.random.key(0), 3)
        >>> weights = 0.1 * jax.random.normal(keys[0], (2, 2, 2, 16))
        >>> bottlenecks = jax.random.normal(keys[1], (2, 2, 16, 2)) / 4
        >>> x = jax.random.normal(keys[2], (3, 4))
        >>> float(inverse_error(weights, bottlenecks, x, key=keys[0], pseudoinverse="exact")) < 1e-3
        True

    Source:
        XGN eq (12): J J^⊣ = 1.
    """
    check_integer("probes", probes, at_least=1)
    check_key(key, optional=False)
    mode = to_mode(pseudoinverse, **options)
    network, x, names = check_problem(weights, bottlenecks, x, activation, mode)
    p = check_readout(readout, 2 * network.half, network.weights.dtype)
    return _inverse_error(names, probes, network, x, p, mode, key)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _inverse_error(
    activations: tuple[Activation, ...],
    probes: int,
    network: Couplings,
    x: Array,
    readout: Array | None,
    mode: Mode,
    key: Array,
) -> Array:
    def forward(weights: Array) -> Array:
        return _outputs(network, weights, x, activations, readout)

    out = jax.eval_shape(forward, network.weights)

    def error(parts: tuple[Array, Array]) -> Array:
        index, k = parts
        v = jax.random.normal(k, out.shape, out.dtype)
        now = mode.fresh(None, index)
        step, _, _ = direction_of(network, x, lambda _: v, activations, readout, now, measure=False)
        made = jax.jvp(forward, (network.weights,), (step,))[1]
        return jnp.sqrt(jnp.sum((made - v) ** 2) / jnp.sum(v**2))

    return jnp.max(jax.lax.map(error, (jnp.arange(probes), jax.random.split(key, probes))))


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
    pseudoinverse: PseudoInverse = "truncate",
    **options: Any,
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
        pseudoinverse: a mode or its shorthand, as there. `Noise(key)` draws anew in every step.
        **options: `rtol`, `atol`, `method` and `noise` of a shorthand, as there.

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
    mode = to_mode(pseudoinverse, **options)
    network, x, names = check_problem(weights, bottlenecks, x, activation, mode)
    check_finite("targets", targets)
    y = check_array("targets", targets).astype(network.weights.dtype)
    p = check_readout(readout, 2 * network.half, network.weights.dtype)
    shape = (len(x), 2 * network.half if p is None else p.shape[0])
    if y.shape != shape:
        raise ValueError(f"targets must have the shape of the outputs, {shape}; got {y.shape}.")
    rate = jnp.asarray(learning_rate, network.weights.dtype)
    return _flow_error(names, steps, network, x, y, p, mode, rate)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _flow_error(
    activations: tuple[Activation, ...],
    steps: int,
    network: Couplings,
    x: Array,
    y: Array,
    readout: Array | None,
    mode: Mode,
    rate: Array,
) -> Array:
    first = _outputs(network, network.weights, x, activations, readout) - y

    def step(w: Array, k: Array) -> tuple[Array, Array]:
        epsilon = _outputs(network, w, x, activations, readout) - y
        wanted = jnp.exp(-rate * k.astype(rate.dtype)) * first
        off = root(jnp.sum((epsilon - wanted) ** 2))
        direction, _, _ = direction_of(
            network._replace(weights=w), x, lambda _: epsilon, activations, readout,
            mode.fresh(None, k), measure=False,
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
