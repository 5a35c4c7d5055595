"""A forecast in steps and seconds from the name of a task, and the real training run."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxttp._core.checks import check_used
from jaxttp._core.process import versions
from jaxttp._core.results import RESULT, plain_number, plain_numbers
from jaxttp._core.types import Progress, take
from jaxttp.forecast import Prediction, predict_training_time
from jaxttp.losses.rule import Target, target_label
from jaxttp.ntk.sharded import mesh_of
from jaxttp.pipeline.settings import Settings, check_unused, hyperparameters
from jaxttp.pipeline.tasks import Task, build_task
from jaxttp.training import StepTime, TrainingRun, time_step, train


class Arrival(NamedTuple):
    """When one threshold or target is reached.

    Attributes:
        words: what is reached, "10 % of the loss decrease left" or "loss below 0.3".
        steps: predicted, -1 for never.
        seconds: predicted; None for never.
        unsure: by how many steps the forecast may be off, where it says so.
        real_steps: of the real training; None without one, -1 for never.
        real_seconds: likewise (no compilation, no evaluation); None for never, too.
    """

    words: str
    steps: int
    seconds: float | None
    unsure: int | None
    real_steps: int | None
    real_seconds: float | None


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A forecast in steps and in seconds, and what really happened where that was asked for.

    Attributes:
        settings: what was asked for.
        task: the network and data.
        prediction: in steps.
        step_time: the measured time of one training step on this device.
        run: the real training, or None.
    """

    settings: Settings
    task: Task
    prediction: Prediction
    step_time: StepTime
    run: TrainingRun | None = None

    plot, _repr_html_, __repr__ = RESULT

    @property
    def arrivals(self) -> dict[float | Target, Arrival]:
        """When every threshold and target of the prediction is reached, forecast and real.

        A real run that diverged, which a forecast need not predict, reaches nothing.
        """
        prediction, run = self.prediction, self.run
        unsure = {**(prediction.steps_uncertainty or {}), **prediction.targets_uncertainty}
        labels = {e: target_label(e, prediction.rule, prediction.metric) for e in prediction.steps}
        labels |= {target: target.words() for target in prediction.targets}
        real: dict[Any, int] = {}
        real_step = 0.0
        if run is not None:
            rule, metric = prediction.rule, prediction.metric
            real |= run.read(tuple(prediction.steps), rule=rule, metric=metric)
            real |= run.reach(prediction.targets)
            real_step = run.seconds / prediction.horizon

        def seconds(steps: int | None, step_seconds: float) -> float | None:
            return None if steps is None or steps < 0 else steps * step_seconds

        return {
            target: Arrival(
                labels[target], steps, seconds(steps, self.step_time.seconds), unsure.get(target),
                real.get(target), seconds(real.get(target), real_step),
            )
            for target, steps in {**prediction.steps, **prediction.targets}.items()
        }  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Plain values; thresholds become strings, seconds have an entry "horizon" too.

        Losses of a real run that diverged are None where they are not finite.
        """
        prediction, run, arrivals = self.prediction, self.run, self.arrivals
        budget = self.settings.budget
        plain = {"loss": self.task.loss, "budget": "inf" if budget == math.inf else budget}
        settings = dataclasses.asdict(self.settings) | plain

        def by_threshold(field: str) -> dict[str, Any]:
            values = {repr(e): getattr(arrivals[e], field) for e in prediction.steps}
            return {e: value for e, value in values.items() if value is not None}

        real = None
        if run is not None:
            real = {
                "steps": by_threshold("real_steps"),
                "loss": plain_numbers(run.loss),
                "error": plain_numbers(run.error),
                "seconds": by_threshold("real_seconds") | {"horizon": run.seconds},
            }
        step_seconds = self.step_time.seconds
        return {
            "steps": by_threshold("steps"),
            "horizon": prediction.horizon,
            "loss": plain_numbers(prediction.loss),
            "error": plain_numbers(prediction.error),
            "hyperparameters": {**prediction.hyperparameters, **settings},
            "max_learning_rate": plain_number(prediction.max_learning_rate),
            "stable": prediction.stable,
            "warnings": prediction.warnings,
            "plan": prediction.plan,
            "rule": prediction.rule,
            "metric": prediction.metric,
            "targets": [
                {"metric": target.metric, "value": target.value, **arrivals[target]._asdict()}
                for target in prediction.targets
            ],
            "dynamics": prediction.dynamics,
            "seconds": by_threshold("seconds") | {"horizon": prediction.horizon * step_seconds},
            "step_seconds": step_seconds,
            "cost": dataclasses.asdict(prediction.cost),
            "task": self.task.description,
            "note": self.task.note,
            "versions": versions(),
            "verified": real,
        }


@dataclasses.dataclass(frozen=True)
class TaskRun:
    """The real training run of a named task.

    Attributes:
        settings: what was asked for.
        task: the network and data.
        run: the training.
        steps: by what is reached, in words, the first step there; -1 for never.
    """

    settings: Settings
    task: Task
    run: TrainingRun
    steps: Mapping[str, int]

    plot, _repr_html_, __repr__ = RESULT

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.run.seconds / self.settings.steps

    def to_json(self) -> dict[str, Any]:
        """Plain values; losses of a run that diverged are None where they are not finite."""
        return {
            "steps": dict(self.steps),
            "seconds": {
                words: step * self.step_seconds for words, step in self.steps.items() if step >= 0
            },
            "horizon": self.settings.steps,
            "loss": plain_numbers(self.run.loss),
            "error": plain_numbers(self.run.error),
            "task": self.task.description,
            "versions": versions(),
        }


def train_task(settings: Settings, *, progress: Progress | None = None) -> TaskRun:
    """Train a named task for real, without a forecast.

    Args:
        settings: what to train.
        progress: called with (stage, done, total).

    Returns:
        A `TaskRun`.

    Raises:
        ValueError: settings of a forecast alone; whatever `build_task` refuses.

    Example:
        >>> small = Settings(data="wine", samples_per_class=8, steps=20, learning_rate=0.1)
        >>> list(train_task(small).steps)[0]
        '1 % of the loss decrease left'
    """
    forecast_only = ("total_samples", "relinearize", "budget", "sketch_dim", "mesh")
    check_unused(settings, forecast_only, "it is for a forecast, and this is a real training")
    task = build_task(settings)
    run = _train(settings, task, _setup(settings, task), progress)
    reached = run.read(settings.thresholds, metric=settings.metric)
    words = {target_label(e, "relative", settings.metric): step for e, step in reached.items()}
    on_targets = run.reach(settings.targets())
    words |= {target.words(): step for target, step in on_targets.items()}
    return TaskRun(settings, task, run, words)


def _setup(settings: Settings, task: Task) -> dict[str, Any]:
    """The training setup of a task, as `train`, `time_step` and forecasts take it."""
    optimizer = hyperparameters(settings).optimizer()
    return {"loss": task.loss, "batch_size": settings.batch_size, "optimizer": optimizer}


def _train(
    settings: Settings, task: Task, setup: dict[str, Any], progress: Progress | None
) -> TrainingRun:
    """The real training of a task.

    It has another draw of batches than the forecast: those of a training run are not known before.
    """
    report = None if progress is None else lambda i, n: progress("real training", i, n)
    return train(
        *task.model, task.x, task.y, **setup, steps=settings.steps, progress=report,
        key=jax.random.split(jax.random.key(settings.seed))[1],
    )  # fmt: skip


def forecast(
    settings: Settings, *, verify: bool = False, progress: Progress | None = None
) -> Forecast:
    """Forecast the training of a named task in steps and seconds; with `verify`, train it too.

    Args:
        settings: what to forecast.
        verify: also run the real training, after the forecast.
        progress: called with (stage, done, total).

    Returns:
        A `Forecast`.

    Raises:
        ValueError: `total_samples` with `verify`; whatever `build_task` and `predict_training_time`
            refuse.

    Example:
        >>> small = Settings(data="wine", samples_per_class=8, steps=20, learning_rate=0.1)
        >>> result = forecast(small)
        >>> result.prediction.loss.shape, result.run is None
        ((21,), True)
    """
    hint = "verify=True would train on the given samples; leave one of the two out"
    check_used("total_samples", settings.total_samples, not verify, hint)
    task = build_task(settings)
    key = jax.random.split(jax.random.key(settings.seed))[0]
    batch_size, setting = settings.batch_size, hyperparameters(settings)
    total = settings.total_samples or len(task.y)
    # The samples of a step: a batch, or all of them.
    rows = np.arange(min(total, batch_size or total)) % len(task.y)
    step = _setup(settings, task)
    options = settings.pick(
        "steps", "thresholds", "metric", "target_loss", "target_error", "relinearize", "sketch_dim",
        "budget", "total_samples",
    )  # fmt: skip
    options |= step
    if setting.schedule == "constant" and setting.is_heavy_ball:
        options |= settings.pick("learning_rate", "momentum") | {"optimizer": None}
    prediction = predict_training_time(
        *task.model, task.x, task.y, **options, key=key, mesh=mesh_of(settings.mesh),
        progress=progress,
    )  # fmt: skip
    if progress is not None:
        progress("timing a step", 0, 1)
    step_time = time_step(*task.model, take(task.x, rows), task.y[rows], **step)
    run = None
    if verify and prediction.stable:
        run = _train(settings, task, step, progress)
    return Forecast(settings, task, prediction, step_time, run)
