"""A report of a named task: forecast, spectrum and sweep; `jaxttp.plots` makes a page of it."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxttp._core.results import RESULT
from jaxttp._core.versions import versions
from jaxttp.ntk import empirical_ntk
from jaxttp.ntk.sharded import mesh_of
from jaxttp.pipeline._unused import check_unused
from jaxttp.pipeline.settings import Settings
from jaxttp.pipeline.spectra import TaskSpectrum, task_spectrum
from jaxttp.pipeline.sweeping import TaskSweep, sweep_task
from jaxttp.pipeline.training_time import Forecast, forecast

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class TaskReport:
    """Everything about a named task that one page holds.

    Attributes:
        forecast: its training time, with the real training where that was asked for.
        sweep: the same for a grid of settings of heavy-ball descent, with its batches and schedule.
        spectrum: of its kernel.
        versions: what it was made with.
    """

    forecast: Forecast
    sweep: TaskSweep
    spectrum: TaskSpectrum
    versions: dict[str, str]

    plot, _repr_html_, __repr__ = RESULT

    def settings_in_words(self) -> dict[str, str]:
        """What was asked for, without what was left alone."""
        settings = self.forecast.settings
        given = dataclasses.asdict(settings)
        if settings.trainable != "lora":
            del given["rank"]
        for name in ("thresholds", "target_loss", "target_error"):
            given[name] = ", ".join(f"{e:g}" for e in given[name]) or None
        for name in ("nesterov", "warmup"):
            given[name] = given[name] or None
        return {
            name.replace("_", " "): str(value) for name, value in given.items() if value is not None
        }

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "forecast": self.forecast.to_json(),
            "sweep": self.sweep.to_json(),
            "spectrum": self.spectrum.to_json(),
            "versions": self.versions,
        }


def report_task(
    settings: Settings, *, verify: bool = False, progress: Progress | None = None
) -> TaskReport:
    """Forecast, sweep and spectrum of a named task.

    Args:
        settings: the task.
        verify: also train for real.
        progress: called with (stage, done, total).

    Returns:
        A `TaskReport`; `jaxttp.plots.save_report` writes its page.

    Raises:
        ValueError: whatever `forecast`, `sweep_task` and `task_spectrum` refuse.

    Example:
        >>> small = Settings(data="wine", samples_per_class=4, steps=15, learning_rate=0.1)
        >>> report = report_task(small)
        >>> report.spectrum.rank <= len(report.forecast.task.y) * 3
        True
    """
    check_unused(settings, ("total_samples",), "sweep and spectrum are of the samples drawn")
    ahead = forecast(settings, verify=verify, progress=progress)
    if progress is not None:
        progress("kernel", 0, 1)
    # A new kernel: the forecast does not keep the one it built, which may have been a sketch.
    kernel = empirical_ntk(*ahead.task.model, ahead.task.x, mesh=mesh_of(settings.mesh))
    known: dict[str, Any] = {"task": ahead.task, "kernel": kernel, "progress": progress}
    around = dataclasses.replace(
        settings, optimizer="sgd", weight_decay=None, nesterov=False, budget="auto",
        sketch_dim=None,
    )  # fmt: skip
    swept = sweep_task(
        around, batch_sizes=(settings.batch_size,), schedules=(settings.schedule,),
        time_steps=False, **known,
    )  # fmt: skip
    return TaskReport(ahead, swept, task_spectrum(settings, **known), versions())
