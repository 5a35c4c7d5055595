"""How long training takes on all samples of a named task, from the kernel of some of them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxttp._core.checks import check_integer
from jaxttp._core.results import RESULT
from jaxttp._core.types import Progress
from jaxttp.forecast import Extrapolation, extrapolate
from jaxttp.pipeline.settings import (
    Arrival,
    Settings,
    aims,
    arrivals,
    check_unused,
    make_optimizer,
    reached_seconds,
)
from jaxttp.pipeline.tasks import Task, build_task
from jaxttp.training import StepTime, TrainingRun, time_step, train

ONE = "one exact kernel of `subset` samples is extrapolated to all that are drawn"
WHOLE = "full-batch descent at one rate is extrapolated, with or without momentum"


@dataclasses.dataclass(frozen=True)
class TaskExtrapolation:
    """A forecast for all samples of a task from a few of them.

    Attributes:
        settings: the task, with all of its samples.
        task: the network and data.
        found: the forecast.
        run: the real training on all samples, or None.
        step_time: the measured time of a step on all samples, or None.
    """

    settings: Settings
    task: Task
    found: Extrapolation
    run: TrainingRun | None = None
    step_time: StepTime | None = None

    plot, _repr_html_, __repr__ = RESULT

    @property
    def real_steps(self) -> Mapping[float, int] | None:
        """Real training times, None without a real run; -1 where it diverged."""
        if self.run is None:
            return None
        return self.run.read(tuple(self.found.steps))

    @property
    def seconds(self) -> dict[float, float] | None:
        """Predicted seconds for every threshold that is reached; None where no step was timed."""
        if self.step_time is None:
            return None
        return reached_seconds(self.found.steps, self.step_time.seconds)

    @property
    def real_seconds(self) -> dict[float, float] | None:
        """Seconds the real run took to get there; None without one."""
        real = self.real_steps
        if real is None or self.run is None:
            return None
        return reached_seconds(real, self.run.seconds / self.settings.steps)

    @property
    def targets(self) -> tuple[Arrival, ...]:
        """When the losses that the settings aim at are reached."""
        each = None if self.step_time is None else self.step_time.seconds
        return arrivals(
            aims(self.settings),
            self.found,
            reached=self.found.stable,
            step_seconds=each,
            run=self.run,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values; thresholds become strings, a spread that is not known becomes None."""
        found, real, timed, spent = self.found, self.real_steps, self.seconds, self.real_seconds
        finite = lambda v: float(v) if np.isfinite(v) else None  # noqa: E731
        return {
            "task": self.task.description,
            "note": self.task.note,
            "settings": dataclasses.asdict(self.settings),
            "subset": found.subset,
            "samples": found.samples,
            "steps": {repr(e): t for e, t in found.steps.items()},
            "spread": {repr(e): finite(s) for e, s in found.spread.items()},
            "seconds": None if timed is None else {repr(e): t for e, t in timed.items()},
            "step_seconds": None if self.step_time is None else self.step_time.seconds,
            "targets": [one._asdict() for one in self.targets],
            "stable": found.stable,
            "loss": [finite(v) for v in found.loss],
            "loss_spread": [finite(v) for v in found.loss_spread],
            "verified": None if real is None or self.run is None else {
                "steps": {repr(e): t for e, t in real.items()},
                "seconds": {repr(e): t for e, t in (spent or {}).items()},
                "loss": [finite(v) for v in np.asarray(self.run.loss)],
            },
        }  # fmt: skip


def extrapolate_task(
    settings: Settings,
    *,
    subset: int,
    verify: bool = False,
    method: str | None = None,
    alpha: float | None = None,
    time_steps: bool = True,
    progress: Progress | None = None,
) -> TaskExtrapolation:
    """Forecast full-batch training on all samples of a task from the kernel of a subset.

    Args:
        settings: data, samples (all with ``samples_per_class=None``), loss, rate, momentum,
            horizon, thresholds, target losses and seed.
        subset: N0, samples of the kernel.
        verify: also train on all samples for real.
        method: as in `extrapolate`.
        alpha: as in `extrapolate`.
        time_steps: also measure the seconds of a step on all samples.
        progress: called with (stage, done, total).

    Returns:
        A `TaskExtrapolation`.

    Raises:
        ValueError: a batch size, an optimiser or a schedule, goals about the error, and whatever
            `build_task` and `extrapolate` refuse.

    Example:
        >>> small = Settings(data="wine", samples_per_class=20, steps=20, learning_rate=0.05)
        >>> extrapolate_task(small, subset=24).found.samples
        60
    """
    if settings.batch_size is not None:
        raise ValueError("batch_size cannot be extrapolated: full batches only.")
    check_unused(settings, ("optimizer", "weight_decay", "nesterov", "schedule", "warmup"), WHOLE)
    check_unused(settings, ("budget", "total_samples"), ONE)
    check_unused(settings, ("mesh",), "the kernel of the subset is decomposed on one device")
    check_unused(settings, ("sketch_dim",), "the kernel of the subset is exact")
    check_unused(settings, ("metric", "target_error"), "the error on all samples is not known")
    task = build_task(settings)
    check_integer("subset", subset, at_least=2, at_most=len(task.y))
    if progress is not None:
        progress("kernel of the subset", 0, 1)
    found = extrapolate(
        *task.model, task.x, task.y, learning_rate=settings.learning_rate, subset=subset,
        key=jax.random.key(settings.seed), loss=task.loss, momentum=settings.momentum,
        steps=settings.steps, thresholds=settings.thresholds, method=method,
        alpha=alpha,
    )  # fmt: skip
    optimizer, timed, run = make_optimizer(settings).transformation, None, None
    if time_steps:
        if progress is not None:
            progress("timing a step", 0, 1)
        timed = time_step(*task.model, task.x, task.y, loss=task.loss, optimizer=optimizer)
    if verify and found.stable:
        run = train(
            *task.model, task.x, task.y, loss=task.loss, steps=settings.steps, optimizer=optimizer,
            progress=None if progress is None else lambda i, n: progress("real training", i, n),
        )  # fmt: skip
    return TaskExtrapolation(settings, task, found, run, timed)
