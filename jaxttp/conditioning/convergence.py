"""From a condition number to a training time."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.arrays import double
from jaxttp._core.checks import check_array, check_number, is_concrete


def _check_condition(condition: Any) -> Array:
    """Kappa in float64; a known value below 1 is an error."""
    kappa = check_array("condition", condition).astype(jnp.float64)
    if is_concrete(condition) and not bool(np.all(np.asarray(condition) >= 1.0)):  # NaN neither
        raise ValueError(f"condition must be at least 1; got {condition!r}.")
    return kappa


def contraction_rate(condition: ArrayLike) -> Float[Array, "..."]:
    """(kappa - 1) / (kappa + 1), by which a step of gradient descent shrinks the slowest error.

    At the best constant rate 2 / (lambda_max + lambda_min), on a quadratic.

    Args:
        condition: kappa >= 1, any shape.

    Returns:
        A factor in [0, 1]; 1 for an infinite condition number.

    Raises:
        ValueError: kappa below 1.

    Example:
        >>> float(contraction_rate(3.0))
        0.5

    Source:
        Standard; GNC Section 2.
    """
    with double():
        kappa = _check_condition(condition)
        return jnp.where(jnp.isinf(kappa), 1.0, (kappa - 1) / (kappa + 1))


def steps_to_accuracy(condition: ArrayLike, accuracy: Any) -> Float[Array, "..."]:
    """Steps of gradient descent after which the distance to the minimum is below eps of the first.

    ceil(log eps / log rate), the worst case over the starting points; the squared distance and
    the loss fall twice as fast. A start without a component along the slowest direction needs
    fewer: the forecast from the kernel (`jaxttp.predict_training_time`) takes it into account.

    Args:
        condition: kappa >= 1, any shape.
        accuracy: eps in (0, 1).

    Returns:
        A whole number as float64; +inf for an infinite condition number.

    Raises:
        ValueError: kappa below 1, accuracy outside (0, 1).

    Example:
        >>> float(steps_to_accuracy(3.0, 0.01))     # 2^-7 < 0.01 < 2^-6
        7.0

    Source:
        Standard; GNC Section 2.
    """
    check_number("accuracy", accuracy, above=0.0, below=1.0)
    with double():
        kappa = _check_condition(condition)
        # log((kappa - 1) / (kappa + 1)) without cancellation for large kappa
        slow = jnp.log1p(-2.0 / (kappa + 1))
        steps = jnp.log(jnp.asarray(accuracy).astype(jnp.float64)) / slow
        steps = jnp.ceil(steps - 1e-9 * jnp.abs(steps))
        return jnp.where(jnp.isinf(kappa), jnp.inf, jnp.maximum(steps, 1.0))
