"""What the site changes in pages: notebooks lose their badges and installation cells.

The badge is a picture on another host, and a page here needs no network.
"""

import json
from typing import Any

from sphinx.application import Sphinx


def plain_notebook(text: str) -> str:
    """A notebook without what is for Colab alone."""
    book = json.loads(text)
    kept = []
    for cell in book["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and '"google.colab" in sys.modules' in source:
            continue
        lines = [line for line in source.splitlines() if "colab-badge.svg" not in line]
        kept.append({**cell, "source": "\n".join(lines)})
    return json.dumps({**book, "cells": kept})


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Before a page is parsed."""
    if docname.startswith("notebooks/"):
        source[0] = plain_notebook(source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """What Sphinx calls."""
    app.connect("source-read", read)
    return {"parallel_read_safe": True}
