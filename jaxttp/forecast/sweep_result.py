"""The result of a sweep: times, curves and verdicts of many settings, and which are the best."""

import csv
import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxttp._core.checks import check_choice
from jaxttp._core.files import replaced
from jaxttp._core.progress import readable_time
from jaxttp._core.results import RESULT, plain_number, wrapped
from jaxttp.forecast.prediction import Prediction
from jaxttp.forecast.stability import Rates, stability_message
from jaxttp.forecast.training_setup import Hyperparameters, algorithm_name, schedule_name
from jaxttp.losses import get_loss
from jaxttp.losses.rule import Rule, Target, step_words

SHOWN = 5
"""Settings that a sweep prints, and checks against the network."""
RISK = 2.0
"""Factor on the time of settings that oscillate at the edge of stability, in rankings."""
FEW = 8
"""Of at most this many settings all stable ones are forecast again and printed."""
FIRST, REBUILT, SIMULATED = (
    "on the first kernel", "along rebuilt kernels", "by training the linearized network",
)  # fmt: skip
"""How a setting was forecast."""


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Forecasts of many settings on one kernel; prints its best rows.

    Attributes:
        settings: what was forecast, S of them.
        samples: N, of the training data.
        rule: how training times are read off the curves.
        loss: predicted loss curves (S, T + 1), T the longest horizon; a shorter one is held at its
            end.
        error: predicted error curves (S, T + 1), likewise.
        stable: (S,), False where the forecast diverges, or any step's rate is beyond its limit and
            kernels were not rebuilt (as in `Prediction.stable`); `message` says
            which. Such settings are not ranked.
        max_learning_rate: (S,), where a constant rate with this momentum and loss diverges at the
            start of training with full batches; every step's rate is compared with it.
        targets: losses and errors to get below, K of them; the first is what settings are ranked
            by.
        shared: whether the target was chosen by the sweep.
        step_seconds: seconds of a step (S,), or None.
        forecasts: of the settings that were forecast by themselves.
        relinearized: those of them that were forecast again along rebuilt kernels, in the order in
            which they were; the others' times are those of the first kernel.
        warnings: of the settings that were checked with the network (by `sweep`): a sentence as
            `Prediction.warnings`, or None.
        trainings: FLOPs of the sweep, in training runs of its first setting; None where it
            was made from a kernel.
        notes: how the network is evaluated, where that is not as it was given, such as
            "1 BatchNorm on running averages".
    """

    settings: tuple[Hyperparameters, ...]
    samples: int
    rule: Rule
    loss: np.ndarray
    error: np.ndarray
    stable: np.ndarray
    max_learning_rate: np.ndarray
    targets: tuple[Target, ...] = ()
    shared: bool = False
    step_seconds: np.ndarray | None = None
    forecasts: Mapping[int, Prediction] = dataclasses.field(default_factory=dict)
    relinearized: tuple[int, ...] = ()
    warnings: Mapping[int, str | None] = dataclasses.field(default_factory=dict)
    trainings: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The E thresholds of the rule."""
        return self.rule.thresholds

    @property
    def final_loss(self) -> np.ndarray:
        """Predicted mean loss on all samples at the horizon, (S,)."""
        return self.loss[:, -1]

    @property
    def final_error(self) -> np.ndarray:
        """Predicted error at the horizon, (S,)."""
        return self.error[:, -1]

    @functools.cached_property
    def steps(self) -> np.ndarray:
        """Training times (S, E) in steps; -1 where a setting diverges or never gets there."""
        return self._read(self.rule)

    @functools.cached_property
    def target_steps(self) -> np.ndarray:
        """Steps to every target (S, K), -1 as in `steps`."""
        columns = [self._read(target.rule(self.rule.smooth)) for target in self.targets]
        return np.concatenate([np.zeros((len(self.settings), 0), int), *columns], axis=1)

    def _read(self, rule: Rule) -> np.ndarray:
        """Steps of every setting to every threshold of a rule, each within its own horizon."""
        curves = rule.curve(self.loss, self.error)
        horizons = np.array([setting.steps for setting in self.settings])
        times = np.full((len(horizons), len(rule.thresholds)), -1)
        for steps in set(horizons):
            rows = np.flatnonzero(self.stable & (horizons == steps))
            read = jnp.asarray(curves[rows, : steps + 1])
            for column, threshold in enumerate(rule.thresholds):
                times[rows, column] = jax.vmap(lambda c, e=threshold: rule.time(c, e))(read)
        return times

    def with_forecasts(self, forecasts: Mapping[int, Prediction]) -> "Sweep":
        """The sweep with forecasts of single settings in place of the first kernel's."""
        loss, error, stable = self.loss.copy(), self.error.copy(), self.stable.copy()
        warnings = dict(self.warnings)
        for i, forecast in forecasts.items():
            loss[i] = held_to(np.asarray(forecast.loss, np.float64), loss.shape[1])
            error[i] = held_to(np.asarray(forecast.error, np.float64), error.shape[1])
            stable[i], warnings[i] = forecast.stable, forecast.warnings
        return dataclasses.replace(
            self, loss=loss, error=error, stable=stable, warnings=warnings,
            forecasts={**self.forecasts, **forecasts},
        )  # fmt: skip

    def method(self, i: int) -> str:
        """How setting i was forecast: `FIRST`, `REBUILT` or `SIMULATED`."""
        if i in self.relinearized:
            return REBUILT
        alone = self.forecasts.get(i)
        return SIMULATED if alone is not None and alone.dynamics == "weight_space" else FIRST

    def named(self, i: int) -> str:
        """Setting i, with its horizon where settings differ in it."""
        setting = self.settings[i]
        alike = all(other.steps == setting.steps for other in self.settings)
        return str(setting) if alike else f"{setting}, {setting.steps} steps"

    @property
    def ranked_by(self) -> float | Target:
        """The default of the ranking: the first target, or the middle threshold."""
        return self.targets[0] if self.targets else self.thresholds[len(self.thresholds) // 2]

    def label(self, threshold: float | Target | None = None) -> str:
        """A threshold or a target in words; that of `ranked_by` when None."""
        target = self.ranked_by if threshold is None else threshold
        return target.words() if isinstance(target, Target) else self.rule.words(target)

    def times(self, threshold: float | Target | None = None) -> np.ndarray:
        """Steps of every setting to a threshold or a target (S,), -1 as in `steps`.

        Args:
            threshold: one of those asked for; `ranked_by` when None, here and in what follows.

        Raises:
            ValueError: another one.
        """
        target = self.ranked_by if threshold is None else threshold
        if not isinstance(target, Target):
            check_choice("threshold", target, self.thresholds)
            return self.steps[:, self.thresholds.index(target)]
        if target not in self.targets:
            raise ValueError(
                f"{target.words()!r} was not asked for; give it as target_loss or target_error."
            )
        return self.target_steps[:, self.targets.index(target)]

    def oscillates(self, threshold: float | Target | None = None) -> np.ndarray:
        """Which settings have no error estimate there (`Prediction.doubted_from`), (S,).

        Their path is at the edge of stability, or a kernel is frozen: a real run oscillates.
        """
        times, oscillates = self.times(threshold), np.zeros(len(self.settings), bool)
        for i in self.relinearized:
            since = self.forecasts[i].doubted_from
            oscillates[i] = since is not None and since < times[i]
        return oscillates

    def expected(self, threshold: float | Target | None = None) -> np.ndarray:
        """Times as settings are ranked by them, (S,): infinite where a setting never gets there.

        Those of settings that oscillate count `RISK` times.
        """
        times = self.times(threshold)
        weighed = np.where(self.oscillates(threshold), RISK * times, times)
        return np.where(self.stable & (times >= 0), weighed, np.inf)

    def cost(self, threshold: float | Target | None = None) -> np.ndarray:
        """What every setting spends to get there, (S,): seconds where known, else samples seen.

        Infinite where it diverges or never gets there.
        """
        times = self.times(threshold)
        return np.where(self.stable & (times >= 0), times * self._step_cost, np.inf)

    @property
    def _step_cost(self) -> np.ndarray:
        if self.step_seconds is not None:
            return self.step_seconds
        return np.array([setting.batch_size or self.samples for setting in self.settings])

    def ranking(
        self, threshold: float | Target | None = None, *, by_cost: bool = False
    ) -> tuple[int, ...]:
        """The settings that get there, by steps (or by cost), then by the lowest final loss.

        A target is the same for all settings, as is the rule "absolute". A threshold of the rule
        "relative" (or "gap") measures every setting by its own final loss, so that a slow one can
        seem early.
        """
        times = self.expected(threshold)
        spent = times * self._step_cost if by_cost else times
        order = np.lexsort((self.final_loss, spent))
        return tuple(int(i) for i in order if np.isfinite(times[i]))

    def best(self, threshold: float | Target | None = None) -> int:
        """The first of the `ranking`.

        Raises:
            ValueError: an unknown threshold, or no setting that gets there.
        """
        ranking = self.ranking(threshold)
        if not ranking:
            raise ValueError(self.hint(threshold))
        return ranking[0]

    def nearest(self, threshold: float | Target | None = None) -> tuple[int, ...]:
        """The stable settings that do not get there, by how near their curves come at the end."""
        target = self.ranked_by if threshold is None else threshold
        rule = target.rule() if isinstance(target, Target) else self.rule
        order = np.lexsort((self.final_loss, rule.curve(self.loss, self.error)[:, -1]))
        short = self.stable & (self.times(target) < 0)
        return tuple(int(i) for i in order if short[i])

    def shown(self) -> set[int]:
        """The five cheapest settings, and the first to every threshold and target."""
        shown = set(self.ranking(by_cost=True)[:SHOWN])
        for target in (*self.targets, *self.thresholds):
            shown.update(self.ranking(target)[:1])
        return shown

    def pareto(self, threshold: float | Target | None = None) -> tuple[int, ...]:
        """The settings that no other one beats in both cost and final loss, cheapest first."""
        front: list[int] = []
        for i in self.ranking(threshold, by_cost=True):
            if not front or self.final_loss[i] < self.final_loss[front[-1]]:
                front.append(i)
        return tuple(front)

    def message(self, i: int) -> str:
        """One line on the stability of setting i."""
        setting, rates, stable = self.settings[i], None, bool(self.stable[i])
        if self.method(i) != SIMULATED:
            values = setting.rates()[:1] if setting.schedule == "constant" else setting.rates()
            rates = Rates(values, values / self.max_learning_rate[i])
        return stability_message(self.loss[i], rates, stable=stable, batch_size=setting.batch_size)

    @property
    def warning(self) -> str | None:
        """One line on the settings that are not stable; None where all of them are."""
        unstable = np.flatnonzero(~self.stable).tolist()
        if not unstable:
            return None
        i = min(unstable, key=lambda i: self.final_loss[i])  # the one that looks best
        return f"{len(unstable)} not stable, as {self.named(i)}: {self.message(i)}"

    def off(self, i: int, target: float | Target) -> int | None:
        """By how many steps the time of setting i may be off; None where that is not known."""
        if i not in self.relinearized:
            return None
        forecast = self.forecasts[i]
        errors: dict[Any, int] = {
            **(forecast.steps_uncertainty or {}), **forecast.targets_uncertainty
        }  # fmt: skip
        if target in errors or not isinstance(target, Target):
            return errors.get(target)
        return forecast.off(target, smooth=self.rule.smooth)  # a shared target

    def time_words(self, i: int, target: float | Target) -> str:
        """When setting i gets there, with what the time may be off by."""
        time = int(self.times(target)[i])
        if time < 0:
            return "-"
        if self.oscillates(target)[i]:
            return f"about {time}"
        return step_words(time, self.off(i, target), self.settings[i].steps)

    def rows(self) -> list[dict[str, Any]]:
        """One flat dictionary a setting, of plain values; None where there is no number."""
        return [self._row(i) for i in range(len(self.settings))]

    def _row(self, i: int) -> dict[str, Any]:
        setting = self.settings[i]
        row: dict[str, Any] = {
            "algorithm": algorithm_name(setting.algorithm),
            "learning_rate": float(setting.learning_rate),
            "momentum": float(setting.momentum),
            "weight_decay": setting.decay,
            "batch_size": setting.batch_size,
            "schedule": schedule_name(setting.schedule),
            "loss": get_loss(setting.loss).name,
            "horizon": setting.steps,
            "stable": bool(self.stable[i]),
            "max_learning_rate": plain_number(self.max_learning_rate[i]),
            "final_loss": float(self.final_loss[i]),
            "final_error": float(self.final_error[i]),
        }
        for target in (*self.thresholds, *self.targets):
            time = int(self.times(target)[i])
            name = target.column if isinstance(target, Target) else f"{target:g}"
            row[f"steps_{name}"] = time if time >= 0 else None
            row[f"uncertainty_{name}"] = self.off(i, target)
            if self.step_seconds is not None:
                row[f"seconds_{name}"] = float(time * self.step_seconds[i]) if time >= 0 else None
        return row | {
            "forecast": self.method(i), "oscillates": bool(self.oscillates()[i]),
            "warnings": self.warnings.get(i), "message": self.message(i),
        }  # fmt: skip

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the rows to a CSV file."""
        rows = self.rows()
        with replaced(path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)

    @property
    def advice(self) -> str:
        """What to use, in one line: the first setting, when it gets there, and the next best."""
        order = self.ranking()
        if not order:
            return self.hint()
        if self.times()[order[0]] == 0:
            return f"{self.label()} holds before training already: name a lower target"
        advice = f"use {self.named(order[0])}: {self.label()} at {self._when(order[0])}"
        if len(order) == 1:
            return f"{advice}; no other setting is forecast to get there"
        return f"{advice}; next best {self.named(order[1])}: {self._when(order[1])}"

    def _when(self, i: int) -> str:
        seconds = "" if self.step_seconds is None else f", {readable_time(float(self.cost()[i]))}"
        return f"step {self.time_words(i, self.ranked_by)}{seconds}"

    def hint(self, threshold: float | Target | None = None) -> str:
        """The message where no setting gets there."""
        message, near = f"no setting gets to {self.label(threshold)}", self.nearest(threshold)
        if not near:
            return f"{message}: none is stable; try lower rates"
        end = f"loss {self.final_loss[near[0]]:.3g}, error {self.final_error[near[0]]:.3g}"
        return f"{message}: {self.named(near[0])} ends nearest, at {end}; try more steps"

    @property
    def depth(self) -> str:
        """One line on how the settings were forecast, and the cost."""
        methods = [self.method(i) for i in range(len(self.settings))]
        counts = ((methods.count(name), name) for name in (REBUILT, FIRST, SIMULATED))
        depth = ", ".join(f"{count} {name}" for count, name in counts if count)
        if self.trainings is not None:
            depth += f"; cost: the FLOPs of {self.trainings:.2g} of {len(methods)} training runs"
        return depth

    def __str__(self) -> str:
        order, count = self.ranking(by_cost=True), len(self.settings)
        shared = " (a target that the sweep chose for all)" if self.shared else ""
        lines = [
            f"Sweep of {count} settings, {int(self.stable.sum())} stable; "
            f"the first to {self.label()}{shared}:",
            wrapped(f"  (steps to {', '.join(self.label(e) for e in self.thresholds)})", 3),
        ]
        shown = order[: FEW if count <= FEW else SHOWN]
        for i in shown:
            lines += self._lines(i)
        if (left := count - len(shown)) > 0:
            late = count - len(order)
            lines.append(f"  {left} more in rows(), {late} too late or not stable")
        notes = f"evaluated with: {', '.join(self.notes)}" if self.notes else ""
        for line in filter(None, (self.depth, self.advice, self.warning, notes)):
            lines.append(wrapped(f"  {line}", 2))
        return "\n".join(lines)

    def _lines(self, i: int) -> list[str]:
        """The times and final loss of a setting, and its warning."""
        times = ", ".join(self.time_words(i, e) for e in self.thresholds)
        for target in self.targets:
            if self.times(target)[i] >= 0:
                times += f"; {target.words()}: step {self.time_words(i, target)}"
        end = f"loss {self.final_loss[i]:.4g}"
        if self.forecasts and self.method(i) != REBUILT:
            end += f", {self.method(i)}"
        if self.oscillates()[i]:
            end += ", oscillates"
        lines = [f"  {self.named(i):<40} steps {times}; {end}"]
        if self.warnings.get(i) is not None:
            lines.append(wrapped(f"    warning: {self.warnings[i]}", 11))
        return lines

    plot, _repr_html_, __repr__ = RESULT


def held_to(curves: np.ndarray, length: int) -> np.ndarray:
    """Curves (..., t) held at their ends until they have this length."""
    widths = [(0, 0)] * (curves.ndim - 1)
    return np.pad(curves, [*widths, (0, length - curves.shape[-1])], mode="edge")
