"""Kernels and their spectra, outputs and factors in motion, similarity of layers."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxttp.dynamics import Trajectory, TwoFactorTrajectory, WeightSpaceTrajectory
from jaxttp.ntk import Eigensystem, PowerLaw, SpectralDensity
from jaxttp.ntk.lanczos import with_error
from jaxttp.pipeline import TaskSpectrum
from jaxttp.plots._style import CYCLE, GREY, OTHER, PREDICTED, REAL, figure_of, panels, positive
from jaxttp.representation import CKATable


def plot_eigenvalues(axes: Axes, values: Any, rank: int) -> None:
    """Eigenvalues that count as non-zero (`rank` of them, in decreasing order), by rank."""
    shown = positive(values)[:rank]
    axes.loglog(np.arange(1, rank + 1), shown, color=PREDICTED, label="eigenvalues of Θ")
    axes.set(xlabel="rank", ylabel="eigenvalue")


def plot_law(axes: Axes, law: PowerLaw) -> None:
    """A power law over the window that it was fitted to."""
    window = np.arange(law.window[0], law.window[1] + 1)
    curve = float(law.coefficient) * window ** -float(law.exponent)
    label = f"power law, exponent {float(law.exponent):.2f}"
    axes.loglog(window, curve, "--", color=GREY, label=label)
    axes.set(xlabel="rank", ylabel="eigenvalue")


@figure_of
def plot_task_spectrum(result: TaskSpectrum) -> Figure:
    """Eigenvalues with their power law; cumulative fractions of residual and labels."""
    figure, (left, right) = panels(2, title=result.task.description, height=4.2)
    plot_eigenvalues(left, result.values, result.rank)
    plot_law(left, result.law)
    ranks, residual = np.arange(1, len(result.values) + 1), 100 * np.cumsum(result.residual)
    right.semilogx(ranks, residual, color=PREDICTED, label="residual")
    labels = 100 * np.cumsum(result.labels)
    right.semilogx(ranks, labels, "--", color=OTHER, label="centered labels")
    right.set(xlabel="leading eigenvectors", ylabel="fraction (%)", ylim=(0, 103))
    return figure


@figure_of
def plot_eigensystem(result: Eigensystem) -> Figure:
    """The eigenvalues that count as non-zero, by rank."""
    figure, (axes,) = panels(title=f"rank {int(result.rank)} of {len(result.values)}")
    plot_eigenvalues(axes, result.values, int(result.rank))
    return figure


@figure_of
def plot_power_law(result: PowerLaw) -> Figure:
    """The fitted line over its window."""
    figure, (axes,) = panels(title=f"R² {float(result.r_squared):.3f}")
    plot_law(axes, result)
    return figure


@figure_of
def plot_density(result: SpectralDensity, *, width: float = 0.3) -> Figure:
    """The density of eigenvalues over their logarithm, with its standard error, sign by sign.

    Args:
        result: of `jaxttp.ntk.spectral_density`.
        width: of the smoothing, in factors of e.
    """
    figure, (axes,) = panels(title=str(result))
    nodes, weights = np.asarray(result.nodes), np.asarray(result.weights)
    counts = (np.abs(nodes) > float(result.rounding)) & (weights > 0)
    logs = np.log(np.where(counts, np.abs(nodes), 1.0))
    for sign, color, name in ((1, PREDICTED, "positive"), (-1, REAL, "negative")):
        side = counts & (sign * nodes > 0)
        if not side.any():
            continue
        grid = np.linspace(logs[side].min() - 4 * width, logs[side].max() + 4 * width, 400)
        z = (grid[:, None, None] - logs) / width
        bumps = np.where(side, np.exp(-0.5 * z**2) / (width * np.sqrt(2 * np.pi)), 0.0)
        density, error = (
            result.size * np.asarray(part) for part in result.integral(lambda _, b=bumps: b)
        )
        x, ends = sign * np.exp(grid), (density - error, density + error)
        axes.plot(x, density, color=color, label=f"{name} eigenvalues")
        if len(nodes) > 1:
            label = f"± standard error ({len(nodes)} probes)"
            axes.fill_between(x, *ends, alpha=0.3, color=color, lw=0, label=label)
    zeros, spread = map(float, result.zeros())
    if zeros >= 0.5:
        axes.plot([], [], "o", color=OTHER, label=f"rounded to 0: {with_error(zeros, spread)}")
    signed: dict[str, Any] = {"value": "symlog", "linthresh": np.exp(logs.min() - 4 * width)}
    axes.set_xscale(**signed if np.any(counts & (nodes < 0)) else {"value": "log"})
    axes.set(xlabel="eigenvalue", ylabel="eigenvalues for each factor of e")
    axes.set_ylim(bottom=0)
    return figure


@figure_of
def plot_cka(result: CKATable) -> Figure:
    """Similarity of every layer with every other one; a square of its own for every number."""
    values = np.asarray(result.values)
    figure, (axes,) = panels(height=max(4.6, 0.45 * len(result.rows) + 2))
    image = axes.pcolormesh(values, cmap="viridis", vmin=0, vmax=1, rasterized=True)
    figure.colorbar(image, ax=axes, label="linear CKA")
    axes.set_xticks(np.arange(len(result.columns)) + 0.5, result.columns, rotation=45, ha="right")
    axes.set_yticks(np.arange(len(result.rows)) + 0.5, result.rows)
    axes.invert_yaxis()
    axes.set(xlabel="layer", ylabel="layer")
    if values.size <= 100:
        for (i, j), value in np.ndenumerate(values):
            color = "black" if value > 0.6 else "white"
            axes.text(j + 0.5, i + 0.5, f"{value:.2f}", ha="center", va="center", color=color)
    return figure


@figure_of
def plot_trajectory(result: Trajectory | WeightSpaceTrajectory, *, sample: int = 0) -> Figure:
    """The outputs of one sample, and how far outputs have moved; the weights, too, if known."""
    in_weights = isinstance(result, WeightSpaceTrajectory)
    title = f"warning: {result.warnings}" if in_weights else ""
    figure, (left, middle, *right) = panels(3 if in_weights else 2, title=title)
    path = np.asarray(result.train)[:, sample]
    for c, color in zip(range(path.shape[1]), CYCLE, strict=False):
        left.plot(result.ts, path[:, c], color=color, label=f"output {c}")
    left.set(xlabel="time (steps)", ylabel=f"outputs of sample {sample}")
    samples = {"training samples": (result.train, PREDICTED), "test samples": (result.test, OTHER)}
    for label, (outputs, color) in samples.items():
        if outputs is not None:
            paths = np.asarray(outputs, float)
            moved = np.sqrt(np.mean((paths - paths[:1]) ** 2, axis=(1, 2)))
            middle.plot(result.ts, moved, color=color, label=label)
    middle.set(xlabel="time (steps)", ylabel="outputs moved (root mean square)")
    middle.set_ylim(bottom=0)
    if in_weights:
        right[0].plot(result.ts, np.asarray(result.displacement), color=REAL)
        right[0].set(xlabel="time (steps)", ylabel="weights moved (fraction of their norm)")
        right[0].set_ylim(bottom=0)
    return figure


@figure_of
def plot_two_factor(result: TwoFactorTrajectory) -> Figure:
    """Singular values of both factors over time."""
    figure, axes = panels(2, sharey=True)
    factors = {"features f": result.f, "unembedding W": result.w}
    for panel, (name, factor) in zip(axes, factors.items(), strict=True):
        values = np.linalg.svd(np.asarray(factor, float), compute_uv=False)
        for k, column in enumerate(values.T):
            color, label = (CYCLE[k], f"σ{k + 1}") if k < len(CYCLE) else (GREY, None)
            panel.plot(result.ts, column, lw=1.6, color=color, label=label)
        panel.set(xlabel="time (steps)", ylabel=f"singular values of the {name}")
    return figure
