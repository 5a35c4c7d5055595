"""Docstrings as reStructuredText: formulas keep their lines, signs mean nothing, names are links.

The docstrings are plain text: names and code stand in backticks, an indented block after an empty
line is a formula or a table, `*`, `|` and `_` are themselves. Sphinx reads reStructuredText, where
each of these has another meaning.
"""

import itertools
import re

SECTIONS = [f"{name}:" for name in "Args Returns Raises Yields Attributes Example Source".split()]
_CODE = re.compile(r"(``.*?``|`[^`]*`)")
_RULE = re.compile(r"^\s*=+( +=+)+\s*$")


def escape(line: str) -> str:
    """A line whose signs outside of backticks are plain text."""
    parts = _CODE.split(line)
    parts[::2] = [re.sub(r"([*|\\]|_\b|\b_)", r"\\\1", part) for part in parts[::2]]
    for i in range(2, len(parts), 2):  # `Model`s
        if re.match(r"[\w²³ᵀ⁺]", parts[i]):
            parts[i] = "\\ " + parts[i]
    return re.sub(r"((?:^|: )\s*\w)\.$", r"\1\\.", "".join(parts))  # `T.` begins no list


def to_rst(lines: list[str]) -> list[str]:
    """A docstring's lines, as Napoleon and docutils read them."""
    starts = [i for i, line in enumerate(lines) if line.rstrip() in SECTIONS]
    found = _text(lines[: starts[0]] if starts else lines, 0)
    for start, end in itertools.pairwise([*starts, len(lines)]):
        head, body = lines[start].rstrip(), lines[start + 1 : end]
        if head == "Returns:":  # Napoleon reads text before a colon as a type
            body = _text([line[4:] for line in body], 0)
            rest = [f"    {line}".rstrip() for line in body[1:]]
            found += [f":returns: {body[0]}", *rest, ""]
        else:
            found += [head, *_text(body, 4, blocks=head not in ("Args:", "Attributes:"))]
    return found


def _text(lines: list[str], base: int, *, blocks: bool = True) -> list[str]:
    """Paragraphs, lists, tables, examples and, where blocks may be, indented blocks."""
    found: list[str] = []
    inside = ""
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        text, depth = line.strip(), len(line) - len(line.lstrip())
        if inside == "table":
            inside = "table" if after.strip() or not _RULE.match(line) else ""
        elif (inside == "example" and text) or (inside == "block" and (not text or depth > base)):
            pass
        elif not text or _RULE.match(line) or text.startswith(">>>"):
            inside = "example" if text.startswith(">>>") else "table" if text else ""
        elif blocks and not before.strip() and depth > base:
            inside = "block"
            found += [" " * base + "::", ""]
        else:
            inside, previous = "", before.strip()
            is_first_item = text.startswith("- ") and previous and not previous.startswith("- ")
            if is_first_item and len(before) - len(before.lstrip()) <= depth:
                found.append("")
            line = escape(line)
        found.append(line)
    return found
