"""When does the loss on test samples stop falling, and does it rise again?"""

from typing import Any, NamedTuple

import numpy as np

from jaxttp._core.checks import check_choice, check_finite, check_known
from jaxttp.losses.crossing import METRICS, check_smooth, smooth_curve

NEAR = 0.01
"""Values within this share of the fall above the lowest are as good as it."""
RISE = 0.05
"""A curve that ends by this share of its fall above its lowest value has risen again."""


class EarlyStopping(NamedTuple):
    """Where a curve on test samples is lowest; prints itself as a line.

    Attributes:
        step: of the lowest value.
        value: the lowest value.
        end: the value at the end.
        near: the first and the last step of the stretch around `step` in which the curve is within
            1 % of its fall of the lowest value: stopping anywhere there is as good.
        overfits: whether the end is by more than 5 % of the fall above the lowest value.
        horizon: T.
        metric: of which curve, "loss" or "error".
        unsure: by how many steps a forecast may be off; None of a real curve, or where that is not
            known.
    """

    step: int
    value: float
    end: float
    near: tuple[int, int]
    overfits: bool
    horizon: int
    metric: str = "loss"
    unsure: int | None = None

    def __str__(self) -> str:
        name, (first, last) = f"test {self.metric}", self.near
        if self.overfits:
            off = "" if self.unsure is None else f" ± {self.unsure}"
            alike = f"; as good from {first} to {last}" if last > first else ""
            return (
                f"{name} is lowest, {self.value:.4g}, at step {self.step}{off}{alike}; "
                f"then it rises to {self.end:.4g}: stop early"
            )
        words = f"{name} does not rise again within {self.horizon} steps"
        return words if first == self.horizon else f"{words}; it is as low from step {first} on"


def early_stopping(curve: Any, *, metric: str = "loss", smooth: int = 1) -> EarlyStopping:
    """Where a loss (or error) on test samples is lowest, and whether it rises again.

    Args:
        curve: on test samples, of a forecast or a real training, by step (T + 1,).
        metric: what it is, "loss" or "error".
        smooth: the curve is averaged over so many steps first, see `jaxttp.forecast.smooth_curve`.

    Returns:
        An `EarlyStopping`; of a curve that never falls below its start that start.

    Raises:
        ValueError: a curve that is not a finite vector, an unknown metric, a smoothing that does
            not fit.

    Example:
        >>> print(early_stopping([1.0, 0.5, 0.25, 0.2, 0.3, 0.5]))
        test loss is lowest, 0.2, at step 3; then it rises to 0.5: stop early
        >>> print(early_stopping([1.0, 0.4, 0.22, 0.2, 0.2]))
        test loss does not rise again within 4 steps; it is as low from step 3 on

    Source:
        Standard; the shares of 1 % and 5 % are ours.
    """
    check_choice("metric", metric, METRICS)
    check_known(curve=curve)
    check_smooth(smooth, np.size(curve))
    values = np.asarray(smooth_curve(curve, smooth))
    check_finite("curve", values)
    step = int(np.argmin(values))
    lowest, fall = float(values[step]), float(values[0] - values[step])
    above = np.flatnonzero(values > lowest + NEAR * fall)
    first = int(above[above < step][-1]) + 1 if np.any(above < step) else 0
    last = int(above[above > step][0]) - 1 if np.any(above > step) else len(values) - 1
    end = float(values[-1])
    return EarlyStopping(
        step, lowest, end, (first, last), end > lowest + RISE * fall, len(values) - 1, metric
    )
