"""The spectrum of a named task's kernel, and a report: forecast, spectrum and sweep."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxttp._core.process import versions
from jaxttp._core.results import RESULT
from jaxttp._core.types import Progress
from jaxttp.dynamics.stability import max_learning_rate
from jaxttp.losses import encode_targets
from jaxttp.ntk import PowerLaw, eigendecomposition, empirical_ntk, fit_power_law, label_alignment
from jaxttp.ntk.sharded import gathered, mesh_of
from jaxttp.pipeline.settings import Settings, check_unused
from jaxttp.pipeline.sweeping import Choices, TaskSweep, sweep_task
from jaxttp.pipeline.tasks import Task, build_task
from jaxttp.pipeline.training_time import Forecast, forecast


@dataclasses.dataclass(frozen=True)
class TaskSpectrum:
    """The kernel of a task before training, by its eigenvalues.

    Attributes:
        settings: the task; rate, momentum, batches and horizon are not used.
        task: the network and data.
        values: eigenvalues of Theta, descending (N C,).
        residual: fraction of the squared norm of the loss's gradient in the outputs, at the start,
            along each eigenvector (N C,).
        labels: fraction of that of the centred targets (N C,).
        law: power law of the eigenvalues.
        rank: how many count as non-zero.
        max_learning_rate: of gradient descent, at the start of training.
    """

    settings: Settings
    task: Task
    values: np.ndarray
    residual: np.ndarray
    labels: np.ndarray
    law: PowerLaw
    rank: int
    max_learning_rate: float

    plot, _repr_html_, __repr__ = RESULT

    @property
    def condition(self) -> float:
        """Largest over smallest non-zero eigenvalue."""
        return float(self.values[0] / self.values[self.rank - 1])

    def head(self, fraction: float, of: str = "residual") -> int:
        """How many leading eigenvectors hold this fraction of the residual, or of the labels."""
        index = np.searchsorted(np.cumsum(getattr(self, of)), fraction - 1e-9)
        return int(min(index, len(self.values) - 1)) + 1

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "task": self.task.description,
            "settings": dataclasses.asdict(self.settings),
            "values": self.values.tolist(),
            "residual": self.residual.tolist(),
            "labels": self.labels.tolist(),
            "exponent": float(self.law.exponent),
            "r_squared": float(self.law.r_squared),
            "rank": self.rank,
            "condition": self.condition,
            "max_learning_rate": self.max_learning_rate,
        }


def task_spectrum(
    settings: Settings,
    *,
    task: Task | None = None,
    kernel: ArrayLike | None = None,
    progress: Progress | None = None,
) -> TaskSpectrum:
    """Eigenvalues of a task's kernel, and the alignment of residual and labels with them.

    Args:
        settings: the task. On a `mesh` every device computes its rows of the kernel, which are put
            together on one device to be decomposed.
        task: what `build_task` makes of the settings, where it is available.
        kernel: its kernel (N, C, N, C), likewise.
        progress: called with (stage, done, total).

    Returns:
        A `TaskSpectrum`.

    Raises:
        ValueError: whatever `build_task` refuses.

    Example:
        >>> result = task_spectrum(Settings(data="wine", samples_per_class=4))
        >>> result.values.shape, round(float(result.residual.sum()), 6)
        ((36,), 1.0)

    Source:
        TTP section 3 and Appendix D, with the alignment squared.
    """
    tell, task = progress or (lambda *_: None), build_task(settings) if task is None else task
    apply_fn, params = task.model
    x = jax.tree.map(jnp.asarray, task.x)
    if kernel is None:
        check_unused(settings, ("sketch_dim",), "a spectrum is of the exact kernel")
        tell("kernel", 0, 1)
        theta = gathered(empirical_ntk(apply_fn, params, x, mesh=mesh_of(settings.mesh)))
    else:
        theta = gathered(kernel)
    outputs = apply_fn(params, x)
    targets, loss = encode_targets(task.loss, task.y, outputs)
    tell("eigenvalues", 0, 1)
    system = eigendecomposition(theta)
    # For cross-entropy the residual is the softmax minus the labels.
    centred = targets - jnp.mean(targets, axis=0, keepdims=True)
    residual, labels = (
        np.asarray(label_alignment(system, direction), np.float64)
        for direction in (loss.gradient(outputs, targets), centred)
    )
    residual /= residual.sum() or 1.0
    labels /= labels.sum() or 1.0
    rank, values = int(system.rank), np.asarray(system.values, np.float64)
    limit = float(max_learning_rate(theta, outputs, targets, loss=loss))
    law = fit_power_law(system.values[:rank])
    return TaskSpectrum(settings, task, values, residual, labels, law, rank, limit)


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
        """What was asked for: the main settings, and those that are not as by default."""
        settings, main = self.forecast.settings, ("data", "samples_per_class", "learning_rate")
        values = {}
        for field in dataclasses.fields(settings):
            value = getattr(settings, field.name)
            if field.name in main or value != field.default:
                values[field.name.replace("_", " ")] = str(value)
        return values

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
    shared: dict[str, Any] = {"task": ahead.task, "kernel": kernel, "progress": progress}
    descent = dataclasses.replace(
        settings, optimizer="sgd", weight_decay=None, nesterov=False, budget="auto", sketch_dim=None
    )
    choices = Choices(batch_sizes=(settings.batch_size,), schedules=(settings.schedule,))
    result = sweep_task(descent, choices, time_steps=False, **shared)
    return TaskReport(ahead, result, task_spectrum(settings, **shared), versions())
