"""What counts as done: thresholds, a definition, a curve; the one place that reads a curve."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxttp.crossing import check_reading, metric_time

THRESHOLDS = (0.01, 0.1, 0.4)


@dataclasses.dataclass(frozen=True)
class Rule:
    """How training times are read off a loss or an error curve.

    A rule of one's own is a subclass with another `time`.

    Attributes:
        thresholds: the epsilons; shares in (0, 1) for the kind "relative", in units of the curve
            otherwise.
        kind: the definition, see `training_time`.
        metric: which curve, "loss" or "error".
        smooth: steps over which it is averaged first, see `smooth_curve`.
        window: steps of the kind "plateau"; a tenth of the horizon when None.

    Raises:
        ValueError: an unknown kind or metric, numbers out of range, a window without "plateau".

    Example:
        >>> below = Rule((0.3,), kind="absolute")
        >>> below.words(0.3), below.read([1.0, 0.5, 0.2], None)
        ('loss below 0.3', {0.3: 2})
    """

    thresholds: tuple[float, ...] = THRESHOLDS
    kind: str = "relative"
    metric: str = "loss"
    smooth: int = 1
    window: int | None = None

    def __post_init__(self) -> None:
        checked = check_reading(self.thresholds, self.kind, self.metric, self.smooth, self.window)
        object.__setattr__(self, "thresholds", checked)

    @classmethod
    def of(
        cls,
        thresholds: float | Sequence[float] | None,
        rule: "str | Rule",
        metric: str = "loss",
        smooth: int = 1,
        window: int | None = None,
        *,
        steps: int | None = None,
    ) -> "Rule":
        """The rule that keywords name, or the one that is given, checked against a horizon.

        Args:
            thresholds: as the attribute; those of the given rule, or the usual ones, when None.
            rule: a kind, or a `Rule`, beside which no other keyword may be given.
            metric: as the attribute.
            smooth: as the attribute.
            window: as the attribute.
            steps: the horizon T, where it is known.

        Raises:
            ValueError: as `Rule`; keywords beside a `Rule` that say something else.
        """
        if isinstance(rule, Rule):
            if (thresholds, metric, smooth, window) != (None, "loss", 1, None):
                raise ValueError(
                    "rule is a Rule, which says thresholds, metric, smooth and window itself; give "
                    "them to it, or name the rule."
                )
            found = rule
        else:
            wanted = THRESHOLDS if thresholds is None else thresholds
            several = (wanted,) if isinstance(wanted, int | float) else tuple(wanted)
            found = cls(several, rule, metric, smooth, window)
        return found if steps is None else found.check(steps)

    def check(self, steps: int) -> "Rule":
        """Itself, where smoothing and window fit a horizon of T steps.

        Raises:
            ValueError: they do not.
        """
        check_reading(self.thresholds, self.kind, self.metric, self.smooth, self.window, steps)
        return self

    def curve(self, loss: Any, error: Any) -> Any:
        """The one of both curves that is read."""
        return loss if self.metric == "loss" else error

    def time(self, curve: Any, threshold: float) -> Any:
        """The first step at which a curve (T + 1,) is there, or -1; works under `vmap`."""
        return metric_time(
            curve, threshold, metric=self.metric, rule=self.kind, smooth=self.smooth,
            window=self.window,
        )  # fmt: skip

    def read(self, loss: Any, error: Any, *, reached: bool = True) -> dict[float, int]:
        """Training times off one of two curves.

        Args:
            loss: (T + 1,).
            error: (T + 1,); looked at with metric="error" only.
            reached: False where nothing counts as reached, since the forecast diverges.

        Returns:
            Steps for every threshold, -1 for never.
        """
        if not reached:
            return dict.fromkeys(self.thresholds, -1)
        curve = self.curve(loss, error)
        return {e: int(self.time(curve, e)) for e in self.thresholds}

    def words(self, threshold: float) -> str:
        """A threshold in words."""
        return goal_words(threshold, self.kind, self.metric)


def goal_words(threshold: float, kind: str, metric: str = "loss") -> str:
    """A threshold in words, as results say it that keep the names of a rule.

    Example:
        >>> goal_words(0.1, "relative"), goal_words(0.05, "gap", "error")
        ("10 % of the loss's drop", 'error within 0.05 of its end')
    """
    known = {
        "relative": f"{100 * threshold:g} % of the {metric}'s drop",
        "absolute": f"{metric} below {threshold:.4g}",
        "gap": f"{metric} within {threshold:.4g} of its end",
        "plateau": f"{metric} falling by less than {threshold:.4g}",
    }
    return known.get(kind, f"{metric}, {kind} {threshold:.4g}")
