"""Gauges of exactness: is J J^⊣ the identity, and does training follow ε(t) = e^{−t} ε_0?"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._checks import check_integer, check_number
from jaxttp.gauss_newton._network import Activation
from jaxttp.gauss_newton.readout import read
from jaxttp.gauss_newton.reversible import revmlp_forward
from jaxttp.gauss_newton.update import gauss_newton_direction


def inverse_error(
    weights: ArrayLike,
    bottlenecks: ArrayLike | None,
    x: ArrayLike,
    *,
    key: Array,
    probes: int = 4,
    activation: Activation | Sequence[Activation] = "relu",
    readout: ArrayLike | None = None,
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
        **options: `pseudoinverse`, `rtol`, `atol` and `method`, as there.

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
    weights = jnp.asarray(weights)
    p = None if readout is None else jnp.asarray(readout, weights.dtype)
    out = jax.eval_shape(lambda: _outputs(weights, bottlenecks, x, activation, p))

    def error(k: Array) -> Array:
        v = jax.random.normal(k, out.shape, out.dtype)
        step = gauss_newton_direction(
            weights, bottlenecks, x, v, activation=activation, readout=readout, **options
        )
        made = jax.jvp(lambda w: _outputs(w, bottlenecks, x, activation, p), (weights,), (step,))[1]
        return jnp.sqrt(jnp.sum((made - v) ** 2) / jnp.sum(v**2))

    return jnp.max(jax.lax.map(error, jax.random.split(key, probes)))


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
        **options: `pseudoinverse`, `rtol`, `atol` and `method`, as there.

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
    w = jnp.asarray(weights)
    y = jnp.asarray(targets, w.dtype)
    p = None if readout is None else jnp.asarray(readout, w.dtype)
    first = _outputs(w, bottlenecks, x, activation, p) - y
    rate = jnp.asarray(learning_rate, w.dtype)

    def step(w: Array, k: Array) -> tuple[Array, Array]:
        epsilon = _outputs(w, bottlenecks, x, activation, p) - y
        wanted = jnp.exp(-rate * k.astype(rate.dtype)) * first
        off = jnp.sqrt(jnp.sum((epsilon - wanted) ** 2))
        direction = gauss_newton_direction(
            w, bottlenecks, x, epsilon, activation=activation, readout=readout, **options
        )
        return w - rate * direction, off

    w, errors = jax.lax.scan(step, w, jnp.arange(steps))
    last = _outputs(w, bottlenecks, x, activation, p) - y - jnp.exp(-rate * steps) * first
    worst = jnp.maximum(jnp.max(errors), jnp.sqrt(jnp.sum(last**2)))
    return worst / jnp.sqrt(jnp.sum(first**2))


def _outputs(
    weights: ArrayLike,
    bottlenecks: ArrayLike | None,
    x: ArrayLike,
    activation: Activation | Sequence[Activation],
    readout: Array | None,
) -> Array:
    return read(readout, revmlp_forward(weights, bottlenecks, x, activation=activation))
