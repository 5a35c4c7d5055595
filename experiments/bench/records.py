"""Records of benchmarks, the tables that documents show of them, and the numbers that they quote.

    python -m experiments.bench.records write races --draws 20    # run, keep what is printed
    python -m experiments.bench.records render                    # write the tables into documents

A record is a file of JSON in `experiments/bench/records`: the command, the date, the machine, the
commit, the tables that the command printed, and facts (numbers that stand in no table). A document
shows a table below the comment ``<!-- record: NAME TABLE FILTER -->``; a row is shown if one of its
cells is FILTER. A paragraph or list with the comment ``<!-- numbers: NAME NAME -->`` quotes only
numbers of these records or of these scripts of the gallery, and one with ``<!-- numbers: defined
-->`` only definitions and defaults.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from experiments.bench.harness import head, line, stamp

FOLDER = Path(__file__).parent / "records"
ROOT = Path(__file__).parents[2]
GALLERY = ROOT / "docs/gallery/results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(<!-- record: (\w+) (\d+) ?([^\n]*?) -->\n)(?:`.*\n\n(?:\|.*\n)+)?")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\]\([^)]*\)", flags=re.S | re.M)
UNIT = r"%|(?:s|ms|min|MiB|GiB|CPU|seconds|minutes|times|steps|of|runs)\b"
NUMBER = r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"


def text_of(name: str) -> str:
    """The record of a benchmark, or the numbers of a script of the gallery."""
    path = FOLDER / f"{name}.json"
    return (path if path.exists() else GALLERY / name / "cpu/measured.json").read_text()


def tables(text: str) -> list[dict[str, Any]]:
    r"""The Markdown tables of a text: columns and rows of cells.

    Example:
        >>> tables("| a | b |\n|---|---|\n| 1 | 2 % |\n")
        [{'columns': ['a', 'b'], 'rows': [['1', '2 %']]}]
    """
    out = []
    for table in re.findall(r"(?:^\|.*\|\n?)+", text, flags=re.M):
        rows = [[cell.strip() for cell in row[1:-1].split("|")] for row in table.splitlines()]
        out.append({"columns": rows[0], "rows": rows[2:]})
    return out


def write(name: str, record: dict[str, Any]) -> None:
    """Keep a record, one row a line."""
    text = json.dumps(record, ensure_ascii=False, indent=1)
    for cells in re.findall(r"\[[^\[\]]*\]", text):
        text = text.replace(cells, re.sub(r"\s*\n\s*", " ", cells))
    (FOLDER / f"{name}.json").write_text(text + "\n")


def measure(name: str, arguments: list[str]) -> None:
    """Run a benchmark and keep its record; the facts of the former one are dropped."""
    command = ["python", "-m", f"experiments.bench.{name}", *arguments]
    done = subprocess.run([sys.executable, *command[1:]], check=True, stdout=subprocess.PIPE)
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], stdout=subprocess.PIPE)
    found = stamp()
    write(name, {
        "command": " ".join(command), "date": found["date"][:10], "machine": found["machine"],
        "commit": commit.stdout.decode().strip(), "facts": {},
        "tables": tables(done.stdout.decode()),
    })  # fmt: skip


def shown(match: re.Match[str]) -> str:
    """The comment that asks for a table, where it comes from, and the table."""
    opening, name, table, only = match.groups()
    record = json.loads(text_of(name))
    columns, rows = record["tables"][int(table)].values()
    rows = [row for row in rows if not only or only in row]
    source = f"`{record['command']}`, {record['date']}, {record['machine']} ({record['commit']}):"
    return "\n".join([opening + source, "", head(columns), *map(line, rows), ""])


def render(text: str) -> str:
    """A document with its tables as the records have them."""
    return BLOCK.sub(shown, text)


def quoted(text: str) -> set[str]:
    """The numbers of a text."""
    return {number.replace(",", "") for number in re.findall(NUMBER, CODE.sub(" ", text))}


def unrecorded(text: str) -> list[str]:
    """The numbers with a unit in a document that no record of their block has."""
    out = []
    for block in re.split(r"\n\s*\n", CODE.sub(" ", BLOCK.sub("", text))):
        names = " ".join(re.findall(r"<!-- numbers: (.*?) -->", block)).split()
        if "defined" in names:
            continue
        records = "\n".join(map(text_of, names))
        pattern = rf"{NUMBER}(?=\s?(?:{UNIT}))" + (rf"|{NUMBER}(?=\s?\|)" if names else "")
        numbers = {number.replace(",", "") for number in re.findall(pattern, block)}
        out += [
            f"{number} in {block.strip()[:60]!r}" for number in sorted(numbers - quoted(records))
        ]
    return out


def main(arguments: list[str] | None = None) -> None:
    """Write a record, or the tables of documents."""
    match sys.argv[1:] if arguments is None else arguments:
        case ["write", name, *more]:
            measure(name, more)
        case ["render"]:
            for page in PAGES:
                page.write_text(render(page.read_text()))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
