"""Spectra, condition numbers at neighboring ranks, and sweeps with their bounds."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxttp.conditioning import ConditionNumber, ConditionSweep, RankSensitivity
from jaxttp.pipeline import Conditioning
from jaxttp.plots._style import GREY, OTHER, PREDICTED, REAL, band, figure_of, panels, positive

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
    """
    values, rank = np.asarray(result.eigenvalues), int(result.rank or 0)
    axes.semilogy(np.arange(1, len(values) + 1), positive(values), color=PREDICTED, lw=1.8)
    if rank > 0:
        label = f"smallest nonzero, rank {rank}"
        axes.plot(rank, values[rank - 1], "*", color=REAL, ms=13, zorder=5, label=label)
    axes.axhline(float(result.tolerance), color=GREY, ls=":", label="n · eps · λmax")
    axes.set(xlabel="rank", ylabel="absolute eigenvalue")


def plot_rank_sensitivity(axes: Axes, result: RankSensitivity) -> None:
    """The condition number for every rank that one might have believed."""
    finite = np.isfinite(result.values)
    axes.semilogy(result.ranks[finite], result.values[finite], color=PREDICTED, lw=1.8)
    for value in result.values[finite & (result.ranks == result.rank)]:
        axes.plot(result.rank, value, "*", color=REAL, ms=13, zorder=5, label=f"κ = {value:.3g}")
    axes.set(xlabel="rank", ylabel="condition number")


@figure_of
def plot_ranks(result: RankSensitivity) -> Figure:
    """The condition number by the rank that counts."""
    figure, (axes,) = panels()
    plot_rank_sensitivity(axes, result)
    return figure


@figure_of
def plot_condition_number(result: ConditionNumber) -> Figure:
    """The spectrum with what counts of it; its ends where only those are known."""
    sign = "≥ " if result.is_lower_bound else ""
    figure, (axes,) = panels(title=f"condition number {sign}{float(result.value):.4g}")
    if result.eigenvalues is not None:
        plot_spectrum(axes, result)
    else:
        ends = [float(result.largest), float(result.smallest)]
        axes.semilogy(["largest", "smallest nonzero"], ends, "*", ms=13, color=REAL)
        axes.set_ylabel("absolute eigenvalue (largest and smallest)")
    return figure


@figure_of
def plot_conditioning(result: Conditioning) -> Figure:
    """The spectrum, and the condition number by rank with its bounds.

    Source:
        GNC Appendix C, Figure 9.
    """
    if result.sensitivity is None:
        return plot_condition_number(result.condition)
    figure, (left, right) = panels(2, title=result.description)
    plot_spectrum(left, result.condition)
    plot_rank_sensitivity(right, result.sensitivity)
    for (name, bound), style in zip(result.bounds.items(), ("--", ":"), strict=False):
        if np.isfinite(bound):
            right.axhline(bound, color=OTHER, ls=style, label=f"bound, {name}: {bound:.3g}")
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
    x, shown = np.asarray(x, float)[known], shown[known]
    axes.plot(x, np.nanmedian(shown, axis=1), color=color, ls=style, marker="o", ms=4, label=label)
    if shown.shape[1] > 1:
        band(axes, x, np.nanmin(shown, axis=1), np.nanmax(shown, axis=1), None, color)


@figure_of
def plot_condition_sweep(result: ConditionSweep, *, title: str = "") -> Figure:
    """Condition number and bounds over a parameter; lines are medians, bands the range of draws.

    Source:
        GNC Figures 2, 3, 5, 6, 20, 22, 23.
    """
    figure, (axes,) = panels(title=title)
    bound = "bound" if result.maximum is None else "convex bound"
    for label, table, color, style in (
        ("condition number", result.condition, PREDICTED, "-"),
        (bound, result.bound, REAL, "--"),
        ("maximum bound", result.maximum, OTHER, ":"),
    ):
        if table is not None:
            plot_draws(axes, result.values, table, label=label, color=color, style=style)
    axes.set(xlabel=LABELS[result.parameter], ylabel="condition number", yscale="log")
    if result.parameter == "width":
        axes.set_xscale("log")
    return figure
