"""Colours, sizes, axes and files, the same for every figure."""

import io
import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxttp._core.files import replaced

# Okabe and Ito's colours, which stay apart under every form of colour blindness.
PREDICTED = "#0072B2"
REAL = "#D55E00"
OTHER = "#009E73"
FOURTH = "#CC79A7"
GREY = "0.45"
CYCLE = (PREDICTED, REAL, OTHER, FOURTH, "#E69F00", "#56B4E9", "#404040")

SIZE = 12
"""Points of text in a figure 11 inches wide: readable at half size."""
STYLE: Mapping[str, Any] = {
    "font.size": SIZE,
    "axes.titlesize": SIZE,
    "figure.titlesize": SIZE,
    "legend.fontsize": SIZE - 1,
    "legend.frameon": False,
    "lines.linewidth": 2.0,
    "axes.prop_cycle": cycler(color=CYCLE),
    "figure.facecolor": "white",
    "axes.facecolor": "white",
}
"""What every figure of this package is drawn under."""


class ShownFigure(Figure):
    """A figure that a notebook shows, whether or not it has drawn one of pyplot before."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=72, bbox_inches="tight")
        return file.getvalue()


def panels(count: int = 1, *, title: str = "", height: float = 4.6, **options: Any) -> Any:
    """A figure of panels side by side, 5.5 inches each.

    Args:
        count: of panels.
        title: above them.
        height: inches.
        options: of `matplotlib.figure.Figure.subplots`.

    Returns:
        ``(figure, axes)``, the axes as an array.
    """
    width = 6.8 if count == 1 else 5.5 * count
    figure = ShownFigure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False, **options)[0]
    if title:
        lines = (textwrap.fill(line, int(10 * width)) for line in title.splitlines())
        # Names of files and classes may have dollars, which would begin a formula.
        figure.suptitle("\n".join(lines), parse_math=False)
    return figure, axes


def tidy(axes: Axes) -> None:
    """A light grid, and no frame on the right and above."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def legend(axes: Axes, **options: Any) -> None:
    """A legend without a frame, where there is something to explain."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, **options)


def positive(values: Any) -> np.ndarray:
    """What a logarithmic axis can show; the rest becomes nan."""
    shown = np.asarray(values, float)
    return np.where(np.isfinite(shown) & (shown > 0), shown, np.nan)


def save(figure: Figure, path: str | os.PathLike[str], *, dpi: int = 140) -> None:
    """Write a figure to a file on its own ground; the suffix says the format."""
    path = Path(path)
    with replaced(path if path.suffix else path.with_suffix(".png")) as place:
        figure.savefig(place, dpi=dpi, facecolor=figure.get_facecolor())
