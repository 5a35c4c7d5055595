"""A forecast beside what really happened."""

from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxttp.pipeline import Forecast
from jaxttp.plots._style import PREDICTED, REAL

MARKERS = ("o", "s", "D", "^", "v", "P", "X")


def plot_forecast(result: Forecast) -> Figure:
    """Loss and error by step, predicted and real, with the training times marked.

    Args:
        result: a `jaxttp.pipeline.Forecast`.

    Returns:
        A matplotlib figure (not attached to pyplot, so nothing needs closing).

    Example:
        >>> from jaxttp.pipeline import Settings, forecast
        >>> small = Settings(data="wine", samples_per_class=8, steps=20, learning_rate=0.1)
        >>> result = forecast(small)
        >>> len(plot_forecast(result).axes)
        2
    """
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    prediction, run = result.prediction, result.run
    t = np.arange(prediction.horizon + 1)
    classification = result.task.loss != "squared_error" or result.task.y.ndim == 1
    scale = 100.0 if classification else 1.0
    for axes, predicted, real, factor in (
        (left, prediction.loss, None if run is None else run.loss, 1.0),
        (right, prediction.error, None if run is None else run.error, scale),
    ):
        if real is not None:
            axes.plot(t, factor * np.asarray(real), color=REAL, lw=2.2, label="real training")
        axes.plot(
            t, factor * np.asarray(predicted), color=PREDICTED, lw=2.2, ls="--", label="forecast"
        )
        axes.set_xlabel("training step")
        axes.set_xlim(0, 1.02 * prediction.horizon)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    _mark(left, np.asarray(prediction.loss), prediction.steps, PREDICTED, filled=False)
    if run is not None:
        _mark(left, np.asarray(run.loss), result.real_steps or {}, REAL, filled=True)
    left.set_ylabel(f"training loss ({result.task.loss.replace('_', '-')})")
    right.set_ylabel(
        "misclassified training samples (%)" if classification else "unexplained variance"
    )
    rows = []
    for marker, (threshold, step) in zip(cycle(MARKERS), prediction.steps.items(), strict=False):
        text = f"within {100 * threshold:g} % of the drop: {_when(step)}"
        if result.real_steps is not None:
            text += f" forecast, {_when(result.real_steps[threshold])} real"
        handle = left.plot([], [], marker, color="0.25", mfc="none", ms=8)[0]
        rows.append((handle, text))
    handles, labels = left.get_legend_handles_labels()
    left.legend(
        [*handles, *(handle for handle, _ in rows)],
        [*labels, *(text for _, text in rows)],
        frameon=False,
        fontsize=10,
    )
    right.legend(frameon=False, fontsize=10)
    settings = result.settings
    momentum = f", momentum {settings.momentum:g}" if settings.momentum else ""
    batch = f", batch {settings.batch_size}" if settings.batch_size else ""
    figure.suptitle(
        f"{result.task.description}\nlearning rate {settings.learning_rate:g}{momentum}{batch}",
        fontsize=11,
    )
    return figure


def _when(step: int) -> str:
    return f"step {step}" if step >= 0 else "diverges"


def _mark(axes: Axes, curve: np.ndarray, steps: Any, color: str, *, filled: bool) -> None:
    for marker, step in zip(cycle(MARKERS), steps.values(), strict=False):
        if step >= 0:
            face = color if filled else "white"
            axes.plot(
                step,
                curve[step],
                marker,
                color=color,
                mfc=face,
                mew=1.8,
                ms=9,
                zorder=5,
                clip_on=False,
            )
