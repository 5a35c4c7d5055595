"""Colours, axes and files, the same for every figure."""

import os

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colours, which stay apart under every form of colour blindness.
PREDICTED = "#0072B2"
REAL = "#D55E00"
OTHER = "#009E73"
GREY = "0.45"


def tidy(axes: Axes) -> None:
    """A light grid, and no frame on the right and above."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: str | os.PathLike[str], *, dpi: int = 140) -> None:
    """Write a figure to a file; the suffix says the format."""
    figure.savefig(path, dpi=dpi, facecolor="white")
