"""Outputs, losses and singular values in motion."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxttp.dynamics import (
    Diffusion,
    FlowCurves,
    LinearFilter,
    RelinearizedTrajectory,
    Trajectory,
    TwoFactorObservables,
    TwoFactorTrajectory,
    WeightSpaceTrajectory,
)
from jaxttp.plots._draw import figure_of
from jaxttp.plots._style import CYCLE, GREY, OTHER, PREDICTED, REAL, legend, panels, tidy

SHOWN = 6
"""Lines of a kind that a panel holds before they cover each other."""


def _draw_outputs(axes: Axes, ts: Any, train: Any, sample: int) -> None:
    """The outputs of one sample over time."""
    path = np.asarray(train)[:, sample]
    for c, color in zip(range(min(path.shape[1], SHOWN)), CYCLE, strict=False):
        axes.plot(ts, path[:, c], color=color, label=f"output {c}")
    axes.set(xlabel="time (steps)", ylabel=f"outputs of sample {sample}")
    legend(axes)


def _draw_distance(axes: Axes, ts: Any, train: Any, test: Any) -> None:
    """How far the outputs have moved from their start, as a root mean square."""
    for outputs, color, name in ((train, PREDICTED, "training"), (test, OTHER, "test")):
        if outputs is not None:
            path = np.asarray(outputs, float)
            far = np.sqrt(np.mean((path - path[:1]) ** 2, axis=(1, 2)))
            axes.plot(ts, far, color=color, label=f"{name} samples")
    axes.set(xlabel="time (steps)", ylabel="outputs moved (root mean square)")
    axes.set_ylim(bottom=0)
    legend(axes)


@figure_of
def plot_trajectory(result: Trajectory, *, sample: int = 0) -> Figure:
    """The outputs of one sample, and how far all outputs have moved.

    Args:
        result: of any function of `jaxttp.dynamics` that moves outputs.
        sample: which one.

    Returns:
        A matplotlib figure.
    """
    figure, (left, right) = panels(2)
    ts = np.asarray(result.ts)
    _draw_outputs(left, ts, result.train, sample)
    _draw_distance(right, ts, result.train, result.test)
    for axes in (left, right):
        tidy(axes)
    return figure


@figure_of
def plot_weight_space(result: WeightSpaceTrajectory, *, sample: int = 0) -> Figure:
    """The outputs of one sample, and how far outputs and weights have moved.

    Args:
        result: of `jaxttp.dynamics.weight_space`.
        sample: which one.

    Returns:
        A matplotlib figure.
    """
    figure, (left, middle, right) = panels(3, title=f"trust: {result.trust}")
    ts = np.asarray(result.ts)
    _draw_outputs(left, ts, result.train, sample)
    _draw_distance(middle, ts, result.train, result.test)
    right.plot(ts, np.asarray(result.displacement), color=REAL)
    right.set(xlabel="time (steps)", ylabel="weights moved (share of their norm)")
    right.set_ylim(bottom=0)
    for axes in (left, middle, right):
        tidy(axes)
    return figure


@figure_of
def plot_relinearized(result: RelinearizedTrajectory) -> Figure:
    """The loss with its estimated error, and where kernels were built.

    Args:
        result: of `jaxttp.dynamics.relinearized_recursion`.

    Returns:
        A matplotlib figure.
    """
    figure, (axes,) = panels()
    ts, loss, off = (np.asarray(v) for v in (result.ts, result.loss, result.loss_uncertainty))
    axes.plot(ts, loss, color=PREDICTED, label="forecast")
    axes.fill_between(ts, loss - off, loss + off, color=PREDICTED, alpha=0.18, lw=0,
                      label="estimated error")  # fmt: skip
    for place, end in enumerate(result.ends):
        axes.axvline(end, color=GREY, lw=1, ls=":", label="segment ends" if place == 0 else None)
    axes.set(xlabel="training step", ylabel="training loss")
    axes.set_ylim(bottom=0)
    legend(axes)
    tidy(axes)
    return figure


@figure_of
def plot_diffusion(result: Diffusion) -> Figure:
    """Loss and error under mini-batch noise: the median over paths, and the band of 80 %.

    Args:
        result: of `jaxttp.dynamics.diffusion`.

    Returns:
        A matplotlib figure.
    """
    figure, axes = panels(2, title=f"noise {result.noise}, batches by {result.protocol}")
    ts = np.asarray(result.ts)
    for place, curve, name in zip(
        axes, (result.loss, result.error), ("training loss", "error"), strict=True
    ):
        paths = np.atleast_2d(np.asarray(curve))
        low, middle, high = np.quantile(paths, (0.1, 0.5, 0.9), axis=0)
        several = len(paths) > 1
        place.plot(ts, middle, color=PREDICTED, label="median" if several else "one path")
        if several:
            words = f"80 % of {len(paths)} paths"
            place.fill_between(ts, low, high, color=PREDICTED, alpha=0.18, lw=0, label=words)
        place.set(xlabel="training step", ylabel=name)
        place.set_ylim(bottom=0)
        legend(place)
        tidy(place)
    return figure


@figure_of
def plot_flow_curves(result: FlowCurves) -> Figure:
    """Loss and error under gradient flow.

    Args:
        result: of `jaxttp.dynamics.flow_curves`.

    Returns:
        A matplotlib figure.
    """
    figure, axes = panels(2)
    for place, curve, name in zip(
        axes, (result.loss, result.error), ("training loss", "error"), strict=True
    ):
        place.plot(np.asarray(result.ts), np.asarray(curve), color=PREDICTED)
        place.set(xlabel="time (steps)", ylabel=name)
        place.set_ylim(bottom=0)
        tidy(place)
    return figure


@figure_of
def plot_filter(result: LinearFilter) -> Figure:
    """What a linear optimiser makes of one unit gradient at its first step.

    Args:
        result: of `jaxttp.dynamics.linear_filter`.

    Returns:
        A matplotlib figure.
    """
    figure, (axes,) = panels()
    axes.plot(np.asarray(result.impulse)[:, 0], "o-", ms=4, color=PREDICTED,
              label="unit gradient at step 0")  # fmt: skip
    if result.weight_decay:
        axes.plot(
            np.asarray(result.decay), "s--", ms=4, color=REAL, label="unit weight, no gradient"
        )
    axes.set(xlabel="step", ylabel="update of the weight")
    legend(axes)
    tidy(axes)
    return figure


@figure_of
def plot_two_factor(result: TwoFactorTrajectory) -> Figure:
    """Singular values of both factors over time.

    Args:
        result: of `jaxttp.dynamics.two_factor_flow` or `two_factor_descent`.

    Returns:
        A matplotlib figure.
    """
    figure, axes = panels(2, sharey=True)
    for place, factor, name in zip(
        axes, (result.f, result.w), ("features f", "unembedding W"), strict=True
    ):
        values = np.linalg.svd(np.asarray(factor, float), compute_uv=False)
        for k in range(values.shape[1] - 1, -1, -1):
            place.plot(np.asarray(result.ts), values[:, k], lw=1.6,
                       color=CYCLE[k] if k < SHOWN else GREY, alpha=1 if k < SHOWN else 0.4,
                       label=f"σ{k + 1}" if k < SHOWN else None)  # fmt: skip
        place.set(xlabel="time (steps)", ylabel=f"singular values of the {name}")
        handles, labels = place.get_legend_handles_labels()
        place.legend(handles[::-1], labels[::-1], frameon=False)
        tidy(place)
    return figure


@figure_of
def plot_observables(result: TwoFactorObservables) -> Figure:
    """Singular values of both factors and their rates, beside what the theorem says of those.

    Args:
        result: of `jaxttp.dynamics.two_factor_observables`, at one moment.

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: moments stacked along a leading axis.
    """
    if np.ndim(result.singular_f) != 1:
        raise ValueError("the observables must be those of one moment; got several, stacked.")
    figure, (left, right) = panels(2, title=f"loss {float(result.loss):.4g}")
    ranks = np.arange(1, len(result.singular_f) + 1)
    left.plot(ranks, np.asarray(result.singular_f), "o-", color=PREDICTED, label="features f")
    left.plot(ranks, np.asarray(result.singular_w), "s--", color=REAL, label="unembedding W")
    left.set(xlabel="rank", ylabel="singular value")
    for rate, theorem, color, name in (
        (result.rate_f, result.theorem_f, PREDICTED, "f"),
        (result.rate_w, result.theorem_w, REAL, "W"),
    ):
        right.plot(ranks, np.asarray(rate), "o", color=color, label=f"dσ/dt of {name}")
        right.plot(ranks, np.asarray(theorem), "--", color=color, label=f"theorem, {name}")
    right.set(xlabel="rank", ylabel="change a step")
    for axes in (left, right):
        legend(axes)
        tidy(axes)
    return figure
