"""Thresholds and curves: the step at which a loss or an error curve counts as converged.

`training_time` has the four definitions. A `Rule` holds one of them with its thresholds, fractions
of the curve's own decrease by default. A `Target` is a value for a curve to fall below, wherever it
ends. `early_stopping` finds the lowest point of a curve on test samples.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxttp._core.checks import (
    check_array,
    check_choice,
    check_finite,
    check_finite_value,
    check_integer,
    check_known,
    check_number,
    is_concrete,
    values_known,
)

RULES = ("relative", "gap", "absolute", "plateau")
METRICS = ("loss", "error")
THRESHOLDS = (0.01, 0.1, 0.4)
TRAIN_CURVES = ("loss", "error")
ALL_CURVES = (*TRAIN_CURVES, "test_loss", "test_error")


def training_time(
    curve: Any,
    threshold: Any,
    *,
    rule: str = "relative",
    window: int | None = None,
    smooth: int = 1,
) -> Int[Array, ""]:
    """The first step at which a loss (or error) curve counts as converged.

    Args:
        curve: L_0, ..., L_T, shape (T + 1,); one entry a step.
        threshold: epsilon; a fraction in (0, 1) for "relative", in units of the curve otherwise.
        rule: "relative": first t with |L_t - L_T| < epsilon |L_0 - L_T|;
            "gap": first t with |L_t - L_T| < epsilon; "absolute": first t with L_t < epsilon;
            "plateau": first t with L_{t-window} - L_t < epsilon.
        window: steps of "plateau"; a tenth of the horizon when None. An epoch has N/B steps.
        smooth: steps over which the curve is averaged first, see `smooth_curve`.

    Returns:
        The step as an integer scalar, or -1 for a curve that never converges: with "relative" if
        it ends where it began (0 steps if that is 0, with nothing left to train), with "absolute"
        if it stays above the threshold, with "plateau" if it keeps falling.

    Raises:
        ValueError: an unknown rule, a threshold out of range, a curve that is not a finite vector,
            a window or a smoothing that does not fit it, a window without "plateau".
        RuntimeError: at run time, for a traced curve with NaN or infinity.

    Example:
        >>> import jax.numpy as jnp
        >>> int(training_time(jnp.array([1.0, 0.5, 0.2, 0.1, 0.0]), 0.25))
        2
        >>> int(training_time(jnp.array([1.0, 0.5, 0.4]), 0.3, rule="absolute"))
        -1

    Source:
        TTP Section 5 and Appendix A; the paper leaves open whether epsilon is a fraction of
        L_0 - L_T: it is in "relative", the default, and not in "gap".
    """
    check_number("threshold", threshold, above=0.0, below=1.0 if rule == "relative" else None)
    return Rule((threshold,), rule, smooth=smooth, window=window).time(curve, threshold)


def smooth_curve(curve: Any, width: int) -> Float[Array, " t"]:
    """A curve averaged over `width` neighbouring steps, its first value left as it is.

    S_t is the mean of L_s over |s - t| <= (width - 1)/2 within the curve, and S_0 = L_0: smoothing
    L_0 too would lower it, and move every training time. Smooth forecast and reality alike.

    Args:
        curve: L_0, ..., L_T, shape (T + 1,).
        width: an odd number of steps; 1 changes nothing.

    Returns:
        The smoothed curve (T + 1,).

    Raises:
        ValueError: an even width, or one longer than the curve.

    Example:
        >>> smooth_curve([4.0, 1.0, 1.0, 1.0, 0.0, 0.0], 3).tolist()[:4]
        [4.0, 2.0, 1.0, 0.66666...]

    Source:
        TTP Section 5 reads training times off smoothed losses; the raw L_0 is an erratum.
    """
    curve = _as_curve(curve)
    check_integer("width", width, at_least=1, at_most=curve.shape[0])
    if width % 2 == 0:
        raise ValueError(f"width must be odd, so that it has a middle; got {width}.")
    return _smoothed(jnp.asarray(curve), width)


def _smoothed(curve: Any, width: int) -> Any:
    """The same of a checked curve, by NumPy for an array of NumPy, else by JAX."""
    if width == 1:
        return curve
    xp: Any = np if isinstance(curve, np.ndarray) else jnp
    options = {"mode": "same"} if xp is np else {"mode": "same", "precision": "highest"}
    window = xp.ones(width, curve.dtype)
    sums = xp.convolve(curve, window, **options)
    counts = xp.convolve(xp.ones_like(curve), window, **options)
    return xp.concatenate([curve[:1], (sums / counts)[1:]])


def _as_curve(curve: Any) -> Any:
    """A curve of floats, in NumPy where its values are known, so that nothing is compiled."""
    with values_known():
        curve = check_array("curve", curve, ndim=1, floating=True)
    if curve.shape[0] < 2:
        raise ValueError(f"curve must hold at least two losses; got shape {curve.shape}.")
    return np.asarray(curve) if is_concrete(curve) else curve


@dataclasses.dataclass(frozen=True)
class Rule:
    """How training times are read off a loss or an error curve.

    A rule of one's own is a subclass with another `time`.

    Attributes:
        thresholds: the epsilons; fractions in (0, 1) for the kind "relative", in units of the curve
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

    thresholds: tuple[Any, ...] = THRESHOLDS
    kind: str = "relative"
    metric: str = "loss"
    smooth: int = 1
    window: int | None = None

    def __post_init__(self) -> None:
        check_choice("rule", self.kind, RULES)
        check_choice("metric", self.metric, METRICS)
        thresholds = _as_tuple(self.thresholds)
        if len(thresholds) == 0:
            raise ValueError("thresholds must hold at least one number; got none.")
        below, hint = (1.0, "1 % is 0.01.") if self.kind == "relative" else (None, "")
        for threshold in thresholds:
            check_number("thresholds", threshold, above=0.0, below=below, hint=hint)
        if all(map(is_concrete, thresholds)):
            thresholds = tuple(map(float, thresholds))
        object.__setattr__(self, "thresholds", thresholds)
        self.check()

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
        """The rule of these keywords, or a `Rule` as it is, checked against a horizon.

        Args:
            thresholds: as the attribute; those of a `Rule`, or `THRESHOLDS`, when None.
            rule: a kind, or a `Rule`, with which no other keyword may be given.
            metric: as the attribute.
            smooth: as the attribute.
            window: as the attribute.
            steps: the horizon T, where it is known.

        Raises:
            ValueError: as `Rule`; a `Rule` with other keywords.
        """
        if isinstance(rule, Rule):
            if (thresholds, metric, smooth, window) != (None, "loss", 1, None):
                raise ValueError(
                    "rule is a Rule, which says thresholds, metric, smooth and window itself; give "
                    "them to it, or name the rule."
                )
            return rule.check(steps)
        thresholds = THRESHOLDS if thresholds is None else _as_tuple(thresholds)
        return cls(thresholds, rule, metric, smooth, window).check(steps)

    def check(self, steps: int | None = None) -> "Rule":
        """Itself, where smoothing and window fit a horizon of T steps, if that is known.

        Raises:
            ValueError: they do not.
        """
        longest = None if steps is None else steps + 1
        check_integer("smooth", self.smooth, at_least=1, at_most=longest)
        if self.smooth % 2 == 0:
            raise ValueError(f"smooth must be odd, so that it has a middle; got {self.smooth}.")
        if self.window is not None:
            hint = "" if steps is None else "The curve is that long."
            check_integer("window", self.window, at_least=1, at_most=steps, hint=hint)
            if self.kind != "plateau":
                raise ValueError(
                    f"window={self.window!r} is for rule='plateau'; with rule={self.kind!r} leave "
                    "it out."
                )
        return self

    def curve(self, loss: Any, error: Any) -> Any:
        """The curve of `metric`."""
        return loss if self.metric == "loss" else error

    def time(self, curve: Any, threshold: Any) -> Any:
        """The first step at which a curve (T + 1,) converges, or -1; works under `vmap`."""
        curve = _as_curve(curve)
        last = curve.shape[0] - 1
        curve = _smoothed(check_finite_value("curve", curve), self.check(last).smooth)
        xp: Any = np if isinstance(curve, np.ndarray) and is_concrete(threshold) else jnp
        curve = xp.asarray(curve)
        threshold, distance = xp.asarray(threshold, curve.dtype), xp.abs(curve - curve[-1])
        begin, may_count = 0, True
        if self.kind == "absolute":
            reached = curve < threshold
        elif self.kind == "plateau":
            begin = max(1, last // 10) if self.window is None else self.window
            reached = curve[:-begin] - curve[begin:] < threshold
        elif self.kind == "gap":
            reached = (distance < threshold) | (distance == 0)
        else:
            reached = (distance < threshold * distance[0]) | (distance == 0)
            may_count = (distance[0] > 0) | (curve[-1] == 0)
            if self.metric == "error":  # a fraction of its decrease, which has to exist
                may_count = may_count & (curve[-1] <= curve[0])
        step = xp.where(may_count & xp.any(reached), xp.argmax(reached) + begin, -1)
        return jax.device_put(step)  # jnp.asarray would compile a function for NumPy scalars

    def read(self, loss: Any, error: Any, *, reached: bool = True) -> dict[float, int]:
        """Training times off one of two curves.

        Args:
            loss: (T + 1,).
            error: (T + 1,); used with metric="error" only.
            reached: False where nothing counts as reached, since the forecast diverges.

        Returns:
            Steps for every threshold, -1 for never.
        """
        if not reached:
            return dict.fromkeys(self.thresholds, -1)
        curve = self.curve(loss, error)
        return {e: int(self.time(curve, e)) for e in self.thresholds}

    def words(self, threshold: float) -> str:
        """A label of the threshold."""
        return target_label(threshold, self.kind, self.metric)

    def about(self, targets: "Iterable[Target]") -> "Rule":
        """The rule for uncertainties: the target losses, if there are any, else itself.

        Example:
            >>> Rule().about([Target(0.3)]).thresholds, Rule().about([]) == Rule()
            ((0.3,), True)
        """
        losses = tuple(t.value for t in targets if t.curve_name == "loss")
        return Rule(losses, "absolute", smooth=self.smooth) if losses else self


def target_label(threshold: float, kind: str, metric: str = "loss") -> str:
    """A label of a threshold, from the names of a rule.

    Example:
        >>> target_label(0.1, "relative"), target_label(0.05, "gap", "error")
        ('10 % of the loss decrease left', 'error within 0.05 of its end')
    """
    labels = {
        "relative": f"{100 * threshold:g} % of the {metric} decrease left",
        "absolute": f"{metric} below {threshold:.4g}",
        "gap": f"{metric} within {threshold:.4g} of its end",
        "plateau": f"{metric} falling by less than {threshold:.4g}",
    }
    return labels[kind]


def step_words(step: int, unsure: int | None, horizon: int | None = None) -> str:
    """A label of a training time with its uncertainty.

    With an uncertainty of the whole horizon, of more than one step, it may never be reached.

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
    """A loss or an error to fall below, on the training or on the test samples.

    Attributes:
        value: in units of the curve: a loss above 0, an error in (0, 1].
        metric: which curve, "loss" or "error".
        on: "train" or "test".

    Raises:
        ValueError: an unknown metric or kind of samples, a value out of range.

    Example:
        >>> target = Target(0.3)
        >>> target.words(), int(target.time([1.0, 0.5, 0.2]))
        ('loss below 0.3', 2)
        >>> Target(0.05, "error", on="test").words()
        'test error below 0.05'
    """

    value: float
    metric: str = "loss"
    on: str = "train"

    def __post_init__(self) -> None:
        check_choice("metric", self.metric, METRICS)
        check_choice("on", self.on, ("train", "test"))
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

    def words(self) -> str:
        """A label of the target."""
        return ("" if self.on == "train" else "test ") + self.rule().words(self.value)


Values = float | Sequence[float] | None
"""A keyword for targets: a number, several, or None for none."""


def targets_of(
    target_loss: Values = None,
    target_error: Values = None,
    target_test_loss: Values = None,
    target_test_error: Values = None,
    *,
    known: Sequence[str] = ALL_CURVES,
    hint: str = "",
) -> tuple[Target, ...]:
    """The targets that the keywords of the public entry points take, in the order of these.

    Args:
        target_loss: losses on the training samples, each above 0.
        target_error: errors on them, each in (0, 1].
        target_test_loss: as `target_loss`, on the test samples.
        target_test_error: as `target_error`, on the test samples.
        known: the available curves, see `check_targets`.
        hint: for targets of other curves.

    Returns:
        The targets, each once.

    Raises:
        ValueError: no number, or one out of range; a target of a curve that is not available.

    Example:
        >>> [target.words() for target in targets_of((0.3, 0.1), target_test_error=0.05)]
        ['loss below 0.3', 'loss below 0.1', 'test error below 0.05']
    """
    by_curve = (target_loss, target_error, target_test_loss, target_test_error)
    targets = []
    for curve, values in zip(ALL_CURVES, by_curve, strict=True):
        on, metric = ("test" if curve.startswith("test_") else "train"), curve.split("_")[-1]
        for value in () if values is None else _as_tuple(values):
            targets.append(Target(_target_value(f"target_{curve}", value, metric), metric, on))
    return check_targets(targets, known=known, hint=hint)


def check_targets(
    targets: Iterable[Target | float],
    *,
    known: Sequence[str] = ALL_CURVES,
    hint: str = "",
) -> tuple[Target, ...]:
    """Targets as a tuple, each once, if their curves are available.

    Args:
        targets: as values, or as keys, such as `Prediction.targets`; a number stands for a loss on
            the training samples.
        known: names of the available curves, of `ALL_CURVES`.
        hint: for targets of other curves.

    Raises:
        TypeError: one target, not a list.
        ValueError: a target of a curve that is not available, a number out of range.

    Example:
        >>> check_targets([Target(0.3, on="test")], known=("loss", "error"), hint="Give x_test.")
        Traceback (most recent call last):
        ...
        ValueError: target_test_loss=0.3 cannot be read here. Give x_test.
    """
    if isinstance(targets, Target | int | float):
        raise TypeError("targets must hold Target values; put the one into a list.")
    checked = [target if isinstance(target, Target) else Target(target) for target in targets]
    for target in checked:
        if target.curve_name not in known:
            raise ValueError(
                f"target_{target.curve_name}={target.value:g} cannot be read here. {hint}"
            )
    return tuple(dict.fromkeys(checked))


class Curves(NamedTuple):
    """The curves of targets, for callers without a result that holds them.

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
        curves: a `Prediction`, a `TrainingRun` or `Curves`, with the curves of the targets.
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
    available = [name for name in ALL_CURVES if getattr(curves, name, None) is not None]
    hint = f"The available curves are {', '.join(available)}."
    checked = check_targets(targets, known=available, hint=hint)
    if not reached:
        return dict.fromkeys(checked, -1)
    return {t: int(t.time(getattr(curves, t.curve_name), smooth)) for t in checked}


def _as_tuple(values: Any) -> tuple[Any, ...]:
    """A number, or several, as a tuple."""
    is_several = isinstance(values, Sequence) or getattr(values, "ndim", 0) > 0
    return tuple(values) if is_several else (values,)


def _target_value(name: str, value: Any, metric: str) -> float:
    """A positive target, at most 1 for an error."""
    check_number(name, value, above=0.0)
    if metric == "error" and value > 1:
        raise ValueError(f"{name} must be at most 1, as an error is a fraction; got {value!r}.")
    return float(value)


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
        text = f"{name} does not rise again within {self.horizon} steps"
        return text if first == self.horizon else f"{text}; it is as low from step {first} on"


def early_stopping(curve: Any, *, metric: str = "loss", smooth: int = 1) -> EarlyStopping:
    """Where a loss (or error) on test samples is lowest, and whether it rises again.

    Args:
        curve: on test samples, of a forecast or a real training, by step (T + 1,).
        metric: "loss" or "error".
        smooth: steps over which the curve is averaged first, see `jaxttp.forecast.smooth_curve`.

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
        Standard; the fractions of 1 % and 5 % are ours.
    """
    check_choice("metric", metric, METRICS)
    check_known(curve=curve)
    values = np.asarray(smooth_curve(curve, smooth))
    check_finite("curve", values)
    step = int(np.argmin(values))
    lowest, fall = float(values[step]), float(values[0] - values[step])
    above = np.flatnonzero(values > lowest + 0.01 * fall)
    first = int(above[above < step][-1]) + 1 if np.any(above < step) else 0
    last = int(above[above > step][0]) - 1 if np.any(above > step) else len(values) - 1
    end = float(values[-1])
    return EarlyStopping(
        step, lowest, end, (first, last), end > lowest + 0.05 * fall, len(values) - 1, metric
    )
