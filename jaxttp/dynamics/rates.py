"""What a linear optimizer amounts to: the map of every step, its rates, its effective rate."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxttp._core.checks import check_number, check_used
from jaxttp._core.compile import jit
from jaxttp.dynamics._kernels import check_rate
from jaxttp.dynamics.filters import linear_filter
from jaxttp.dynamics.optimizers import (
    HeavyBall,
    Optimizer,
    inlined,
    keep_dtypes,
    same_program,
    slots,
)


class StepMaps(NamedTuple):
    """What an optimiser does at every step to (weight, accumulators) of a mode.

    Attributes:
        still: M (T, k, k), without a gradient.
        pulled: b (T, k), what a unit gradient adds.
    """

    still: np.ndarray
    pulled: np.ndarray


def step_maps(optimizer: optax.GradientTransformation, steps: int) -> StepMaps:
    """The maps of a linear optimiser, read off by feeding it unit vectors at every step.

    Raises:
        ValueError: a state whose accumulators cannot be told from its counters.
    """
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(True):
        try:
            count = len(slots(optimizer, optimizer.init(jnp.zeros(1))))
            first = optimizer.init(jnp.zeros(2 + count))
            descent = same_program(optimizer, jnp.zeros(()))
            rows = inlined(_step_rows, descent)(descent, first, steps)
        except (ValueError, TypeError, AttributeError) as problem:
            raise ValueError(f"optimizer: its steps cannot be taken apart ({problem})") from problem
    rows = np.asarray(rows, np.float64)
    return StepMaps(rows[:, :, 1:], rows[:, :, 0])


@functools.partial(jit, static_argnums=2)
def _step_rows(optimizer: Optimizer, first: optax.OptState, steps: int) -> Array:
    """The weight and the accumulators (T, k, 1 + k) after one step from each unit vector."""
    basis = jnp.eye(2 + len(slots(optimizer, first)))

    def step(state: Any, _: None) -> tuple[Any, Array]:
        units = iter(basis[2:])
        here = optax.tree_utils.tree_map_params(
            optimizer, lambda leaf: next(units).astype(leaf.dtype), state
        )
        updates, new = optimizer.update(basis[0], here, basis[1])
        rows = jnp.stack([basis[1] + jnp.asarray(updates), *slots(optimizer, new)])
        return keep_dtypes(new, state), rows

    return jax.lax.scan(step, first, None, length=steps)[1]


def map_of(rate: float, momentum: float) -> StepMaps:
    """The map of heavy-ball descent, for one step."""
    still = np.array([[[1.0, -rate * momentum], [0.0, momentum]]])
    return StepMaps(still, np.array([[-rate, 1.0]]))


def step_rates(maps: StepMaps) -> np.ndarray:
    """The learning rates (T,) of SGD with any momentum; NaN where there is no such number.

    Under a constant gradient the weight moves by eta/(1 - m) a step in the end, with Nesterov's
    momentum as well; 1 - m is det(I - F), F the map of the accumulators alone.
    """
    inner = np.eye(maps.still.shape[1] - 1) - maps.still[:, 1:, 1:]
    size = np.linalg.det(inner)
    solvable = np.abs(size) > 1e-9
    inner[~solvable] = np.eye(inner.shape[1])
    rest = np.linalg.solve(inner, maps.pulled[:, 1:, None])[..., 0]
    rates = -size * (maps.pulled[:, 0] + np.einsum("tk,tk->t", maps.still[:, 0, 1:], rest))
    return np.where(solvable & (rates >= 0) & (period(maps) == 1), np.abs(rates), np.nan)


def period(maps: StepMaps) -> int:
    """The longest wait for a step that moves the weight, in the middle of others."""
    moves = np.flatnonzero(np.any(maps.still[:, 0, 1:] != 0, axis=1) | (maps.pulled[:, 0] != 0))
    gaps = np.diff(moves)
    # A schedule may pause, a rule such as MultiSteps pauses again and again.
    return int(gaps.max()) if len(gaps) > 1 and gaps.min() > 1 else 1


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
