"""The result of a forecast: training times, curves, uncertainty and cost."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxtyping import Array, Float

from jaxttp._core.checks import check_choice
from jaxttp._core.progress import readable_time
from jaxttp._core.results import RESULT, wrapped
from jaxttp.forecast.cost import fraction_of
from jaxttp.forecast.stability import Rates, stability_message
from jaxttp.forecast.uncertainty import displaced, time_error
from jaxttp.losses.rule import (
    METRICS,
    EarlyStopping,
    Rule,
    Target,
    early_stopping,
    reach,
    step_words,
    target_label,
)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a forecast cost.

    Attributes:
        kernels: kernels built.
        gradient_evaluations: backward passes over all samples, rounded up; an exact kernel takes
            one for each of the C outputs, a step of full-batch training takes one.
        seconds: wall-clock time without compilation.
        compile_seconds: time to trace and compile.
        operations: FLOPs, see `jaxttp.forecast.cost`.
        training_operations: FLOPs of the predicted training run.
        training_seconds: estimated for this machine, without compilation; None where it is not.
        estimated_seconds: the estimate of `seconds`, likewise.
    """

    kernels: int
    gradient_evaluations: int
    seconds: float
    compile_seconds: float
    operations: float
    training_operations: float
    training_seconds: float | None = None
    estimated_seconds: float | None = None

    plot, _repr_html_, __repr__ = RESULT

    def __str__(self) -> str:
        kernels = "1 kernel" if self.kernels == 1 else f"{self.kernels} kernels"
        passes, seconds = self.gradient_evaluations, self.training_seconds
        return (
            f"{kernels}, {passes} gradient evaluation{'' if passes == 1 else 's'}, "
            f"{self.seconds:.2f} s + {self.compile_seconds:.2f} s of compilation; "
            f"{fraction_of(self.operations, self.training_operations)} the training's FLOPs"
            + (f" (about {readable_time(seconds)})" if seconds else "")
        )


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A forecast of training; prints itself as a table.

    Attributes:
        steps: training time in steps for every threshold; -1 where the forecast diverges or never
            reaches it.
        loss: predicted mean loss L_0, ..., L_T on the training samples, (T + 1,).
        error: predicted error (fraction misclassified; for regression unexplained variance), (T +
            1,).
        max_learning_rate: beyond it the linearized network diverges at the start of training; of an
            `optimizer` at the step that exceeds its limit the most. Infinite for Adam, whose limit
            moves; of gradient descent where the optimizer has none (Lion, accumulated steps).
        stable: False when the outputs diverge or the loss exceeds twice its start; with one kernel
            also when the learning rate of any step exceeds the limit of full batches. With rebuilt
            kernels the loss alone decides: rates beyond the limit often train.
        cost: the cost of the forecast.
        horizon: T.
        rule: the definition of training time, see `training_time`.
        metric: the curve of the training times, "loss" or "error".
        dynamics: the name of the dynamics.
        hyperparameters: the training setup and options as plain values.
        outputs: predicted outputs (T + 1, N, C), with dynamics "sde" their mean over the paths.
            With softmax cross-entropy, their mean over classes is that before training: neither
            loss nor probabilities depend on it.
        loss_uncertainty: with relinearization, the estimated error of the loss curve (T + 1,), from
            the second-order correction; None otherwise.
        steps_uncertainty: with relinearization, the estimated error of every training time, at
            least 1; None otherwise.
        loss_band: with dynamics "sde", an interval that holds the loss of a fraction `level` of all
            runs at every step, (2, T + 1); the error of a sketched kernel widens it, and is the
            whole band with other dynamics.
        steps_band: the same for every training time, where it is stable.
        test_loss: predicted loss on the test samples (T + 1,), where they were given.
        test_error: predicted error on the test samples (T + 1,), where they were given.
        warnings: a reliability warning, or None. With one kernel it compares the network's speed of
            learning and its loss at predicted weights with the linearized ones; with rebuilt
            kernels it depends on the estimated error.
        rates: the learning rate of every step (or one for all), and its fraction of the limit.
        targets: the step at which every target is reached, -1 for never. `reach` reads others off
            the same forecast.
        targets_uncertainty: as `steps_uncertainty`, for targets on the training samples.
        targets_band: as `steps_band`, for targets on the training samples.
        doubted_from: the step from which on the error has no estimate, by `warnings`: later times
            have no uncertainty and no band. None for never.
        frozen_from: the step from which on the kernel is frozen, because the path stays beyond the
            edge of stability; None for never.
        error_kind: what the error is: "misclassified", "wrong_bits" or "wrong_tokens", fractions
            that are wrong; "unexplained_variance", of regressions; or the name of a loss's own.
        plan: the plan within a budget, see `jaxttp.forecast.cost`; None where the default budget
            removed nothing.
        notes: changes in how the network was evaluated, such as "2 BatchNorm on running averages"
            or "parameters promoted from bfloat16".
    """

    steps: Mapping[float, int]
    loss: Float[Array, " t"]
    error: Float[Array, " t"]
    max_learning_rate: float
    stable: bool
    cost: Cost
    horizon: int
    rule: str
    dynamics: str
    hyperparameters: Mapping[str, Any]
    outputs: Float[Array, "t n c"]
    loss_uncertainty: Float[Array, " t"] | None = None
    steps_uncertainty: Mapping[float, int] | None = None
    loss_band: Float[Array, "2 t"] | None = None
    steps_band: Mapping[float, tuple[int, int]] | None = None
    test_loss: Float[Array, " t"] | None = None
    test_error: Float[Array, " t"] | None = None
    warnings: str | None = None
    rates: Rates | None = None
    metric: str = "loss"
    targets: Mapping[Target, int] = dataclasses.field(default_factory=dict)
    targets_uncertainty: Mapping[Target, int] = dataclasses.field(default_factory=dict)
    targets_band: Mapping[Target, tuple[int, int]] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    doubted_from: int | None = None
    frozen_from: int | None = None
    plan: str | None = None
    error_kind: str = "misclassified"

    def read(
        self,
        thresholds: float | Sequence[float],
        *,
        metric: str = "loss",
        rule: str = "relative",
        smooth: int = 1,
        window: int | None = None,
    ) -> dict[float, int]:
        """Training times by another definition, from the same curves.

        Args:
            thresholds: the epsilons.
            metric: "loss", or "error" for the time that the error rate takes.
            rule: see `training_time`.
            smooth: see `smooth_curve`.
            window: steps of the rule "plateau".

        Returns:
            Steps for every threshold, -1 where the forecast diverges or never gets there.

        Raises:
            ValueError: an unknown metric or rule, a threshold, a smoothing or a window that does
                not fit it.
        """
        reading = Rule.of(thresholds, rule, metric, smooth, window, steps=len(self.loss) - 1)
        return reading.read(self.loss, self.error, reached=self.stable)

    def reach(self, targets: Iterable[Target | float], *, smooth: int = 1) -> dict[Target, int]:
        """When losses and errors are below targets, from the same curves.

        Args:
            targets: such as ``[Target(0.05, "error", on="test")]``; a number is a loss on the
                training samples.
            smooth: steps over which the curves are averaged first, see `smooth_curve`.

        Returns:
            Steps for every target, -1 where the forecast diverges or never gets there.

        Raises:
            ValueError: a target of the test samples where none were given, a smoothing that does
                not fit.
        """
        return reach(self, targets, smooth=smooth, reached=self.stable)

    def off(self, target: Target, *, smooth: int = 1) -> int | None:
        """By how many steps the time of a target on the training samples may be off; or None."""
        rule, time = target.rule(smooth), self.reach([target], smooth=smooth)[target]
        if self.loss_uncertainty is None or self._is_doubted(time):
            return None
        if target.metric == "error":
            return displaced(self.loss, self.loss_uncertainty, time)
        return time_error(self.loss, self.loss_uncertainty, lambda c: rule.time(c, target.value))

    def early_stopping(self, *, metric: str = "loss", smooth: int = 1) -> EarlyStopping:
        """Where the test loss (or test error) is lowest, and whether it rises again from there.

        Args:
            metric: "loss" or "error".
            smooth: steps over which the curve is averaged first, see `smooth_curve`.

        Returns:
            An `EarlyStopping`; with relinearization the error of its step is that of the training
            loss at that step.

        Raises:
            ValueError: no test samples were given, the forecast is not stable, an unknown metric, a
                smoothing that does not fit.
        """
        check_choice("metric", metric, METRICS)
        curve = self.test_loss if metric == "loss" else self.test_error
        if curve is None:
            raise ValueError("early_stopping is about test samples: give x_test and y_test.")
        if not self.stable:
            raise ValueError(f"early_stopping needs a training that is stable: {self.message}.")
        lowest = early_stopping(curve, metric=metric, smooth=smooth)
        if self.loss_uncertainty is None or self._is_doubted(lowest.step):
            return lowest
        return lowest._replace(unsure=displaced(self.loss, self.loss_uncertainty, lowest.step))

    @property
    def message(self) -> str:
        """One line on stability."""
        batch_size = self.hyperparameters.get("batch_size")
        return stability_message(self.loss, self.rates, stable=self.stable, batch_size=batch_size)

    def _is_doubted(self, step: int) -> bool:
        """Whether the error at a step has no estimate, by `warnings`."""
        return self.doubted_from is not None and not 0 <= step <= self.doubted_from

    @property
    def end_in_doubt(self) -> str:
        """The ± of the final loss, or an empty text where it has no estimate."""
        off = None if self._is_doubted(self.horizon) or not self.stable else self.loss_uncertainty
        return "" if off is None else f" ± {float(off[-1]):.2g}"

    @property
    def scale(self) -> str:
        """The normalization of the loss where it is not the usual one; else empty."""
        halved = self.hyperparameters.get("loss") == "squared_error"
        return ", half the sum of squares over outputs" if halved else ""

    def _when(self, step: int, off: int | None, band: tuple[int, int] | None) -> str:
        """The text of a time, with its error and its band where it is reached."""
        if step < 0:
            falls = bool(self.loss[-1] <= self.loss[0])
            return "not reached" if self.stable else "not stable" if falls else "diverges"
        when = f"step {step_words(step, off, self.horizon)}"
        if self._is_doubted(step):
            when = f"about step {step}"
        if band is None or band[0] == band[1] == step:
            return when
        low, high = band
        source = "" if self.dynamics == "sde" else " by the sketch"
        return when + (f" ({low}-{high}{source})" if high >= 0 else f" ({low} or later{source})")

    def __str__(self) -> str:
        batch = self.hyperparameters.get("batch_size")
        head = f"Training-time forecast: {self.horizon} steps, dynamics {self.dynamics!r}"
        if batch and self.dynamics != "sde":
            head += f", one draw of batches of {batch} (± is about that draw)"
        if total := self.hyperparameters.get("total_samples"):
            head += f", for {total:,} samples, read off {self.outputs.shape[1]:,}"
        lines = [head]
        if self.cost.operations > 0.5 * self.cost.training_operations:
            ratio = fraction_of(self.cost.operations, self.cost.training_operations)
            lines.append(f"  train instead: this forecast took {ratio} the training's FLOPs")
        if self.warnings is not None:
            lines.append(wrapped(f"  warning: {self.warnings}", 4))
        labels = {e: target_label(e, self.rule, self.metric) for e in self.steps}
        labels |= {target: target.words() for target in self.targets}
        errors = {**(self.steps_uncertainty or {}), **self.targets_uncertainty}
        bands = {**(self.steps_band or {}), **self.targets_band}
        for target, step in {**self.steps, **self.targets}.items():
            when = self._when(step, errors.get(target), bands.get(target))
            lines.append(f"  {labels[target]:<31} {when}")
        first, last = float(self.loss[0]), float(self.loss[-1])
        lines.append(f"  loss   {first:.4g} -> {last:.4g}{self.end_in_doubt}{self.scale}")
        lines.append(f"  error  {float(self.error[0]):.4g} -> {float(self.error[-1]):.4g}")
        if self.test_loss is not None and self.test_error is not None:
            ends = [float(c[i]) for c in (self.test_loss, self.test_error) for i in (0, -1)]
            lines.append("  test   loss {:.4g} -> {:.4g}, error {:.4g} -> {:.4g}".format(*ends))
            if self.stable:
                lines.append(wrapped(f"  {self.early_stopping()}", 4))
        lines.append(wrapped(f"  {self.message}", 4))
        if self.plan is not None:
            lines.append(wrapped(f"  plan   {self.plan}", 9))
        lines.append(wrapped(f"  cost   {self.cost}", 9))
        if self.notes:
            lines.append(wrapped(f"  evaluated with: {', '.join(self.notes)}", 9))
        return "\n".join(lines)

    plot, _repr_html_, __repr__ = RESULT
