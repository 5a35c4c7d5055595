"""The fastest setting, or starting point, by real training: successive halving.

For short training runs or small networks the kernels of a forecast cost more than training the
settings for a few steps. A race trains: all settings take a few steps, the better ones more
(`Rungs`), and so on, until the first of the remaining ones reaches the target.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp._core.checks import check_known, check_number
from jaxttp._core.progress import shown
from jaxttp._core.results import RESULT, wrapped
from jaxttp._core.traced import network_of
from jaxttp._core.types import ApplyFn, Params, Progress, count, take
from jaxttp.adapters.inputs import check_samples
from jaxttp.dynamics._network import loss_of_weights
from jaxttp.dynamics.batches import batch_indices, check_batches
from jaxttp.forecast.cost import STEP
from jaxttp.forecast.problem import Candidate, Problem, check_candidates, problem_of
from jaxttp.forecast.sweep_result import SHOWN
from jaxttp.forecast.training_setup import Hyperparameters, algorithm_name, check_settings
from jaxttp.losses import get_loss
from jaxttp.losses.rule import Target
from jaxttp.training import TrainingStep


@dataclasses.dataclass(frozen=True)
class Rungs:
    """Constants of a race, chosen on the tuning tasks of experiments/bench/races.py.

    Attributes:
        first: steps of the first rung.
        growth: ratio of the ends of consecutive rungs.
        keep: fraction of the settings that continue.
        least: least number of settings that continue.
        near: with batches the loss on all samples is evaluated where a batch's loss is below this
            multiple of the target.
    """

    first: int = 4
    growth: float = 1.6
    keep: float = 0.6
    least: int = 3
    near: float = 2.0

    def ends(self, steps: int) -> list[int]:
        """The steps at which a rung ends.

        Example:
            >>> Rungs().ends(20)
            [4, 7, 12, 20]
        """
        ends, end = [], self.first
        while end < steps:
            ends.append(end)
            end = math.ceil(self.growth * end)
        return [*ends, steps]


RUNGS = Rungs()


@dataclasses.dataclass(frozen=True)
class Race:
    """Results of real training, ranked; with starting points all pairs of these and settings.

    Attributes:
        settings: all that started, S of them.
        target: the loss on all training samples to get to; None for the lowest at the horizon.
        times: steps to the target (S,), -1 where it was not seen there.
        losses: on all training samples, for every setting at the steps `at`.
        at: the steps at which losses were evaluated, for every setting.
        trainings: FLOPs that were spent, in training runs of one setting.
        params: all parameters of the first one at the target, or, where none reached it, of the
            lowest loss at the end of the last rung. None where nothing stayed finite.
        notes: how the network is evaluated and trained, where that is not as it was given, such as
            "1 BatchNorm on running averages".
        starts: the starting point of each (S,), in a race of several; else empty.
    """

    settings: tuple[Hyperparameters, ...]
    target: Target | None
    times: np.ndarray
    losses: tuple[np.ndarray, ...]
    at: tuple[np.ndarray, ...]
    trainings: float
    params: Params | None
    notes: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()

    def named(self, i: int) -> str:
        """Setting i, with its starting point where there are several."""
        return f"{self.starts[i]}, {self.settings[i]}" if self.starts else str(self.settings[i])

    @property
    def finite(self) -> np.ndarray:
        """Whether all losses are finite, (S,): a run ends at the first that is not."""
        return np.isfinite([curve[-1] for curve in self.losses])

    @property
    def trained(self) -> np.ndarray:
        """Steps that every setting was trained, (S,)."""
        return np.array([at[-1] for at in self.at])

    def places(self) -> list[int]:
        """All that started: by steps to the target, by steps trained, then by the last loss."""
        last = np.array([curve[-1] for curve in self.losses])
        times = np.where(self.times >= 0, self.times, self.settings[0].steps + 1)
        return np.lexsort((last, -self.trained, ~self.finite, times)).tolist()

    @property
    def order(self) -> tuple[str, ...]:
        """Starting points, the first one first: each counts as its best setting.

        Those that were left out come by how far they got. Empty in a race of one start.
        """
        return tuple(dict.fromkeys(self.starts[i] for i in self.places())) if self.starts else ()

    def ranking(self) -> tuple[int, ...]:
        """Those that were seen at the target, by steps; without a target those at the end.

        Ties go to the lower loss.
        """
        is_ranked = self.times >= 0
        if self.target is None:
            is_ranked = self.finite & (self.trained == self.trained.max())
        return tuple(i for i in self.places() if is_ranked[i])

    def best(self) -> int:
        """The index of the first.

        Raises:
            ValueError: none got to the target, or nothing stayed finite.
        """
        order = self.ranking()
        if not order:
            raise ValueError(f"{self.advice}, more steps or a target that is nearer.")
        return order[0]

    @property
    def advice(self) -> str:
        """What to use, in one line."""
        order = self.ranking()
        if not order:
            what = "stayed finite" if self.target is None else f"got to {self.target.words()}"
            return f"no setting {what}: try other rates"
        if self.target is not None and self.times[order[0]] == 0:
            return f"{self.target.words()} holds before training already: name a lower target"
        advice = f"use {self._line(order[0])}"
        return advice if len(order) == 1 else f"{advice}; next {self._line(order[1])}"

    def _line(self, i: int) -> str:
        """Setting i with its time, or its last loss."""
        end = f"loss {self.losses[i][-1]:.4g} at step {self.trained[i]}"
        if self.target is not None and self.times[i] >= 0:
            end = f"{self.target.words()} at step {self.times[i]}"
        return f"{self.named(i)}: {end}"

    def rows(self) -> list[dict[str, Any]]:
        """One flat dictionary a setting, of plain values; None where there is no number."""
        return [
            {
                "start": self.starts[i] if self.starts else None,
                "setting": str(setting),
                "algorithm": algorithm_name(setting.algorithm),
                "learning_rate": float(setting.learning_rate),
                "momentum": float(setting.momentum),
                "weight_decay": setting.decay,
                "trained": int(self.trained[i]),
                "loss": float(self.losses[i][-1]) if self.finite[i] else None,
                "steps": int(self.times[i]) if self.times[i] >= 0 else None,
                "finite": bool(self.finite[i]),
            }
            for i, setting in enumerate(self.settings)
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "target": None if self.target is None else self.target.value,
            "first": self.ranking()[0] if self.ranking() else None,
            "order": list(self.order),
            "trainings": self.trainings,
            "advice": self.advice,
            "notes": list(self.notes),
            "rows": self.rows(),
        }

    def __str__(self) -> str:
        target = "the lowest loss" if self.target is None else self.target.words()
        several = f" of {len(self.order)} starting points" if self.starts else ""
        lines = [f"Race of {len(self.settings)} settings{several} to {target}, trained for real:"]
        lines += [f"  {self._line(i)}" for i in self.places()[:SHOWN]]
        if len(self.settings) > SHOWN:
            lines.append(f"  {len(self.settings) - SHOWN} more in rows()")
        if self.starts:
            lines.append(wrapped(f"  starting points: {', '.join(self.order)}", 2))
        lines.append(f"  cost: FLOPs of {self.trainings:.2g} of {len(self.settings)} training runs")
        lines.append(wrapped(f"  {self.advice}", 2))
        if self.notes:
            lines.append(wrapped(f"  trained with: {', '.join(self.notes)}", 2))
        return "\n".join(lines)

    plot, _repr_html_, __repr__ = RESULT


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
    progress: Progress | bool | None = None,
) -> Race:
    """Train settings by successive halving until the first reaches a loss.

    `apply_fn` trains in the mode in which it is given: adapters put BatchNorm on its running
    averages and switch dropout off (`Race.notes`). `params` are not changed. The first setting that
    reaches the loss ends the race; for the best setting of each algorithm race them separately.

    Unlike `sweep` a race trains. It includes the effects of high rates, growing curvature and
    noise, and costs a few training runs for dozens of settings: less than a sweep for small
    networks, more where a forecast costs 3 % of a training run.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``, in evaluation mode.
        params: pytree of floating-point arrays, the weights before training.
        x: training samples (N, ...), an array or a pytree of arrays with N rows each.
        y: integer labels (N,) or targets (N, C).
        settings: all that start; `grid` makes combinations, of any algorithms. They share loss,
            batch size and horizon.
        target_loss: the target, a loss on the training samples above 0; when None the remaining
            settings train to the horizon, and the lowest loss there wins.
        key: a `jax.random.key` for the batches, which all settings share.
        protocol: how batches are drawn, see `jaxttp.dynamics.batch_indices`.
        trainable: which parameters train, as in `empirical_ntk`; all of them when None.
        progress: as in `predict_training_time`; called with (stage, settings done, in all).

    Returns:
        A `Race`. Weights and velocities of all settings in the race are in memory at a time. With
        batches the loss on all samples is evaluated at the end of a rung and, where the batches'
        loss is at most twice the target, every N/(3 B) steps, which costs as much as training;
        times are multiples of that.

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
        >>> result = race(lambda w, x: x @ w, jnp.zeros((2, 2)), x, y, settings, target_loss=0.3)
        >>> str(result.settings[result.best()]), int(result.times[result.best()])
        ('rate 1, momentum 0.9', 3)

    Source:
        Successive halving (Jamieson and Talwalkar 2016), with a target that ends it; the numbers of
        the rungs were chosen on tuning tasks (`experiments/bench/races.py`).
    """
    check_known(params=params, x=x, y=y)
    return race_starts(
        {"": Candidate(apply_fn, params, trainable)}, x, y, settings,
        target_loss=target_loss, key=key, protocol=protocol, progress=progress,
    )  # fmt: skip


def race_starts(
    candidates: Mapping[str, Candidate],
    x: Any,
    y: Any,
    settings: Sequence[Hyperparameters],
    *,
    target_loss: float | None = None,
    key: Array | None = None,
    protocol: str | None = None,
    progress: Progress | bool | None = None,
) -> Race:
    """`race` for starting points: checkpoints, networks, sets of trained weights.

    The best start depends on its best rate, and a few steps suffice to find that rate. Every start
    begins with all settings, and slow pairs are dropped. `compare` forecasts instead, and explains
    the ranking; for networks that train in seconds a race is cheaper and more reliable.

    Args:
        candidates: starting points by name.
        x: training samples (N, ...), an array or a pytree of arrays with N rows each; a candidate
            may have them in a form of its own.
        y: integer labels (N,) or targets (N, C).
        settings: what every start is trained by. They share loss, batch size and horizon.
        target_loss: as in `race`.
        key: as in `race`; all see the same batches.
        protocol: as in `race`.
        progress: as in `race`.

    Returns:
        A `Race` of all pairs, whose `starts` name the starting points and `order` ranks them.
        `trainings` count every pair's steps by its own training run.

    Raises:
        ValueError: no candidates; whatever `race` refuses.
        TypeError: candidates or settings that are none.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxttp.forecast import grid
        >>> x = jnp.stack([jnp.linspace(-1, 1, 20), jnp.ones(20)], axis=1)
        >>> y = (x[:, 0] > 0).astype(int)
        >>> linear = lambda w, x: x @ w
        >>> weights = {"zero": jnp.zeros((2, 2)), "near": jnp.array([[-2.0, 2.0], [0.0, 0.0]])}
        >>> starts = {name: Candidate(linear, w) for name, w in weights.items()}
        >>> result = race_starts(starts, x, y, grid(learning_rate=(0.1, 1.0)), target_loss=0.15)
        >>> result.order, str(result.settings[result.best()])
        (('near', 'zero'), 'rate 1')

    Source:
        Successive halving, as `race`, with its numbers.
    """
    check_candidates(candidates)
    x = check_samples("x", x)
    check_known(key=key, target_loss=target_loss)
    settings = check_settings(settings)
    if len({(get_loss(s.loss), s.batch_size, s.steps) for s in settings}) > 1:
        raise ValueError(
            "settings must share loss, batch_size and steps, to be in one race; race every group "
            "by itself."
        )
    target = None
    if target_loss is not None:
        target = Target(float(check_number("target_loss", target_loss, above=0.0)))
    loss, batch_size, horizon = settings[0].loss, settings[0].batch_size, settings[0].steps
    protocol = check_batches(batch_size, key, protocol, count(x))
    indices = None
    if batch_size is not None:
        indices = np.asarray(batch_indices(key, count(x), batch_size, horizon, protocol=protocol))
    problems = {name: problem_of(name, start, x, y, loss) for name, start in candidates.items()}
    runners = []
    for problem in problems.values():
        steps: dict[Any, TrainingStep] = {}  # one serves all settings of an algorithm
        for setting in settings:
            optimizer, coefficients = setting.stepper()
            kind = setting.algorithm, *coefficients
            if kind not in steps:
                steps[kind] = TrainingStep(problem.network, problem.loss, optimizer)
            runners.append(Runner(setting, problem, indices, target, steps[kind]))
    _halve(runners, horizon, shown(progress))
    for problem in problems.values():
        # All settings see the same batches: one finite run shows that all gradients are finite.
        own = (runner for runner in runners if runner.problem is problem)
        problem.check_gradients(max(own, key=lambda runner: (runner.done, runner.finite)).losses)
    fraction = (batch_size or count(x)) / count(x)
    spent = sum(runner.done * fraction + runner.looks / STEP for runner in runners)
    times = np.array([-1 if runner.arrival is None else runner.arrival for runner in runners])
    notes = tuple(dict.fromkeys(n for problem in problems.values() for n in problem.notes))
    result = Race(
        settings * len(problems), target, times,
        tuple(np.array(runner.losses) for runner in runners),
        tuple(np.array(runner.at) for runner in runners),
        float(spent / (horizon * fraction)), None, notes,
        tuple(name for name in problems for _ in settings if name),  # `race` has no name
    )  # fmt: skip
    for i in result.places():
        if runners[i].finite and runners[i].weights is not None:
            params = runners[i].problem.restore(runners[i].weights)
            return dataclasses.replace(result, params=params)
    return result


@dataclasses.dataclass(eq=False)
class Runner:
    """A setting in training from the weights of a problem, until the loss reaches a target.

    Attributes:
        setting: the hyperparameters.
        problem: network and data.
        indices: of the batch of every step (T, B); None for all samples.
        target: a loss on all samples; None for none.
        step: of training, shared by all settings of an algorithm.
        done: steps taken.
        looks: further forward passes of all samples.
        losses: on all samples, at the steps `at`.
        at: the steps before which losses were evaluated.
        arrival: the step at which the target was reached.
    """

    setting: Hyperparameters
    problem: Problem
    indices: np.ndarray | None
    target: Target | None
    step: TrainingStep
    done: int = 0
    looks: float = 0.0
    losses: list[float] = dataclasses.field(default_factory=list)
    at: list[int] = dataclasses.field(default_factory=list)
    arrival: int | None = None

    def __post_init__(self) -> None:
        optimizer, coefficients = self.setting.stepper()
        self.rates, self.weights = self.setting.rates(), self.problem.weights
        self.state: Any = optimizer.init(self.weights)
        for name, value in coefficients.items():
            self._set(name, value)
        self.every, self.batch_loss = 1, math.inf
        if self.indices is not None:  # an evaluation of all samples costs as much as these steps
            self.every = math.ceil(len(self.problem.f0) / (STEP * self.indices.shape[1]))

    @property
    def finite(self) -> bool:
        """Whether all losses are finite: a run ends at the first that is not."""
        return not self.losses or math.isfinite(self.losses[-1])

    @property
    def running(self) -> bool:
        """Whether training goes on."""
        return self.arrival is None and self.finite

    @property
    def is_seen(self) -> bool:
        """Whether the loss at the present weights is known."""
        return bool(self.at) and self.at[-1] == self.done

    def advance(self, end: int) -> None:
        """Train to a step, or to the target, and evaluate the loss there."""
        while self.done < end and self.running:
            if self._is_due():
                self._look()
            else:
                self._train()
        if self.running and not self.is_seen:
            self._look()

    def _is_due(self) -> bool:
        """Whether the loss on all samples is evaluated before the next mini-batch."""
        if self.indices is None or self.done % self.every or self.is_seen:
            return False
        if self.done == 0 or not math.isfinite(self.batch_loss):
            return True
        return self.target is not None and self.batch_loss <= RUNGS.near * self.target.value

    def _look(self) -> None:
        problem, weights = self.problem, self.weights
        network = network_of(problem.network).precise(weights, problem.x)
        loss = loss_of_weights(network, weights, problem.x, problem.targets, loss=problem.loss)
        self.looks += 1
        self._note(float(loss))

    def _train(self) -> None:
        """Take a step; with full batches its loss is noted."""
        x, targets = self.problem.x, self.problem.targets
        if self.indices is not None:
            rows = self.indices[self.done]
            x, targets = take(x, rows), targets[rows]
        self._set("rate", self.rates[self.done])
        weights, state, f, _ = self.step(self.weights, self.state, x, targets)
        self.batch_loss = float(self.problem.loss.value(f, targets))
        if self.indices is None and not self.is_seen:
            self._note(self.batch_loss)
            if not self.running:
                self.looks += STEP  # the step is discarded
                return
        self.weights, self.state, self.done = weights, state, self.done + 1

    def _note(self, loss: float) -> None:
        self.at.append(self.done)
        self.losses.append(loss)
        if self.target is not None and loss <= self.target.value:
            self.arrival = self.done

    def _set(self, name: str, value: float) -> None:
        values = self.state.hyperparams
        values[name] = jnp.asarray(value, values[name].dtype)


def _halve(runners: Sequence[Runner], steps: int, progress: Progress | None) -> None:
    """Train runners until the first reaches the target, or the remaining ones the horizon.

    Runners that are dropped lose their weights.
    """
    alive, bound = list(runners), steps
    for end in RUNGS.ends(steps):
        for done, runner in enumerate(alive):
            runner.advance(min(end, bound))  # a later one cannot win
            bound = bound if runner.arrival is None else runner.arrival
            if progress is not None:
                progress(f"training to step {end}", done, len(alive))
        if end == steps or any(runner.arrival is not None for runner in alive):
            return
        alive = sorted((r for r in alive if r.finite), key=lambda r: r.losses[-1])
        kept = max(RUNGS.least, math.ceil(RUNGS.keep * len(alive)))
        for runner in alive[kept:]:
            runner.weights = runner.state = None
        alive = alive[:kept]
