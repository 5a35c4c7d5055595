"""From the name of a task to a sweep or a race of settings."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxttp._core.checks import check_choice
from jaxttp._core.results import RESULT
from jaxttp._core.types import Progress
from jaxttp.forecast import Hyperparameters, Linearizer, Problem, Race, Sweep, grid, race
from jaxttp.forecast.sweep import SweepPlan, forecast_leaders, screen, with_trust
from jaxttp.forecast.training_setup import DESCENT, SCHEDULES
from jaxttp.losses.rule import Rule, Target
from jaxttp.ntk import Exact, Sketched
from jaxttp.ntk.sharded import mesh_of
from jaxttp.pipeline.settings import Settings, check_unused, warmed
from jaxttp.pipeline.tasks import Task, build_task
from jaxttp.training import time_step

OTHERS = "algorithms and weight_decays name several"
ALIKE = "all are compared on the samples drawn, by forecasts alike; jaxttp predict knows it"
ADAPTIVE_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
"""Those of Adam and AdamW, for which no largest stable rate is known."""


@dataclasses.dataclass(frozen=True)
class TaskSweep:
    """A sweep over a named task.

    Attributes:
        settings: the task; its rate, momentum, schedule and batch size are not used.
        task: the network and data.
        sweep: the forecasts; beside a race those of gradient descent alone, for the goal.
        threshold: the goal that the advice is for, a threshold or a `Target`.
        race: of all settings to that goal, where one was asked for.
    """

    settings: Settings
    task: Task
    sweep: Sweep
    threshold: float | Target
    race: Race | None = None

    plot, _repr_html_, __repr__ = RESULT

    @property
    def max_learning_rate(self) -> float:
        """The largest stable constant rate without momentum, at the start of training.

        Infinite where all settings are of algorithms for which none is known.
        """
        limits, settings = self.sweep.max_learning_rate, self.sweep.settings
        known = [
            v / (1 + s.momentum) for v, s in zip(limits, settings, strict=True) if s.is_heavy_ball
        ]
        return float(min(known, default=np.inf))

    @property
    def fastest(self) -> int | None:
        """The setting that reaches the goal with the fewest steps; None where none does."""
        try:
            return self.sweep.best(self.threshold)
        except ValueError:
            return None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "task": self.task.description,
            "note": self.task.note,
            "settings": dataclasses.asdict(self.settings),
            "thresholds": list(self.sweep.thresholds),
            "threshold": (
                goal.value if isinstance(goal := self.threshold, Target) else self.threshold
            ),
            "goal": self.sweep.goal(self.threshold),
            "targets": [one.words() for one in self.sweep.targets],
            "rule": self.sweep.rule.kind,
            "metric": self.sweep.rule.metric,
            "max_learning_rate": limit if np.isfinite(limit := self.max_learning_rate) else None,
            "fastest": self.fastest,
            "pareto": list(self.sweep.pareto(self.threshold)),
            "rows": self.sweep.rows(),
            "race": None if self.race is None else self.race.to_json(),
        }


def sweep_task(
    settings: Settings,
    *,
    learning_rates: Sequence[float] | None = None,
    momenta: Sequence[float] = (0.0, 0.9),
    batch_sizes: Sequence[int | None] = (None,),
    schedules: Sequence[str] = ("constant",),
    algorithms: Sequence[str] = ("sgd",),
    weight_decays: Sequence[float] = (),
    threshold: float | None = None,
    metric: str | None = None,
    time_steps: bool = True,
    race_them: bool = False,
    task: Task | None = None,
    kernel: ArrayLike | None = None,
    progress: Progress | None = None,
) -> TaskSweep:
    """Forecast a grid of settings for a named task from one kernel, and those that lead again.

    Args:
        settings: data, samples, loss, horizon, warm-up of every schedule, thresholds, metric, width
            of a sketch, seed; where there are target losses or errors, the advice is for the first
            of them.
        learning_rates: of all; when None 16, from a hundredth of the largest stable rate to twice
            it, and for Adam and AdamW six from 1e-4 to 3e-2.
        momenta: of "sgd" and "nesterov", the latter's above 0.
        batch_sizes: None for full batches.
        schedules: names of `jaxttp.forecast.training_setup.SCHEDULES`.
        algorithms: of "sgd", "nesterov", "adam", "adamw". The last two are forecast by training the
            linearised network, about a training each (see `jaxttp.sweep`), unless they race.
        weight_decays: of all but "adam"; when empty none, and 0.01 for "adamw".
        threshold: one of the settings' thresholds, or of their targets' values, for the advice;
            the first target when None, or where there is none a loss that the sweep chooses for
            all settings.
        metric: which curve the training times are read off; that of the settings when None.
        time_steps: also measure the seconds of a step, for every batch size.
        race_them: in place of forecasting those that lead again train all in heats, to the loss
            that the advice is for (`jaxttp.race`).
        task: what `build_task` makes of the settings, where it is at hand.
        kernel: its kernel (N, C, N, C), likewise.
        progress: called with (stage, done, total).

    Returns:
        A `TaskSweep`.

    Raises:
        ValueError: whatever `build_task` and `sweep` refuse; a threshold that is not forecast; a
            race to anything but a loss.

    Example:
        >>> small = Settings(data="wine", samples_per_class=6, steps=20, relinearize=0)
        >>> result = sweep_task(small, momenta=(0.0,), time_steps=False)
        >>> len(result.sweep.settings), result.max_learning_rate > 0
        (16, True)
    """
    check_unused(settings, ("optimizer", "weight_decay", "nesterov"), OTHERS)
    check_unused(settings, ("budget", "total_samples"), ALIKE)
    targets = settings.targets()
    _goal(threshold, settings.thresholds, targets)  # refuses what will not be forecast
    report = progress or (lambda stage, done, total: None)
    task = build_task(settings) if task is None else task
    problem = Problem.of(*task.model, task.x, task.y, loss=task.loss)
    first = None if kernel is None else jnp.asarray(kernel)
    key = jax.random.split(jax.random.key(settings.seed), 2)[0]
    mesh, width = mesh_of(settings.mesh), settings.sketch_dim
    estimator = Exact(mesh=mesh) if width is None else Sketched(width, key, mesh=mesh)
    lines = Linearizer(problem, estimator, progress, first)
    common: dict[str, Any] = {
        "batch_size": list(batch_sizes), "loss": task.loss, "steps": settings.steps, "schedule": [
            warmed(check_choice("schedule", name, SCHEDULES), settings.warmup, settings.steps)
            for name in schedules
        ],
    }  # fmt: skip
    kinds = {"momentum": list(momenta), "weight_decay": list(weight_decays) or None}
    choices = _choices(algorithms, learning_rates, lines, kinds, common)
    screened = choices
    if race_them:  # forecasts are for the goal alone
        screened = tuple(one for one in choices if one.is_heavy_ball)
        screened = screened or _choices(("sgd",), None, lines, {"momentum": (0.0, 0.9)}, common)
    seconds = _seconds(task, screened, report) if time_steps else None
    report("sweep", 0, 1)
    rule = Rule(settings.thresholds, metric=metric or settings.metric)
    plan = SweepPlan(screened, len(problem.f0), rule, targets, key, None, seconds)
    swept = screen(lines, plan)
    if not race_them:
        swept = forecast_leaders(swept, lines, plan, relinearize=settings.relinearize)
        swept = with_trust(swept, lines, plan, swept.shown())
    goal = swept.ranked_by if threshold is None else _goal(threshold, settings.thresholds, targets)
    raced = _race(task, choices, swept.goal(goal), goal, key, progress) if race_them else None
    return TaskSweep(settings, task, swept, goal, raced)


def _choices(
    algorithms: Sequence[str],
    learning_rates: Sequence[float] | None,
    lines: Linearizer,
    kinds: Mapping[str, Any],
    common: Mapping[str, Any],
) -> tuple[Hyperparameters, ...]:
    """All combinations, of every algorithm those that it knows."""
    found: list[Hyperparameters] = []
    for name in algorithms:
        own: dict[str, Any] = {"learning_rate": learning_rates}
        if learning_rates is None:
            # Heavy-ball momentum allows up to twice the largest stable rate.
            around_limit = np.geomspace(0.01 * lines.limit, 2.0 * lines.limit, 16).tolist()
            own["learning_rate"] = around_limit if name in DESCENT else ADAPTIVE_RATES
        if name in DESCENT:
            if name == "nesterov" and not any(kinds["momentum"]):
                raise ValueError("momenta must hold one above 0, for algorithm 'nesterov'.")
            own["momentum"] = [m for m in kinds["momentum"] if m or name != "nesterov"]
        if name != "adam":
            own["weight_decay"] = kinds.get("weight_decay")
        found += grid(algorithm=name, **own, **common)
    return tuple(found)


def _seconds(task: Task, settings: Sequence[Hyperparameters], report: Progress) -> list[float]:
    """Seconds of a step of every setting, measured once for an algorithm and a batch size."""
    kinds = list(dict.fromkeys((one.algorithm, one.batch_size) for one in settings))
    found: dict[tuple[Any, int | None], float] = {}
    for done, (algorithm, size) in enumerate(kinds):
        report("timing a step", done, len(kinds))
        found[algorithm, size] = time_step(
            *task.model, task.x, task.y, loss=task.loss, batch_size=size,
            optimizer=Hyperparameters(1e-3, algorithm=algorithm).optimizer(),
        ).seconds  # fmt: skip
    return [found[one.algorithm, one.batch_size] for one in settings]


def _race(
    task: Task,
    settings: Sequence[Hyperparameters],
    words: str,
    goal: float | Target,
    key: Any,
    progress: Progress | None,
) -> Race:
    """All settings, trained in heats."""
    if not isinstance(goal, Target) or goal.curve_name != "loss":
        raise ValueError(
            f"race_them is to a loss; the advice is for {words}: name one, by target_loss."
        )
    return race(
        *task.model, task.x, task.y, settings, target_loss=goal.value, key=key, progress=progress
    )


def _goal(
    wanted: float | None, thresholds: Sequence[float], targets: Sequence[Target]
) -> float | Target:
    """What advice is for."""
    if wanted is None:
        return targets[0] if targets else thresholds[len(thresholds) // 2]
    for target in targets:
        if target.value == wanted:
            return target
    return check_choice("threshold", wanted, (*thresholds, *(one.value for one in targets)))
