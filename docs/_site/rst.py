"""Docstrings as reStructuredText: formulas keep their lines, signs mean nothing, names are links.

The docstrings are plain text: names and code stand in backticks, an indented block after an empty
line is a formula or a table, `*`, `|` and `_` are themselves. Sphinx reads reStructuredText, where
each of these means something else.
"""

import re

SECTIONS = ("Args", "Returns", "Raises", "Yields", "Attributes", "Example", "Source")
_CODE = re.compile(r"(``.*?``|`[^`]*`)")
_RULE = re.compile(r"^\s*=+( +=+)+\s*$")


def indent(line: str) -> int:
    """How far a line is indented."""
    return len(line) - len(line.lstrip())


def escape(line: str) -> str:
    """Outside of backticks a sign is a sign."""
    parts = _CODE.split(line)
    parts[::2] = [re.sub(r"([*|\\]|_\b|\b_)", r"\\\1", part) for part in parts[::2]]
    for i in range(2, len(parts), 2):  # `Model`s
        if re.match(r"[\w²³ᵀ⁺]", parts[i]):
            parts[i] = "\\ " + parts[i]
    return "".join(parts)


def to_rst(lines: list[str]) -> list[str]:
    """A docstring's lines, as Napoleon and docutils read them."""
    found: list[str] = []
    base, section, table = 0, "", False
    at, before = 0, ""
    while at < len(lines):
        line = lines[at]
        head = line.rstrip()
        if _RULE.match(line):
            table = bool(lines[at + 1 : at + 2]) and lines[at + 1].strip() != ""
        if head[:-1] in SECTIONS and head.endswith(":"):
            section, base = head[:-1], 4
            if section == "Returns":  # Napoleon would take what is before a colon for a type
                at = _returns(lines, at + 1, found)
                before = ""
                continue
            found.append(line)
        elif table or not line.strip() or _RULE.match(line):
            found.append(line)
        elif line.lstrip().startswith(">>>"):
            while at < len(lines) and lines[at].strip():
                found.append(lines[at])
                at += 1
            before = "code"
            continue
        elif not before.strip() and indent(line) > base and section not in ("Args", "Attributes"):
            at = _literal(lines, at, base, found)
            before = ""
            continue
        else:
            item = line.lstrip().startswith("- ")
            if item and before.strip() and not before.lstrip().startswith("- "):
                if indent(before) <= indent(line):
                    found.append("")
            found.append(escape(line))
        before = line
        at += 1
    return found


def _literal(lines: list[str], at: int, base: int, found: list[str]) -> int:
    """Copies an indented block as it stands, behind the sign for one; where it ends."""
    found.extend([" " * base + "::", ""])
    while at < len(lines) and (not lines[at].strip() or indent(lines[at]) > base):
        found.append(lines[at])
        at += 1
    if found[-1].strip():
        found.append("")
    return at


def _returns(lines: list[str], at: int, found: list[str]) -> int:
    """Makes a field of the section; where it ends."""
    end = at
    while end < len(lines) and (not lines[end].strip() or indent(lines[end]) >= 4):
        end += 1
    body = to_rst([line[4:] for line in lines[at:end]])
    while body and not body[-1].strip():
        body.pop()
    first, *rest = body or [""]
    found.append(f":returns: {first}")
    found.extend("    " + line if line.strip() else "" for line in rest)
    found.append("")
    return end
