"""The figure of any result by its type: style, axes, files, and bars and lines for all other types.

A figure function has the decorator `figure_of` and takes a result of the type that it is annotated
with; `draw` finds it. Grids, legends and ticks are the same everywhere, and made here.
"""

import dataclasses
import functools
import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation, MaxNLocator

from jaxttp._core.files import replaced

# Okabe and Ito's colours, which stay apart under every form of colour blindness.
PREDICTED = "#0072B2"
REAL = "#D55E00"
OTHER = "#009E73"
FOURTH = "#CC79A7"
GREY = "0.45"
CYCLE = (PREDICTED, REAL, OTHER, FOURTH, "#E69F00", "#56B4E9", "#404040")
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
STYLE: Mapping[str, Any] = {
    "font.size": 12,
    "axes.titlesize": 12,
    "figure.titlesize": 12,
    "legend.fontsize": 11,
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "legend.frameon": False,
    "lines.linewidth": 2.0,
    "axes.prop_cycle": cycler(color=CYCLE),
}
"""What every figure of this package is drawn under; grounds are those of the user's style."""


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
        title: one line above them, in smaller letters the longer it is.
        height: inches.
        options: of `matplotlib.figure.Figure.subplots`.

    Returns:
        ``(figure, axes)``, the axes as an array.
    """
    width = 6.8 if count == 1 else 5.5 * count
    figure = ShownFigure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False, **options)[0]
    if title:
        line = ", ".join(title.splitlines())
        # Names of files and classes may have dollars, which would begin a formula.
        figure.suptitle(line, parse_math=False, fontsize=min(12.0, 120 * width / len(line)))
    return figure, axes


class _LogTicks(LogFormatterSciNotation):
    """All labels of a logarithmic axis in one format: decimals over a few decades, else powers."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        assert self.axis is not None  # set by matplotlib
        label, (low, high) = super().__call__(x, pos), self.axis.get_view_interval()
        return f"{x:g}" if label and low > 9e-4 and high < 2e5 else label


def tidy(axes: Axes) -> None:
    """A light grid, no frame on the right and above, whole steps, and one format of ticks."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_xscale() == "linear" and axes.get_xlabel().endswith((" step", "rank", "index")):
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=(1, 2, 5, 10)))
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":  # beyond two decades in view the decades are enough
            axis.set_major_formatter(_LogTicks(minor_thresholds=(2, 0.6)))
            axis.set_minor_formatter(_LogTicks(minor_thresholds=(2, 0.6)))


def positive(values: Any) -> np.ndarray:
    """What a logarithmic axis can show; the rest becomes nan."""
    shown = np.asarray(values, float)
    return np.where(np.isfinite(shown) & (shown > 0), shown, np.nan)


def band(
    axes: Axes, x: Any, low: Any, high: Any, label: str | None, color: str | None = PREDICTED
) -> None:
    """What lies between two curves, lightly."""
    axes.fill_between(x, low, high, color=color, alpha=0.18, lw=0, label=label)


def save(figure: Figure, path: str | os.PathLike[str], *, dpi: int = 140) -> None:
    """Write a figure to a file on its own ground; the suffix says the format."""
    path = Path(path)
    with replaced(path if path.suffix else path.with_suffix(".png")) as temporary:
        figure.savefig(temporary, dpi=dpi, facecolor=figure.get_facecolor())


def styled(function: Callable[..., Figure]) -> Callable[..., Figure]:
    """Draw under the style; grids and legends where the function has made none."""

    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Figure:
        with mpl.rc_context(cast(Any, STYLE)):
            figure = function(*args, **options)
            for axes in figure.axes:
                is_map = any(isinstance(mesh, QuadMesh) for mesh in axes.collections)
                if is_map or axes.get_label() == "<colorbar>" or not axes.axison:
                    continue
                tidy(axes)
                if axes.get_legend() is None and axes.get_legend_handles_labels()[0]:
                    axes.legend()
        return figure

    return wrapped


@functools.singledispatch
@styled
def draw(result: Any) -> Figure:
    """The figure of a result; every type of result has its own, and takes its own options.

    Args:
        result: what a public function returned.

    Returns:
        A matplotlib figure (not attached to pyplot, so nothing needs closing). A result of a type
        that has no figure of its own shows its numbers on a line, and its vectors by index.

    Raises:
        TypeError: nothing in it can be drawn.

    Example:
        >>> from jaxttp.training import StepTime
        >>> draw(StepTime(2.0, 5.0)).axes[0].get_xlabel()
        'value'
    """
    numbers, vectors = _numbers_and_vectors(result)
    if not numbers and not vectors:
        raise TypeError(f"{type(result).__name__} holds no numbers that could be drawn.")
    height = 4.6 if vectors else 1.4 + 0.5 * len(numbers)
    count = bool(numbers) + len(vectors)
    figure, axes = panels(count, title=type(result).__name__, height=height)
    for panel, (name, values) in zip(axes, vectors.items(), strict=False):
        panel.plot(values, "o-", ms=4)
        panel.set(xlabel="index", ylabel=name.replace("_", " "))
    if numbers:
        names = [name.replace("_", " ") for name in numbers]
        bars = axes[-1].barh(names, list(numbers.values()), color=OTHER, height=0.5)
        axes[-1].bar_label(bars, [f"{value:.4g}" for value in numbers.values()], padding=4)
        axes[-1].margins(x=0.15)
        axes[-1].invert_yaxis()
        axes[-1].set_xlabel("value")
        if 0 < 50 * min(numbers.values()) < max(numbers.values()):
            axes[-1].set_xscale("log")
    return figure


def figure_of(function: Callable[..., Figure]) -> Callable[..., Figure]:
    """Make a function of a result the figure of the result's type, in the style."""
    return draw.register(styled(function))


def _numbers_and_vectors(result: Any) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """The finite numbers among a result's fields, and the first three vectors."""
    if dataclasses.is_dataclass(result):
        fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    elif hasattr(result, "_asdict"):
        fields = result._asdict()
    else:
        raise TypeError(f"{type(result).__name__} is no result of this library.")
    for name in [name for name, value in fields.items() if isinstance(value, Mapping)]:
        fields |= {str(key): value for key, value in fields.pop(name).items()}
    numbers: dict[str, float] = {}
    vectors: dict[str, np.ndarray] = {}
    for name, value in fields.items():
        value = getattr(value, "value", value)  # of a condition number
        if not isinstance(value, int | float | np.generic | np.ndarray | jax.Array):
            continue
        array = np.asarray(value)
        if not np.issubdtype(array.dtype, np.number) or not np.any(np.isfinite(array)):
            continue
        if array.ndim == 0:
            numbers[name] = float(array)
        elif len(array) > 1 and (array.ndim == 1 or array.shape[1:] < (9,)):
            vectors[name] = array  # of a few columns one line each
    return numbers, dict(list(vectors.items())[:3])
