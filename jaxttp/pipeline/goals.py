"""When training is done, as settings say it: shares of the drop, and losses and errors to get to.

The one place where targets of settings become arguments of the front doors.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxttp._checks import check_used
from jaxttp.pipeline.settings import Settings
from jaxttp.rule import Rule, goal_words


class Arrival(NamedTuple):
    """When one target is reached.

    Attributes:
        metric: "loss" or "error".
        value: what it is to get below.
        steps: predicted, -1 for never.
        seconds: predicted; None for never, or where no step was timed.
        real_steps: of the real training; None without one, -1 for never.
        real_seconds: likewise.
    """

    metric: str
    value: float
    steps: int
    seconds: float | None = None
    real_steps: int | None = None
    real_seconds: float | None = None

    @property
    def words(self) -> str:
        """The target in words."""
        return goal_words(self.value, "absolute", self.metric)


def arrivals(
    targets: Mapping[str, tuple[float, ...]],
    found: Any,
    *,
    reached: bool,
    step_seconds: float | None,
    run: Any = None,
) -> tuple[Arrival, ...]:
    """When every target is reached.

    Args:
        targets: for "loss" and "error" what to get below, as `targets_of` finds them.
        found: a forecast with curves `loss` and, where there are target errors, `error`.
        reached: False where nothing counts as reached, since the forecast diverges.
        step_seconds: of one step, or None.
        run: the real training beside it, a `jaxttp.TrainingRun`, or None.

    Returns:
        One `Arrival` a target.

    Example:
        >>> import types
        >>> curve = types.SimpleNamespace(loss=[1.0, 0.5, 0.2])
        >>> arrivals({"loss": (0.3,)}, curve, reached=True, step_seconds=0.5)[0][:4]
        ('loss', 0.3, 2, 1.0)
    """
    out = []
    for metric, values in targets.items():
        if not values:
            continue
        rule = Rule(values, "absolute", metric)
        ahead = rule.read(found.loss, getattr(found, "error", None), reached=reached)
        real = None if run is None else rule.read(run.loss, run.error, reached=run.finite)
        each = None if run is None else run.seconds / (len(run.loss) - 1)
        for value in values:
            after = None if real is None else real[value]
            out.append(
                Arrival(
                    metric, value, ahead[value], _seconds(ahead[value], step_seconds), after,
                    _seconds(after, each),
                )
            )  # fmt: skip
    return tuple(out)


def _seconds(steps: int | None, each: float | None) -> float | None:
    return None if each is None or steps is None or steps < 0 else steps * each


def targets_of(settings: Any) -> dict[str, tuple[float, ...]]:
    """The targets of settings by their metric, losses first."""
    return {"loss": settings.target_loss, "error": settings.target_error}


def reading(
    settings: Settings, *, thresholds: Sequence[float] | None, rule: str, metric: str
) -> Mapping[str, Any]:
    """Thresholds, rule and metric of a sweep or a comparison: those given, or the targets.

    Args:
        settings: with the targets, of one kind.
        thresholds: where there are no targets.
        rule: likewise.
        metric: likewise.

    Returns:
        Keywords of `jaxttp.compare` and `jaxttp.forecast.sweep_kernel`.

    Raises:
        ValueError: both kinds of targets, or targets beside what they would replace.

    Example:
        >>> asked = Settings(target_error=(0.05,))
        >>> reading(asked, thresholds=(0.1,), rule="relative", metric="loss")
        {'thresholds': (0.05,), 'rule': 'absolute', 'metric': 'error'}
    """
    targets = {name: values for name, values in targets_of(settings).items() if values}
    if not targets:
        return {"thresholds": thresholds, "rule": rule, "metric": metric}
    if len(targets) > 1:
        raise ValueError(
            "target_loss and target_error: a ranking has one kind of goal; give one of them."
        )
    ((kind, values),) = targets.items()
    other = None if metric in ("loss", kind) else metric
    check_used("metric", other, False, f"the goal is target_{kind}")
    return {"thresholds": values, "rule": "absolute", "metric": kind}
