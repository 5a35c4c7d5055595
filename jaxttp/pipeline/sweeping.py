"""From the name of a task to a sweep or a race of settings."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxttp._core.checks import check_choice
from jaxttp._core.results import RESULT, plain_number
from jaxttp._core.types import Progress
from jaxttp.forecast import Hyperparameters, Linearizer, Problem, Race, Sweep, grid, race
from jaxttp.forecast.sweep import SweepPlan, forecast_leaders, screen, with_warnings
from jaxttp.forecast.training_setup import DESCENT, SCHEDULES
from jaxttp.losses.rule import Rule
from jaxttp.ntk import Exact, Sketched
from jaxttp.ntk.sharded import mesh_of
from jaxttp.pipeline.settings import Settings, check_unused, warmed
from jaxttp.pipeline.tasks import Task, build_task
from jaxttp.training import time_step

RACED_RATES = (1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Learning rates of a race that names none: what is too high is seen in the first rung."""
ADAPTIVE_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
"""Those of Adam and AdamW, for which no largest stable rate is known."""
ALIKE = "all are compared on the samples drawn, by forecasts alike; jaxttp predict knows it"
RACED = "a race trains, on one device, to one loss (target_loss), and builds no kernel"


@dataclasses.dataclass(frozen=True)
class Choices:
    """A grid of settings by names and numbers.

    Attributes:
        learning_rates: of all. When None a sweep takes 16, from a hundredth of the largest stable
            rate to twice it, a race 13 from 0.001 to 10; for Adam and AdamW six from 1e-4 to 3e-2.
        momenta: of "sgd" and "nesterov", the latter's above 0.
        batch_sizes: None for full batches.
        schedules: names of `jaxttp.forecast.training_setup.SCHEDULES`.
        algorithms: of "sgd", "nesterov", "adam", "adamw". The last two are forecast by training the
            linearized network, about one training run each (see `jaxttp.sweep`), unless they race.
        weight_decays: of all but "adam"; when empty none, and 0.01 for "adamw".
    """

    learning_rates: Sequence[float] | None = None
    momenta: Sequence[float] = (0.0, 0.9)
    batch_sizes: Sequence[int | None] = (None,)
    schedules: Sequence[str] = ("constant",)
    algorithms: Sequence[str] = ("sgd",)
    weight_decays: Sequence[float] = ()

    def grid(
        self, settings: Settings, task: Task, rates: Sequence[float]
    ) -> tuple[Hyperparameters, ...]:
        """All combinations, of every algorithm those that it knows.

        Args:
            settings: whose horizon and warm-up they share.
            task: whose loss they share.
            rates: of descent, where no rates are named.
        """
        settings_list: list[Hyperparameters] = []
        schedules = [
            warmed(check_choice("schedule", name, SCHEDULES), settings.warmup, settings.steps)
            for name in self.schedules
        ]
        for name in self.algorithms:
            values: dict[str, Any] = {"learning_rate": self.learning_rates}
            if self.learning_rates is None:
                values["learning_rate"] = rates if name in DESCENT else ADAPTIVE_RATES
            if name in DESCENT:
                if name == "nesterov" and not any(self.momenta):
                    raise ValueError("momenta must hold one above 0, for algorithm 'nesterov'.")
                values["momentum"] = [m for m in self.momenta if m or name != "nesterov"]
            if name != "adam":
                values["weight_decay"] = list(self.weight_decays) or None
            settings_list += grid(
                algorithm=name, batch_size=list(self.batch_sizes), schedule=schedules,
                loss=task.loss, steps=settings.steps, **values,
            )  # fmt: skip
        return tuple(settings_list)


@dataclasses.dataclass(frozen=True)
class TaskSweep:
    """A sweep over a named task.

    Attributes:
        settings: the task; its rate, momentum, schedule and batch size are not used.
        task: the network and data.
        sweep: the forecasts; advice is for its `ranked_by`.
    """

    settings: Settings
    task: Task
    sweep: Sweep

    plot, _repr_html_, __repr__ = RESULT

    @property
    def max_learning_rate(self) -> float:
        """The largest stable constant rate without momentum, at the start of training.

        Infinite where all settings are of algorithms for which none is known.
        """
        largest = np.inf
        for setting, limit in zip(self.sweep.settings, self.sweep.max_learning_rate, strict=True):
            if setting.is_heavy_ball:
                largest = min(largest, limit / (1 + setting.momentum))
        return float(largest)

    @property
    def target(self) -> str:
        """The target in words."""
        return self.sweep.label(self.sweep.ranked_by)

    @property
    def fastest(self) -> int | None:
        """The setting that reaches the target with the fewest steps; None where none does."""
        return next(iter(self.sweep.ranking()), None)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        result = self.sweep
        return {
            "task": self.task.description,
            "note": self.task.note,
            "settings": dataclasses.asdict(self.settings),
            "thresholds": list(result.thresholds),
            "target": self.target,
            "targets": [target.words() for target in result.targets],
            "rule": result.rule.kind,
            "metric": result.rule.metric,
            "max_learning_rate": plain_number(self.max_learning_rate),
            "fastest": self.fastest,
            "pareto": list(result.pareto()),
            "rows": result.rows(),
        }


def sweep_task(
    settings: Settings,
    choices: Choices = Choices(),
    *,
    time_steps: bool = True,
    task: Task | None = None,
    kernel: ArrayLike | None = None,
    progress: Progress | None = None,
) -> TaskSweep:
    """Forecast a grid of settings for a named task from one kernel, and those that lead again.

    Args:
        settings: data, samples, loss, horizon, warm-up of every schedule, thresholds, metric, width
            of a sketch, seed; where there are target losses or errors, the advice is for the first
            of them, else for a loss that the sweep chooses for all settings.
        choices: the grid.
        time_steps: also measure the seconds of a step, for every algorithm and batch size.
        task: what `build_task` makes of the settings, where it is available.
        kernel: its kernel (N, C, N, C), likewise.
        progress: called with (stage, done, total).

    Returns:
        A `TaskSweep`.

    Raises:
        ValueError: whatever `build_task` and `sweep` refuse.

    Example:
        >>> small = Settings(data="wine", samples_per_class=6, steps=20, relinearize=0)
        >>> result = sweep_task(small, Choices(momenta=(0.0,)), time_steps=False)
        >>> len(result.sweep.settings), result.max_learning_rate > 0
        (16, True)
    """
    check_unused(settings, ("budget", "total_samples"), ALIKE)
    tell = progress or (lambda *_: None)
    task = _task(settings) if task is None else task
    tell("kernel", 0, 1)
    problem = Problem.of(*task.model, task.x, task.y, loss=task.loss)
    first = None if kernel is None else jnp.asarray(kernel)
    key = jax.random.split(jax.random.key(settings.seed), 2)[0]
    mesh, width = mesh_of(settings.mesh), settings.sketch_dim
    estimator = Exact(mesh=mesh) if width is None else Sketched(width, key, mesh=mesh)
    linearizer = Linearizer(problem, estimator, progress, first)
    # Heavy-ball momentum allows up to twice the largest stable rate.
    around_limit = np.geomspace(0.01, 2.0, 16) * linearizer.limit
    grid = choices.grid(settings, task, around_limit.tolist())
    seconds = _step_seconds(task, grid, tell) if time_steps else None
    tell("sweep", 0, 1)
    rule = Rule(settings.thresholds, metric=settings.metric)
    plan = SweepPlan(grid, len(problem.f0), rule, settings.targets(), key, None, seconds)
    result = screen(linearizer, plan)
    result = forecast_leaders(result, linearizer, plan, relinearize=settings.relinearize)
    return TaskSweep(settings, task, with_warnings(result, linearizer, plan, result.shown()))


def race_task(
    settings: Settings, choices: Choices = Choices(), *, progress: Progress | None = None
) -> tuple[Task, Race]:
    """Train a grid of settings for a named task in rungs, the slow ones left out early.

    Args:
        settings: data, samples, loss, horizon, warm-up of every schedule and seed; one target loss,
            or none for the lowest loss at the horizon.
        choices: the grid; one batch size.
        progress: called with (stage, done, total).

    Returns:
        ``(task, race)``.

    Raises:
        ValueError: targets other than one loss; whatever `build_task` and `race` refuse.

    Example:
        >>> small = Settings(data="wine", samples_per_class=4, steps=20, target_loss=(0.5,))
        >>> _, result = race_task(small, Choices(learning_rates=(0.03, 0.3), momenta=(0.0,)))
        >>> str(result.settings[result.ranking()[0]])
        'rate 0.3'
    """
    unused = ("relinearize", "sketch_dim", "thresholds", "metric", "target_error", "mesh")
    check_unused(settings, unused, RACED)
    if len(settings.target_loss) > 1:
        raise ValueError(f"target_loss={settings.target_loss} must be one loss, a race's target.")
    task = _task(settings)
    found = race(
        *task.model, task.x, task.y, choices.grid(settings, task, RACED_RATES),
        target_loss=next(iter(settings.target_loss), None), progress=progress,
        key=jax.random.key(settings.seed),
    )  # fmt: skip
    return task, found


def _task(settings: Settings) -> Task:
    names = ("optimizer", "weight_decay", "nesterov")
    check_unused(settings, names, "algorithms and weight_decays name several")
    return build_task(settings)


def _step_seconds(task: Task, settings: Sequence[Hyperparameters], tell: Progress) -> list[float]:
    """Seconds of a step of every setting, measured once for an algorithm and a batch size."""
    seconds: dict[Any, Any] = dict.fromkeys((s.algorithm, s.batch_size) for s in settings)
    for done, (algorithm, size) in enumerate(seconds):
        tell("timing a step", done, len(seconds))
        seconds[algorithm, size] = time_step(
            *task.model, task.x, task.y, loss=task.loss, batch_size=size,
            optimizer=Hyperparameters(1e-3, algorithm=algorithm).optimizer(),
        ).seconds  # fmt: skip
    return [seconds[s.algorithm, s.batch_size] for s in settings]
