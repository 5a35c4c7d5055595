"""Notebooks as the site shows them: without badges and installation cells.

The badge is a picture on another host, and a page here needs no network.
"""

import json


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
