"""What counts as done: thresholds, a definition, a curve; the one place that reads a curve.

A `Rule` measures a curve by itself, as a share of its own drop by default. A `Target` is a value
that a curve is to get below, wherever it ends: results have both.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from jaxttp._core.checks import check_choice, check_number
from jaxttp.losses.crossing import METRICS, check_reading, metric_time, smooth_curve

THRESHOLDS = (0.01, 0.1, 0.4)
SAMPLES = ("train", "test")
TRAIN_CURVES = ("loss", "error")
ALL_CURVES = (*TRAIN_CURVES, "test_loss", "test_error")


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
            wanted: Any = THRESHOLDS if thresholds is None else thresholds
            several = (wanted,) if np.ndim(wanted) == 0 else tuple(wanted)
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

    def about(self, targets: "Iterable[Target]") -> "Rule":
        """The rule that doubts are about: losses to get below, where some were asked for.

        Example:
            >>> Rule().about([Target(0.3)]).thresholds, Rule().about([]) == Rule()
            ((0.3,), True)
        """
        losses = tuple(t.value for t in targets if t.curve_name == "loss")
        return Rule(losses, "absolute", smooth=self.smooth) if losses else self


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


def step_words(step: int, unsure: int | None, horizon: int | None = None) -> str:
    """A time that is reached, with by how much it may be off.

    Where that is the whole horizon, of more than one step, a curve so far off never gets there.

    Example:
        >>> step_words(80, None), step_words(80, 9, 150), step_words(80, 150, 150)
        ('80', '80 ± 9', '80 (or never)')
    """
    if unsure is None:
        return str(step)
    never = horizon is not None and unsure >= horizon > 1
    return f"{step} (or never)" if never else f"{step} ± {unsure}"


@dataclasses.dataclass(frozen=True)
class Target:
    """A loss or an error to get below, on the training or on the test samples.

    Attributes:
        value: in units of the curve: a loss above 0, an error in (0, 1].
        metric: which curve, "loss" or "error".
        on: "train" or "test".

    Raises:
        ValueError: an unknown metric or kind of samples, a value out of range.

    Example:
        >>> wanted = Target(0.3)
        >>> wanted.words(), int(wanted.time([1.0, 0.5, 0.2]))
        ('loss below 0.3', 2)
        >>> Target(0.05, "error", on="test").words()
        'test error below 0.05'
    """

    value: float
    metric: str = "loss"
    on: str = "train"

    def __post_init__(self) -> None:
        check_choice("metric", self.metric, METRICS)
        check_choice("on", self.on, SAMPLES)
        object.__setattr__(self, "value", _target_value("value", self.value, self.metric))

    @property
    def curve_name(self) -> str:
        """The field of a result that holds its curve, such as "loss" or "test_error"."""
        return self.metric if self.on == "train" else f"test_{self.metric}"

    @property
    def column(self) -> str:
        """A name for tables and files, such as "loss_0.3" or "test_error_0.05"."""
        return f"{self.curve_name}_{self.value!r}"

    def rule(self, smooth: int = 1) -> Rule:
        """The rule that reads its curve, averaged first as `smooth_curve` does."""
        return Rule((self.value,), "absolute", self.metric, smooth)

    def time(self, curve: Any, smooth: int = 1) -> Any:
        """The first step at which a curve (T + 1,) is below, or -1; works under `vmap`."""
        return self.rule(smooth).time(curve, self.value)

    def lasting(self, curve: Any, smooth: int = 1) -> int:
        """The first step from which on a curve (T + 1,) stays below; -1 where its end is above.

        Example:
            >>> Target(0.3).lasting([1.0, 0.2, 0.4, 0.1]), Target(0.3).lasting([1.0, 0.2, 0.4])
            (3, -1)
        """
        below = np.asarray(smooth_curve(curve, smooth)) < self.value
        if not below[-1]:
            return -1
        above = np.flatnonzero(~below)
        return int(above[-1]) + 1 if len(above) else 0

    def words(self) -> str:
        """The target in words."""
        return ("" if self.on == "train" else "test ") + self.rule().words(self.value)


Values = float | Sequence[float] | None
"""What a keyword for targets takes: a number, several, or None for none."""


def targets_of(
    target_loss: Values = None,
    target_error: Values = None,
    target_test_loss: Values = None,
    target_test_error: Values = None,
    *,
    known: Sequence[str] = ALL_CURVES,
    remedy: str = "",
) -> tuple[Target, ...]:
    """The targets that the keywords of the front doors name, in the order of these.

    Args:
        target_loss: losses on the training samples, each above 0.
        target_error: errors on them, each in (0, 1].
        target_test_loss: as `target_loss`, on the test samples.
        target_test_error: as `target_error`, on the test samples.
        known: the curves that there will be, see `check_targets`.
        remedy: what to do about another one.

    Returns:
        The targets, each once.

    Raises:
        ValueError: no number, or one out of range; a target of a curve that there will not be.

    Example:
        >>> [target.words() for target in targets_of((0.3, 0.1), target_test_error=0.05)]
        ['loss below 0.3', 'loss below 0.1', 'test error below 0.05']
    """
    given = (target_loss, target_error, target_test_loss, target_test_error)
    found = []
    for curve, values in zip(ALL_CURVES, given, strict=True):
        on, metric = ("test" if curve.startswith("test_") else "train"), curve.split("_")[-1]
        if values is None:
            continue
        for value in (values,) if np.ndim(values) == 0 else values:  # type: ignore[union-attr]
            found.append(Target(_target_value(f"target_{curve}", value, metric), metric, on))
    return check_targets(found, known=known, remedy=remedy)


def check_targets(
    targets: Iterable[Target | float],
    *,
    known: Sequence[str] = ALL_CURVES,
    remedy: str = "",
) -> tuple[Target, ...]:
    """Targets as a tuple, each once, where there will be curves to read them off.

    Args:
        targets: as values, or as keys, such as `Prediction.targets`; a number stands for a loss on
            the training samples.
        known: names of the curves that there will be, of `ALL_CURVES`.
        remedy: what to do about another one.

    Raises:
        TypeError: something that is neither a `Target` nor a number.
        ValueError: a target of a curve that there will not be, a number out of range.

    Example:
        >>> check_targets([Target(0.3, on="test")], known=("loss", "error"), remedy="Give x_test.")
        Traceback (most recent call last):
        ...
        ValueError: target_test_loss=0.3 cannot be read here. Give x_test.
    """
    if isinstance(targets, Target) or _is_number(targets):
        raise TypeError("targets must hold Target values; put the one into a list.")
    several: list[Any] = [Target(cast("float", one)) if _is_number(one) else one for one in targets]
    for target in several:
        if not isinstance(target, Target):
            raise TypeError(f"targets must hold Target, such as Target(0.3); got {target!r}.")
        if target.curve_name not in known:
            raise ValueError(
                f"target_{target.curve_name}={target.value:g} cannot be read here. {remedy}"
            )
    return tuple(dict.fromkeys(several))


class Curves(NamedTuple):
    """What targets are read off, where there is no result that holds it.

    Attributes:
        loss: (T + 1,).
        error: likewise, or None, as the others.
        test_loss: likewise.
        test_error: likewise.
    """

    loss: Any
    error: Any = None
    test_loss: Any = None
    test_error: Any = None


def reach(
    curves: Any,
    targets: Iterable[Target | float],
    *,
    smooth: int = 1,
    reached: bool = True,
) -> dict[Target, int]:
    """The first steps at which the curves of a result are below targets.

    Args:
        curves: a `Prediction`, a `TrainingRun` or `Curves`: what has those that targets are of.
        targets: as values, or as keys; a number stands for a loss on the training samples.
        smooth: steps over which every curve is averaged first, see `smooth_curve`.
        reached: False where nothing counts as reached, since the training diverges.

    Returns:
        Steps for every target, -1 for never.

    Raises:
        ValueError: a target of a curve that is not there, a smoothing that does not fit it.

    Example:
        >>> curves = Curves(loss=[1.0, 0.5, 0.2], error=[0.5, 0.1, 0.0])
        >>> reach(curves, [Target(0.3)]), reach(curves, [Target(0.1, "error")], reached=False)
        ({Target(value=0.3, metric='loss', on='train'): 2}, {Target(value=0.1, ...): -1})
    """
    known = [name for name in ALL_CURVES if getattr(curves, name, None) is not None]
    remedy = f"The curves at hand are {', '.join(known)}."
    several = check_targets(targets, known=known, remedy=remedy)
    if not reached:
        return dict.fromkeys(several, -1)
    return {t: int(t.time(getattr(curves, t.curve_name), smooth)) for t in several}


def _is_number(value: Any) -> bool:
    """Whether it is a number of Python, NumPy or JAX."""
    array = isinstance(value, np.generic | np.ndarray | jax.Array) and value.ndim == 0
    return isinstance(value, int | float) or array


def _target_value(name: str, value: Any, metric: str) -> float:
    """A target that can be reached, and asks for something."""
    check_number(name, value, above=0.0)
    if metric == "error" and value > 1:
        raise ValueError(f"{name} must be at most 1, as an error is a share; got {value!r}.")
    return float(value)
