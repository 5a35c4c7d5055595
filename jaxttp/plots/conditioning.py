"""Spectra, condition numbers at neighbouring ranks, and sweeps beside their bounds."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxttp.conditioning import (
    Bounds,
    ConditionNumber,
    ConditionSweep,
    LayerSpectra,
    LeakyPoint,
    LinearPoint,
    RankSensitivity,
    Tracker,
    rank_sensitivity,
)
from jaxttp.pipeline import Conditioning, TrackedRun
from jaxttp.plots._draw import figure_of
from jaxttp.plots._style import (
    CYCLE,
    FOURTH,
    GREY,
    OTHER,
    PREDICTED,
    REAL,
    legend,
    panels,
    positive,
    tidy,
)

LABELS = {
    "depth": "depth (weight matrices)",
    "width": "hidden width",
    "skip": "skip weight β",
    "alpha": "negative slope α",
}


def plot_spectrum(axes: Axes, result: ConditionNumber) -> None:
    """Eigenvalues by rank, with the smallest that counts and the tolerance.

    Args:
        axes: where to draw.
        result: with all eigenvalues.

    Raises:
        ValueError: a result without eigenvalues.
    """
    if result.eigenvalues is None:
        raise ValueError(f"a {result.kind!r} result knows no spectrum to draw.")
    values, rank = np.asarray(result.eigenvalues), int(result.rank)
    shown = np.where(values > 0, values, np.nan)
    axes.semilogy(np.arange(1, len(values) + 1), shown, color=PREDICTED, lw=1.8)
    if rank > 0:
        axes.plot(rank, values[rank - 1], "*", color=REAL, ms=13, zorder=5,
                  label=f"smallest that counts, rank {rank}")  # fmt: skip
    bottom = np.nanmin(shown) if np.any(np.isfinite(shown)) else 0.0
    if float(result.tolerance) > 1e-3 * bottom or rank < len(values):
        axes.axhline(float(result.tolerance), color=GREY, ls=":", label="n · eps · λmax")
    axes.set(xlabel="rank", ylabel="eigenvalue")
    legend(axes)
    tidy(axes)


def plot_rank_sensitivity(axes: Axes, result: RankSensitivity) -> None:
    """The condition number for every rank that one might have believed.

    Args:
        axes: where to draw.
        result: of `jaxttp.conditioning.rank_sensitivity`.
    """
    finite = np.isfinite(result.values)
    axes.semilogy(result.ranks[finite], result.values[finite], color=PREDICTED, lw=1.8)
    place = np.flatnonzero(result.ranks == result.rank)
    if len(place) and finite[place[0]]:
        value = result.values[place[0]]
        axes.plot(result.rank, value, "*", color=REAL, ms=13, zorder=5, label=f"κ = {value:.3g}")
        legend(axes)
    axes.set(xlabel="rank that counts", ylabel="condition number")
    tidy(axes)


@figure_of
def plot_conditioning(result: Conditioning) -> Figure:
    """The spectrum, and the condition number by rank with its bounds.

    Args:
        result: of `jaxttp.pipeline.condition`.

    Returns:
        A matplotlib figure; without all eigenvalues one that says so.

    Example:
        >>> from jaxttp.pipeline import ConditionSettings, condition
        >>> found = condition(ConditionSettings(data="wine", width=40))
        >>> len(plot_conditioning(found).axes)
        2

    Source:
        GNC Appendix C, Figure 9.
    """
    figure, (left, right) = panels(2, title=result.description)
    condition = result.condition
    if condition.eigenvalues is None or result.sensitivity is None:
        for axes in (left, right):
            axes.set_axis_off()
        left.text(0.0, 0.5, f"only the ends of the spectrum are known:\n{condition}", wrap=True)
    else:
        plot_spectrum(left, condition)
        plot_rank_sensitivity(right, rank_sensitivity(condition))
        for (name, bound), style in zip(result.bounds.items(), ("--", ":"), strict=False):
            if np.isfinite(bound):
                right.axhline(bound, color=OTHER, ls=style, label=f"bound, {name}: {bound:.3g}")
        legend(right)
    return figure


def plot_draws(
    axes: Axes, x: Any, table: Any, *, label: str | None = None, color: Any = None, style: str = "-"
) -> None:
    """A curve for several draws: a line through the medians, a band from the least to the greatest.

    Args:
        axes: where to draw.
        x: (V,).
        table: (V, S), S draws; what is not finite is left out.
        label: of the line.
        color: of line and band.
        style: of the line.

    Example:
        >>> axes = Figure().subplots()
        >>> plot_draws(axes, (1, 2, 3), [[1.0, 3.0], [2.0, np.inf], [np.inf, np.inf]])
        >>> axes.lines[0].get_xydata().tolist()
        [[1.0, 2.0], [2.0, 2.0]]
    """
    shown = np.asarray(table, float)
    shown = np.where(np.isfinite(shown), shown, np.nan)
    if np.all(np.isnan(shown)):
        axes.plot([], [], color=color, ls=style, label=f"{label} (infinite)")
        return
    known = ~np.all(np.isnan(shown), axis=1)
    x = np.asarray(x, float)[known]
    shown = shown[known]
    axes.plot(x, np.nanmedian(shown, axis=1), color=color, ls=style, marker="o", ms=4, label=label)
    if shown.shape[1] > 1:
        low, high = np.nanmin(shown, axis=1), np.nanmax(shown, axis=1)
        axes.fill_between(x, low, high, color=color, alpha=0.18, lw=0)


@figure_of
def plot_condition_sweep(result: ConditionSweep, *, title: str = "") -> Figure:
    """Condition number and bounds over a parameter; lines are medians, bands the range of draws.

    Args:
        result: of `jaxttp.conditioning.sweep`.
        title: above the figure.

    Returns:
        A matplotlib figure.

    Example:
        >>> import jax
        >>> from jaxttp.conditioning import sweep
        >>> found = sweep("depth", (2, 3), inputs=4, outputs=2, width=6, key=jax.random.key(0))
        >>> plot_condition_sweep(found).axes[0].get_xlabel()
        'depth (weight matrices)'

    Source:
        GNC Figures 2, 3, 5, 6, 20, 22, 23.
    """
    figure, (axes,) = panels(title=title)
    curves = [("condition number", result.condition, PREDICTED, "-")]
    curves.append(("bound" if result.maximum is None else "convex bound", result.bound, REAL, "--"))
    if result.maximum is not None:
        curves.append(("maximum bound", result.maximum, OTHER, ":"))
    for label, table, color, style in curves:
        plot_draws(axes, result.values, table, label=label, color=color, style=style)
    axes.set_yscale("log")
    if result.parameter == "width":
        axes.set_xscale("log")
    axes.set(xlabel=LABELS[result.parameter], ylabel="condition number")
    legend(axes)
    tidy(axes)
    return figure


@figure_of
def plot_condition_number(result: ConditionNumber) -> Figure:
    """The spectrum with what counts of it; its ends where only those are known.

    Args:
        result: of `jaxttp.conditioning.condition_number`.

    Returns:
        A matplotlib figure.
    """
    sign = "≥ " if result.is_lower_bound else ""
    figure, (axes,) = panels(title=f"condition number {sign}{float(result.value):.4g}")
    if result.eigenvalues is not None:
        plot_spectrum(axes, result)
        return figure
    ends, rank = [float(result.largest), float(result.smallest)], int(result.rank)
    axes.semilogy([1, rank] if rank >= 0 else [0, 1], ends, "*", ms=13, color=REAL)
    if rank < 0:
        axes.set_xticks([0, 1], ["first", "last (rank not known)"])
    axes.set(xlabel="rank", ylabel="eigenvalue (the ends that are known)")
    tidy(axes)
    return figure


@figure_of
def plot_ranks(result: RankSensitivity) -> Figure:
    """The condition number by the rank that counts.

    Args:
        result: of `jaxttp.conditioning.rank_sensitivity`.

    Returns:
        A matplotlib figure.
    """
    figure, (axes,) = panels()
    plot_rank_sensitivity(axes, result)
    return figure


def _terms(axes: Axes, terms: Any, weights: Any) -> None:
    """What every layer contributes to the bound."""
    layers = np.arange(1, len(terms) + 1)
    axes.bar(layers, positive(terms), color=PREDICTED, alpha=0.35, width=0.6, label="κ of a layer")
    axes.plot(layers, positive(np.asarray(weights) * np.asarray(terms)), "o", color=PREDICTED,
              label="its part of the convex bound")  # fmt: skip
    axes.set_yscale("log")
    axes.set_xticks(layers)
    axes.set(xlabel="layer", ylabel="condition number")


@figure_of
def plot_bounds(result: Bounds) -> Figure:
    """Both bounds, and what every layer contributes.

    Args:
        result: of `jaxttp.conditioning.linear_bound`, of one network.

    Returns:
        A matplotlib figure.
    """
    figure, (axes,) = panels()
    _terms(axes, result.terms, result.weights)
    axes.axhline(float(result.convex), color=REAL, ls="--", label="convex bound")
    axes.axhline(float(result.maximum), color=OTHER, ls=":", label="maximum bound")
    legend(axes)
    tidy(axes)
    return figure


@figure_of
def plot_linear_point(result: LinearPoint) -> Figure:
    """The condition number under its bounds, and what every layer contributes.

    Args:
        result: of `jaxttp.conditioning.linear_point`.

    Returns:
        A matplotlib figure.
    """
    figure, (axes,) = panels()
    _terms(axes, result.terms, result.weights)
    axes.axhline(float(result.condition.value), color=FOURTH, label="condition number")
    axes.axhline(float(result.convex), color=REAL, ls="--", label="convex bound")
    axes.axhline(float(result.maximum), color=OTHER, ls=":", label="maximum bound")
    legend(axes)
    tidy(axes)
    return figure


@figure_of
def plot_leaky_point(result: LeakyPoint) -> Figure:
    """The condition number and eq (11), which bounds it.

    Args:
        result: of `jaxttp.conditioning.leaky_point`.

    Returns:
        A matplotlib figure.
    """
    figure, (axes,) = panels(height=2.4)
    values = [float(result.condition.value), float(result.bound)]
    bars = axes.barh(["condition number", "bound"], values, color=(PREDICTED, REAL), height=0.5)
    axes.bar_label(bars, [f"{value:.4g}" for value in values], padding=4)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set_xlabel("condition number")
    tidy(axes)
    return figure


@figure_of
def plot_layer_spectra(result: LayerSpectra) -> Figure:
    """Condition numbers and smallest singular values of the products around every layer.

    Args:
        result: of `jaxttp.conditioning.layer_spectra`.

    Returns:
        A matplotlib figure.
    """
    figure, (left, right) = panels(2)
    layers = np.arange(1, len(result.outer_condition) + 1)
    for axes, outer, inner, name in (
        (left, result.outer_condition, result.inner_condition, "condition number"),
        (right, result.outer_smallest, result.inner_smallest, "smallest squared singular value"),
    ):
        axes.semilogy(layers, positive(outer), "o-", color=PREDICTED, label="layers above")
        axes.semilogy(layers, positive(inner), "s--", color=REAL, label="layers below")
        axes.set_xticks(layers)
        axes.set(xlabel="layer", ylabel=name)
        legend(axes)
        tidy(axes)
    return figure


def _records(records: Any) -> Figure:
    figure, (left, right) = panels(2)
    steps = [record.step for record in records]
    left.plot(steps, positive([record.loss for record in records]), "o-", ms=4, color=REAL)
    left.set(xlabel="training step", ylabel="training loss", yscale="log")
    for name, color in zip(records[0].values, CYCLE, strict=False):
        values = positive([float(record.values[name]) for record in records])
        right.plot(steps, values, "o-", ms=4, color=color, label=name)
    right.set(xlabel="training step", ylabel="measured", yscale="log")
    legend(right)
    for axes in (left, right):
        tidy(axes)
    return figure


@figure_of
def plot_tracked(result: TrackedRun) -> Figure:
    """Loss and measures along a real training.

    Args:
        result: of `jaxttp.pipeline.tracked_run`.

    Returns:
        A matplotlib figure.
    """
    return _records(result.records)


@figure_of
def plot_tracker(result: Tracker) -> Figure:
    """Loss and measures that a callback has recorded.

    Args:
        result: after a training.

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: nothing is recorded yet.
    """
    if not result.records:
        raise ValueError("the tracker has no records yet; pass it to a training as callback.")
    return _records(result.records)
