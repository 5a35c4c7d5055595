"""How sure is a training time? Bands over paths, and what an uncertain curve leaves open."""

from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jaxttp.forecast.crossing import training_time


def steps_band(
    curves: Array,
    threshold: float,
    *,
    quantiles: tuple[float, ...] = (0.1, 0.5, 0.9),
    **definition: Any,
) -> tuple[int, ...]:
    """Quantiles of the training time over many loss curves.

    Args:
        curves: losses (P, T + 1), one curve a path.
        threshold: epsilon, as in `training_time`.
        quantiles: shares of the paths.
        **definition: rule, window and smooth of `training_time`.

    Returns:
        One step a quantile; paths that never get there count as -1.

    Example:
        >>> import jax.numpy as jnp
        >>> curves = jnp.array([[1.0, 0.5, 0.0, 0.0], [1.0, 0.9, 0.5, 0.0]])
        >>> steps_band(curves, 0.6, quantiles=(0.0, 1.0))
        (1, 2)
    """
    times = jax.vmap(lambda curve: training_time(curve, threshold, **definition))(curves)
    return tuple(int(t) for t in np.quantile(np.asarray(times), quantiles, method="nearest"))


def steps_uncertainty(loss: Any, uncertainty: Any, threshold: float, **definition: Any) -> int:
    """How far a training time moves when the loss curve moves by its uncertainty.

    Args:
        loss: the forecast (T + 1,).
        uncertainty: its estimated error (T + 1,).
        threshold: epsilon, as in `training_time`.
        **definition: rule, window and smooth of `training_time`.

    Returns:
        The larger move of both directions in steps, at least 1 (a time is a whole number); the
        horizon where a moved curve does not get there.

    Example:
        >>> import jax.numpy as jnp
        >>> steps_uncertainty(jnp.linspace(1.0, 0.0, 11), jnp.zeros(11), 0.5)
        1
    """
    loss, uncertainty = np.asarray(loss), np.asarray(uncertainty)
    moved = (loss, loss + uncertainty, loss - uncertainty)
    base, *others = (int(training_time(curve, threshold, **definition)) for curve in moved)
    if base < 0 or min(others) < 0:
        return len(loss) - 1
    return max(1, *(abs(other - base) for other in others))
