"""The kernel of a named task: its spectrum, and how much of the labels lies where."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxttp._core.results import RESULT
from jaxttp.dynamics.stability import max_learning_rate
from jaxttp.losses import encode_targets
from jaxttp.ntk import (
    Eigensystem,
    PowerLaw,
    eigendecomposition,
    empirical_ntk,
    fit_power_law,
    label_alignment,
)
from jaxttp.ntk.sharded import gathered, mesh_of
from jaxttp.pipeline._unused import check_unused
from jaxttp.pipeline.settings import Settings
from jaxttp.pipeline.tasks import Task, build_task

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class TaskSpectrum:
    """The kernel of a task before training, by its eigenvalues.

    Attributes:
        settings: the task; rate, momentum, batches and horizon are not used.
        task: the network and data.
        values: eigenvalues of Theta, descending (N C,).
        residual: share of the squared norm of the loss's gradient in the outputs, at the start,
            along each eigenvector (N C,).
        labels: share of that of the centred targets (N C,).
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

    def head(self, share: float, of: str = "residual") -> int:
        """How many leading eigenvectors hold this share of the residual, or of the labels."""
        found = np.searchsorted(np.cumsum(getattr(self, of)), share - 1e-9)
        return int(min(found, len(self.values) - 1)) + 1

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "task": self.task.description,
            "settings": {
                k: v for k, v in dataclasses.asdict(self.settings).items() if _is_plain(v)
            },
            "values": self.values.tolist(),
            "residual": self.residual.tolist(),
            "labels": self.labels.tolist(),
            "exponent": float(self.law.exponent),
            "r_squared": float(self.law.r_squared),
            "rank": self.rank,
            "condition": self.condition,
            "max_learning_rate": self.max_learning_rate,
        }


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, tuple))


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
        task: what `build_task` makes of the settings, where it is at hand.
        kernel: its kernel (N, C, N, C), likewise.
        progress: called with (stage, done, total).

    Returns:
        A `TaskSpectrum`.

    Raises:
        ValueError: whatever `build_task` refuses.

    Example:
        >>> found = task_spectrum(Settings(data="wine", samples_per_class=4))
        >>> found.values.shape, round(float(found.residual.sum()), 6)
        ((36,), 1.0)

    Source:
        TTP section 3 and Appendix D, with the alignment squared.
    """
    task = build_task(settings) if task is None else task
    apply_fn, params = task.model
    x = jax.tree.map(jnp.asarray, task.x)
    if kernel is None:
        check_unused(settings, ("sketch_dim",), "a spectrum is of the exact kernel")
        if progress is not None:
            progress("kernel", 0, 1)
        theta = gathered(empirical_ntk(apply_fn, params, x, mesh=mesh_of(settings.mesh)))
    else:
        theta = gathered(kernel)
    outputs = apply_fn(params, x)
    targets, loss = encode_targets(task.loss, task.y, outputs)
    if progress is not None:
        progress("eigenvalues", 0, 1)
    system = eigendecomposition(theta)
    # For cross-entropy the residual is the softmax minus the labels.
    centred = targets - jnp.mean(targets, axis=0, keepdims=True)
    return TaskSpectrum(
        settings,
        task,
        np.asarray(system.values, np.float64),
        _shares(system, loss.gradient(outputs, targets)),
        _shares(system, centred),
        fit_power_law(system.values[: int(system.rank)]),
        int(system.rank),
        float(max_learning_rate(theta, outputs, targets, loss=loss)),
    )


def _shares(system: Eigensystem, direction: Array) -> np.ndarray:
    share = np.asarray(label_alignment(system, direction), np.float64)
    return share / share.sum() if share.sum() > 0 else share
