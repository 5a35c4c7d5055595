"""Sweeps as heat maps and as a choice between cost and loss; comparisons and races."""

import dataclasses
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxttp.forecast import Comparison, Race, Sweep
from jaxttp.losses.rule import Target
from jaxttp.pipeline import TaskSweep
from jaxttp.plots._style import CYCLE, GREY, OTHER, PREDICTED, REAL, figure_of, panels

BELOW: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "frameon": False}
"""A legend under its panel."""


@figure_of
def plot_sweep(sweep: Sweep, threshold: float | Target | None = None, *, title: str = "") -> Figure:
    """Steps to a target by learning rate and all else, with advice, and the Pareto set.

    Every row of the heat map is one combination of algorithm, momentum, weight decay, batch size,
    schedule, loss and horizon. Settings that diverge or never get there are hatched; the line is
    the largest stable rate at the start of training, the star the setting with the fewest steps,
    dots those that need at most a tenth more, or one step.

    Args:
        sweep: a `jaxttp.forecast.Sweep`.
        threshold: one of its thresholds or targets; the first target, or else the middle threshold,
            when None.
        title: above the figure.

    Raises:
        ValueError: a threshold or a target that was not forecast.
    """
    target = sweep.ranked_by if threshold is None else threshold
    sweep.times(target)  # checks it
    figure, (left, right) = panels(2, title=title, height=5.2, width_ratios=(3, 2))
    plot_heat_map(left, sweep, target)
    plot_pareto(right, sweep, target)
    return figure


@figure_of
def plot_task_sweep(result: TaskSweep) -> Figure:
    """The same for a named task."""
    return plot_sweep(result.sweep, title=result.task.description)


def plot_heat_map(axes: Axes, sweep: Sweep, threshold: float | Target) -> None:
    """Steps to a target by learning rate and all else, with a colour bar.

    Args:
        axes: where to draw.
        sweep: the forecasts.
        threshold: one of its thresholds or targets.
    """
    rates = sorted({float(setting.learning_rate) for setting in sweep.settings})
    kinds = [dataclasses.replace(setting, learning_rate=1.0) for setting in sweep.settings]
    firsts = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]  # of every row
    at = [next(row for row, i in enumerate(firsts) if kinds[i] == kind) for kind in kinds]
    columns = [rates.index(float(setting.learning_rate)) for setting in sweep.settings]
    table, times = np.full((len(firsts), len(rates)), np.nan), sweep.times(threshold)
    for i, cell in enumerate(zip(at, columns, strict=True)):
        if sweep.stable[i] and times[i] >= 0:
            table[cell] = times[i]
    edges, rows = _edges(rates), np.arange(len(firsts) + 1)
    axes.patch.set(hatch="///", facecolor="0.93", edgecolor="0.8")
    masked = np.ma.masked_invalid(table)
    image = axes.pcolormesh(edges, rows, masked, cmap="viridis_r", rasterized=True)
    axes.set_xscale("log")
    for row, i in enumerate(firsts):
        limit = sweep.max_learning_rate[i]
        if edges[0] < limit < edges[-1]:
            name = "largest stable rate" if row == 0 else None
            axes.plot([limit] * 2, [row, row + 1], color=REAL, lw=2.5, label=name)
    if np.any(np.isfinite(table)):
        best = sweep.best(threshold)
        fewest = table[at[best], columns[best]]
        near = np.argwhere(table <= max(1.1 * fewest, fewest + 1))
        white: dict[str, Any] = {"mfc": "white", "mec": "black", "ls": "none"}
        x, y = [rates[column] for _, column in near], [row + 0.5 for row, _ in near]
        axes.plot(x, y, "o", ms=5, label="at most 10 % or 1 step more", **white)
        x, y = rates[columns[best]], at[best] + 0.5
        axes.plot(x, y, "*", ms=17, label="fewest steps", **white)
    axes.set_yticks(rows[:-1] + 0.5, [_row_name(sweep.named(i)) for i in firsts])
    axes.set(xlim=(edges[0], edges[-1]), ylim=(0, len(firsts)), xlabel="learning rate")
    axes.set_title(f"steps to {sweep.label(threshold)}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(**BELOW)
    axes.figure.colorbar(image, ax=axes, label="training steps")


def plot_pareto(axes: Axes, sweep: Sweep, threshold: float | Target) -> None:
    """Final loss against cost; the settings that no other one beats in both are joined.

    Args:
        axes: where to draw.
        sweep: the forecasts.
        threshold: one of its thresholds or targets; a loss to get below is a line.
    """
    cost, loss = sweep.cost(threshold), sweep.final_loss
    best, reached = list(sweep.pareto(threshold)), np.isfinite(cost)
    axes.plot(cost[reached], loss[reached], "o", color=GREY, alpha=0.4, label="every setting")
    axes.plot(cost[best], loss[best], "o-", color=PREDICTED, label="cheapest for its loss")
    # The ends and the middle: more labels would cover each other.
    for i in {best[k] for k in (0, len(best) // 2, -1)} if best else ():
        style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 10}
        axes.annotate(sweep.named(i), (cost[i], loss[i]), xytext=(7, 5), **style)
    if isinstance(threshold, Target) and threshold.metric == "loss":
        axes.axhline(threshold.value, color=GREY, lw=1.2, ls=":", label=threshold.words())
    unit = "samples seen" if sweep.step_seconds is None else "seconds"
    axes.set(xlabel=f"{unit} until the target", ylabel="predicted loss at the horizon")
    if np.any(reached):
        # Nothing is spent on a target that holds before training, and 0 has no logarithm.
        axes.set_xscale("linear" if np.any(cost[reached] <= 0) else "log")
        axes.set_yscale("log")
    else:
        axes.annotate("no setting reaches it", (0.5, 0.5), xycoords="axes fraction", ha="center")
    axes.margins(x=0.25, y=0.1)
    axes.legend(**BELOW)


def _row_name(name: str) -> str:
    """A setting's name without the learning rate."""
    return ", ".join(part for part in name.split(", ") if not part.startswith("rate ")) or "plain"


def _edges(rates: list[float]) -> np.ndarray:
    """Edges of cells around rates, in the logarithm."""
    logs = np.log(rates)
    half = np.diff(logs) / 2 if len(logs) > 1 else np.array([0.5])
    middle = logs[:-1] + half[: len(logs) - 1]
    return np.exp([logs[0] - half[0], *middle, logs[-1] + half[-1]])


@figure_of
def plot_comparison(result: Comparison, *, title: str = "") -> Figure:
    """Loss curves of the starting points, with the targets, and what their kernels say.

    Targets are lines, with a star where a starting point gets below; those of the error have a
    panel of their own.
    """
    by_error = any(target.metric == "error" for target in result.sweep.targets)
    widths = (3, 3, 2) if by_error else (3, 2)
    figure, (left, *middle, right) = panels(len(widths), title=title, width_ratios=widths)
    _curves_to_targets(left, result, result.sweep.loss, "loss")
    left.set_yscale("log")
    if (result.sweep.rule.kind, result.sweep.rule.metric) == ("absolute", "loss"):
        for target in result.sweep.thresholds:
            left.axhline(target, color=GREY, lw=1, ls=":")
    for axes in middle:
        _curves_to_targets(axes, result, result.sweep.error, "error")
        axes.set_ylim(bottom=0)
    y = np.arange(len(result.names))
    speeds = [why.speed for why in result.explanations]
    alignment = [why.alignment for why in result.explanations]
    right.barh(y - 0.19, speeds, 0.36, color=PREDICTED, label="speed")
    right.barh(y + 0.19, alignment, 0.36, color=OTHER, label="labels along leading eigenvectors")
    right.set_yticks(y, result.names)
    right.invert_yaxis()
    right.set(xlim=(0, 1), xlabel="fraction")
    right.legend(**BELOW)
    return figure


def _curves_to_targets(axes: Axes, result: Comparison, curves: Any, metric: str) -> None:
    """The curves of all starting points, with lines and stars for the targets of this metric."""
    for i, (name, setting) in enumerate(zip(result.names, result.sweep.settings, strict=True)):
        label = f"{name} (rate {setting.learning_rate:.3g})"
        axes.plot(curves[i], color=CYCLE[i % len(CYCLE)], lw=2, label=label)
    axes.set(xlabel="training step", ylabel=f"predicted training {metric}")
    for target, steps in zip(result.sweep.targets, result.sweep.target_steps.T, strict=True):
        if target.metric != metric:
            continue
        axes.axhline(target.value, color=GREY, lw=1.2, ls=":", zorder=1)
        at: dict[str, Any] = {"xy": (1, target.value), "xycoords": ("axes fraction", "data")}
        axes.annotate(target.words(), ha="right", va="bottom", **at)
        for i, step in enumerate(steps):
            if step >= 0:
                style: dict[str, Any] = {"color": CYCLE[i % len(CYCLE)], "zorder": 6}
                axes.plot(step, curves[i][step], "*", ms=17, mec="white", clip_on=False, **style)


@figure_of
def plot_race(result: Race, *, title: str = "") -> Figure:
    """Losses of all that started, as far as they were trained; the first three in colour."""
    figure, (axes,) = panels(1, title=title)
    first = result.ranking()[:3]
    for i in sorted(range(len(result.losses)), key=lambda i: i in first):  # these above the others
        style: dict[str, Any] = {"color": GREY, "lw": 0.8}
        if i in first:
            style = {"color": CYCLE[first.index(i)], "label": result.named(i)}
        curve = np.where(np.isfinite(result.losses[i]), result.losses[i], np.nan)
        axes.plot(result.at[i], curve, "o-", markevery=[len(curve) - 1], ms=4, **style)
    axes.set(xlabel="training step", ylabel="loss on all training samples", yscale="log")
    positive = [value for curve in result.losses for value in curve if value > 0]
    if result.target is not None:
        positive.append(result.target.value)
        axes.axhline(result.target.value, color=REAL, lw=1.2, ls=":", label=result.target.words())
    starts = [curve[0] for curve in result.losses if np.isfinite(curve[0])]
    if starts:  # diverging curves leave the view
        axes.set_ylim(bottom=0.7 * min(positive), top=2 * max(starts))
    if first or result.target is not None:
        axes.legend(**BELOW)
    return figure
