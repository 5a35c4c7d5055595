"""What an optimiser amounts to: the effective rate of momentum, or the map of every step."""

import functools
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxttp._core.checks import check_number, check_used
from jaxttp._core.compile import jit
from jaxttp.dynamics._kernels import check_rate
from jaxttp.dynamics._limits import step_maps
from jaxttp.dynamics.filters import linear_filter
from jaxttp.dynamics.optimizers import HeavyBall


def effective_learning_rate(learning_rate: Any, momentum: Any) -> Any:
    """Eta / (1 - m): the rate of plain gradient descent that heavy-ball momentum tends to.

    The accumulator needs about 1/(1 - m) steps to fill; until then the true motion is slower, by a
    delay of m/(1 - m) steps in the long run. `recursion` follows the accumulator exactly; use
    this where there is none (flow, closed form, diffusion).

    Args:
        learning_rate: eta > 0, a number or an array of numbers.
        momentum: m in [0, 1).

    Returns:
        The effective rate, of the same kind.

    Raises:
        ValueError: a rate or a momentum out of range.

    Example:
        >>> round(effective_learning_rate(0.1, 0.9), 6)
        1.0

    Source:
        TTP Section 3.1. The paper also divides the noise by a factor sqrt(1/(1 - m)), which is
        larger than 1 and not needed when the effective rate stands in the noise term as well.
    """
    check_number("learning_rate", learning_rate, at_least=0.0)
    check_number("momentum", momentum, at_least=0.0, below=1.0)
    return learning_rate / (1.0 - momentum)


def every_step(
    learning_rate: Any,
    momentum: Any,
    optimizer: optax.GradientTransformation | HeavyBall | None,
    steps: int,
) -> tuple[Any, Any]:
    """How every step moves (f - f_0, accumulators): s <- M_t s + b_t times the gradient's move.

    Args:
        learning_rate: eta > 0 of gradient descent, or None.
        momentum: with it, by the effective rate.
        optimizer: a linear one without weight decay in its place, or None.
        steps: T.

    Returns:
        M (T, 1 + k, 1 + k) and b (T, 1 + k), k the optimiser's accumulators.

    Raises:
        ValueError: neither or both, what is not linear, weight decay.

    Example:
        >>> import optax
        >>> still, pulled = every_step(None, 0.0, optax.sgd(0.1, 0.5), 3)
        >>> still[0].round(3).tolist(), pulled[0].round(3).tolist()
        ([[1.0, -0.05], [0.0, 0.5]], [-0.1, 1.0])
    """
    if (learning_rate is None) == (optimizer is None):
        given = "neither" if optimizer is None else "both"
        raise ValueError(f"give exactly one of learning_rate and optimizer; got {given}.")
    if optimizer is None:
        rate = effective_learning_rate(check_rate(learning_rate), momentum)
        return jnp.ones((steps, 1, 1)), jnp.broadcast_to(-rate, (steps, 1))
    check_used("momentum", momentum or None, False, "put it into optimizer: optax.sgd(rate, 0.9)")
    if isinstance(optimizer, HeavyBall):  # its numbers may be traced
        return _heavy_ball(optimizer.rates, optimizer.momentum, steps)
    if linear_filter(optimizer, steps=steps).weight_decay:
        raise ValueError(
            "optimizer decays the weights, which the diffusion does not follow; leave the decay "
            "out, or use jaxttp.dynamics.recursion with several keys."
        )
    maps = step_maps(optimizer, steps)
    return maps.still, maps.pulled


@functools.partial(jit, static_argnums=2)
def _heavy_ball(rates: Any, m: Any, steps: int) -> tuple[Array, Array]:
    """The maps of `every_step` with rates, one or (T,), and a velocity where there is momentum."""
    ones, etas = jnp.ones(steps), jnp.broadcast_to(rates, (steps,))
    if m is None:
        return ones[:, None, None], -etas[:, None]
    still = jnp.array([[ones, -etas * m], [0.0 * ones, m * ones]])
    return jnp.moveaxis(still, -1, 0), jnp.stack([-etas, ones], axis=1)
