"""Sweeps as heat maps and as a choice between cost and loss."""

import dataclasses
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxttp.forecast import Comparison, Race, Sweep
from jaxttp.losses.rule import Target
from jaxttp.pipeline import TaskSweep
from jaxttp.plots._draw import figure_of
from jaxttp.plots._style import CYCLE, GREY, OTHER, PREDICTED, REAL, panels, tidy

REGRET = 0.1
"""Settings that need so much more than the fewest steps are as good."""
FIRST_ONES = 3
"""Settings of a race that are drawn in colour."""


@figure_of
def plot_sweep(sweep: Sweep, threshold: float | Target | None = None, *, title: str = "") -> Figure:
    """Steps to a goal by learning rate and all else, with advice, and the Pareto set.

    Every row of the heat map is one combination of algorithm, momentum, weight decay, batch size,
    schedule, loss and horizon. Settings that diverge or never get there are hatched; the line is
    the largest stable rate at the start of training, the star the setting with the fewest steps,
    dots those that need at most a tenth more, or one step.

    Args:
        sweep: a `jaxttp.forecast.Sweep`.
        threshold: one of its thresholds or targets; the first target, or else the middle threshold,
            when None.
        title: above the figure.

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: a threshold or a target that was not forecast.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxttp.forecast import grid, sweep_kernel
        >>> settings = grid(learning_rate=(0.1, 0.2), momentum=(0.0, 0.9), steps=20)
        >>> found = sweep_kernel(jnp.eye(2), jnp.zeros((2, 2)), jnp.array([0, 1]), settings)
        >>> len(plot_sweep(found, 0.1).axes)  # heat map, Pareto set, colour bar
        3
    """
    goal = sweep.ranked_by if threshold is None else threshold
    sweep.times(goal)  # checks it
    figure, (left, right) = panels(2, title=title, height=5.2, width_ratios=(3, 2))
    plot_heat_map(left, sweep, goal)
    plot_pareto(right, sweep, goal)
    return figure


@figure_of
def plot_task_sweep(result: TaskSweep) -> Figure:
    """The same for a named task and the goal that its advice is for; of a race its curves.

    Args:
        result: of `jaxttp.pipeline.sweep_task`.

    Returns:
        A matplotlib figure.
    """
    if result.race is not None:
        return plot_race(result.race, title=result.task.description)
    return plot_sweep(result.sweep, result.threshold, title=result.task.description)


def plot_heat_map(axes: Axes, sweep: Sweep, threshold: float | Target) -> None:
    """Steps to a goal by learning rate and all else, with a colour bar.

    Args:
        axes: where to draw.
        sweep: the forecasts.
        threshold: one of its thresholds or targets.
    """
    rates = sorted({float(one.learning_rate) for one in sweep.settings})
    kinds = [dataclasses.replace(one, learning_rate=1.0) for one in sweep.settings]
    rows = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]  # the first of each
    at = [next(row for row, i in enumerate(rows) if kinds[i] == kind) for kind in kinds]
    table = np.full((len(rows), len(rates)), np.nan)
    times = sweep.times(threshold)
    columns = [rates.index(float(one.learning_rate)) for one in sweep.settings]
    where = list(zip(at, columns, strict=True))
    for i, place in enumerate(where):
        if sweep.stable[i] and times[i] >= 0:
            table[place] = times[i]
    edges = _edges(rates)
    axes.patch.set(hatch="///", facecolor="0.93", edgecolor="0.8")
    image = axes.pcolormesh(
        edges,
        np.arange(len(rows) + 1),
        np.ma.masked_invalid(table),
        cmap="viridis_r",
        rasterized=True,
    )
    axes.set_xscale("log")
    for row, i in enumerate(rows):
        limit = sweep.max_learning_rate[i]
        if edges[0] < limit < edges[-1]:
            name = "largest stable rate" if row == 0 else None
            axes.plot([limit] * 2, [row, row + 1], color=REAL, lw=2.5, label=name)
    if np.any(np.isfinite(table)):
        best = where[sweep.best(threshold)]
        fewest = table[best]
        near = np.argwhere(table <= max((1 + REGRET) * fewest, fewest + 1))
        axes.plot(
            [rates[column] for _, column in near], [row + 0.5 for row, _ in near], "o", ms=5,
            mfc="white", mec="black", ls="none", label=f"at most {REGRET:.0%} more, or a step",
        )  # fmt: skip
        axes.plot(
            rates[best[1]],
            best[0] + 0.5,
            "*",
            ms=17,
            mfc="white",
            mec="black",
            label="fewest steps",
        )
    axes.set_yticks(np.arange(len(rows)) + 0.5, [_label(sweep.named(i)) for i in rows])
    axes.set_ylim(0, len(rows))
    axes.set_xlim(edges[0], edges[-1])
    axes.set_xlabel("learning rate")
    axes.set_title(f"steps to {sweep.goal(threshold)}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.18), frameon=False)
    bar = axes.figure.colorbar(image, ax=axes, label="training steps")
    if bar.solids is not None:
        bar.solids.set_rasterized(True)


def plot_pareto(axes: Axes, sweep: Sweep, threshold: float | Target) -> None:
    """Final loss against cost; the settings that no other one beats in both are joined.

    Args:
        axes: where to draw.
        sweep: the forecasts.
        threshold: one of its thresholds or targets; a loss to get below is a line.
    """
    cost = sweep.cost(threshold)
    chosen = list(sweep.pareto(threshold))
    reached = np.isfinite(cost)
    axes.plot(
        cost[reached], sweep.final_loss[reached], "o", color=GREY, alpha=0.4, ms=5,
        label="every setting",
    )  # fmt: skip
    axes.plot(
        cost[chosen], sweep.final_loss[chosen], "o-", color=PREDICTED, ms=7,
        label="cheapest for its loss",
    )  # fmt: skip
    for i in _apart(chosen):
        axes.annotate(
            sweep.named(i), (cost[i], sweep.final_loss[i]), xytext=(7, 5), fontsize=10,
            textcoords="offset points",
        )  # fmt: skip
    if isinstance(threshold, Target) and threshold.metric == "loss":
        axes.axhline(threshold.value, color=GREY, lw=1.2, ls=":", label=threshold.words())
    unit = "samples seen" if sweep.step_seconds is None else "seconds"
    axes.set_xlabel(f"{unit} until there")
    axes.set_ylabel("predicted loss at the horizon")
    if np.any(reached):
        # Nothing is spent on a goal that holds before training, and 0 has no logarithm.
        axes.set_xscale("linear" if np.any(cost[reached] <= 0) else "log")
        axes.set_yscale("log")
    else:
        axes.annotate("no setting gets there", (0.5, 0.5), xycoords="axes fraction", ha="center")
    axes.margins(x=0.25, y=0.1)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.18), frameon=False)
    tidy(axes)


def _apart(chosen: list[int]) -> list[int]:
    """The ends and the middle: more labels would cover each other."""
    return list(dict.fromkeys(chosen[i] for i in (0, len(chosen) // 2, -1))) if chosen else []


def _label(name: str) -> str:
    """What is not the learning rate."""
    words = [word for word in name.split(", ") if not word.startswith("rate ")]
    return ", ".join(words) or "plain"


def _edges(rates: list[float]) -> np.ndarray:
    """Edges of cells around rates, in the logarithm."""
    logs = np.log(rates)
    if len(logs) == 1:
        return np.exp(np.array([logs[0] - 0.5, logs[0] + 0.5]))
    middle = (logs[1:] + logs[:-1]) / 2
    ends = [logs[0] - (middle[0] - logs[0])], [logs[-1] + (logs[-1] - middle[-1])]
    return np.exp(np.concatenate([ends[0], middle, ends[1]]))


@figure_of
def plot_comparison(found: Comparison, *, title: str = "") -> Figure:
    """Loss curves of the starting points, with the goals, and what their kernels say.

    Targets are lines, with a star where a starting point gets below; those of the error have a
    panel of their own.

    Args:
        found: a `jaxttp.forecast.Comparison`.
        title: above the figure.

    Returns:
        A matplotlib figure.

    Example:
        >>> from jaxttp.pipeline import Settings, compare_task
        >>> small = Settings(data="wine", samples_per_class=4, steps=20, relinearize=0)
        >>> _, found = compare_task(small, ("all", "head"), time_steps=False)
        >>> len(plot_comparison(found).axes)
        2
    """
    by_error = any(target.metric == "error" for target in found.targets)
    widths = (3, 3, 2) if by_error else (3, 2)
    figure, (left, *middle, right) = panels(len(widths), title=title, width_ratios=widths)
    labels = [
        f"{name} (rate {one.learning_rate:.3g})"
        for name, one in zip(found.names, found.settings, strict=True)
    ]
    _curves_to_targets(left, found, found.loss, "loss", labels)
    for axes in middle:
        _curves_to_targets(axes, found, found.error, "error", labels)
        axes.set(xlabel="training step", ylabel="predicted training error")
        axes.set_ylim(bottom=0)
        tidy(axes)
    if (found.rule, found.metric) == ("absolute", "loss"):
        for goal in found.thresholds:
            left.axhline(goal, color=GREY, lw=1, ls=":")
    left.set_yscale("log")
    left.set_xlabel("training step")
    left.set_ylabel("predicted training loss")
    left.legend(frameon=False)
    places = np.arange(len(found.names))
    speeds = [why.speed for why in found.explanations]
    shares = [why.alignment for why in found.explanations]
    right.barh(places - 0.19, speeds, 0.36, color=PREDICTED, label="speed")
    right.barh(places + 0.19, shares, 0.36, color=OTHER, label="labels along leading eigenvectors")
    right.set_yticks(places, found.names)
    right.invert_yaxis()
    right.set_xlim(0, 1)
    right.set_xlabel("share")
    right.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    for axes in (left, right):
        tidy(axes)
    return figure


def _curves_to_targets(
    axes: Axes, found: Comparison, curves: Any, metric: str, labels: list[str]
) -> None:
    """The curves of all starting points, with lines and stars for the targets of this metric."""
    for i, label in enumerate(labels):
        axes.plot(curves[i], color=CYCLE[i % len(CYCLE)], lw=2, label=label)
    for column, target in enumerate(found.targets):
        if target.metric != metric:
            continue
        axes.axhline(target.value, color=GREY, lw=1.2, ls=":", zorder=1)
        axes.annotate(target.words(), (1, target.value), xycoords=("axes fraction", "data"),
                      xytext=(-2, 3), textcoords="offset points", ha="right", color=GREY,
                      fontsize=10)  # fmt: skip
        for i, step in enumerate(found.target_steps[:, column]):
            if step >= 0:
                axes.plot(step, curves[i][step], "*", color=CYCLE[i % len(CYCLE)], ms=17,
                          mec="white", mew=0.8, clip_on=False, zorder=6)  # fmt: skip


@figure_of
def plot_race(found: Race, *, title: str = "") -> Figure:
    """Losses of all that started, as far as they were trained; the first ones in colour.

    Args:
        found: a `jaxttp.forecast.Race`.
        title: above the figure.

    Returns:
        A matplotlib figure.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxttp.forecast import grid, race
        >>> settings = grid(learning_rate=(0.1, 1.0), steps=5)
        >>> found = race(lambda w, x: x @ w, jnp.zeros((2, 2)), jnp.eye(2), jnp.arange(2), settings)
        >>> plot_race(found).axes[0].get_xlabel()
        'training step'
    """
    figure, (axes,) = panels(1, title=title)
    order = found.ranking()[:FIRST_ONES]
    for i in (*(i for i in range(len(found.losses)) if i not in order), *order):
        curve = found.losses[i]
        shown = np.where(np.isfinite(curve), curve, np.nan)
        steps, place = found.at[i], order.index(i) if i in order else None
        color = GREY if place is None else CYCLE[place]
        label = None if place is None else found.named(i)
        width, above = (0.8, 1) if place is None else (2.2, 3)
        axes.plot(steps, shown, color=color, lw=width, label=label, zorder=above)
        axes.plot(steps[-1], shown[-1], "o", ms=3 if place is None else 5, color=color,
                  zorder=above)  # fmt: skip
    if found.goal is not None:
        axes.axhline(found.goal.value, color=REAL, lw=1.2, ls=":", label=found.goal.words())
    axes.set_yscale("log")
    starts = [curve[0] for curve in found.losses if np.isfinite(curve[0])]
    if starts:
        least = [curve[np.isfinite(curve)].min() for curve in found.losses if len(curve)
                 and np.isfinite(curve[0])]  # fmt: skip
        goal = [] if found.goal is None else [found.goal.value]
        low = min((value for value in (*least, *goal, *starts) if value > 0), default=1e-3)
        axes.set_ylim(bottom=0.7 * low, top=2 * max(starts))
    axes.set(xlabel="training step", ylabel="loss on all training samples")
    if order or found.goal is not None:
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    tidy(axes)
    return figure
