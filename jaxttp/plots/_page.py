"""One HTML page that needs nothing else: figures as SVG that follow the reader's light or dark."""

import html
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from jaxttp._core.html import html_table
from jaxttp.plots._dark import GROUND, INK, dark_color

_HEX = re.compile(r"#[0-9a-fA-F]{6}\b")

_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --page: #f3f4f6; --ink: #1c1e21;
  --soft: #5a616b; --line: #d9dce1; --accent: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --ground: %(ground)s; --page: #0c0e12; --ink: %(ink)s; --soft: #a3abb6;
    --line: #30353d; --accent: #56b4e9; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 1.2rem; margin: 36px 0 12px; }
p { margin: 6px 0; overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.cards { display: grid; gap: 12px; margin-top: 20px;
  grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
.card, figure, .table { background: var(--ground); border: 1px solid var(--line);
  border-radius: 10px; padding: 14px; }
.card b { display: block; font-size: 1.5rem; line-height: 1.2; color: var(--accent); }
.figures { display: grid; gap: 16px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%%, 420px), 1fr)); }
.figures, .table, figure.wide { margin: 16px 0; }
figure { margin: 0; min-width: 0; }
figure svg { display: block; width: 100%%; height: auto; max-width: 480px; margin: 0 auto; }
figure.wide { overflow-x: auto; }
figure.wide svg { min-width: 720px; max-width: none; }
svg text { fill: var(--ink);
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif !important; }
figcaption { font-size: 0.9rem; color: var(--soft); margin-top: 8px; }
.table { overflow-x: auto; padding: 4px 14px; }
table { border-collapse: collapse; width: 100%%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 7px 8px; border-bottom: 1px solid var(--line); }
th { font-weight: 600; vertical-align: bottom; }
td + td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tbody tr:last-child td { border-bottom: 0; }
pre { margin: 0; padding: 10px 0; overflow-x: auto; font-size: 0.85rem; }
@media print { body { background: #ffffff; } h2 { break-after: avoid; }
  figure { break-inside: avoid; } }
"""


def svg(figure: Figure, label: str, name: str) -> str:
    """A figure as an inline SVG whose colours turn with the page.

    Args:
        figure: light.
        label: what it shows, for readers who do not see it.
        name: letters that no other figure of the page has.

    Returns:
        An ``<svg>`` element: text stays text, every colour is a variable of `palette`.

    Example:
        >>> figure = Figure(figsize=(2, 1))
        >>> line = figure.subplots().plot([1, 2], color="#0072B2")
        >>> text = svg(figure, "a line", "a")
        >>> text.startswith('<svg role="img" aria-label="a line"'), "var(--c0072b2)" in text
        (True, True)
    """
    file = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", facecolor="none", edgecolor="none")
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.S)
    used = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', text))
    used = {one for pair in used for one in pair if one}
    text = re.sub(
        r' id="([^"]+)"',
        lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "",
        text,
    )
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r'fill="(#[0-9a-fA-F]{6})"', r'style="fill: \1"', text)
    text = _HEX.sub(lambda found: f"var({_variable(found[0])})", text)
    text = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1">', text, count=1)
    return text.replace(
        "<svg ", f'<svg role="img" aria-label="{html.escape(label, quote=True)}" ', 1
    ).strip()


def _variable(color: str) -> str:
    return f"--c{color[1:].lower()}"


def palette(body: str) -> str:
    """The style of the colours that the figures of a page use, light and dark.

    Args:
        body: HTML with the figures.

    Returns:
        CSS.
    """
    colors = sorted(set(re.findall(r"var\(--c([0-9a-f]{6})\)", body)))
    light = " ".join(f"--c{one}: #{one};" for one in colors)
    dark = " ".join(f"--c{one}: {dark_color('#' + one)};" for one in colors)
    only = "@media screen and (prefers-color-scheme: dark)"
    return f":root {{ {light} }}\n{only} {{ :root {{ {dark} }} }}"


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
    style = _STYLE % {"ground": GROUND, "ink": INK}
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{style}{palette(body)}
</style>
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


def figures(drawn: Mapping[str, tuple[Figure, str]], *, wide: bool = False) -> str:
    """Figures side by side where there is room.

    Args:
        drawn: name (letters) -> figure and caption.
        wide: they are too wide for a phone, and scroll there.

    Returns:
        HTML.
    """
    kind = ' class="wide"' if wide else ""
    inner = "".join(
        f"<figure{kind}>{svg(figure, caption, name)}"
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        for name, (figure, caption) in drawn.items()
    )
    return inner if wide else f'<div class="figures">{inner}</div>'
