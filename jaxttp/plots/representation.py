"""What features look like, and how weights move."""

import numpy as np
from matplotlib.figure import Figure

from jaxttp.plots._dark import KEEP
from jaxttp.plots._draw import figure_of
from jaxttp.plots._style import GREY, OTHER, PREDICTED, REAL, legend, panels, tidy
from jaxttp.representation import CKATable, Geometry, WeightPath


@figure_of
def plot_geometry(result: Geometry) -> Figure:
    """Eigenvalues of the features' covariance with their power law, and the effective ranks.

    Args:
        result: of `jaxttp.representation.representation_geometry`.

    Returns:
        A matplotlib figure.
    """
    figure, (axes,) = panels()
    sigma = np.asarray(result.singular_values)
    counts = np.flatnonzero(sigma > 1e-12 * sigma.max())
    axes.loglog(counts + 1, sigma[counts] ** 2, color=PREDICTED, label="eigenvalues")
    first, last = result.alpha.window
    window = np.arange(first, last + 1)
    slope = window ** -float(result.alpha.exponent)
    level = np.exp(np.mean(np.log(sigma[first - 1 : last] ** 2 / slope)))
    axes.loglog(window, level * slope, "--", color=GREY,
                label=f"power law, exponent {float(result.alpha.exponent):.2f}")  # fmt: skip
    for value, name, color, style in (
        (result.rankme, "RankMe", REAL, "--"),
        (result.participation_ratio, "participation ratio", OTHER, ":"),
    ):
        axes.axvline(float(value), color=color, ls=style, label=f"{name} {float(value):.3g}")
    axes.set(xlabel="rank", ylabel="squared singular value")
    legend(axes)
    tidy(axes)
    return figure


@figure_of
def plot_weight_path(result: WeightPath) -> Figure:
    """How far the weights have gone, and in which direction.

    Args:
        result: of `jaxttp.representation.weight_path`.

    Returns:
        A matplotlib figure.
    """
    figure, (left, right) = panels(2)
    count = len(np.asarray(result.norm))
    left.plot(np.asarray(result.norm), color=GREY, ls=":", label="norm")
    left.plot(np.asarray(result.distance), color=PREDICTED, label="distance from the start")
    left.set(xlabel="checkpoint", ylabel="norm of weights")
    left.set_ylim(bottom=0)
    right.plot(np.asarray(result.cosine), color=PREDICTED, label="with the start")
    right.plot(np.arange(2, count), np.asarray(result.step_cosine), "o--", ms=4, color=REAL,
               label="between moves")  # fmt: skip
    right.set(xlabel="checkpoint", ylabel="cosine")
    for axes in (left, right):
        legend(axes)
        tidy(axes)
    return figure


@figure_of
def plot_cka(result: CKATable) -> Figure:
    """Similarity of every layer with every other one.

    Args:
        result: of `jaxttp.representation.cka_table`.

    Returns:
        A matplotlib figure.
    """
    values = np.asarray(result.values)
    side = max(4.6, 0.45 * len(values) + 2)
    figure, (axes,) = panels(height=side)
    rows, columns = np.arange(len(result.rows) + 1), np.arange(len(result.columns) + 1)
    image = axes.pcolormesh(columns, rows, values, cmap="viridis", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, label="linear CKA")
    axes.set_xticks(columns[:-1] + 0.5, result.columns, rotation=45, ha="right")
    axes.set_yticks(rows[:-1] + 0.5, result.rows)
    axes.invert_yaxis()
    axes.set(xlabel="layer", ylabel="layer")
    if values.size <= 100:
        for (i, j), value in np.ndenumerate(values):
            color = "black" if value > 0.6 else "white"  # on the map, whatever the ground
            axes.text(j + 0.5, i + 0.5, f"{value:.2f}", ha="center", va="center", color=color,
                      label=KEEP)  # fmt: skip
    return figure
