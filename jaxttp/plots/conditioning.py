"""Spectra, condition numbers at neighbouring ranks, and sweeps beside their bounds."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxttp.conditioning import ConditionNumber, RankSensitivity, Sweep, rank_sensitivity
from jaxttp.pipeline import Conditioning
from jaxttp.plots._style import GREY, OTHER, PREDICTED, REAL, tidy

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
    axes.axhline(float(result.tolerance), color=GREY, ls=":", label="n · eps · λmax")
    axes.set(xlabel="rank", ylabel="eigenvalue")
    axes.legend(frameon=False, fontsize=9)
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
        axes.legend(frameon=False, fontsize=9)
    axes.set(xlabel="rank that counts", ylabel="condition number")
    tidy(axes)


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
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
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
        right.legend(frameon=False, fontsize=9)
    figure.suptitle(result.description, fontsize=11)
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


def plot_condition_sweep(result: Sweep, *, title: str = "") -> Figure:
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
    figure = Figure(figsize=(6.8, 4.6), layout="constrained")
    axes = figure.subplots()
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
    axes.legend(frameon=False, fontsize=9)
    tidy(axes)
    if title:
        figure.suptitle(title, fontsize=10)
    return figure
