"""Forecasts, beside what really happened where that is known."""

from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxttp.forecast import (
    Online,
    OnlineForecast,
    Prediction,
    WallClock,
)
from jaxttp.gauss_newton import StepForecast
from jaxttp.losses.rule import Target
from jaxttp.pipeline import Forecast, PrunedRun
from jaxttp.pipeline.optimizers import training_words
from jaxttp.plots._draw import figure_of, styled
from jaxttp.plots._marks import (
    MARKERS,
    legend_with,
    mark_early_stopping,
    mark_ends,
    mark_targets,
    mark_times,
    when,
)
from jaxttp.plots._style import GREY, OTHER, PREDICTED, REAL, legend, panels, tidy
from jaxttp.training import TrainingRun

SHARES = ("misclassified", "wrong_bits", "wrong_tokens")
"""Errors that count what is wrong, and are shown in percent."""
UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def _goal(threshold: float, rule: str, metric: str = "loss") -> str:
    if rule == "relative":
        return f"within {100 * threshold:g} % of the drop"
    return f"{rule}, {metric} {threshold:g}"


def plot_loss(axes: Axes, prediction: Prediction, *, run: Any = None, real_steps: Any = None,
              name: str = "", times: bool = True) -> None:  # fmt: skip
    """The predicted loss by step with its training times marked; bands and the real one if known.

    Args:
        axes: where to draw.
        prediction: the forecast.
        run: the real training, if there was one.
        real_steps: its training times.
        name: of the loss.
        times: name the training times and the targets in the legend.
    """
    loss, steps = np.asarray(prediction.loss), np.arange(prediction.horizon + 1)
    last = prediction.horizon if prediction.doubted_from is None else prediction.doubted_from
    sure = slice(last + 1)
    if run is not None:
        axes.plot(steps, np.asarray(run.loss), color=REAL, lw=2.2, label="real training")
    axes.plot(steps, loss, color=PREDICTED, lw=2.2, ls="--", label="forecast")
    if prediction.loss_band is not None:
        sources = ["mini-batches"] if prediction.dynamics == "sde" else []
        if prediction.hyperparameters.get("sketch_dim") is not None:
            sources.append("projections")
        words = f"band over {' and '.join(sources)}" if sources else "band"
        low, high = np.asarray(prediction.loss_band)
        axes.fill_between(steps[sure], low[sure], high[sure], color=PREDICTED, alpha=0.18, lw=0,
                          label=words)  # fmt: skip
    elif prediction.loss_uncertainty is not None:
        off = np.asarray(prediction.loss_uncertainty)
        axes.fill_between(steps[sure], (loss - off)[sure], (loss + off)[sure], color=PREDICTED,
                          alpha=0.18, lw=0, label="estimated error")  # fmt: skip
    if prediction.test_loss is not None:
        axes.plot(steps, np.asarray(prediction.test_loss), color=OTHER, ls="-.", label="test")
    name = f" ({name.replace('_', '-')})" if name else ""
    axes.set(xlabel="training step", ylabel=f"training loss{name}")
    axes.set_xlim(0, 1.02 * prediction.horizon)
    axes.set_ylim(bottom=0)
    tidy(axes)
    marked = prediction.metric == "loss"
    if marked:
        mark_times(axes, loss, prediction.steps, PREDICTED, filled=False)
    if run is not None and marked:
        mark_times(axes, np.asarray(run.loss), real_steps or {}, REAL, filled=True)
    rows = mark_targets(axes, prediction, metric="loss", run=run)
    rows += mark_early_stopping(axes, prediction)
    mark_ends(axes, {PREDICTED: loss, REAL: None if run is None else run.loss,
                     OTHER: prediction.test_loss})  # fmt: skip
    if not times:
        legend(axes)
        return
    for marker, (threshold, step) in zip(cycle(MARKERS), prediction.steps.items(), strict=False):
        goal = _goal(threshold, prediction.rule, prediction.metric)
        text = f"{goal}: {when(step, prediction.stable)}"
        if real_steps is not None:
            finite = run is None or bool(np.all(np.isfinite(np.asarray(run.loss))))
            text += f", real {when(real_steps[threshold], finite).removeprefix('step ')}"
        handle = axes.plot([], [], marker, color="0.25", mfc="none", ms=8)[0]
        rows.append((handle, text))
    legend_with(axes, rows)


def plot_error(
    axes: Axes, prediction: Prediction, *, run: Any = None, classes: bool = True
) -> None:
    """The predicted error by step, and the real one if there was a run.

    Args:
        axes: where to draw.
        prediction: the forecast.
        run: the real training, if there was one.
        classes: whether the error is a share of misclassified samples.
    """
    scale = 100.0 if classes else 1.0
    steps = np.arange(prediction.horizon + 1)
    if run is not None:
        real = scale * np.asarray(run.error)
        axes.plot(steps, real, color=REAL, lw=2.2, label="real training")
    error = scale * np.asarray(prediction.error)
    axes.plot(steps, error, color=PREDICTED, lw=2.2, ls="--", label="forecast")
    if prediction.test_error is not None:
        test = scale * np.asarray(prediction.test_error)
        axes.plot(steps, test, color=OTHER, ls="-.", label="test")
    axes.set(
        xlabel="training step",
        ylabel="misclassified training samples (%)" if classes else _error_name(prediction),
    )
    axes.set_xlim(0, 1.02 * prediction.horizon)
    axes.set_ylim(bottom=0)
    tidy(axes)
    rows = mark_targets(axes, prediction, metric="error", run=run, scale=scale)
    curves = [None if c is None else scale * np.asarray(c) for c in (
        prediction.error, None if run is None else run.error, prediction.test_error
    )]  # fmt: skip
    mark_ends(axes, dict(zip((PREDICTED, REAL, OTHER), curves, strict=True)),
              unit="%" if classes else "")  # fmt: skip
    legend_with(axes, rows)


def _error_name(prediction: Prediction) -> str:
    """An error that is no share of samples, in words."""
    known = prediction.error_kind not in SHARES
    return prediction.error_kind.replace("_", " ") if known else "unexplained variance"


@figure_of
def plot_prediction(result: Prediction, *, title: str = "") -> Figure:
    """Predicted loss and error by step, with the training times marked.

    Args:
        result: of `jaxttp.predict_training_time`.
        title: above the figure.

    Returns:
        A matplotlib figure.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxttp import predict_training_time
        >>> found = predict_training_time(lambda w, x: x @ w, jnp.zeros((2, 2)), jnp.eye(2),
        ...                               jnp.array([0, 1]), learning_rate=0.1, steps=10)
        >>> len(plot_prediction(found).axes)
        2
    """
    name = str(result.hyperparameters.get("loss", ""))
    figure, (left, right) = panels(2, title=title)
    plot_loss(left, result, name=name)
    plot_error(right, result, classes=result.error_kind in SHARES)
    return figure


@figure_of
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
    figure, (left, right) = panels(
        2, title=f"{result.task.description}\n{training_words(result.settings)}"
    )
    run, real = result.run, result.real_steps
    plot_loss(left, result.prediction, run=run, real_steps=real, name=result.task.loss)
    plot_error(right, result.prediction, run=run, classes=has_classes(result))
    return figure


def has_classes(result: Forecast) -> bool:
    """Whether the task of a forecast is a classification."""
    return result.task.loss != "squared_error" or result.task.y.ndim == 1


@styled
def _loss_and_error(ts: Any, loss: Any, error: Any, *, label: str, color: str, axis: str) -> Figure:
    figure, axes = panels(2)
    for place, curve, name in zip(axes, (loss, error), ("training loss", "error"), strict=True):
        place.plot(ts, np.asarray(curve), color=color, label=label)
        place.set(xlabel=axis, ylabel=name)
        place.set_ylim(bottom=0)
        tidy(place)
        legend(place)
    return figure


@figure_of
def plot_run(result: TrainingRun) -> Figure:
    """Loss and error of a real training, by step.

    Args:
        result: of `jaxttp.train`.

    Returns:
        A matplotlib figure.
    """
    steps = np.arange(len(result.loss))
    return _loss_and_error(
        steps, result.loss, result.error, label="real training", color=REAL, axis="training step"
    )


@figure_of
def plot_pruned_run(result: PrunedRun) -> Figure:
    """Loss and error of a pruned network's training.

    Args:
        result: of `jaxttp.pipeline.pruning_runs`.

    Returns:
        A matplotlib figure.
    """
    label = f"{100 * result.rate:g} % pruned, κ = {float(result.condition.value):.3g}"
    steps = np.arange(len(result.run.loss))
    return _loss_and_error(
        steps, result.run.loss, result.run.error, label=label, color=REAL, axis="training step"
    )


@figure_of
def plot_step_forecast(result: StepForecast) -> Figure:
    """Loss and error of exact Gauss-Newton steps in function space.

    Args:
        result: of `jaxttp.gauss_newton.forecast_steps`.

    Returns:
        A matplotlib figure.
    """
    return _loss_and_error(
        np.asarray(result.ts), result.loss, result.error, label="forecast", color=PREDICTED,
        axis="Gauss-Newton step",
    )  # fmt: skip


@figure_of
def plot_online(result: OnlineForecast) -> Figure:
    """The loss seen so far, the forecast corrected by it, and the one from before training.

    Args:
        result: of `Online.forecast` or `jaxttp.online`.

    Returns:
        A matplotlib figure.
    """
    figure, (axes,) = panels()
    steps = np.arange(len(result.loss))
    axes.plot(steps, result.open_loop, color=GREY, ls=":", label="forecast before training")
    axes.plot(steps[result.at :], result.loss[result.at :], color=PREDICTED, ls="--",
              label=f"forecast corrected by {result.kind}")  # fmt: skip
    seen = result.loss[: result.at + 1]
    axes.plot(steps[: result.at + 1], seen, color=REAL, label="real so far")
    axes.axvline(result.at, color=GREY, lw=1)
    mark_times(axes, result.loss, result.steps, PREDICTED, filled=False)
    axes.set(xlabel="training step", ylabel="training loss")
    axes.set_ylim(bottom=0)
    legend_with(axes, mark_targets(axes, result))
    tidy(axes)
    return figure


@figure_of
def plot_online_callback(result: Online, *, kind: str = "weights") -> Figure:
    """The forecast as it stands after the steps seen so far.

    Args:
        result: the callback.
        kind: see `Online.forecast`.

    Returns:
        A matplotlib figure.
    """
    return plot_online(result.forecast(kind))


@figure_of
def plot_wall_clock(result: WallClock) -> Figure:
    """Seconds to every threshold and to the horizon.

    Args:
        result: of `jaxttp.wall_clock`.

    Returns:
        A matplotlib figure.
    """
    figure, (axes,) = panels(height=3.2)
    goals = (goal.words() if isinstance(goal, Target) else f"{goal:g}" for goal in result.seconds)
    names = [*(f"to {goal}" for goal in goals), "whole horizon"]
    seconds = np.array([*result.seconds.values(), result.total_seconds])
    unit, size = next((u, s) for u, s in UNITS if s <= result.total_seconds or s == UNITS[-1][1])
    bars = axes.barh(names, seconds / size, color=PREDICTED, height=0.5)
    axes.bar_label(bars, [f"{value:.3g}" for value in seconds / size], padding=4)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set_xlabel(f"{unit} ({result.source})")
    tidy(axes)
    return figure
