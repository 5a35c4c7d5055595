"""The heats of a race: all settings start, and the slow ones are left out early.

All train `FIRST` steps, the better `KEEP` of them `GROWTH` times as many in all, and so on, `LEAST`
of them to the end, which is where the first of those that are left is at the goal: a later one
cannot win. Thirty settings of which the best needs 10 of 150 steps cost as much as 1.5 trainings of
one, at 80 steps as 3.4 (`expected`).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxttp._core.traced import network_of
from jaxttp._core.types import Params, take
from jaxttp.dynamics._network import loss_of_weights
from jaxttp.dynamics.batches import batch_indices
from jaxttp.forecast.hyperparameters import Hyperparameters
from jaxttp.forecast.price import STEP
from jaxttp.forecast.problem import Problem
from jaxttp.losses.rule import Target
from jaxttp.training import TrainingStep

FIRST, GROWTH, KEEP, LEAST = 4, 1.6, 0.6, 3
"""Steps of the first heat, how they grow, which share goes on, and how many at least."""
NEAR = 2.0
"""With batches the loss on all samples is looked for from where a batch's is so many goals."""


def heats(steps: int) -> list[int]:
    """The steps at which a heat ends.

    Example:
        >>> heats(20)
        [4, 7, 12, 20]
    """
    ends, end = [], FIRST
    while end < steps:
        ends.append(end)
        end = math.ceil(GROWTH * end)
    return [*ends, steps]


def expected(count: int, steps: int, best: int) -> float:
    """What a race will cost at most, in trainings of one setting, if the first needs `best` steps.

    Example:
        >>> round(expected(30, 150, 10), 2), round(expected(30, 150, 80), 2)
        (1.51, 3.43)
    """
    spent, done, left = 0.0, 0, count
    for end in heats(steps):
        upto = min(end, best)
        spent, done = spent + left * (upto - done + 1 / STEP), upto
        if best <= end:
            break
        left = min(left, max(LEAST, math.ceil(KEEP * left)))
    return spent / steps


@dataclasses.dataclass(frozen=True, eq=False)
class Track:
    """What all run on: data, batches, programs, and when the loss is looked at."""

    problem: Problem
    indices: np.ndarray | None
    every: int
    steps: dict[Any, Callable[..., Any]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls, problem: Problem, one: Hyperparameters, key: Array | None, protocol: str
    ) -> "Track":
        """Of a problem, for settings that share loss, batch size and horizon with one of them."""
        n = len(problem.f0)
        if one.batch_size is None:
            return cls(problem, None, 1)
        drawn = batch_indices(key, n, one.batch_size, one.steps, protocol=protocol)
        return cls(problem, np.asarray(drawn), math.ceil(n / (STEP * one.batch_size)))

    def value(self, outputs: Array, targets: Array) -> Array:
        """The loss of outputs."""
        return self.problem.loss.value(outputs, targets)

    def evaluate(self, weights: Params) -> Array:
        """The loss of weights, on all samples."""
        problem = self.problem
        network = network_of(problem.network).precise(weights, problem.x)
        return loss_of_weights(network, weights, problem.x, problem.targets, loss=problem.loss)

    def step(
        self, algorithm: Any, stepper: optax.GradientTransformation, numbers: dict[str, float]
    ) -> Callable[..., Any]:
        """A step of an algorithm, compiled once for all of its settings."""
        key = algorithm, *numbers
        if key not in self.steps:
            problem = self.problem
            self.steps[key] = TrainingStep(problem.network, problem.loss, stepper)
        return self.steps[key]

    def batch(self, t: int) -> tuple[Any, Array]:
        """The samples of step t, and their targets."""
        x, targets = self.problem.x, self.problem.targets
        if self.indices is None:
            return x, targets
        return take(x, self.indices[t]), targets[self.indices[t]]


class Runner:
    """A setting in training."""

    def __init__(self, setting: Hyperparameters, track: Track) -> None:
        stepper, numbers = setting.stepper()
        self.rates, self.track = setting.rates(), track
        self.step = track.step(setting.algorithm, stepper, numbers)
        self.weights = track.problem.weights
        self.state: Any = stepper.init(self.weights)
        for name, value in numbers.items():
            self._set(name, value)
        self.done, self.looks = 0, 0.0  # steps, and ways forward beside them
        self.batch_loss = math.inf
        self.losses: list[float] = []
        self.at: list[int] = []
        self.there: int | None = None

    @property
    def finite(self) -> bool:
        """Whether all losses that were seen are: the last, as none is looked for after that."""
        return not self.losses or math.isfinite(self.losses[-1])

    @property
    def running(self) -> bool:
        """Whether there is anything left to train."""
        return self.there is None and self.finite

    @property
    def seen(self) -> int:
        """The last step whose loss is known, -1 for none."""
        return self.at[-1] if self.at else -1

    def advance(self, end: int, goal: Target | None) -> None:
        """Train to a step, or to the goal, and look at the loss there."""
        track, whole = self.track, self.track.indices is None
        while self.done < end and self.running:
            t = self.done
            if not whole and self._is_near(t, goal):
                self._look(t, goal)
                if not self.running:
                    return
            self._set("rate", self.rates[t])
            x, targets = track.batch(t)
            weights, state, f, _ = self.step(self.weights, self.state, x, targets)
            self.batch_loss = float(track.value(f, targets))
            if whole and self.seen < t:
                self._note(t, self.batch_loss, goal)
                if not self.running:
                    self.looks += STEP  # a step that goes for nothing showed it
                    return
            self.weights, self.state, self.done = weights, state, t + 1
        if self.running and self.seen < self.done:
            self._look(self.done, goal)

    def _is_near(self, t: int, goal: Target | None) -> bool:
        """Whether the loss on all samples is to be looked at, before step t of a batch."""
        if t % self.track.every or self.seen == t:
            return False
        if t == 0 or not math.isfinite(self.batch_loss):
            return True
        return goal is not None and self.batch_loss <= NEAR * goal.value

    def _set(self, name: str, value: float) -> None:
        numbers = self.state.hyperparams
        numbers[name] = jnp.asarray(value, numbers[name].dtype)

    def _look(self, t: int, goal: Target | None) -> None:
        self.looks += 1
        self._note(t, float(self.track.evaluate(self.weights)), goal)

    def _note(self, t: int, loss: float, goal: Target | None) -> None:
        self.at.append(t)
        self.losses.append(loss)
        if goal is not None and loss <= goal.value:
            self.there = t

    def drop(self) -> None:
        """Out of the race: what it held may go."""
        self.weights = self.state = None


def run_heats(
    runners: Sequence[Runner],
    steps: int,
    goal: Target | None,
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Train runners until the first of them is at a goal, or those that are left at the horizon.

    Args:
        runners: that start; those that are left out are dropped.
        steps: the horizon.
        goal: a loss; None for none.
        progress: called with (stage, runners done, runners in the heat).
    """
    alive, bar = list(runners), None
    for end in heats(steps):
        for done, one in enumerate(alive):
            one.advance(end if bar is None else min(end, bar), goal)
            bar = one.there if one.there is not None else bar
            if progress is not None:
                progress(f"training to step {end}", done, len(alive))
        if bar is not None:
            return
        alive = sorted((one for one in alive if one.finite), key=lambda one: one.losses[-1])
        if end == steps or not alive:
            return
        going_on = alive[: max(LEAST, math.ceil(KEEP * len(alive)))]
        for one in alive[len(going_on) :]:
            one.drop()
        alive = going_on
