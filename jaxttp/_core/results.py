"""Printing, notebook display and plotting of all results.

A result has the three by one line in its body, ``plot, _repr_html_, __repr__ = RESULT``, be it a
dataclass, a NamedTuple or a module. Its text is its own ``__str__`` if it has one, else one field a
line. Its figure is that of `jaxttp.plots` for its type.
"""

import dataclasses
import html
import importlib
import math
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.core import Tracer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = 12
"""Rows of a table that a notebook shows."""


def describe(result: Any) -> str:
    """A result as text: its name, and its fields one a line.

    Args:
        result: a dataclass, module or named tuple.

    Returns:
        Lines of text; arrays by dtype, shape and range, numbers to six digits.

    Example:
        >>> from jaxttp.training import StepTime
        >>> print(describe(StepTime(seconds=0.25, compile_seconds=1.0)))
        StepTime
          seconds          0.25
          compile_seconds  1
    """
    fields = getattr(result, "_fields", None) or [f.name for f in dataclasses.fields(result)]
    values = {name: getattr(result, name, None) for name in fields}
    values = {name: value for name, value in values.items() if value is not None}
    width = max(map(len, values), default=0)
    rows = [f"  {name:<{width}}  {_short(value)}" for name, value in values.items()]
    return "\n".join([type(result).__name__, *rows])


def wrapped(line: str, indent: int) -> str:
    """A long line in several of at most 110 characters, those after the first indented.

    Args:
        line: with its own indentation.
        indent: of the others, in spaces.

    Example:
        >>> wrapped("  a " + "b" * 100 + " c d e f", 4).splitlines()[1]
        '    f'
    """
    return textwrap.fill(line, 110, subsequent_indent=" " * indent, break_long_words=False)


def plain_number(value: Any) -> float | None:
    """A float as JSON takes it; None where it is not finite, which JSON does not know."""
    return float(value) if math.isfinite(float(value)) else None


def plain_numbers(values: Any) -> list[float | None]:
    """A list of them."""
    return [plain_number(value) for value in np.asarray(values)]


def _short(value: Any) -> str:
    """One line for any value."""
    if isinstance(value, Tracer | jax.ShapeDtypeStruct):
        return f"traced {value.dtype}{list(value.shape)}"
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return _array(value)
    if isinstance(value, bool | int | str):
        return str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        text = ", ".join(f"{key}: {_short(item)}" for key, item in value.items())
        return text if len(text) <= 100 else f"{len(value)} entries"
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        text = ", ".join(map(_short, value)) if len(value) <= 8 else ""
        return text if 0 < len(text) <= 100 else f"{len(value)} entries"
    text = str(value).split("\n")[0]
    return text if len(text) <= 100 else text[:97] + "..."


def _array(value: Any) -> str:
    if not isinstance(value.dtype, np.dtype):  # random keys
        return f"{value.dtype}{list(value.shape)}"
    array = np.asarray(value)
    kind = f"{array.dtype}{list(array.shape)}"
    if array.ndim == 0:
        return _short(array.item())
    if not array.size or not np.issubdtype(array.dtype, np.number):
        return kind
    if array.ndim == 1 and array.size <= 6:
        form = "{:.4g}" if np.issubdtype(array.dtype, np.inexact) else "{}"
        return " ".join(map(form.format, array))
    finite = array[np.isfinite(array)]
    if not finite.size:
        return f"{kind}, nothing finite"
    missing = "" if finite.size == array.size else f", {array.size - finite.size} not finite"
    return f"{kind} from {finite.min():.4g} to {finite.max():.4g}{missing}"


def _text(self: Any) -> str:
    """The result's own text if it has one and is not traced, else its fields one a line."""
    is_traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(self))
    has_text = type(self).__str__ is not object.__str__
    return str(self) if has_text and not is_traced else describe(self)


def _in_html(self: Any) -> str:
    """For notebooks: a table where the result has rows, its text otherwise."""
    if callable(getattr(self, "rows", None)):
        rows = self.rows()
        table = html_table(list(rows[0]), [list(row.values()) for row in rows[:ROWS]])
        more = f"<p>{len(rows) - ROWS} more rows</p>" if len(rows) > ROWS else ""
        return table + more
    return f"<pre>{html.escape(_text(self))}</pre>"


def _plot(self: Any, **options: Any) -> "Figure":
    """The figure of this result, see `jaxttp.plots.draw` (loads matplotlib).

    Args:
        self: the result.
        options: of the figure for this type.

    Returns:
        A matplotlib figure that is not attached to pyplot; a notebook shows it.
    """
    return figures().draw(self, **options)


def figures() -> Any:
    """The package `jaxttp.plots`, loaded with the first figure."""
    return importlib.import_module("jaxttp.plots")


RESULT = (_plot, _in_html, _text)
"""``plot, _repr_html_, __repr__`` for the body of a result's class."""


def html_table(head: Any, rows: Any) -> str:
    """A plain HTML table; numbers to four digits, aligned to the right.

    Args:
        head: titles of the columns.
        rows: lists of values.

    Returns:
        HTML text, escaped.

    Example:
        >>> html_table(["a<b"], [[0.12345]])
        '<table><thead><tr><th>a&lt;b</th></tr></thead><tbody><tr><td>0.1235</td></tr></tbody></table>'
    """

    def cell(value: Any) -> str:
        if value is None:
            return "–"
        if isinstance(value, float):
            return f"{value:.4g}"
        return html.escape(str(value))

    def line(values: Any, tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{cell(value)}</{tag}>" for value in values) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><thead>{line(head, 'th')}</thead><tbody>{body}</tbody></table>"
