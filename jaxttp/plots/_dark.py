"""Any figure on a dark ground: greys turned over, hues made lighter, everything else as it was.

The finished figure is repainted, whoever drew it. A style that is set before drawing reaches text,
axes and ground, but none of the colours that a plot names (ninety times in this package): lines in
the light style's blue and black bars then sink into the ground. Only names that are looked up when
a figure is drawn would do without, and matplotlib looks its own ("C0") up when it is saved.
"""

from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.collections import Collection
from matplotlib.colors import to_hex, to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text

from jaxttp.plots._style import FOURTH, OTHER, PREDICTED, REAL

GROUND = "#15181e"
INK = "#e8e8e8"
LIGHTER = {
    PREDICTED.lower(): "#56b4e9",
    REAL.lower(): "#ff9d4d",
    OTHER.lower(): "#35d0a5",
    FOURTH.lower(): "#eaa8cf",
}
"""The style's hues, each with one that stands out on a dark ground."""
KEEP = "_keep"
"""The label of what has the right colour on every ground."""


def dark_color(color: Any) -> str:
    """The colour that takes a colour's place on a dark ground.

    Args:
        color: whatever matplotlib takes.

    Returns:
        A hexadecimal colour without opacity: white becomes the ground, black the ink, the style's
        hues lighter ones; other hues stay.

    Example:
        >>> dark_color("white"), dark_color("black"), dark_color("#0072B2"), dark_color("#fde725")
        ('#15181e', '#e8e8e8', '#56b4e9', '#fde725')
    """
    plain = to_hex(color)
    if plain in LIGHTER:
        return LIGHTER[plain]
    rgb = np.array(to_rgba(plain)[:3])
    if np.ptp(rgb) > 0.02:
        return plain
    ground, ink = (np.array(to_rgba(one)[:3]) for one in (GROUND, INK))
    mixed = rgb.mean() * ground + (1 - rgb.mean()) * ink
    return to_hex(tuple(mixed))


def darken(figure: Figure) -> Figure:
    """Turn a figure's colours for a dark ground, in place.

    Args:
        figure: any, light; a second call would turn its greys back.

    Returns:
        The same figure.

    Example:
        >>> figure = Figure()
        >>> line = figure.subplots().plot([1, 2], color=PREDICTED)[0]
        >>> darken(figure) is figure, line.get_color()
        (True, '#56b4e9ff')
    """
    for artist in figure.findobj(include_self=True):
        if artist.get_label() == KEEP:
            continue
        if isinstance(artist, Text):
            _turn(artist, "color")
        elif isinstance(artist, Line2D):
            _turn(artist, "markerfacecolor", "markeredgecolor", "color")
        elif isinstance(artist, Patch):
            _turn(artist, "facecolor", "edgecolor")
        elif isinstance(artist, Collection) and artist.get_array() is None:
            _turn(artist, "facecolor", "edgecolor")
    for axes in figure.axes:  # after the ticks that are there, those that will be made
        axes.tick_params(which="both", color=INK, labelcolor=INK, grid_color=INK,
                         grid_alpha=0.15)  # fmt: skip
    figure.set_facecolor(GROUND)
    return figure


def _turn(artist: Artist, *names: str) -> None:
    was = {name: getattr(artist, f"get_{name}")() for name in names}
    for name, color in was.items():
        if isinstance(color, np.ndarray) and color.ndim == 2:
            found: Any = [_opaque(one) for one in color]
        elif isinstance(color, str) and color in ("none", "auto"):
            continue
        else:
            found = _opaque(color)
        getattr(artist, f"set_{name}")(found)


def _opaque(color: Any) -> str:
    """Turned, with its own opacity."""
    alpha = round(255 * to_rgba(color)[3])
    return f"{dark_color(color)}{alpha:02x}"
