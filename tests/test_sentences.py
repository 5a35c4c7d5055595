"""Sentences of README and guides are short."""

import re
import statistics
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs/guides").glob("*.md"))]


def sentences(text: str) -> list[str]:
    """Sentences of a Markdown page, without code, formulas, tables and headings."""
    text = re.sub(r"<!--.*?-->|```.*?```", "\n\n", text, flags=re.S)
    text = re.sub(r"\$\$.*?\$\$|\$[^$\n]*\$|`[^`\n]*`", "x", text, flags=re.S)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)  # a link counts as its text
    text = re.sub(r"^\s*(\||#|:::).*$", "", text, flags=re.M)
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", text)
    lines = (" ".join(paragraph.split()).lstrip("-*0123456789. ") for paragraph in paragraphs)
    parts = (part for line in lines for part in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*(x])", line))
    return [part for part in parts if len(words(part)) > 1]


def words(sentence: str) -> list[str]:
    """Words and numbers of a sentence."""
    return re.findall(r"[\w'’%.,/-]*\w[\w'’%.,/-]*", sentence)


def test_the_median_has_14_words_and_95_percent_have_28():
    written = [sentence for page in PAGES for sentence in sentences(page.read_text())]
    written.sort(key=lambda sentence: len(words(sentence)))
    lengths = [len(words(sentence)) for sentence in written]
    assert statistics.median(lengths) <= 14
    assert lengths[int(0.95 * (len(lengths) - 1))] <= 28, "\n".join(written[-10:])
