"""Which setting, or which start, is first, by real training in heats: successive halving.

A forecast costs kernels. Where a training is short or a network small, these cost more than to
train the settings themselves for a few steps; and what was trained is never wrong about itself. So
this is no forecast, and says so: a race trains. All settings start, and the slow ones are left out
early: all train `FIRST` steps, the better `KEEP` of them `GROWTH` times as many in all, and so on,
`LEAST` of them to the end, which is where the first of those that are left is at the goal: a later
one cannot win.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxttp._core.checks import check_known, check_number
from jaxttp._core.traced import network_of
from jaxttp._core.types import ApplyFn, Params, count, take
from jaxttp.adapters.inputs import check_samples
from jaxttp.dynamics._network import loss_of_weights
from jaxttp.dynamics.batches import batch_indices, check_batches
from jaxttp.forecast.cost import STEP
from jaxttp.forecast.problem import Candidate, Problem, check_candidates, problem_of
from jaxttp.forecast.raced import Race
from jaxttp.forecast.training_setup import Hyperparameters, check_settings
from jaxttp.losses import get_loss
from jaxttp.losses.rule import Target
from jaxttp.training import TrainingStep

Progress = Callable[[str, int, int], None]
FIRST, GROWTH, KEEP, LEAST = 4, 1.6, 0.6, 3
"""Steps of the first heat, how they grow, which share goes on, and how many at least."""
NEAR = 2.0
"""With batches the loss on all samples is looked for from where a batch's is so many goals."""


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
    progress: Progress | None = None,
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
        batches the loss on all samples is looked at where a heat ends and, as long as the batches
        themselves are at no more than twice the goal, every N/(3 B) steps, so that to look costs as
        much as to train; times are multiples of that.

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
        the heats were chosen on tuning tasks (`experiments/bench/races.py`).
    """
    check_known(params=params, x=x, y=y)
    x, settings = check_samples("x", x), _alike(settings)
    of_problem = functools.partial(
        Problem.of, apply_fn, params, x, y, loss=settings[0].loss, trainable=trainable
    )
    return _race({"": of_problem}, {"": settings}, x, target_loss, key, protocol, progress)


def race_starts(
    candidates: Mapping[str, Candidate],
    x: Any,
    y: Any,
    settings: Sequence[Hyperparameters] | Mapping[str, Sequence[Hyperparameters]],
    *,
    target_loss: float | None = None,
    key: Array | None = None,
    protocol: str | None = None,
    progress: Progress | None = None,
) -> Race:
    """`race` for starting points: checkpoints, networks, what is trained, each by every setting.

    Which start is best depends on the rate that suits it, and a rate that suits is found with a few
    steps: so every start begins with all settings, and what is slow is left out, start or rate.
    `compare` forecasts instead, and says why; of networks that train in seconds this is the better
    guide at a fraction of the cost.

    Args:
        candidates: starting points by name.
        x: training samples (N, ...), an array or a pytree of arrays with N rows each; a candidate
            may have them in a form of its own.
        y: integer labels (N,) or targets (N, C).
        settings: what every start is trained by; or by the name of a start, its own. They share
            loss, batch size and horizon.
        target_loss: as in `race`.
        key: as in `race`; all see the same batches.
        protocol: as in `race`.
        progress: as in `race`.

    Returns:
        A `Race` of all pairs, whose `starts` name the starting points and `order` ranks them.
        `trainings` count every pair's steps by a training of its own.

    Raises:
        ValueError: no candidates; names of settings that are not those of the candidates; whatever
            `race` refuses.
        TypeError: candidates or settings that are none.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxttp.forecast import grid
        >>> x = jnp.stack([jnp.linspace(-1, 1, 20), jnp.ones(20)], axis=1)
        >>> y = (x[:, 0] > 0).astype(int)
        >>> linear = lambda w, x: x @ w
        >>> ways = {"zero": jnp.zeros((2, 2)), "near": jnp.array([[-2.0, 2.0], [0.0, 0.0]])}
        >>> starts = {name: Candidate(linear, w) for name, w in ways.items()}
        >>> found = race_starts(starts, x, y, grid(learning_rate=(0.1, 1.0)), target_loss=0.15)
        >>> found.order, str(found.settings[found.best()])
        (('near', 'zero'), 'rate 1')

    Source:
        Successive halving, as `race`, with its numbers.
    """
    check_candidates(candidates)
    by_start = _by_start(candidates, settings)
    x, one = check_samples("x", x), next(iter(by_start.values()))[0]
    problems = {
        name: functools.partial(problem_of, name, start, x, y, one.loss)
        for name, start in candidates.items()
    }
    return _race(problems, by_start, x, target_loss, key, protocol, progress)


def _race(
    problems: Mapping[str, Callable[[], Problem]],
    by_start: Mapping[str, Sequence[Hyperparameters]],
    x: Any,
    target_loss: float | None,
    key: Array | None,
    protocol: str | None,
    progress: Progress | None,
) -> Race:
    """A race of starting points by name, each by its settings; of one start its name is empty.

    Problems are made here, after all that is cheaper to refuse.
    """
    check_known(key=key, target_loss=target_loss)
    every = _alike([one for some in by_start.values() for one in some])
    one, goal = every[0], _goal(target_loss)
    protocol = check_batches(one.batch_size, key, protocol, count(x))
    runners, starts = [], []
    for name, of_problem in problems.items():
        track = Track(of_problem(), one, key, protocol)
        runners += [Runner(setting, track) for setting in by_start[name]]
        starts += [name] * len(by_start[name]) if name else []
    run_heats(runners, one.steps, goal, progress)
    return _result(every, goal, runners, tuple(starts))


def _by_start(
    candidates: Mapping[str, Candidate],
    settings: Sequence[Hyperparameters] | Mapping[str, Sequence[Hyperparameters]],
) -> dict[str, tuple[Hyperparameters, ...]]:
    """The settings of every start."""
    if not isinstance(settings, Mapping):
        return dict.fromkeys(candidates, check_settings(settings))
    if set(settings) != set(candidates):
        raise ValueError(
            f"settings must have those of every candidate, {', '.join(map(repr, candidates))}, and "
            f"of no other; got those of {', '.join(map(repr, settings)) or 'none'}."
        )
    return {name: check_settings(settings[name]) for name in candidates}


def _goal(target_loss: float | None) -> Target | None:
    if target_loss is None:
        return None
    check_number("target_loss", target_loss, above=0.0)
    return Target(float(target_loss))


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


class Track:
    """What all run on: data, batches, programs, and how often the loss is looked at."""

    def __init__(
        self, problem: Problem, one: Hyperparameters, key: Array | None, protocol: str
    ) -> None:
        self.problem = problem
        self.indices: np.ndarray | None = None
        self.every = 1
        self._steps: dict[Any, TrainingStep] = {}
        if one.batch_size is not None:
            n = len(problem.f0)
            drawn = batch_indices(key, n, one.batch_size, one.steps, protocol=protocol)
            self.indices, self.every = np.asarray(drawn), math.ceil(n / (STEP * one.batch_size))

    def evaluate(self, weights: Params) -> Array:
        """The loss of weights, on all samples."""
        problem = self.problem
        network = network_of(problem.network).precise(weights, problem.x)
        return loss_of_weights(network, weights, problem.x, problem.targets, loss=problem.loss)

    def step(
        self, algorithm: Any, stepper: optax.GradientTransformation, numbers: dict[str, float]
    ) -> TrainingStep:
        """A step of an algorithm, compiled once for all of its settings."""
        key = algorithm, *numbers
        if key not in self._steps:
            self._steps[key] = TrainingStep(self.problem.network, self.problem.loss, stepper)
        return self._steps[key]

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
            self.batch_loss = float(track.problem.loss.value(f, targets))
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


def run_heats(
    runners: Sequence[Runner],
    steps: int,
    goal: Target | None,
    progress: Progress | None = None,
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
            one.weights = one.state = None  # what it held may go
        alive = going_on


def _result(
    settings: tuple[Hyperparameters, ...],
    goal: Target | None,
    runners: Sequence[Runner],
    starts: tuple[str, ...] = (),
) -> Race:
    problems: list[Problem] = [runner.track.problem for runner in runners]
    for problem in {id(problem): problem for problem in problems}.values():
        # All settings see the same batches: what outlived a sample shows that its gradient is good.
        own = (runner for runner in runners if runner.track.problem is problem)
        problem.check_gradients(max(own, key=lambda one: (one.done, one.finite)).losses)
    n, one = len(problems[0].f0), settings[0]
    share = (one.batch_size or n) / n
    spent = sum(runner.done * share + runner.looks / STEP for runner in runners)
    ends = [(r.there if r.there is not None else one.steps + 1, r.losses[-1]) for r in runners]
    in_it = [i for i, r in enumerate(runners) if r.weights is not None and r.finite]
    first = min(in_it, key=lambda i: ends[i], default=None)
    notes = dict.fromkeys(note for problem in problems for note in problem.notes)
    return Race(
        settings, goal,
        np.array([-1 if runner.there is None else runner.there for runner in runners]),
        tuple(np.array(runner.losses) for runner in runners),
        tuple(np.array(runner.at) for runner in runners),
        float(spent / (one.steps * share)),
        None if first is None else problems[first].restore(runners[first].weights),
        np.array([runner.finite for runner in runners]), tuple(notes), starts,
    )  # fmt: skip
