"""What a sweep says: times, curves and verdicts of many settings, and which are the best."""

import csv
import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxttp._core.checks import check_choice
from jaxttp._core.files import inert, replaced
from jaxttp._core.results import RESULT, wrapped
from jaxttp.forecast.prediction import Prediction
from jaxttp.forecast.stability import Rates, stability_message
from jaxttp.forecast.training_setup import (
    Hyperparameters,
    algorithm_name,
    schedule_name,
)
from jaxttp.forecast.wall_clock import readable_time
from jaxttp.losses import get_loss
from jaxttp.losses.rule import Target, goal_words, step_words

SHOWN = 5
"""Settings that a sweep prints, and asks the network about."""
RISK = 2.0
"""By how much later than said a setting counts that is thrown about at the edge of stability."""
FEW = 8
"""Of at most so many settings all that are stable are followed and printed."""


SHARED = "a goal that the sweep chose for all"


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Forecasts of many settings on one kernel; prints its best rows.

    Attributes:
        settings: what was forecast, S of them.
        samples: N, of the training data.
        thresholds: E of them.
        rule: the definition of training time, see `training_time`.
        steps: training times (S, E) in steps, -1 where a setting diverges or never gets there, as
            with an error that does not fall.
        final_loss: predicted mean loss on all samples at the horizon, (S,).
        final_error: predicted error at the horizon, (S,).
        stable: (S,), False where the forecast diverges, or any step's rate is beyond its limit and
            kernels were not rebuilt (as in `Prediction.stable`); `message` says
            which. Such settings are not ranked.
        max_learning_rate: (S,), where a constant rate with this momentum and loss diverges at the
            start of training.
        loss: predicted loss curves (S, T + 1), T the longest horizon; a shorter one is held at its
            end.
        step_seconds: seconds of a step (S,), or None.
        metric: the curve that the training times were read off, "loss" or "error".
        error: predicted error curves (S, T + 1), with the metric "error" or a target of it; else
            None.
        trust: what the network says of the settings that are shown first, where it was asked (by
            `sweep`): a sentence as `Prediction.trust`, or None where there is no doubt. Settings
            that are missing were not looked at.
        rate_limit: (S,), what every rate is held against: `max_learning_rate`, or for a schedule
            with mini-batches the mean-square limit, which is lower.
        targets: losses and errors to get below, K of them; the first is what settings are ranked
            by.
        target_steps: steps to every target (S, K), -1 as in `steps`.
        forecasts: of the settings that were forecast by themselves.
        relinearized: those of them that were forecast again along rebuilt kernels, in the order in
            which they were; the others' times are those of the first kernel.
        shared: whether the target was chosen by the sweep.
        trainings: what the sweep cost, in trainings of its first setting, by count; None where it
            was made of a kernel.
        notes: how the network is evaluated, where that is not as it was given, such as
            "1 BatchNorm on running averages".
        smooth: steps over which curves are averaged before they are read.
    """

    settings: tuple[Hyperparameters, ...]
    samples: int
    thresholds: tuple[float, ...]
    rule: str
    steps: np.ndarray
    final_loss: np.ndarray
    final_error: np.ndarray
    stable: np.ndarray
    max_learning_rate: np.ndarray
    loss: np.ndarray
    step_seconds: np.ndarray | None = None
    metric: str = "loss"
    error: np.ndarray | None = None
    trust: Mapping[int, str | None] = dataclasses.field(default_factory=dict)
    rate_limit: np.ndarray | None = None
    targets: tuple[Target, ...] = ()
    target_steps: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0), int))
    forecasts: Mapping[int, Prediction] = dataclasses.field(default_factory=dict)
    relinearized: tuple[int, ...] = ()
    shared: bool = False
    trainings: float | None = None
    notes: tuple[str, ...] = ()
    smooth: int = 1

    @property
    def simulated(self) -> frozenset[int]:
        """The settings of algorithms that know no kernel, such as AdamW.

        Each was followed by training the linearised network, which rebuilds nothing and costs about
        a training.
        """
        ways = {i: one.dynamics for i, one in self.forecasts.items()}
        return frozenset(i for i, way in ways.items() if way == "weight_space")

    @property
    def unsure(self) -> frozenset[int]:
        """The settings whose real training may fail (`Prediction.unsure_from`); others come first.

        The noise of their batches outgrows what kernels can follow.
        """
        return frozenset(i for i, one in self.forecasts.items() if one.unsure_from is not None)

    @property
    def rough(self) -> frozenset[int]:
        """The settings that are in doubt before the goal (`Prediction.doubted_from`).

        Their path comes to the edge of stability, or a kernel is held: a real training is thrown
        about, and they are ranked by twice their time.
        """
        return frozenset(
            i for i in self.relinearized
            if (since := self.forecasts[i].doubted_from) is not None
            and 0 <= since < self.times()[i]
        )  # fmt: skip

    def named(self, i: int) -> str:
        """Setting i in words, with its loss and its horizon where these are not those of all."""
        one, parts = self.settings[i], [str(self.settings[i])]
        if len({get_loss(other.loss) for other in self.settings}) > 1:
            parts.append(get_loss(one.loss).name)
        if len({other.steps for other in self.settings}) > 1:
            parts.append(f"{one.steps} steps")
        return ", ".join(parts)

    @property
    def ranked_by(self) -> float | Target:
        """What settings are ranked by unless told: the first target, or the middle threshold."""
        return self.targets[0] if self.targets else self.thresholds[len(self.thresholds) // 2]

    def times(self, threshold: float | Target | None = None) -> np.ndarray:
        """Steps of every setting to a threshold or a target (S,), -1 as in `steps`.

        Args:
            threshold: one of those asked for; `ranked_by` when None, here and in what follows.

        Raises:
            ValueError: another one.
        """
        goal = self.ranked_by if threshold is None else threshold
        if isinstance(goal, Target):
            if goal not in self.targets:
                raise ValueError(
                    f"{goal.words()!r} was not asked for; give it as target_loss or target_error."
                )
            return self.target_steps[:, self.targets.index(goal)]
        known = check_choice("threshold", goal, self.thresholds)
        return self.steps[:, self.thresholds.index(known)]

    @property
    def limits(self) -> np.ndarray:
        """What every setting's rates are held against, (S,)."""
        return self.max_learning_rate if self.rate_limit is None else self.rate_limit

    def message(self, i: int) -> str:
        """One line on the stability of setting i."""
        one = self.settings[i]
        limits = self.limits
        if i in self.simulated:
            return stability_message(self.loss[i], None, stable=bool(self.stable[i]))
        rates = one.rates()
        if one.schedule == "constant":
            rates = rates[:1]
        in_square = limits[i] < self.max_learning_rate[i]
        beside = Rates(rates, rates / limits[i], one.batch_size if in_square else None)
        words = stability_message(
            self.loss[i], beside, stable=bool(self.stable[i]), batch_size=one.batch_size
        )
        if i not in self.unsure or not self.stable[i]:
            return words
        batches = "" if one.batch_size is None else f"with batches of {one.batch_size} "
        return f"{words}; {batches}it may fail"

    @property
    def warning(self) -> str | None:
        """One line on the settings that are not stable; None where all of them are."""
        unstable = np.flatnonzero(~self.stable).tolist()
        if not unstable:
            return None
        i = min(unstable, key=lambda i: self.final_loss[i])  # the one that looks best
        return f"{len(unstable)} not stable, as {self.named(i)}: {self.message(i)}"

    def cost(self, threshold: float | Target | None = None) -> np.ndarray:
        """What every setting spends to get there, (S,): seconds where known, else samples seen.

        Infinite where it diverges or never gets there.
        """
        times = self.times(threshold)
        each = self.step_seconds
        if each is None:
            each = np.array([one.batch_size or self.samples for one in self.settings])
        return np.where(self.stable & (times >= 0), times * each, np.inf)

    def best(self, threshold: float | Target | None = None) -> int:
        """The index of the setting that gets there with the fewest steps, then the lowest loss.

        A target is the same for all settings, as is the rule "absolute". A threshold of the rule
        "relative" (or "gap") measures every setting by its own final loss, so that a slow one can
        seem early.

        Raises:
            ValueError: an unknown threshold, or no setting that gets there.
        """
        ranking = self.ranking(threshold)
        if not ranking:
            goal = self.ranked_by if threshold is None else threshold
            name = goal.words() if isinstance(goal, Target) else f"threshold={goal:g}"
            lowest = self.max_learning_rate.min()
            below = f"learning rates below {lowest:.4g}" if np.isfinite(lowest) else "other rates"
            raise ValueError(
                f"no setting reaches {name}: all diverge or are too slow; try {below} or more "
                "steps."
            )
        return ranking[0]

    def ranking(self, threshold: float | Target | None = None) -> tuple[int, ...]:
        """The settings that get there, by steps, then by the lowest final loss; `unsure` last."""
        times = self._weighed(self.times(threshold))
        order = np.lexsort((self.final_loss, times))
        return self._sure_first(int(i) for i in order if self.stable[i] and times[i] >= 0)

    def _weighed(self, times: np.ndarray) -> np.ndarray:
        """Times or costs as settings are ranked by them: those of rough ones count more."""
        rough = np.isin(np.arange(len(self.settings)), list(self.rough))
        return np.where(rough & (times > 0), RISK * times, times)

    def _sure_first(self, order: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(order, key=lambda i: i in self.unsure))  # which keeps their order

    def cheapest(self, threshold: float | Target | None = None) -> tuple[int, ...]:
        """The settings that get there, by what they spend, then by the lowest final loss."""
        cost = self._weighed(self.cost(threshold))
        order = np.lexsort((self.final_loss, cost))
        return self._sure_first(int(i) for i in order if np.isfinite(cost[i]))

    def nearest(self, threshold: float | Target | None = None) -> tuple[int, ...]:
        """The stable settings that do not get there, by how near their curves come at the end."""
        first = self.final_error if self._is_error(threshold) else self.final_loss
        order = np.lexsort((self.final_loss, first))
        short = self.stable & (self.times(threshold) < 0)
        return self._sure_first(int(i) for i in order if short[i])

    def _is_error(self, threshold: float | Target | None) -> bool:
        """Whether a goal is about the error."""
        goal = self.ranked_by if threshold is None else threshold
        return (goal.metric if isinstance(goal, Target) else self.metric) == "error"

    def off(self, i: int, threshold: float | Target | None = None) -> int | None:
        """By how many steps the time of setting i may be off; None where that is not known."""
        goal = self.ranked_by if threshold is None else threshold
        if i not in self.relinearized:
            return None
        one = self.forecasts[i]
        if not isinstance(goal, Target):
            return (one.steps_uncertainty or {}).get(goal)
        if goal in one.targets:
            return one.targets_uncertainty.get(goal)
        return one.off(goal, smooth=self.smooth)  # a goal that was chosen after it

    def time_words(self, i: int, threshold: float | Target) -> str:
        """When setting i gets there, with what the time may be off by."""
        time, off = int(self.times(threshold)[i]), self.off(i, threshold)
        if time < 0:
            return str(time)
        rough = i in self.unsure | self.rough
        return f"about {time}" if rough else step_words(time, off, self.settings[i].steps)

    def pareto(self, threshold: float | Target | None = None) -> tuple[int, ...]:
        """The settings that no other one beats in both cost and final loss, cheapest first."""
        cost = self.cost(threshold)
        order = [i for i in np.lexsort((self.final_loss, cost)) if np.isfinite(cost[i])]
        order = [i for i in order if i not in self.unsure] or order
        chosen: list[int] = []
        for i in order:
            if not chosen or self.final_loss[i] < self.final_loss[chosen[-1]]:
                chosen.append(int(i))
        return tuple(chosen)

    def rows(self) -> list[dict[str, Any]]:
        """One flat dictionary a setting, of plain values; None where there is no number."""
        return [self._row(i) for i in range(len(self.settings))]

    def _row(self, i: int) -> dict[str, Any]:
        one, known = self.settings[i], np.isfinite(self.max_learning_rate[i])
        row: dict[str, Any] = {
            "algorithm": algorithm_name(one.algorithm),
            "learning_rate": float(one.learning_rate),
            "momentum": float(one.momentum),
            "weight_decay": one.decay,
            "batch_size": one.batch_size,
            "schedule": schedule_name(one.schedule),
            "loss": get_loss(one.loss).name,
            "horizon": one.steps,
            "stable": bool(self.stable[i]),
            "max_learning_rate": float(self.max_learning_rate[i]) if known else None,
            "final_loss": float(self.final_loss[i]),
            "final_error": float(self.final_error[i]),
        }
        for goal in (*self.thresholds, *self.targets):
            time = self.times(goal)[i]
            name = goal.column if isinstance(goal, Target) else f"{goal:g}"
            row[f"steps_{name}"] = int(time) if time >= 0 else None
            row[f"uncertainty_{name}"] = self.off(i, goal)
            if self.step_seconds is not None:
                seconds = float(time * self.step_seconds[i]) if time >= 0 else None
                row[f"seconds_{name}"] = seconds
        return row | {
            "looked_at": i in self.trust, "trust": self.trust.get(i),
            "relinearized": i in self.relinearized, "unsure": i in self.unsure,
            "rough": i in self.rough, "simulated": i in self.simulated, "message": self.message(i),
        }  # fmt: skip

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the rows to a CSV file."""
        rows = self.rows()
        with replaced(path) as place, place.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows({key: inert(value) for key, value in row.items()} for row in rows)

    @property
    def advice(self) -> str:
        """What to use, in one line: the first setting, when it gets there, and the next best."""
        order, goal = self.ranking(), self.goal(self.ranked_by)
        if not order:
            return f"no setting gets to {goal}: {self.remedy()}"
        if self.times()[order[0]] == 0:
            return f"{goal} holds before training already: name a lower goal"
        first = f"use {self.named(order[0])}: {goal} at {self._time_and_seconds(order[0])}"
        if len(order) == 1:
            return f"{first}; no other gets there"
        return f"{first}; next best {self.named(order[1])}: {self._time_and_seconds(order[1])}"

    def remedy(self, threshold: float | Target | None = None) -> str:
        """What to try where no setting gets there."""
        near = self.nearest(threshold)
        if not near:
            return "none is stable; try lower rates"
        by_error = self._is_error(threshold)
        end = (self.final_error if by_error else self.final_loss)[near[0]]
        what = f"{'an error' if by_error else 'a loss'} of {end:.3g}"
        return f"{self.named(near[0])} comes nearest, to {what}; try more steps, or higher rates"

    def _time_and_seconds(self, i: int) -> str:
        words = f"step {self.time_words(i, self.ranked_by)}"
        if self.step_seconds is None:
            return words
        return f"{words}, {readable_time(float(self.cost()[i]))}"

    @property
    def depth(self) -> str:
        """One line on how the settings were forecast."""
        followed, alone = len(self.relinearized), len(self.simulated)
        first = len(self.settings) - followed - alone
        ways = {
            "along rebuilt kernels": followed,
            "on the first kernel": first,
            "by training the linearized network": alone,
        }
        return ", ".join(f"{count} {way}" for way, count in ways.items() if count)

    @property
    def price(self) -> str:
        """One line on what it cost; empty where that is not known."""
        if self.trainings is None:
            return ""
        count = len(self.settings)
        return f"by count this cost {self.trainings:.2g} trainings; training all would be {count}"

    def goal(self, threshold: float | Target) -> str:
        """A threshold or a target in words."""
        if isinstance(threshold, Target):
            return threshold.words()
        return goal_words(threshold, self.rule, self.metric)

    def __str__(self) -> str:
        order = self.cheapest()
        chosen, reached = f" ({SHARED})" if self.shared else "", len(order)
        lines = [
            f"Sweep of {len(self.settings)} settings, {int(self.stable.sum())} stable; "
            f"the first to {self.goal(self.ranked_by)}{chosen}:",
            wrapped(f"  (steps to {', '.join(self.goal(e) for e in self.thresholds)})", 3),
        ]
        shown = SHOWN if len(self.settings) > FEW else FEW
        for i in order[:shown]:
            lines += self._lines(i)
        if (left := len(self.settings) - min(reached, shown)) > 0:
            lines.append(f"  {left} more in rows(), {len(self.settings) - reached} too late or not "
                         "stable")  # fmt: skip
        for words in (self.depth, self.price, self.advice, self.warning):
            if words:
                lines.append(wrapped(f"  {words}", 2))
        if self.notes:
            lines.append(wrapped(f"  evaluated with: {', '.join(self.notes)}", 9))
        return "\n".join(lines)

    def _lines(self, i: int) -> list[str]:
        """A setting in words, and how far it can be trusted."""
        times = ", ".join(self.time_words(i, e) for e in self.thresholds)
        if self.targets:
            below = [f"{t.words()}: step {self.time_words(i, t)}" for t in self.targets
                     if self.times(t)[i] >= 0]  # fmt: skip
            times = f"{times}; {', '.join(below)}"
        mark = ", one kernel" if self.relinearized and i not in self.relinearized else ""
        mark = ", linearised" if i in self.simulated else mark
        mark = ", thrown about" if i in self.rough else mark
        mark = ", may not train" if i in self.unsure else mark
        lines = [f"  {self.named(i):<40} steps {times}; loss {self.final_loss[i]:.4g}{mark}"]
        if self.trust.get(i) is not None:
            lines.append(wrapped(f"    trust: {self.trust[i]}", 11))
        return lines

    plot, _repr_html_, __repr__ = RESULT
