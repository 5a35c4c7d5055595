"""One HTML page that needs nothing else: tables, and figures as images inside it."""

import base64
import html
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from jaxttp._core.results import html_table

_STYLE = """
* { box-sizing: border-box; }
body { margin: 0; background: #f3f4f6; color: #1c1e21;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 1.2rem; margin: 36px 0 12px; }
p { margin: 6px 0; overflow-wrap: anywhere; }
.soft { color: #5a616b; }
.cards { display: grid; gap: 12px; margin-top: 20px;
  grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
.card, figure, .table { background: #ffffff; border: 1px solid #d9dce1;
  border-radius: 10px; padding: 14px; }
.card b { display: block; font-size: 1.5rem; line-height: 1.2; color: #0072b2; }
.figures { display: grid; gap: 16px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
.figures, .table, figure.wide { margin: 16px 0; }
figure { margin: 0; min-width: 0; overflow-x: auto; }
figure img { display: block; width: 100%; max-width: 480px; margin: 0 auto; }
figure.wide img { min-width: 720px; max-width: none; }
figcaption { font-size: 0.9rem; color: #5a616b; margin-top: 8px; }
.table { overflow-x: auto; padding: 4px 14px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 7px 8px; border-bottom: 1px solid #d9dce1; }
th { font-weight: 600; vertical-align: bottom; }
td + td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tbody tr:last-child td { border-bottom: 0; }
pre { margin: 0; padding: 10px 0; overflow-x: auto; font-size: 0.85rem; }
"""


def image(figure: Figure, caption: str) -> str:
    """A figure as an image inside the page.

    Args:
        figure: any.
        caption: what it shows, for readers who do not see it.

    Example:
        >>> image(Figure(figsize=(1, 1)), "a < b")[:34]
        '<img alt="a &lt; b" src="data:imag'
    """
    file = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "jaxttp"}):  # the same page from the same results
        figure.savefig(file, format="svg", metadata={"Date": None})
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="{html.escape(caption)}" src="data:image/svg+xml;base64,{data}">'


def page(title: str, body: str) -> str:
    """A whole HTML page around a body.

    Args:
        title: in plain words.
        body: HTML.

    Returns:
        The page; nothing in it is fetched from elsewhere.

    Example:
        >>> page("A & B", "<p>found</p>").splitlines()[0]
        '<!doctype html>'
    """
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def heading(text: str, level: int = 2) -> str:
    """A heading, escaped."""
    return f"<h{level}>{html.escape(text)}</h{level}>"


def paragraph(text: str, *, soft: bool = False) -> str:
    """A paragraph, escaped."""
    return f"<p{' class=soft' if soft else ''}>{html.escape(text)}</p>"


def cards(values: Mapping[str, str]) -> str:
    """Numbers to be seen first, each with what it is."""
    inner = "".join(
        f'<div class="card"><b>{html.escape(value)}</b>{html.escape(name)}</div>'
        for name, value in values.items()
    )
    return f'<div class="cards">{inner}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table that scrolls where it is too wide."""
    return f'<div class="table">{html_table(head, rows)}</div>'


def figures(drawn: Mapping[str, Figure], *, wide: bool = False) -> str:
    """Figures side by side where there is room.

    Args:
        drawn: caption -> figure.
        wide: they are too wide for a phone, and scroll there.
    """
    kind = ' class="wide"' if wide else ""
    inner = "".join(
        f"<figure{kind}>{image(figure, caption)}"
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        for caption, figure in drawn.items()
    )
    return inner if wide else f'<div class="figures">{inner}</div>'
