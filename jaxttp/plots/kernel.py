"""Figures of a kernel and its spectrum, and of exact Gauss-Newton steps."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxttp.gauss_newton import StepInfo
from jaxttp.ntk import (
    ClassSeparation,
    ClassSketch,
    Eigensystem,
    KernelPlan,
    PowerLaw,
    SpectralDensity,
)
from jaxttp.ntk.lanczos import with_error
from jaxttp.pipeline import TaskSpectrum, TaskSteps
from jaxttp.plots._draw import figure_of
from jaxttp.plots._style import GREY, OTHER, PREDICTED, REAL, legend, panels, positive, tidy


def plot_eigenvalues(axes: Axes, values: np.ndarray, rank: int) -> None:
    """Eigenvalues that count as non-zero, by rank.

    Args:
        axes: where to draw.
        values: in decreasing order.
        rank: how many count.
    """
    ranks = np.arange(1, rank + 1)
    axes.loglog(ranks, positive(values)[:rank], color=PREDICTED, label="eigenvalues of Θ")
    axes.set(xlabel="rank", ylabel="eigenvalue")
    tidy(axes)


def plot_law(axes: Axes, law: PowerLaw) -> None:
    """A power law over the window that it was fitted to.

    Args:
        axes: where to draw.
        law: of `jaxttp.ntk.fit_power_law`.
    """
    window = np.arange(law.window[0], law.window[1] + 1)
    curve = float(law.coefficient) * window ** -float(law.exponent)
    label = f"power law, exponent {float(law.exponent):.2f}"
    axes.loglog(window, curve, "--", color=GREY, label=label)


def plot_shares(axes: Axes, result: TaskSpectrum) -> None:
    """How much of residual and labels the leading eigenvectors hold.

    Args:
        axes: where to draw.
        result: of `jaxttp.pipeline.task_spectrum`.
    """
    ranks = np.arange(1, len(result.values) + 1)
    for shares, color, style, label in (
        (result.residual, PREDICTED, "-", "residual"),
        (result.labels, OTHER, "--", "centred labels"),
    ):
        axes.semilogx(ranks, 100 * np.cumsum(shares), style, color=color, label=label)
    axes.set(xlabel="leading eigenvectors", ylabel="share (%)", ylim=(0, 103))
    legend(axes)
    tidy(axes)


@figure_of
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
    figure, (left, right) = panels(2, title=result.task.description, height=4.2)
    plot_eigenvalues(left, result.values, result.rank)
    plot_law(left, result.law)
    legend(left)
    plot_shares(right, result)
    return figure


@figure_of
def plot_eigensystem(result: Eigensystem) -> Figure:
    """The eigenvalues that count as non-zero, by rank.

    Args:
        result: of `jaxttp.ntk.eigendecomposition`.

    Returns:
        A matplotlib figure.
    """
    figure, (axes,) = panels(title=f"rank {int(result.rank)} of {len(result.values)}")
    plot_eigenvalues(axes, np.asarray(result.values), int(result.rank))
    return figure


@figure_of
def plot_power_law(result: PowerLaw) -> Figure:
    """The fitted line over its window.

    Args:
        result: of `jaxttp.ntk.fit_power_law`.

    Returns:
        A matplotlib figure.
    """
    figure, (axes,) = panels(title=f"R² {float(result.r_squared):.3f}")
    plot_law(axes, result)
    axes.set(xlabel="rank", ylabel="eigenvalue")
    legend(axes)
    tidy(axes)
    return figure


@figure_of
def plot_density(result: SpectralDensity, *, width: float = 0.3) -> Figure:
    """The density of eigenvalues over their logarithm, on either side of zero, with its error.

    The axis is logarithmic on both sides where there are negative eigenvalues, or some that are
    zero to rounding: a line at 0, whose label counts them. The band is the standard error.

    Args:
        result: of `jaxttp.ntk.spectral_density`.
        width: of the smoothing, in factors of e.

    Returns:
        A matplotlib figure.
    """
    figure, (axes,) = panels(title=str(result))
    nodes, weights = np.asarray(result.nodes), np.asarray(result.weights)
    counts = (np.abs(nodes) > float(result.rounding)) & (weights > 0)
    logs = np.log(np.where(counts, np.abs(nodes), 1.0))
    reach, band = 4 * width, f"± standard error ({len(nodes)} probes)"
    sides = {sign: counts & (sign * nodes > 0) for sign in (-1, 1)}
    for sign, side in sides.items():
        if not side.any():
            continue
        grid = np.linspace(logs[side].min() - reach, logs[side].max() + reach, 400)
        z = (grid[:, None, None] - logs) / width
        bumps = np.where(side, np.exp(-0.5 * z**2) / (width * np.sqrt(2 * np.pi)), 0.0)
        density, error = (
            result.size * np.asarray(part) for part in result.integral(lambda _, b=bumps: b)
        )
        line = sign * np.exp(grid)
        axes.plot(line, density, color=PREDICTED)
        if len(nodes) > 1:
            axes.fill_between(line, density - error, density + error, alpha=0.3, color=PREDICTED,
                              lw=0, label=band)  # fmt: skip
            band = "_"  # once in the legend
    zeros, spread = map(float, result.zeros())
    if zeros >= 0.5 or sides[-1].any():
        # Nothing but zeros lies in the linear part.
        nearest = logs[counts].min() if counts.any() else 0.0
        linear = 10.0 ** np.floor((nearest - reach) / np.log(10))
        ends = [np.exp(logs[side].max() + reach) if side.any() else linear
                for side in sides.values()]  # fmt: skip
        decades = np.log10(ends[0] / linear) + np.log10(ends[1] / linear)
        axes.set_xscale("symlog", linthresh=linear, linscale=max(1.0, 0.1 * decades))
        axes.xaxis.get_major_locator().set_params(numticks=6)  # else they cover each other
        axes.set_xlim(-ends[0], ends[1])
        if zeros >= 0.5:
            axes.axvline(0.0, color=OTHER, label=f"zero to rounding: {with_error(zeros, spread)}")
    else:
        axes.set_xscale("log")
    axes.set(xlabel="eigenvalue", ylabel="eigenvalues for each factor of e")
    axes.set_ylim(bottom=0)
    legend(axes)
    tidy(axes)
    return figure


@figure_of
def plot_class_separation(result: ClassSeparation) -> Figure:
    """How much of the variance lies between the classes.

    Args:
        result: of `jaxttp.ntk.class_separation`.

    Returns:
        A matplotlib figure.
    """
    shares = np.atleast_1d(np.asarray(result.between_share))
    nearest = 100 * float(np.mean(np.asarray(result.nearest_mean)))
    figure, (axes,) = panels(title=f"{nearest:.0f} % of samples nearest their own class's mean")
    axes.bar(np.arange(1, len(shares) + 1), 100 * shares, color=PREDICTED, width=0.6)
    axes.set(xlabel="component", ylabel="variance between classes (%)", ylim=(0, 103))
    tidy(axes)
    return figure


@figure_of
def plot_class_sketch(result: ClassSketch) -> Figure:
    """The kernel of the samples, in their order.

    Args:
        result: of `jaxttp.class_sketch`.

    Returns:
        A matplotlib figure.
    """
    figure, (axes,) = panels(title=f"relative error {float(result.error):.2g}")
    kernel = np.asarray(result.kernel)
    edges = np.arange(len(kernel) + 1)
    image = axes.pcolormesh(edges, edges, kernel, cmap="viridis", rasterized=True)
    figure.colorbar(image, ax=axes, label="mean over outputs of Θ")
    axes.set(xlabel="sample", ylabel="sample")
    axes.invert_yaxis()
    axes.set_aspect("equal")
    return figure


@figure_of
def plot_plan(result: KernelPlan) -> Figure:
    """What each method would cost.

    Args:
        result: of `jaxttp.ntk_plan`.

    Returns:
        A matplotlib figure.
    """
    figure, (axes,) = panels(title=f"{result.method}: {result.reason}", height=3.2)
    names = list(result.flops)
    colors = [PREDICTED if name == result.method else GREY for name in names]
    axes.barh(names, list(result.flops.values()), color=colors, height=0.5)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("floating-point operations")
    tidy(axes)
    return figure


@figure_of
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
    figure, (axes,) = panels(title=result.description)
    shown = np.isfinite(result.loss)
    axes.semilogy(result.forecast.loss, color=PREDICTED, label="forecast")
    axes.semilogy(np.flatnonzero(shown), result.loss[shown], "o--", color=REAL, mfc="none",
                  label="real steps")  # fmt: skip
    name = (result.settings.loss or "squared_error").replace("_", "-")
    axes.set(xlabel="Gauss-Newton step", ylabel=f"training loss ({name})")
    legend(axes)
    tidy(axes)
    return figure


@figure_of
def plot_step_info(result: StepInfo) -> Figure:
    """Directions kept in every half-layer, and how much of the wanted change each missed.

    Args:
        result: of `gauss_newton_direction(..., return_info=True)`.

    Returns:
        A matplotlib figure.
    """
    figure, (left, right) = panels(2, title=str(result))
    blocks = np.arange(1, len(np.asarray(result.ranks)) + 1)
    for half, marker, color in ((0, "o", PREDICTED), (1, "s", REAL)):
        label = f"half-layer {half + 1}"
        left.plot(blocks, np.asarray(result.ranks)[:, half], marker, color=color, label=label)
        missed = positive(np.asarray(result.half_residuals)[:, half])
        right.plot(blocks, missed, marker, color=color, label=label)
    left.set(xlabel="block", ylabel="directions kept")
    left.set_ylim(bottom=0)
    right.set(xlabel="block", ylabel="share of the change missed")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xticks(blocks)
        legend(axes)
        tidy(axes)
    return figure
