"""How sure is a training time? Bands over paths, and what an uncertain curve leaves open."""

from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxttp.losses.rule import metric_time

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


def jackknife(values: Any) -> np.ndarray:
    """Standard deviation of what all groups give, from what it is without each (G, ...)."""
    values = np.asarray(values, np.float64)
    groups = len(values)
    squares = np.sum((values - values.mean(axis=0)) ** 2, axis=0)
    return np.asarray(np.sqrt((groups - 1) / groups * squares))


def with_error(band: Any, middle: Any, deviation: Any, level: float) -> np.ndarray:
    """A band with room for an independent normal error of its middle.

    Args:
        band: lower and upper end (2, ...).
        middle: what lies between them (...).
        deviation: standard deviation of the error (...).
        level: in (0, 1).

    Returns:
        The ends (2, ...), half-widths added in squares.

    Example:
        >>> with_error([6.0, 14.0], 10.0, 3.0 / 1.2815515655446004, 0.8).round(9).tolist()
        [5.0, 15.0]
    """
    reach = NormalDist().inv_cdf((1 + level) / 2) * np.asarray(deviation, np.float64)
    low, high = np.asarray(band, np.float64)
    middle = np.asarray(middle, np.float64)
    below, above = np.maximum(middle - low, 0.0), np.maximum(high - middle, 0.0)
    return np.stack([middle - np.hypot(below, reach), middle + np.hypot(above, reach)])


def steps_with_error(
    bands: Mapping[float, tuple[int, int]] | None,
    times: Mapping[float, int],
    reads: Mapping[float, Sequence[int]],
    level: float,
    horizon: int,
) -> dict[float, tuple[int, int]]:
    """Bands of training times with room for the error of a sketch, within the horizon.

    Args:
        bands: by threshold; the times themselves when None.
        times: training times.
        reads: what they are without each group of the sketch.
        level: in (0, 1).
        horizon: T.

    Returns:
        The wider bands; one that is not reached stays as it is.

    Example:
        >>> steps_with_error(None, {0.1: 20}, {0.1: [19, 20, 20, 21]}, 0.9, 150)
        {0.1: (17, 23)}
    """
    out = dict(bands) if bands is not None else {e: (t, t) for e, t in times.items()}
    for e, (low, high) in out.items():
        if min(low, high, *reads[e]) >= 0:
            ends = with_error((low, high), times[e], jackknife(reads[e]), level)
            out[e] = (max(0, int(np.floor(ends[0]))), min(horizon, int(np.ceil(ends[1]))))
    return out


def steps_band(
    curves: Array,
    threshold: float,
    *,
    quantiles: tuple[float, ...] = (0.1, 0.5, 0.9),
    read: Callable[..., Any] = metric_time,
    **definition: Any,
) -> tuple[int, ...]:
    """Quantiles of the training time over many curves.

    Args:
        curves: losses or errors (P, T + 1), one curve a path.
        threshold: epsilon, as in `training_time`.
        quantiles: shares of the paths.
        read: (curve, threshold) -> step or -1.
        **definition: metric, rule, window and smooth of `metric_time`.

    Returns:
        One step a quantile, -1 for never: paths that never get there are later than all others.

    Example:
        >>> import jax.numpy as jnp
        >>> curves = jnp.array([[1.0, 0.5, 0.0, 0.0], [1.0, 0.9, 0.5, 0.0]])
        >>> steps_band(curves, 0.6, quantiles=(0.0, 1.0))
        (1, 2)
    """
    times = np.array([int(read(curve, threshold, **definition)) for curve in np.asarray(curves)])
    never = curves.shape[1]
    times = np.where(times < 0, never, times)
    found = np.quantile(times, quantiles, method="nearest")
    return tuple(-1 if t == never else int(t) for t in found)


def steps_uncertainty(
    loss: Any,
    uncertainty: Any,
    threshold: float,
    read: Callable[..., Any] = metric_time,
    **definition: Any,
) -> int:
    """How far a training time moves when the loss curve moves by its uncertainty.

    Args:
        loss: the forecast (T + 1,).
        uncertainty: its estimated error (T + 1,).
        threshold: epsilon, as in `training_time`.
        read: (curve, threshold) -> step or -1.
        **definition: rule, window and smooth of `metric_time`.

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
    base, *others = (int(read(curve, threshold, **definition)) for curve in moved)
    if base < 0 or min(others) < 0:
        return len(loss) - 1
    return max(1, *(abs(other - base) for other in others))


def displaced(loss: Any, uncertainty: Any, time: int) -> int:
    """How far the loss of a step moves in time; as far, for want of better, other curves do.

    Args:
        loss: the forecast on the training samples (T + 1,).
        uncertainty: its estimated error (T + 1,).
        time: a step; -1 for never.

    Returns:
        Steps, as `steps_uncertainty`; the horizon for never.

    Example:
        >>> import jax.numpy as jnp
        >>> displaced(jnp.linspace(1.0, 0.0, 11), jnp.full(11, 0.15), 4)
        2
    """
    if time < 0:
        return len(loss) - 1
    level = float(loss[time])
    return steps_uncertainty(loss, uncertainty, level, rule="absolute")
