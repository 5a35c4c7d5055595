"""What a race of settings says: who came first, how far the others were trained, what it cost."""

import dataclasses
from typing import Any

import numpy as np

from jaxttp._core.results import RESULT, wrapped
from jaxttp._core.types import Params
from jaxttp.forecast.swept import SHOWN
from jaxttp.forecast.training_setup import Hyperparameters, algorithm_name
from jaxttp.losses.rule import Target


@dataclasses.dataclass(frozen=True)
class Race:
    """What was really trained, and who came first; of starting points every pair with a setting.

    Attributes:
        settings: that started, S of them.
        goal: the loss on all training samples to get to; None for the lowest at the horizon.
        times: steps to the goal (S,), -1 where it was not seen there.
        losses: on all training samples, for every setting wherever they were looked at.
        at: the steps at which they were, for every setting.
        trainings: what was spent, in trainings of one setting, by count.
        params: all parameters of the first one, as they were there: at the goal, or where there is
            none or it was not reached, at the lowest loss of the last heat's end. None where
            nothing stayed finite.
        finite: (S,), whether all losses that were seen are finite.
        notes: how the network is evaluated and trained, where that is not as it was given, such as
            "1 BatchNorm on running averages".
        starts: the starting point of each (S,), in a race of several; else empty.
    """

    settings: tuple[Hyperparameters, ...]
    goal: Target | None
    times: np.ndarray
    losses: tuple[np.ndarray, ...]
    at: tuple[np.ndarray, ...]
    trainings: float
    params: Params | None
    finite: np.ndarray
    notes: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()

    def named(self, i: int) -> str:
        """What started at place i, in words."""
        return f"{self.starts[i]}, {self.settings[i]}" if self.starts else str(self.settings[i])

    @property
    def order(self) -> tuple[str, ...]:
        """Starting points, the first one first; what was left out comes by how far it got.

        Every start counts as its best setting: by steps to the goal, then by the steps that it was
        trained, then by its loss there, no later than where the first is at the goal. Empty in a
        race of one start.
        """
        if not self.starts:
            return ()
        there = self.times[self.times >= 0]
        steps = np.minimum(self.trained, there.min() if len(there) else self.settings[0].steps)
        seen = zip(self.losses, self.at, steps, strict=True)
        last = np.array([loss[np.searchsorted(at, t, "right") - 1] for loss, at, t in seen])
        last = np.where(np.isfinite(last), last, np.inf)
        times = np.where(self.times >= 0, self.times, self.settings[0].steps + 1)
        places = np.lexsort((last, -steps, ~self.finite, times))
        return tuple(dict.fromkeys(self.starts[i] for i in places))

    @property
    def trained(self) -> np.ndarray:
        """Steps that every setting was trained, (S,)."""
        return np.array([at[-1] for at in self.at])

    def ranking(self) -> tuple[int, ...]:
        """Those that were seen at the goal, by steps; without a goal those that came to the end.

        Ties go to the lower loss.
        """
        last = np.array([curve[-1] for curve in self.losses])
        if self.goal is None:
            there = self.finite & (self.trained == self.trained.max())
        else:
            there = self.times >= 0
        return tuple(int(i) for i in np.lexsort((last, self.times)) if there[i])

    def best(self) -> int:
        """The index of the first.

        Raises:
            ValueError: none got to the goal, or nothing stayed finite.
        """
        order = self.ranking()
        if not order:
            raise ValueError(f"{self.advice}, more steps or a goal that is nearer.")
        return order[0]

    @property
    def advice(self) -> str:
        """What to use, in one line."""
        order = self.ranking()
        if not order:
            what = "stayed finite" if self.goal is None else f"got to {self.goal.words()}"
            return f"no setting {what}: try other rates"
        if self.goal is not None and self.times[order[0]] == 0:
            return f"{self.goal.words()} holds before training already: name a lower goal"
        first = f"use {self.named(order[0])}: {self._said(order[0])}"
        if len(order) > 1:
            return f"{first}; next {self.named(order[1])}: {self._said(order[1])}"
        return first

    def _said(self, i: int) -> str:
        if self.goal is None:
            return f"loss {self.losses[i][-1]:.4g} at step {self.trained[i]}"
        return f"{self.goal.words()} at step {self.times[i]}"

    def rows(self) -> list[dict[str, Any]]:
        """One flat dictionary a setting, of plain values; None where there is no number."""
        return [
            {
                "start": self.starts[i] if self.starts else None,
                "setting": str(one),
                "algorithm": algorithm_name(one.algorithm),
                "learning_rate": float(one.learning_rate),
                "momentum": float(one.momentum),
                "weight_decay": one.decay,
                "trained": int(self.trained[i]),
                "loss": float(self.losses[i][-1]) if self.finite[i] else None,
                "steps": int(self.times[i]) if self.times[i] >= 0 else None,
                "finite": bool(self.finite[i]),
            }
            for i, one in enumerate(self.settings)
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "goal": None if self.goal is None else self.goal.value,
            "first": self.ranking()[0] if self.ranking() else None,
            "order": list(self.order),
            "trainings": self.trainings,
            "advice": self.advice,
            "notes": list(self.notes),
            "rows": self.rows(),
        }

    def __str__(self) -> str:
        goal = "the lowest loss" if self.goal is None else self.goal.words()
        steps = self.settings[0].steps
        several = f" of {len(self.order)} starting points" if self.starts else ""
        lines = [f"Race of {len(self.settings)} settings{several} to {goal}, trained for real:"]
        order = self.ranking()
        rest = [i for i in np.argsort(-self.trained, kind="stable").tolist() if i not in order]
        for i in (*order, *rest)[:SHOWN]:
            there = f"at the goal at step {self.times[i]}; " if self.times[i] >= 0 else ""
            end = f"loss {self.losses[i][-1]:.4g} after {self.trained[i]} of {steps} steps"
            lines.append(f"  {self.named(i):<40} {there}{end}")
        if len(self.settings) > SHOWN:
            lines.append(f"  {len(self.settings) - SHOWN} more in rows()")
        if self.starts:
            lines.append(wrapped(f"  starting points: {', '.join(self.order)}", 2))
        lines.append(wrapped(f"  {self.price}", 2))
        lines.append(wrapped(f"  {self.advice}", 2))
        if self.notes:
            lines.append(wrapped(f"  trained with: {', '.join(self.notes)}", 2))
        return "\n".join(lines)

    @property
    def price(self) -> str:
        """One line on what it cost."""
        trained = f"{self.trainings:.2g} trainings"
        return f"by count this cost {trained}; training all would be {len(self.settings)}"

    plot, _repr_html_, __repr__ = RESULT
