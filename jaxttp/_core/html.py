"""Tables as HTML: of results in a notebook, and on the pages of reports."""

import html
from typing import Any


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
