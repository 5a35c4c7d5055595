"""Forecasts of language models: held gradients, and the fine-tuning on a text."""

from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxttp.forecast import HeldForecast
from jaxttp.pipeline import FineTuning
from jaxttp.pipeline.optimizers import training_words
from jaxttp.plots._draw import figure_of
from jaxttp.plots._marks import MARKERS
from jaxttp.plots._style import GREY, PREDICTED, REAL, legend, panels, tidy


def _foreseen(axes: Axes, found: HeldForecast, *, bounded: bool) -> None:
    """The loss at every step, and how far it may be off where that is known."""
    steps = np.arange(len(found.loss))
    low, high = found.loss - found.uncertainty, found.loss + found.uncertainty
    if bounded:
        axes.fill_between(steps, low, high, color=PREDICTED, alpha=0.18, lw=0,
                          label="estimated error")  # fmt: skip
    axes.plot(steps, found.loss, color=PREDICTED, lw=2.2, ls="--", label="forecast")


@figure_of
def plot_held(result: HeldForecast) -> Figure:
    """The loss foreseen from held gradients with its doubt, and the path before the correction.

    Args:
        result: of `jaxttp.forecast.held_forecast`.

    Returns:
        A matplotlib figure.

    Example:
        >>> ends = np.array([2.0, 1.0])
        >>> found = HeldForecast(np.linspace(2, 1, 11), np.full(11, 0.1), np.array([0, 10]), ends,
        ...                      ends, np.arange(5), gradients=8.0, training_gradients=10.0,
        ...                      diverged=False)
        >>> len(plot_held(found).axes)
        1
    """
    figure, (axes,) = panels()
    _foreseen(axes, result, bounded=result.is_bounded)
    axes.plot(result.at, result.held, "o:", color=GREY, ms=4, label="path of held gradients")
    axes.set(xlabel="training step", ylabel="loss of the watched sequences")
    tidy(axes)
    legend(axes)
    return figure


@figure_of
def plot_fine_tuning(result: FineTuning) -> Figure:
    """The loss of held-out text by tokens seen and steps, foreseen and real, with its goals.

    Args:
        result: of `jaxttp.pipeline.fine_tuning_task`.

    Returns:
        A matplotlib figure.
    """
    title = f"{result.task.description}\n{training_words(result.settings)}"
    figure, (axes,) = panels(title=title, height=5.6)
    found = result.found
    if result.run is not None:
        axes.plot(result.run.at, result.run.loss[result.run.at], color=REAL, lw=2.2,
                  label="real training")  # fmt: skip
    _foreseen(axes, found, bounded=result.is_bounded)
    for marker, one in zip(cycle(MARKERS), result.goals, strict=False):
        if one.step >= 0:
            axes.plot(one.step, found.loss[one.step], marker, color=PREDICTED, mfc="white",
                      mew=1.8, ms=9, zorder=5,
                      label=f"{one.words}: step {one.step}")  # fmt: skip
    axes.set(xlabel="training step", ylabel="loss of held-out text, nats a token")
    each = result.tokens_a_step
    above = axes.secondary_xaxis("top", functions=(lambda t: t * each, lambda n: n / each))
    above.set_xlabel("tokens seen")
    tidy(axes)
    legend(axes)
    return figure
