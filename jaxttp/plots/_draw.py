"""One entrance: the figure of any result, by its type."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import matplotlib as mpl
import numpy as np
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from jaxttp.plots._style import OTHER, PREDICTED, SIZE, STYLE, panels, tidy

COUNTED = (" step", "rank", "index", "checkpoint", "component", "counts", "matrices)")
"""Ends of the names of axes that have no halves."""
STEPS = (1, 2, 5, 10)


def styled(function: Callable[..., Figure]) -> Callable[..., Figure]:
    """Draw under the style, and keep its sizes for ticks that are made later."""

    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Figure:
        with mpl.rc_context(cast(Any, STYLE)):
            figure = function(*args, **options)
        for axes in figure.axes:
            axes.tick_params(labelsize=SIZE - 1)
            for axis in (axes.xaxis, axes.yaxis):
                if axis.get_scale() == "log":
                    axis.set_minor_formatter(FuncFormatter(_two_and_five(axis)))
            if axes.get_xscale() == "linear" and axes.get_xlabel().endswith(COUNTED):
                axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=STEPS))
        return figure

    return wrapped


def _two_and_five(axis: Axis) -> Callable[[float, Any], str]:
    """Labels between the decades: at 2 and 5 where few are in view, everywhere below one."""

    def words(value: float, place: Any) -> str:
        low, high = sorted(axis.get_view_interval())
        leading = round(value / 10 ** np.floor(np.log10(value) + 1e-9))
        decades = np.log10(high / low) if low > 0 else np.inf
        shown = decades < 0.6 or (decades < 2 and leading in (2, 5))
        return f"{value:.4g}" if shown else ""

    return words


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
        >>> from jaxttp.conditioning import Sandwich
        >>> draw(Sandwich(np.array(2.0), np.array(5.0))).axes[0].get_xlabel()
        'value'
    """
    numbers, vectors = _numbers_and_vectors(result)
    if not numbers and not vectors:
        raise TypeError(f"{type(result).__name__} holds no numbers that could be drawn.")
    height = 4.6 if vectors else 1.4 + 0.5 * len(numbers)
    count = bool(numbers) + len(vectors)
    figure, axes = panels(count, title=type(result).__name__, height=height)
    for place, (name, values) in zip(axes, vectors.items(), strict=False):
        place.plot(values, "o-", ms=4, color=PREDICTED)
        place.set(xlabel="index", ylabel=name.replace("_", " "))
    if numbers:
        names = list(numbers)
        bars = axes[-1].barh(range(len(names)), list(numbers.values()), color=OTHER, height=0.5)
        axes[-1].bar_label(bars, [f"{value:.4g}" for value in numbers.values()], padding=4)
        axes[-1].margins(x=0.15)
        axes[-1].set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
        axes[-1].invert_yaxis()
        axes[-1].set_xlabel("value")
        if min(numbers.values()) > 0 and max(numbers.values()) > 50 * min(numbers.values()):
            axes[-1].set_xscale("log")
    for place in axes:
        tidy(place)
    return figure


def figure_of(function: Callable[..., Figure]) -> Callable[..., Figure]:
    """Make a function of a result the figure of the result's type, in the style."""
    found = styled(function)
    draw.register(found)
    return found


def _numbers_and_vectors(result: Any) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """The finite numbers and the vectors among a result's fields."""
    if dataclasses.is_dataclass(result):
        fields = {one.name: getattr(result, one.name) for one in dataclasses.fields(result)}
    elif hasattr(result, "_asdict"):
        fields = result._asdict()
    else:
        raise TypeError(f"{type(result).__name__} is no result of this library.")
    numbers: dict[str, float] = {}
    vectors: dict[str, np.ndarray] = {}
    for name in [name for name, value in fields.items() if isinstance(value, Mapping)]:
        fields |= {str(key): value for key, value in fields.pop(name).items()}
    for name, value in fields.items():
        kinds = int | float | np.generic | np.ndarray | jax.Array
        if isinstance(value, bool) or not isinstance(value, kinds):
            continue
        array = np.asarray(value)
        if not np.issubdtype(array.dtype, np.number):
            continue
        if array.ndim == 0 and np.isfinite(array):
            numbers[name] = float(array)
        elif array.ndim == 1 and array.size > 1 and np.any(np.isfinite(array)):
            vectors[name] = array
    return numbers, dict(list(vectors.items())[:3])
