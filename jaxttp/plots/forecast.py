"""Forecasts of losses and errors, compared with real training runs where there are any."""

from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxttp.dynamics import Diffusion, RelinearizedTrajectory
from jaxttp.forecast import OnlineForecast, Prediction, StaleGradientForecast
from jaxttp.gauss_newton import StepForecast
from jaxttp.losses.rule import target_label
from jaxttp.pipeline import FineTuning, Forecast, TaskSteps
from jaxttp.pipeline.settings import hyperparameters
from jaxttp.plots._style import (
    GREY,
    MARKERS,
    OTHER,
    PREDICTED,
    REAL,
    band,
    figure_of,
    panels,
    positive,
)
from jaxttp.training import TrainingRun

IN_PERCENT = ("misclassified", "wrong_bits", "wrong_tokens")
"""Errors that count what is wrong."""
Rows = list[tuple[Any, str]]
"""Rows of a legend besides the labels of curves: handles and labels."""


# --- marks on curves ------------------------------------------------------------------------------


def _when(step: int, stable: bool) -> str:
    return f"step {step}" if step >= 0 else ("not reached" if stable else "diverges")


def _mark_times(axes: Axes, curve: Any, steps: Any, color: str, *, filled: bool = False) -> None:
    """Marks on a curve at its training times, a shape for each."""
    style: dict[str, Any] = {"mew": 1.8, "ms": 9, "zorder": 5, "clip_on": False, "color": color}
    for marker, step in zip(cycle(MARKERS), steps.values(), strict=False):
        if step >= 0:
            axes.plot(step, curve[step], marker, mfc=color if filled else "white", **style)


def _when_both(step: int, stable: bool, real: int | None, finite: bool = True) -> str:
    """The time of a forecast and, where there is one, of the real run."""
    after = "" if real is None else f", real {_when(real, finite).removeprefix('step ')}"
    return f"{_when(step, stable)}{after}"


def _mark_targets(
    axes: Axes, result: Any, *, metric: str = "loss", run: Any = None, scale: float = 1.0
) -> Rows:
    """A line at every target of a metric, and a star where forecast and real run reach it."""

    def star(curve: Any, step: int, color: str) -> Any:
        style: dict[str, Any] = {"marker": "*", "color": color, "ls": "none", "zorder": 6}
        if step >= 0:
            value = scale * float(curve[step])
            axes.plot(step, value, mec="white", mew=0.8, ms=17, clip_on=False, **style)
        return axes.plot([], [], ms=12, **style)[0]

    rows: Rows = []
    for target, step in result.targets.items():
        if target.metric != metric:
            continue
        axes.axhline(scale * target.value, color=GREY, lw=1.2, ls=":", zorder=1)
        label, real = target.words(), None
        if scale != 1.0:
            label = f"{label.rsplit(' ', 1)[0]} {scale * target.value:.4g} %"
        real_curve = getattr(run, target.curve_name, None)
        if run is not None and real_curve is not None:
            real = run.reach([target])[target]
            star(real_curve, real, REAL)
        color = PREDICTED if target.on == "train" else OTHER
        label += f": {_when_both(step, result.stable, real, run is None or run.finite)}"
        rows.append((star(getattr(result, target.curve_name), step, color), label))
    return rows


def _mark_early_stopping(axes: Axes, prediction: Prediction) -> Rows:
    """A triangle where the test loss is lowest, if it rises again from there."""
    if prediction.test_loss is None or not prediction.stable:
        return []
    lowest = prediction.early_stopping()
    if not lowest.overfits:
        return []
    handle = axes.plot(lowest.step, lowest.value, "^", color=OTHER, mfc="white", ms=9, zorder=5)[0]
    return [(handle, f"lowest test loss: step {lowest.step}")]


def _legend(axes: Axes, rows: Rows) -> None:
    """The legend of labeled curves and these rows; lines of targets lie behind it."""
    handles, labels = axes.get_legend_handles_labels()
    handles += [handle for handle, _ in rows]
    labels += [label for _, label in rows]
    if handles:
        style: dict[str, Any] = {"frameon": True, "framealpha": 0.7, "edgecolor": "none"}
        axes.legend(handles, labels, fontsize="small", **style)


# --- one panel ------------------------------------------------------------------------------------


def _forecast_and_run(axes: Axes, ahead: Any, run: Any, scale: float = 1.0) -> None:
    if run is not None:
        axes.plot(scale * np.asarray(run), color=REAL, label="real training")
    axes.plot(scale * np.asarray(ahead), color=PREDICTED, ls="--", label="forecast")


def _name_loss(axes: Axes, name: str) -> None:
    kind = f" ({name.replace('_', '-')})" if name else ""
    axes.set(xlabel="training step", ylabel=f"training loss{kind}")
    axes.set_ylim(bottom=0)


def _loss(axes: Axes, prediction: Prediction, run: TrainingRun | None, name: str) -> None:
    """The predicted loss with its training times marked; bands and the real loss if known."""
    loss, steps = np.asarray(prediction.loss), np.arange(prediction.horizon + 1)
    _forecast_and_run(axes, loss, None if run is None else run.loss)
    last = prediction.horizon if prediction.doubted_from is None else prediction.doubted_from
    bounded = slice(last + 1)
    if prediction.loss_band is not None:
        sources = ["mini-batches"] if prediction.dynamics == "sde" else []
        if prediction.hyperparameters.get("sketch_dim") is not None:
            sources.append("projections")
        label = f"band over {' and '.join(sources)}" if sources else "band"
        low, high = np.asarray(prediction.loss_band)[:, bounded]
        band(axes, steps[bounded], low, high, label)
    elif prediction.loss_uncertainty is not None:
        error = np.asarray(prediction.loss_uncertainty)
        low, high = (loss - error)[bounded], (loss + error)[bounded]
        band(axes, steps[bounded], low, high, "estimated error")
    if prediction.test_loss is not None:
        axes.plot(steps, np.asarray(prediction.test_loss), color=OTHER, ls="-.", label="test")
    axes.set_xlim(0, 1.02 * prediction.horizon)
    _name_loss(axes, name)
    real: dict[float, int] = {}
    if run is not None:
        real = run.read(tuple(prediction.steps), rule=prediction.rule, metric=prediction.metric)
    if prediction.metric == "loss":
        _mark_times(axes, loss, prediction.steps, PREDICTED)
        if run is not None:
            _mark_times(axes, np.asarray(run.loss), real, REAL, filled=True)
    rows = _mark_targets(axes, prediction, run=run) + _mark_early_stopping(axes, prediction)
    finite = run is None or run.finite
    for marker, (threshold, step) in zip(cycle(MARKERS), prediction.steps.items(), strict=False):
        label = target_label(threshold, prediction.rule, prediction.metric)
        label += f": {_when_both(step, prediction.stable, real.get(threshold), finite)}"
        rows.append((axes.plot([], [], marker, color=GREY, mfc="none", ms=8)[0], label))
    _legend(axes, rows)


def _error(axes: Axes, prediction: Prediction, run: TrainingRun | None) -> None:
    """The predicted error by step, and the real one if there was a run."""
    name, scale = prediction.error_kind.replace("_", " "), 1.0
    if prediction.error_kind in IN_PERCENT:
        name, scale = f"{name} training samples (%)", 100.0
    _forecast_and_run(axes, prediction.error, None if run is None else run.error, scale)
    if prediction.test_error is not None:
        axes.plot(scale * np.asarray(prediction.test_error), color=OTHER, ls="-.", label="test")
    axes.set(xlabel="training step", ylabel=name)
    axes.set_xlim(0, 1.02 * prediction.horizon)
    axes.set_ylim(bottom=0)
    _legend(axes, _mark_targets(axes, prediction, metric="error", run=run, scale=scale))


# --- whole figures --------------------------------------------------------------------------------


@figure_of
def plot_prediction(
    result: Prediction, *, title: str = "", run: TrainingRun | None = None, name: str = ""
) -> Figure:
    """Loss and error by step, predicted and real, with the training times marked.

    Args:
        result: the forecast.
        title: above the figure.
        run: the real training, if there was one.
        name: of the loss, if the forecast does not say it.
    """
    figure, (left, right) = panels(2, title=title)
    _loss(left, result, run, name or str(result.hyperparameters.get("loss", "")))
    _error(right, result, run)
    return figure


@figure_of
def plot_forecast(result: Forecast) -> Figure:
    """The same of a named task."""
    title = f"{result.task.description}\n{hyperparameters(result.settings)}"
    return plot_prediction(result.prediction, title=title, run=result.run, name=result.task.loss)


_CURVES = {
    TrainingRun: ("real training", "training step", REAL),
    StepForecast: ("forecast", "Gauss-Newton step", PREDICTED),
}
"""What a legend and the horizontal axis say, and the color."""


@figure_of
def plot_curves(result: TrainingRun | StepForecast) -> Figure:
    """Loss and error of a real training run or of exact Gauss-Newton steps."""
    label, axis, color = _CURVES[type(result)]
    figure, axes = panels(2)
    ts = getattr(result, "ts", np.arange(len(result.loss)))
    for panel, curve in zip(axes, (result.loss, result.error), strict=True):
        panel.plot(ts, np.asarray(curve), color=color, label=label)
        panel.set(xlabel=axis, ylabel="training loss" if panel is axes[0] else "error")
        panel.set_ylim(bottom=0)
    return figure


@figure_of
def plot_diffusion(result: Diffusion) -> Figure:
    """Loss and error under mini-batch noise: the median over paths, and the band of 80 %."""
    figure, axes = panels(2, title=f"noise {result.noise}, batches by {result.protocol}")
    curves = {"training loss": result.loss, "error": result.error}
    for panel, (name, curve) in zip(axes, curves.items(), strict=True):
        paths = np.atleast_2d(np.asarray(curve))
        low, middle, high = np.quantile(paths, (0.1, 0.5, 0.9), axis=0)
        panel.plot(result.ts, middle, color=PREDICTED, label="median")
        band(panel, result.ts, low, high, f"80 % of {len(paths)} paths")
        panel.set(xlabel="training step", ylabel=name)
        panel.set_ylim(bottom=0)
    return figure


@figure_of
def plot_relinearized(result: RelinearizedTrajectory) -> Figure:
    """The loss with its estimated error, and where kernels were built."""
    figure, (axes,) = panels()
    ts, loss, error = (np.asarray(v) for v in (result.ts, result.loss, result.loss_uncertainty))
    axes.plot(ts, loss, color=PREDICTED, label="forecast")
    band(axes, ts, loss - error, loss + error, "estimated error")
    for i, end in enumerate(result.ends):
        axes.axvline(end, color=GREY, lw=1, ls=":", label="segment ends" if i == 0 else None)
    _name_loss(axes, "")
    return figure


@figure_of
def plot_online(result: OnlineForecast) -> Figure:
    """The loss seen so far, the forecast corrected by it, and the one from before training."""
    figure, (axes,) = panels()
    at, steps = result.at, np.arange(len(result.loss))
    axes.plot(result.open_loop, color=GREY, ls=":", label="forecast before training")
    axes.plot(steps[at:], result.loss[at:], color=PREDICTED, ls="--", label="corrected forecast")
    axes.plot(result.loss[: at + 1], color=REAL, label="real so far")
    axes.axvline(at, color=GREY, lw=1)
    _mark_times(axes, result.loss, result.steps, PREDICTED)
    _name_loss(axes, "")
    _legend(axes, _mark_targets(axes, result))
    return figure


@figure_of
def plot_stale_gradients(result: StaleGradientForecast) -> Figure:
    """The loss by stale gradients with its uncertainty, and the path before the correction."""
    figure, (axes,) = panels()
    _stale_gradients(axes, result, bounded=result.is_bounded)
    axes.plot(result.at, result.stale, "o:", color=GREY, ms=4, label="path of stale gradients")
    axes.set(xlabel="training step", ylabel="loss of the evaluated sequences")
    return figure


def _stale_gradients(axes: Axes, forecast: StaleGradientForecast, *, bounded: bool) -> None:
    """The loss at every step, and its uncertainty where it has an estimate."""
    loss, error = forecast.loss, forecast.uncertainty
    if bounded:
        band(axes, np.arange(len(loss)), loss - error, loss + error, "estimated error")
    axes.plot(loss, color=PREDICTED, ls="--", label="forecast")


@figure_of
def plot_fine_tuning(result: FineTuning) -> Figure:
    """The loss of held-out text by tokens seen and steps, predicted and real, with its targets."""
    title = f"{result.task.description}\n{hyperparameters(result.settings)}"
    figure, (axes,) = panels(title=title, height=5.6)
    loss, run, tokens = result.found.loss, result.run, result.tokens_a_step
    if run is not None:
        axes.plot(run.at, run.loss[run.at], color=REAL, label="real training")
    _stale_gradients(axes, result.found, bounded=result.is_bounded)
    reached = [target for target in result.targets if target.step >= 0]
    for marker, target in zip(cycle(MARKERS), reached, strict=False):
        style: dict[str, Any] = {"color": PREDICTED, "mfc": "white", "ms": 9}
        label = f"{target.words}: step {target.step}"
        axes.plot(target.step, loss[target.step], marker, label=label, **style)
    axes.set(xlabel="training step", ylabel="loss of held-out text, nats a token")
    above = axes.secondary_xaxis("top", functions=(lambda t: t * tokens, lambda n: n / tokens))
    above.set_xlabel("tokens seen")
    return figure


@figure_of
def plot_steps(result: TaskSteps) -> Figure:
    """The loss of exact Gauss-Newton steps, compared with its forecast."""
    figure, (axes,) = panels(title=result.description)
    axes.semilogy(result.forecast.loss, color=PREDICTED, label="forecast")
    axes.semilogy(positive(result.loss), "o--", color=REAL, mfc="none", label="real steps")
    axes.set(xlabel="Gauss-Newton step", ylabel="training loss")
    return figure
