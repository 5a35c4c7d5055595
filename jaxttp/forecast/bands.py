"""How sure is a training time? Bands over paths, and what an uncertain curve leaves open."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxttp.forecast.crossing import training_time

SPREAD = 1.5
"""How much wider real runs of mini-batches scatter than those of the linearised network."""
CENTRE = 0.3
"""The share of a re-linearised loss's error estimate that its band allows for; times need all."""


def recentred(
    paths: Float[Array, "p t"], plain: Float[Array, " t"], centre: Float[Array, " t"]
) -> Float[Array, "p t"]:
    """Loss curves of the linearised network, moved to where the re-linearised one expects them.

    Each becomes centre (L / plain)^1.5: a network whose kernel grows scatters more than one whose
    kernel does not.

    Args:
        paths: losses under many draws of the batches, (P, T + 1).
        plain: the full-batch loss of the linearised network (T + 1,).
        centre: that of the re-linearised one (T + 1,).

    Returns:
        The moved curves (P, T + 1).

    Example:
        >>> import jax.numpy as jnp
        >>> plain, centre = jnp.array([1.0, 0.5]), jnp.array([1.0, 0.25])
        >>> recentred(jnp.array([[1.0, 0.5]]), plain, centre).tolist()
        [[1.0, 0.25]]
    """
    tiny = jnp.finfo(paths.dtype).tiny
    ratio = jnp.maximum(paths, tiny) / jnp.maximum(plain, tiny)[None]
    return centre[None] * ratio**SPREAD


def loss_band(
    paths: Float[Array, "p t"], level: float, uncertainty: Float[Array, " t"] | None = None
) -> Float[Array, "2 t"]:
    """The band that holds a share `level` of the curves at every step, and the centre's error.

    Args:
        paths: loss curves (P, T + 1).
        level: in (0, 1).
        uncertainty: estimated error of a re-linearised centre (T + 1,).

    Returns:
        Lower and upper ends (2, T + 1).

    Example:
        >>> import jax.numpy as jnp
        >>> loss_band(jnp.arange(11.0)[:, None], 0.8).round(6).tolist()
        [[1.0], [9.0]]
    """
    ends = jnp.asarray([(1 - level) / 2, (1 + level) / 2], paths.dtype)
    band = jnp.quantile(paths, ends, axis=0)
    if uncertainty is None:
        return band
    more = CENTRE * uncertainty
    return jnp.stack([jnp.maximum(band[0] - more, 0.0), band[1] + more])


def widened(band: tuple[int, int], uncertainty: int | None, horizon: int) -> tuple[int, int]:
    """A band of training times with room for its centre's error, within the horizon.

    Args:
        band: lower and upper end in steps.
        uncertainty: estimated error of a re-linearised centre in steps, None for none.
        horizon: T.

    Returns:
        The wider band.

    Example:
        >>> widened((10, 12), 3, 150)
        (7, 15)
    """
    if uncertainty is None or min(band) < 0:
        return band
    return max(0, band[0] - uncertainty), min(horizon, band[1] + uncertainty)


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
