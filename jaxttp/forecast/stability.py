"""Stability: every step's rate compared with its limit, and the predicted loss."""

from typing import Any, NamedTuple

import numpy as np
import optax

from jaxttp.dynamics.stability import step_fractions, step_maps, step_rates

RISE = 2.0
"""A forecast whose loss exceeds this multiple of its start is unstable."""


class Rates(NamedTuple):
    """Every step's rate and its fraction of the largest stable rate.

    The limit is that of the optimizer at that step, with the curvature of the full batch before
    training.

    Attributes:
        rates: learning rates (T,), or one for all steps; NaN where an optimizer has none.
        fractions: rates over limits, of the same shape; 1 or more is not stable.
    """

    rates: np.ndarray
    fractions: np.ndarray

    @property
    def peak(self) -> int:
        """The step with the largest fraction."""
        return int(np.argmax(self.fractions))

    @property
    def limit(self) -> float:
        """The largest stable rate at that step; NaN where there are no rates."""
        fraction = float(self.fractions[self.peak])
        return float(self.rates[self.peak]) / fraction if fraction > 0 else float("nan")

    @property
    def above(self) -> np.ndarray:
        """The steps at or beyond their limit."""
        return np.flatnonzero(self.fractions >= 1)

    @property
    def is_finite(self) -> bool:
        """Whether there are numbers for the rate and its limit."""
        return bool(np.isfinite(self.rates[self.peak]) and np.isfinite(self.limit))

    @property
    def constant(self) -> bool:
        """Whether all steps are alike."""
        return bool(np.all(self.fractions == self.fractions[0]))


def constant_rate(rate: float, limit: float) -> Rates:
    """One rate for all steps, whose fraction rounds to 1 only where it is beyond the limit."""
    fraction = rate / limit
    fraction = min(fraction, np.nextafter(1.0, 0.0)) if rate < limit else max(fraction, 1.0)
    return Rates(np.array([rate]), np.array([fraction]))


def optimizer_rates(
    optimizer: optax.GradientTransformation, steps: int, curvature: float
) -> Rates | None:
    """The rates of any linear optimizer; None where its steps cannot be taken apart.

    Args:
        optimizer: linear, see `linear_filter`.
        steps: the horizon T.
        curvature: the largest one, see `max_learning_rate`.
    """
    try:
        maps = step_maps(optimizer, steps)
    except ValueError:
        return None
    return Rates(step_rates(maps), step_fractions(maps, curvature))


def rises(loss: Any) -> Any:
    """Whether loss curves (..., T + 1) come to more than twice their start, or are not finite."""
    loss = np.asarray(loss, np.float64)
    return ~(np.max(loss, axis=-1) <= RISE * loss[..., 0])


def stability_message(
    loss: Any, rates: Rates | None, *, stable: bool, batch_size: int | None = None
) -> str:
    """One line on stability.

    Args:
        loss: the predicted curve (T + 1,).
        rates: every step's rate and limit, where known.
        stable: whether the forecast is stable.
        batch_size: of the forecast.
    """
    if stable:
        return _stable(rates, batch_size)
    curve = np.asarray(loss, np.float64)
    first, highest, last = (float(value) for value in (curve[0], curve.max(), curve[-1]))
    comes_down = f"the predicted loss comes down from {highest:.3g} to {last:.3g}"
    if rates is None or not len(rates.above):
        batches = "" if batch_size is None else f" with batches of {batch_size}"
        end = f", before {comes_down}" if last < first else ""
        return f"diverges{batches}: the predicted loss rises from {first:.3g} to {highest:.3g}{end}"
    if rates.constant and rates.is_finite and highest > RISE * first:
        return f"diverges above η = {rates.limit:.4g} (learning rate {float(rates.rates[0]):g})"
    though = f", though {comes_down}" if last < first else ""
    return f"{_above(rates)}; the real network may not survive it{though}"


def _stable(rates: Rates | None, batch_size: int | None) -> str:
    if rates is None:  # the optimizer has no limit
        return "stable; no largest learning rate is known for this optimizer"
    fraction = float(rates.fractions[rates.peak])
    if len(rates.above):
        return f"stable with kernels rebuilt, though {_above(rates, ' at the start')}"
    if not fraction > 1e-30:
        return "stable; without curvature no learning rate is too large"
    if not rates.is_finite:
        return f"stable; its largest step is {fraction:.2g} of the largest stable one"
    peak = "" if rates.constant else f" at peak rate {float(rates.rates[rates.peak]):.4g}"
    whose = " for full batches" if batch_size is not None else ""
    return f"stable{peak}; largest stable learning rate {rates.limit:.4g}{whose}"


def _above(rates: Rates, where: str = "") -> str:
    """By how much, and when, the rates exceed their limit."""
    fraction, above = float(rates.fractions[rates.peak]), rates.above
    rate, limit = "its largest step", "the largest stable one"
    if rates.is_finite:
        kind = "learning" if rates.constant else "peak"
        rate, limit = f"{kind} rate {rates.rates[rates.peak]:.3g}", f"the limit {rates.limit:.3g}"
    begin, end = int(above[0]), int(above[-1]) + 1
    when = f" from step {begin}" if begin else ""
    when += f" until step {end}" if end < len(rates.fractions) else ""
    times = f"{fraction:.2g} times" if fraction < 100 else f"{fraction:.0f} times"
    return f"{rate} is {times} {limit}{where}{when}"
