"""What a comparison of starting points found: steps, seconds, and why."""

import dataclasses
import math
from typing import Any

import numpy as np

from jaxttp._core.results import RESULT, wrapped
from jaxttp.forecast.hyperparameters import Hyperparameters
from jaxttp.forecast.seconds import readable_time
from jaxttp.losses.rule import Target, goal_words

FAR = 4.0
"""Times slower or faster from which on starting points are said not to share a learning rate."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What the kernel says about a starting point.

    Attributes:
        speed: g^T Theta g / (lambda_max |g|^2), in [0, 1], g the loss's gradient in the outputs.
        alignment: share of |g|^2 along the 10 leading eigenvectors.
        condition_number: lambda_max over the smallest eigenvalue that counts.
        rank: how many eigenvalues count (those above N C eps lambda_max).
        largest: lambda_max of Theta / N.
        sgd: what the first step of plain gradient descent takes off the loss, by the learning rate
            (of small ones): |grad L|^2. NaN where it was not computed.
        adam: the same of Adam, whose first step is as long in every weight: the sum of |grad L|.
    """

    speed: float
    alignment: float
    condition_number: float
    rank: int
    largest: float
    sgd: float = math.nan
    adam: float = math.nan

    plot, _repr_html_, __repr__ = RESULT


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Starting points side by side, the fastest first; prints itself as a table.

    Attributes:
        names: the starting points, ranked by steps to the first target, then to the next one, then
            to the smallest threshold, the next one, then by the final loss; those that never get
            there, or diverge, come last.
        thresholds: the goals.
        rule: the definition of training time.
        metric: the curve that it is read off, "loss" or "error".
        steps: (K, E), -1 where never reached or unstable.
        step_seconds: seconds of a training step (K,), NaN where not timed.
        settings: how each was trained, with its own best learning rate where none was given.
        final_loss: predicted loss at the horizon (K,).
        final_error: predicted error there (K,).
        loss: predicted loss curves (K, T + 1).
        explanations: what the kernels say (K).
        trust: how far each forecast can be trusted, where there is doubt (K); None where not.
        targets: losses and errors to get below, L of them.
        target_steps: steps to every target (K, L), -1 as in `steps`.
        error: predicted error curves (K, T + 1), with the metric "error" or a target of it; else
            None.
        trainings: what the forecasts cost by count, in trainings of one starting point, without
            what was asked for `trust`; None where it is not known.
    """

    names: tuple[str, ...]
    thresholds: tuple[float, ...]
    rule: str
    steps: np.ndarray
    step_seconds: np.ndarray
    settings: tuple[Hyperparameters, ...]
    final_loss: np.ndarray
    final_error: np.ndarray
    loss: np.ndarray
    explanations: tuple[Explanation, ...]
    metric: str = "loss"
    trust: tuple[str | None, ...] = ()
    targets: tuple[Target, ...] = ()
    target_steps: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0), int))
    error: np.ndarray | None = None
    trainings: float | None = None

    @property
    def price(self) -> str:
        """One line on what it cost; empty where that is not known."""
        if self.trainings is None:
            return ""
        return (
            f"by count this cost {self.trainings:.2g} trainings of one start; jaxttp.race_starts "
            "trains them in heats"
        )

    def seconds(self) -> np.ndarray:
        """Seconds to every threshold (K, E); infinite where never reached, NaN where not timed."""
        return self._seconds(self.steps)

    def target_seconds(self) -> np.ndarray:
        """Seconds to every target (K, L), likewise."""
        return self._seconds(self.target_steps)

    def _seconds(self, steps: np.ndarray) -> np.ndarray:
        return np.where(steps >= 0, steps * self.step_seconds[: len(steps), None], np.inf)

    def rows(self) -> list[dict[str, Any]]:
        """One flat dictionary a starting point, of plain values; None where there is no number."""
        out = []
        for i, name in enumerate(self.names):
            row: dict[str, Any] = {
                "name": name,
                "learning_rate": self.settings[i].learning_rate,
                "final_loss": float(self.final_loss[i]),
                "final_error": float(self.final_error[i]),
            }
            columns = [*(f"{e:.4g}" for e in self.thresholds), *(t.column for t in self.targets)]
            for column, t in zip(columns, self._times(i), strict=True):
                row[f"steps_{column}"] = int(t) if t >= 0 else None
                if np.isfinite(self.step_seconds[i]):
                    row[f"seconds_{column}"] = float(t * self.step_seconds[i]) if t >= 0 else None
            row["trust"] = self.trust[i] if self.trust else None
            out.append(row | dataclasses.asdict(self.explanations[i]))
        return out

    def _times(self, i: int) -> list[int]:
        """Steps of one to every threshold, then to every target."""
        to_targets = [int(t) for t in self.target_steps[i]] if self.targets else []
        return [int(t) for t in self.steps[i]] + to_targets

    def gaps(self) -> tuple[str, ...]:
        """Starting points that one learning rate does not suit, a sentence each.

        Held against the one that Adam's first step brings furthest: who is `FAR` times as slow
        with the same rate, by plain gradient descent or by Adam. Of adapters s A B with B = 0 the
        kernel grows as s^2, so that α/r at an eighth is 64 times slower by descent, 8 times by
        Adam; where every start has its own rate (`compare` without one) it does not matter.
        """
        slopes = np.array([(one.sgd, one.adam) for one in self.explanations])
        good = np.all(np.isfinite(slopes) & (slopes > 0), axis=1)
        if not np.any(good):
            return ()
        first = int(np.argmax(np.where(good, slopes[:, 1], -np.inf)))
        out = []
        for i in np.flatnonzero(good):
            by_descent, by_adam = slopes[first] / slopes[i]
            if max(by_descent, by_adam, 1 / by_descent) >= FAR:
                out.append(
                    f"{self.names[i]}: at the learning rate of {self.names[first]} its loss falls "
                    f"{_times(by_descent)} by gradient descent, {_times(by_adam)} by Adam."
                )
        return tuple(out)

    def __str__(self) -> str:
        words = [goal_words(e, self.rule, self.metric) for e in self.thresholds]
        goals = ", ".join([*words, *(target.words() for target in self.targets)])
        lines = [f"Starting points, steps to {goals}:"]
        width = max(map(len, self.names))
        for i, name in enumerate(self.names):
            why = self.explanations[i]
            times = ", ".join(str(t) if t >= 0 else "-" for t in self._times(i))
            each = self.step_seconds[i]
            each = f", {readable_time(float(each))} a step" if np.isfinite(each) else ""
            lines.append(
                f"  {name:<{width}}  {times:>14}  loss {self.final_loss[i]:.4g}{each}; speed "
                f"{why.speed:.2g}, {why.alignment:.0%} leading, condition "
                f"{why.condition_number:.2g}"
            )
            if self.trust and self.trust[i] is not None:
                lines.append(wrapped(f"    trust: {self.trust[i]}", 11))
        lines += [wrapped(f"  {words}", 4) for words in self.gaps()]
        if self.price:
            lines.append(wrapped(f"  {self.price}", 2))
        return "\n".join(lines)

    plot, _repr_html_, __repr__ = RESULT


def _times(ratio: float) -> str:
    """How much slower, or faster, in words."""
    if 0.8 < ratio < 1.25:
        return "as fast"
    word = "slower" if ratio > 1 else "faster"
    ratio = max(ratio, 1 / ratio)
    return f"{ratio:.0f} times {word}" if ratio >= 10 else f"{ratio:.2g} times {word}"
