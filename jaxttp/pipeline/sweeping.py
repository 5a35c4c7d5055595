"""From the name of a task to a sweep, or to a comparison of starting points."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxttp._checks import check_choice
from jaxttp._result import RESULT
from jaxttp.forecast import (
    Candidate,
    Comparison,
    Linearizer,
    Problem,
    Race,
    Sweep,
    compare,
    grid,
    race,
    sweep_kernel,
)
from jaxttp.forecast.hyperparameters import SCHEDULES
from jaxttp.forecast.leaders import follow_leaders, with_trust
from jaxttp.models import lora
from jaxttp.ntk import Exact, RowSharded
from jaxttp.ntk._select import leaf_paths
from jaxttp.pipeline._unused import check_unused
from jaxttp.pipeline.devices import mesh_of
from jaxttp.pipeline.goals import aims
from jaxttp.pipeline.lora_words import ALL, LoraSettings
from jaxttp.pipeline.optimizers import make_optimizer, warmed
from jaxttp.pipeline.settings import Settings
from jaxttp.pipeline.tasks import Task, build_task
from jaxttp.rule import Rule, Target
from jaxttp.training import time_step

Progress = Callable[[str, int, int], None]
RATES = 16
"""Learning rates of a sweep that names none."""
RANGE = (0.01, 2.0)
"""Their range as shares of the largest stable one; heavy-ball momentum allows up to twice that."""


@dataclasses.dataclass(frozen=True)
class TaskSweep:
    """A sweep over a named task.

    Attributes:
        settings: the task; its rate, momentum, schedule and batch size are not used.
        task: the network and data.
        sweep: the forecasts.
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
        """The largest stable constant rate without momentum, at the start of training."""
        limits, settings = self.sweep.max_learning_rate, self.sweep.settings
        return float(min(v / (1 + s.momentum) for v, s in zip(limits, settings, strict=True)))

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
            "rule": self.sweep.rule,
            "metric": self.sweep.metric,
            "max_learning_rate": self.max_learning_rate,
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
    threshold: float | None = None,
    metric: str | None = None,
    time_steps: bool = True,
    race_them: bool = False,
    task: Task | None = None,
    kernel: ArrayLike | RowSharded | None = None,
    progress: Progress | None = None,
) -> TaskSweep:
    """Forecast a grid of settings for a named task from one kernel, and those that lead again.

    Args:
        settings: data, samples, loss, horizon, warm-up of every schedule, thresholds, metric, seed;
            where there are target losses or errors, the advice is for the first of them. Their
            optimiser is "sgd": a sweep is of heavy-ball descent.
        learning_rates: when None 16, from a hundredth of the largest stable rate to twice it.
        momenta: heavy-ball.
        batch_sizes: None for full batches.
        schedules: names of `jaxttp.forecast.hyperparameters.SCHEDULES`.
        threshold: one of the settings' thresholds, or of their targets' values, for the advice;
            the first target when None, or where there is none a loss that the sweep chooses for
            all settings.
        metric: which curve the training times are read off; that of the settings when None.
        time_steps: also measure the seconds of a step, for every batch size.
        race_them: in place of forecasting those that lead again train all in heats, to the loss
            that the advice is for (`jaxttp.race`).
        task: what `build_task` makes of the settings, where it is at hand.
        kernel: its kernel (N, C, N, C), likewise; on a mesh as `RowSharded`.
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
    targets = aims(settings)
    _goal(threshold, settings.thresholds, targets)  # refuses what will not be forecast
    report = progress or (lambda stage, done, total: None)
    task = build_task(settings) if task is None else task
    problem = Problem.of(*task.model, task.x, task.y, loss=task.loss)
    first = kernel if kernel is None or isinstance(kernel, RowSharded) else jnp.asarray(kernel)
    estimator = Exact(mesh=mesh_of(settings.mesh))
    lines = Linearizer(problem, estimator, progress, first)
    key = jax.random.split(jax.random.key(settings.seed), 2)[0]
    common: dict[str, Any] = {
        "momentum": momenta, "batch_size": list(batch_sizes), "loss": task.loss,
        "steps": settings.steps, "schedule": [
            warmed(check_choice("schedule", name, SCHEDULES), settings.warmup, settings.steps)
            for name in schedules
        ],
    }  # fmt: skip
    if learning_rates is None:
        limit = lines.limit
        learning_rates = tuple(np.geomspace(RANGE[0] * limit, RANGE[1] * limit, RATES).tolist())
    seconds: dict[int | None, float] | None = None
    if time_steps:
        report("timing a step", 0, len(batch_sizes))
        seconds = {
            size: time_step(
                *task.model, task.x, task.y, loss=task.loss, batch_size=size,
                optimizer=make_optimizer(Settings()).transformation,
            ).seconds
            for size in batch_sizes
        }  # fmt: skip
    report("sweep", 0, 1)
    swept = sweep_kernel(
        lines.first, problem.f0, task.y, grid(learning_rate=learning_rates, **common),
        key=key, step_seconds=seconds, thresholds=settings.thresholds, targets=targets,
        metric=metric or settings.metric,
    )  # fmt: skip
    if not race_them:
        rule = Rule(settings.thresholds, metric=metric or settings.metric)
        swept = follow_leaders(
            swept, lines, task.y, rule, relinearize=settings.relinearize, key=key, progress=progress
        )
        swept = with_trust(swept, lines, task.y, key=key)
    goal = swept.ranked_by if threshold is None else _goal(threshold, settings.thresholds, targets)
    raced = _race(task, swept, goal, key, progress) if race_them else None
    return TaskSweep(settings, task, swept, goal, raced)


def _race(
    task: Task, swept: Sweep, goal: float | Target, key: Any, progress: Progress | None
) -> Race:
    """All settings of a sweep, trained in heats."""
    if not isinstance(goal, Target) or goal.curve_name != "loss":
        raise ValueError(
            f"race_them is to a loss; the advice is for {swept.goal(goal)}: name one, by "
            "target_loss."
        )
    return race(
        *task.model, task.x, task.y, swept.settings, target_loss=goal.value, key=key,
        progress=progress,
    )  # fmt: skip


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


STARTS = "every start is forecast by heavy-ball descent at one rate, its own best if none is given"
OTHERS = "a sweep is of heavy-ball descent; jaxttp predict forecasts others one by one"
ALIKE = "all are compared on the samples drawn, by forecasts alike; jaxttp predict knows it"
ADAPTERS = "lora"
START_NAMES = ("all", "head", "last", "bias", ADAPTERS)
"""What can be trained: all weights, the head, the head and the last block, the biases, low-rank
adapters."""
NamedNetwork = tuple[str | None, str | None]
"""A model's name and a file of weights, as in `Settings`."""


def starting_points(
    task: Task, names: Sequence[str] = START_NAMES, *, rank: int = Settings.rank
) -> dict[str, Candidate]:
    """Choices of what to train, by name, for the network of a task.

    Args:
        task: a `Task` whose network has a "head".
        names: of `START_NAMES`; other adapters than "lora" by their settings, with colons between
            them, as "lora:r=8:alpha=16" (see `LoraSettings`).
        rank: of the adapters of "lora".

    Returns:
        Candidates for `jaxttp.compare`.

    Raises:
        ValueError: an unknown name, or settings of adapters that do not fit.

    Example:
        >>> task = build_task(Settings(data="wine", samples_per_class=2))
        >>> sorted(starting_points(task, ("all", "head")))
        ['all', 'head']
    """
    found = (re.match(r"(\w+/\d+)/", path) for path in leaf_paths(task.model.params))
    blocks = [match.group(1) for match in found if match]
    last = max(blocks, key=lambda name: int(name.split("/")[1])) + "/" if blocks else "head"
    chosen: dict[str, Any] = {
        "all": None,
        "head": lambda path: path.startswith("head"),
        "last": lambda path: path.startswith(("head", last)),
        "bias": lambda path: path.endswith("bias"),
    }
    out = {}
    for name in names:
        if name.startswith(f"{ADAPTERS}:"):
            one = LoraSettings.read(name.removeprefix(f"{ADAPTERS}:").replace(":", ","))
        elif check_choice("start", name, START_NAMES) == ADAPTERS:
            one = LoraSettings(rank)
        else:
            one = None
        if one is not None:
            adapted = lora(
                task.model, rank=one.rank, key=jax.random.key(0), alpha=one.alpha,
                rslora=one.rslora, targets=None if one.modules == ALL else one.modules,
            )  # fmt: skip
            out[name] = Candidate(*adapted, x=task.x)
        else:
            out[name] = Candidate(*task.model, trainable=chosen[name], x=task.x)
    return out


def pair_networks(models: Sequence[str], weights: Sequence[str]) -> tuple[NamedNetwork, ...]:
    """Names of models and files of weights that belong together.

    Args:
        models: names, as in `Settings`.
        weights: files; "random" stands for none. One model may have several, several models have
            one each or none at all.

    Returns:
        Pairs (model, weights), at least one.

    Raises:
        ValueError: several models with another number of weights.

    Example:
        >>> pair_networks(("vgg5",), ("random", "trained.safetensors"))
        (('vgg5', None), ('vgg5', 'trained.safetensors'))
    """
    files = [None if name == "random" else name for name in weights]
    if len(models) > 1 and len(files) not in (0, len(models)):
        raise ValueError(
            f"weights: {len(models)} models need as many, or none ('random' for those without a "
            f"file); got {len(files)}."
        )
    names = list(models) or [None]
    if len(names) == 1:
        names *= max(1, len(files))
    return tuple(zip(names, files or [None] * len(names), strict=True))


def compare_task(
    settings: Settings,
    names: Sequence[str] | None = None,
    *,
    networks: Sequence[NamedNetwork] = (),
    learning_rate: float | None = None,
    thresholds: Sequence[float] | None = None,
    rule: str = "absolute",
    metric: str | None = None,
    time_steps: bool = True,
    progress: Progress | None = None,
) -> tuple[Task, Comparison]:
    """Which network, and what of it, to train: forecasts for a named task, ranked and explained.

    Args:
        settings: data, samples, loss, momentum, batch size, horizon, metric, rank of adapters and
            seed; target losses and errors, which rank before the thresholds.
        names: as in `starting_points`; when None "all" of several networks, all but "lora" of one.
        networks: models and weights to compare; that of the settings when empty.
        learning_rate: of all; each gets its own best when None.
        thresholds: the goals; the defaults of `compare` when None.
        rule: the definition of training time.
        metric: which curve it is read off; that of the settings when None.
        time_steps: also measure the seconds of a step.
        progress: called with (stage, done, total).

    Returns:
        ``(task, comparison)``; of several networks the first one's task.

    Raises:
        ValueError: whatever `build_task` and `compare` refuse.

    Example:
        >>> small = Settings(data="wine", samples_per_class=4, steps=20, relinearize=0)
        >>> _, found = compare_task(small, ("all", "head"), time_steps=False)
        >>> len(found.names)
        2
    """
    check_unused(settings, ("optimizer", "weight_decay", "nesterov", "schedule", "warmup"), STARTS)
    check_unused(settings, ("budget", "total_samples"), ALIKE)
    check_unused(settings, ("mesh",), "kernels are compared by decomposing them on one device")
    check_unused(settings, ("trainable",), "names say what is trained")
    several = len(networks) > 1
    names = names or (("all",) if several else START_NAMES[:-1])
    tasks: dict[str, Task] = {}
    for model, weights in networks or ((settings.model, settings.weights),):
        label = ", ".join(filter(None, (model, weights and Path(weights).stem))) or "default"
        one = dataclasses.replace(settings, model=model, weights=weights, rank=Settings.rank)
        tasks[label if label not in tasks else f"{label} ({len(tasks) + 1})"] = build_task(one)
    if "lora" not in names:
        check_unused(settings, ("rank",), "it is that of the adapters of 'lora'")
    candidates = {}
    for label, task in tasks.items():
        for name, one in starting_points(task, names, rank=settings.rank).items():
            words = (label, name) if several and len(names) > 1 else (label if several else name,)
            candidates[", ".join(words)] = one
    task = next(iter(tasks.values()))
    if several:
        words = f"{len(tasks)} networks on {settings.data}, {len(task.y)} samples, {task.loss}"
        task = dataclasses.replace(task, description=words)
    if progress is not None:
        progress("comparing", 0, 1)
    found = compare(
        candidates, task.x, task.y, loss=task.loss, learning_rate=learning_rate,
        momentum=settings.momentum, batch_size=settings.batch_size, steps=settings.steps,
        key=jax.random.key(settings.seed), time_steps=time_steps, thresholds=thresholds, rule=rule,
        relinearize=settings.relinearize,
        metric=metric or settings.metric, target_loss=settings.target_loss,
        target_error=settings.target_error,
    )  # fmt: skip
    return task, found
