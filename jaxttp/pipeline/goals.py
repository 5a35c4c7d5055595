"""When training is done, as settings say it: losses and errors to get to.

The one place where targets of settings become those of the front doors.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxttp.losses.rule import Curves, Target, reach, targets_of


class Arrival(NamedTuple):
    """When one target is reached.

    Attributes:
        metric: "loss" or "error".
        value: what it is to get below.
        steps: predicted, -1 for never.
        seconds: predicted; None for never, or where no step was timed.
        real_steps: of the real training; None without one, -1 for never.
        real_seconds: likewise.
        unsure: by how many steps the forecast may be off, where it says so.
    """

    metric: str
    value: float
    steps: int
    seconds: float | None = None
    real_steps: int | None = None
    real_seconds: float | None = None
    unsure: int | None = None

    @property
    def words(self) -> str:
        """The target in words."""
        return Target(self.value, self.metric).words()


def arrivals(
    targets: Iterable[Target],
    found: Any,
    *,
    reached: bool,
    step_seconds: float | None,
    run: Any = None,
) -> tuple[Arrival, ...]:
    """When every target is reached.

    Args:
        targets: losses and errors to get below, as `aims` finds them.
        found: a forecast with curves `loss` and, where there are target errors, `error`; its
            `targets_uncertainty`, where it has one, is said.
        reached: False where nothing counts as reached, since the forecast diverges.
        step_seconds: of one step, or None.
        run: the real training beside it, a `jaxttp.TrainingRun`, or None.

    Returns:
        One `Arrival` a target.

    Example:
        >>> from jaxttp.losses.rule import Curves
        >>> arrivals([Target(0.3)], Curves([1.0, 0.5, 0.2]), reached=True, step_seconds=0.5)[0][:4]
        ('loss', 0.3, 2, 1.0)
    """
    targets = tuple(targets)
    curves = Curves(found.loss, getattr(found, "error", None))
    ahead = reach(curves, targets, reached=reached)
    real = {} if run is None else run.reach(targets)
    each = None if run is None else run.seconds / (len(run.loss) - 1)
    unsure = getattr(found, "targets_uncertainty", {})
    return tuple(
        Arrival(
            one.metric, one.value, step, _seconds(step, step_seconds), real.get(one),
            _seconds(real.get(one), each), unsure.get(one),
        )
        for one, step in ahead.items()
    )  # fmt: skip


def reached_seconds(steps: Mapping[float, int], each: float) -> dict[float, float]:
    """Seconds to every threshold that is reached.

    Args:
        steps: by threshold, -1 for never.
        each: seconds of a step.

    Example:
        >>> reached_seconds({0.1: 4, 0.01: -1}, 0.5)
        {0.1: 2.0}
    """
    return {threshold: step * each for threshold, step in steps.items() if step >= 0}


def _seconds(steps: int | None, each: float | None) -> float | None:
    return None if each is None or steps is None or steps < 0 else steps * each


def aims(settings: Any) -> tuple[Target, ...]:
    """The targets of settings, losses first.

    Raises:
        ValueError: a value that nothing can be below, see `jaxttp.Target`.
    """
    return targets_of(settings.target_loss, settings.target_error)
