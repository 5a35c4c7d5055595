"""Which setting is first, by real training: all start, and the slow ones are left out early.

A forecast costs kernels. Where a training is short or a network small, these cost more than to
train the settings themselves for a few steps; and what was trained is never wrong about itself. So
this is no forecast, and says so: a race trains, in heats.

All settings train `FIRST` steps, the better `KEEP` of them `GROWTH` times as many in all, and so
on, `LEAST` of them to the end, which is where the first of those that are left is at the goal: a
later one cannot win. Thirty settings of which the best needs 10 of 150 steps cost as much as 1.5
trainings of one, at 80 steps as 3.4 (`expected`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxttp._checks import check_known, check_number
from jaxttp._jit import jit
from jaxttp._samples import count, take
from jaxttp._types import ApplyFn, Params
from jaxttp.dynamics._network import kept
from jaxttp.dynamics.batches import batch_indices, check_batches
from jaxttp.forecast.hyperparameters import Hyperparameters, check_settings
from jaxttp.forecast.price import STEP
from jaxttp.forecast.problem import Problem
from jaxttp.forecast.raced import Race
from jaxttp.losses import Loss, get_loss
from jaxttp.rule import Target
from jaxttp.training import make_step

FIRST, GROWTH, KEEP, LEAST = 4, 1.6, 0.6, 3
"""Steps of the first heat, how they grow, which share goes on, and how many at least."""


def race(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    settings: Sequence[Hyperparameters],
    *,
    target_loss: float | None = None,
    key: Array | None = None,
    protocol: str | None = None,
    trainable: Any = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Race:
    """Train settings for real, in heats, until the first is at a loss; `params` are not changed.

    What trains is `apply_fn`, in evaluation mode where an adapter made it: BatchNorm on its running
    averages, no dropout (`Race.notes`). The first of all ends it; for the best setting of each
    algorithm race them apart.

    This is what `sweep` is not: a training. It sees what one kernel cannot (high rates, curvature
    that grows, noise), and costs a few trainings for dozens of settings: less than the sweep where
    a network is small, more where a forecast costs a thirtieth of a training.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``, in evaluation mode.
        params: pytree of floating-point arrays, the weights before training.
        x: training samples (N, ...), an array or a pytree of arrays with N rows each.
        y: integer labels (N,) or targets (N, C).
        settings: what starts; `grid` makes combinations, of any algorithms. They share loss, batch
            size and horizon.
        target_loss: the loss on the training samples to get to, above 0; without it those that are
            left train to the horizon, and the lowest loss there wins.
        key: a `jax.random.key` for the batches, needed where there are some; all settings see the
            same ones.
        protocol: how batches are drawn, see `jaxttp.dynamics.batch_indices`.
        trainable: which parameters train, as in `empirical_ntk`; all of them when None.
        progress: called with (stage, settings done, settings in all).

    Returns:
        A `Race`. Weights and velocities of all that are in the race are held at a time. With
        batches the loss on all samples is looked at every N/(3 B) steps, so that to look costs as
        much as to train, and times are multiples of that.

    Raises:
        ValueError: no settings, or of several losses, batch sizes or horizons; a target that is not
            above 0; batches without a key; whatever `predict_training_time` refuses of model and
            data.
        TypeError: settings that are none.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxttp.forecast import grid
        >>> x = jnp.stack([jnp.linspace(-1, 1, 20), jnp.ones(20)], axis=1)
        >>> y = (x[:, 0] > 0).astype(int)
        >>> settings = grid(learning_rate=(0.1, 1.0), momentum=(0.0, 0.9), steps=50)
        >>> found = race(lambda w, x: x @ w, jnp.zeros((2, 2)), x, y, settings, target_loss=0.3)
        >>> str(found.settings[found.best()]), int(found.times[found.best()])
        ('rate 1, momentum 0.9', 3)

    Source:
        Successive halving (Jamieson and Talwalkar 2016), with a goal that ends it; the numbers of
        the heats were chosen on tuning tasks (`experiments/bench/advice.py`).
    """
    check_known(params=params, x=x, y=y, key=key, target_loss=target_loss)
    settings = _alike(settings)
    if target_loss is not None:
        check_number("target_loss", target_loss, above=0.0)
    goal = None if target_loss is None else Target(float(target_loss))
    one = settings[0]
    protocol = check_batches(one.batch_size, key, protocol, count(x))
    problem = Problem.of(apply_fn, params, x, y, loss=one.loss, trainable=trainable)
    track = _Track.of(problem, one, key, protocol)
    runners = [_Runner(setting, track) for setting in settings]
    alive, bar = list(range(len(runners))), None
    for end in heats(one.steps):
        for done, i in enumerate(alive):
            runners[i].advance(end if bar is None else min(end, bar), goal)
            bar = runners[i].there if runners[i].there is not None else bar
            if progress is not None:
                progress(f"training to step {end}", done, len(alive))
        if bar is not None:
            break
        alive = [i for i in alive if runners[i].finite]
        alive.sort(key=lambda i: runners[i].losses[-1])
        if end == one.steps or not alive:
            break
        going_on = alive[: max(LEAST, math.ceil(KEEP * len(alive)))]
        for i in alive[len(going_on) :]:
            runners[i].drop()
        alive = going_on
    return _result(settings, goal, runners, problem)


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


def _alike(settings: Sequence[Hyperparameters]) -> tuple[Hyperparameters, ...]:
    """Settings of one race."""
    settings = check_settings(settings)
    for name in ("loss", "batch_size", "steps"):
        values = {get_loss(s.loss) if name == "loss" else getattr(s, name) for s in settings}
        if len(values) > 1:
            said = ", ".join(sorted(str(getattr(s, name)) for s in settings[:8]))
            raise ValueError(
                f"settings must share {name}, to be in one race; got {said}: race every group by "
                "itself, or ask `sweep`."
            )
    return settings


@dataclasses.dataclass(frozen=True, eq=False)
class _Track:
    """What all run on: data, batches, programs, and when the loss is looked at."""

    problem: Problem
    value: Callable[..., Any]
    evaluate: Callable[..., Any]
    indices: np.ndarray | None
    every: int
    steps: dict[Any, Callable[..., Any]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls, problem: Problem, one: Hyperparameters, key: Array | None, protocol: str
    ) -> "_Track":
        n = len(problem.f0)
        programs = kept(_programs, problem.network, problem.loss)
        if one.batch_size is None:
            return cls(problem, *programs, None, 1)
        drawn = batch_indices(key, n, one.batch_size, one.steps, protocol=protocol)
        return cls(problem, *programs, np.asarray(drawn), math.ceil(n / (STEP * one.batch_size)))

    def step(self, stepper: optax.GradientTransformation) -> Callable[..., Any]:
        """A step of an algorithm, compiled once for all of its settings."""
        if stepper not in self.steps:
            problem = self.problem
            self.steps[stepper] = kept(_step, problem.network, problem.loss, stepper)
        return self.steps[stepper]

    def batch(self, t: int) -> tuple[Any, Array]:
        """The samples of step t, and their targets."""
        x, targets = self.problem.x, self.problem.targets
        if self.indices is None:
            return x, targets
        return take(x, self.indices[t]), targets[self.indices[t]]


@functools.lru_cache(maxsize=8)
def _programs(network: ApplyFn, loss: Loss) -> tuple[Callable, Callable]:
    """The loss of outputs, and the loss of weights."""
    return (
        jit(loss.value),
        jit(lambda w, x, targets: loss.value(network(w, x), targets)),
    )


_step = functools.lru_cache(maxsize=16)(make_step)


class _Runner:
    """A setting in training."""

    def __init__(self, setting: Hyperparameters, track: _Track) -> None:
        stepper, numbers = setting.stepper()
        self.rates, self.track, self.step = setting.rates(), track, track.step(stepper)
        self.weights = track.problem.weights
        self.state: Any = stepper.init(self.weights)
        for name, value in numbers.items():
            self._set(name, value)
        self.done, self.looks = 0, 0.0  # steps, and ways forward beside them
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
        track = self.track
        while self.done < end and self.running:
            t = self.done
            looking = t % track.every == 0 and self.seen < t
            if looking and track.indices is not None:
                self._look(t, goal)
                if not self.running:
                    return
            self._set("rate", self.rates[t])
            x, targets = track.batch(t)
            weights, state, f, _ = self.step(self.weights, self.state, x, targets)
            if looking and track.indices is None:
                self._note(t, float(track.value(f, targets)), goal)
                if not self.running:
                    self.looks += STEP  # a step that goes for nothing showed it
                    return
            self.weights, self.state, self.done = weights, state, t + 1
        if self.running and self.seen < self.done:
            self._look(self.done, goal)

    def _set(self, name: str, value: float) -> None:
        numbers = self.state.hyperparams
        numbers[name] = jnp.asarray(value, numbers[name].dtype)

    def _look(self, t: int, goal: Target | None) -> None:
        problem = self.track.problem
        self.looks += 1
        self._note(t, float(self.track.evaluate(self.weights, problem.x, problem.targets)), goal)

    def _note(self, t: int, loss: float, goal: Target | None) -> None:
        self.at.append(t)
        self.losses.append(loss)
        if goal is not None and loss <= goal.value:
            self.there = t

    def drop(self) -> None:
        """Out of the race: what it held may go."""
        self.weights = self.state = None


def _result(
    settings: tuple[Hyperparameters, ...],
    goal: Target | None,
    runners: Sequence[Any],
    problem: Problem,
) -> Race:
    n, one = len(problem.f0), settings[0]
    share = (one.batch_size or n) / n
    spent = sum(runner.done * share + runner.looks / STEP for runner in runners)
    ends = [(r.there if r.there is not None else one.steps + 1, r.losses[-1]) for r in runners]
    in_it = [i for i, r in enumerate(runners) if r.weights is not None and r.finite]
    first = min(in_it, key=lambda i: ends[i], default=None)
    longest = max(runners, key=lambda r: len(r.at))
    return Race(
        settings, goal,
        np.array([-1 if runner.there is None else runner.there for runner in runners]),
        tuple(np.array(runner.losses) for runner in runners), np.array(longest.at),
        float(spent / (one.steps * share)),
        None if first is None else problem.restore(runners[first].weights),
        np.array([runner.finite for runner in runners]), problem.notes,
    )  # fmt: skip
