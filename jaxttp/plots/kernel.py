"""Figures of a kernel's spectrum, and of exact Gauss-Newton steps."""

import numpy as np
from matplotlib.figure import Figure

from jaxttp.pipeline import TaskSpectrum, TaskSteps
from jaxttp.plots._style import GREY, OTHER, PREDICTED, REAL, tidy


def plot_task_spectrum(result: TaskSpectrum) -> Figure:
    """Eigenvalues with their power law; cumulative shares of residual and labels.

    Args:
        result: of `jaxttp.pipeline.task_spectrum`.

    Returns:
        A matplotlib figure.

    Example:
        >>> from jaxttp.pipeline import Settings, task_spectrum
        >>> figure = plot_task_spectrum(task_spectrum(Settings(data="wine", samples_per_class=4)))
        >>> len(figure.axes)
        2
    """
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    ranks = np.arange(1, len(result.values) + 1)
    kept = slice(0, result.rank)
    left.loglog(ranks[kept], result.values[kept], color=PREDICTED, label="eigenvalues of Θ")
    first, last = result.law.window
    window = np.arange(first, last + 1)
    left.loglog(
        window, float(result.law.coefficient) * window ** -float(result.law.exponent), "--",
        color=GREY, label=f"power law, exponent {float(result.law.exponent):.2f}",
    )  # fmt: skip
    left.set(xlabel="rank", ylabel="eigenvalue")
    left.legend(frameon=False, fontsize=9)
    for shares, color, label in (
        (result.residual, PREDICTED, "residual"), (result.labels, OTHER, "centred labels"),
    ):  # fmt: skip
        right.semilogx(ranks, 100 * np.cumsum(shares), color=color, label=label)
    right.set(xlabel="leading eigenvectors", ylabel="share (%)", ylim=(0, 103))
    right.legend(frameon=False, fontsize=9)
    for axes in (left, right):
        tidy(axes)
    figure.suptitle(result.task.description, fontsize=9)
    return figure


def plot_steps(result: TaskSteps) -> Figure:
    """The loss of exact Gauss-Newton steps beside its forecast.

    Args:
        result: of `jaxttp.pipeline.gauss_newton_task`.

    Returns:
        A matplotlib figure.

    Example:
        >>> from jaxttp.pipeline import StepSettings, gauss_newton_task
        >>> small = StepSettings(data="wine", samples_per_class=4, steps=2, bottleneck=32)
        >>> len(plot_steps(gauss_newton_task(small)).axes)
        1
    """
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    shown = np.isfinite(result.loss)
    axes.semilogy(result.forecast.loss, color=PREDICTED, label="forecast")
    axes.semilogy(np.flatnonzero(shown), result.loss[shown], "o--", color=REAL, mfc="none",
                  label="real steps")  # fmt: skip
    axes.set(xlabel="Gauss-Newton step", ylabel=f"mean {result.settings.loss or 'squared_error'}")
    axes.legend(frameon=False, fontsize=9)
    axes.set_title(result.description, fontsize=8)
    tidy(axes)
    return figure
