"""A forecast in steps and seconds from the name of a task, with the real training beside it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxttp._core.checks import check_used
from jaxttp._core.process import versions
from jaxttp._core.results import RESULT, plain_numbers
from jaxttp._core.types import Progress, take
from jaxttp.forecast import Prediction, predict_training_time
from jaxttp.ntk.sharded import mesh_of
from jaxttp.pipeline.settings import (
    Arrival,
    Settings,
    arrivals,
    make_optimizer,
    reached_seconds,
)
from jaxttp.pipeline.tasks import Task, build_task
from jaxttp.training import StepTime, TrainingRun, time_step, train


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
    def seconds(self) -> dict[float, float]:
        """Predicted seconds for every threshold that is reached."""
        return reached_seconds(self.prediction.steps, self.step_time.seconds)

    @property
    def real_steps(self) -> dict[float, int] | None:
        """Real training times in steps, by the same rule; None without a real run.

        All are -1 where the real run diverged, which a forecast need not foresee.
        """
        if self.run is None:
            return None
        found = self.prediction
        return self.run.read(tuple(found.steps), rule=found.rule, metric=found.metric)

    @property
    def real_seconds(self) -> dict[float, float] | None:
        """Seconds the real run took to get there (no compilation, no evaluation)."""
        real = self.real_steps
        if real is None or self.run is None:
            return None
        return reached_seconds(real, self.run.seconds / self.prediction.horizon)

    @property
    def targets(self) -> tuple[Arrival, ...]:
        """When the losses and errors that the settings aim at are reached, forecast and real."""
        return arrivals(
            self.settings.targets(), self.prediction, reached=self.prediction.stable,
            step_seconds=self.step_time.seconds, run=self.run,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Plain values; thresholds become strings, seconds have an entry "horizon" too.

        Losses of a real run that diverged are None where they are not finite.
        """
        prediction = self.prediction
        cost = dataclasses.asdict(prediction.cost)
        asked = dataclasses.asdict(self.settings) | {"loss": self.task.loss}
        out: dict[str, Any] = {
            "steps": _keys(prediction.steps),
            "horizon": prediction.horizon,
            "loss": plain_numbers(prediction.loss),
            "error": plain_numbers(prediction.error),
            "hyperparameters": {**prediction.hyperparameters, **asked},
            "max_learning_rate": prediction.max_learning_rate,
            "stable": prediction.stable,
            "trust": prediction.trust,
            "plan": prediction.plan,
            "rule": prediction.rule,
            "metric": prediction.metric,
            "targets": [one._asdict() for one in self.targets],
            "dynamics": prediction.dynamics,
            "seconds": _keys(self.seconds)
            | {"horizon": prediction.horizon * self.step_time.seconds},
            "step_seconds": self.step_time.seconds,
            "cost": cost,
            "task": self.task.description,
            "note": self.task.note,
            "versions": versions(),
            "verified": None,
        }
        if self.run is not None:
            out["verified"] = {
                "steps": _keys(self.real_steps or {}),
                "loss": plain_numbers(self.run.loss),
                "error": plain_numbers(self.run.error),
                "seconds": _keys(self.real_seconds or {}) | {"horizon": self.run.seconds},
            }
        return out


def _keys(values: Mapping[float, Any]) -> dict[str, Any]:
    return {repr(threshold): value for threshold, value in values.items()}


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
    if settings.total_samples is not None:
        remedy = "verify=True would train on the samples at hand; leave one of the two out"
        check_used("total_samples", settings.total_samples, not verify, remedy)
    task = build_task(settings)
    keys = jax.random.split(jax.random.key(settings.seed), 2)
    batch_size, trainer = settings.batch_size, make_optimizer(settings)
    total = settings.total_samples or len(task.y)
    # A step is of a batch; of all samples, which may not fit into memory, it takes them all.
    rows = np.arange(min(total, batch_size or total)) % len(task.y)
    step: dict[str, Any] = {
        "loss": task.loss, "optimizer": trainer.transformation, "batch_size": batch_size
    }  # fmt: skip
    x, y = take(task.x, rows), task.y[rows]
    prediction = predict_training_time(
        *task.model,
        task.x,
        task.y,
        loss=task.loss,
        **trainer.keywords,
        steps=settings.steps,
        thresholds=settings.thresholds,
        metric=settings.metric,
        target_loss=settings.target_loss,
        target_error=settings.target_error,
        relinearize=settings.relinearize,
        sketch_dim=settings.sketch_dim,
        budget=settings.budget,
        total_samples=settings.total_samples,
        key=keys[0],
        batch_size=batch_size,
        mesh=mesh_of(settings.mesh),
        progress=progress,
    )
    if progress is not None:
        progress("timing a step", 0, 1)
    step_time = time_step(*task.model, x, y, **step)
    run = None
    if verify and prediction.stable:
        report = None if progress is None else lambda i, n: progress("real training", i, n)
        run = train(
            *task.model,
            task.x,
            task.y,
            **step,
            steps=settings.steps,
            key=keys[1],  # another draw of batches than the forecast's: nobody knows those ahead
            progress=report,
        )
    return Forecast(settings, task, prediction, step_time, run)
