"""The cells of a CSV: its head, which column is the label, and what a cell holds."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxttp._core.checks import check_integer

MISSING = ("", "?", "na", "n/a", "nan", "null")
"""What stands for a value that is not known, in small letters."""


class Cells(NamedTuple):
    """The rows of a CSV without its head, the label's column moved to the end.

    Attributes:
        path: the file.
        lines: every row's line in the file.
        rows: cells of a row each.
        heads: the columns' names in the order of `rows`; "column 3" where there is no head.
        places: the columns' places in the file, from 1.
        named: whether there is a head.
    """

    path: Path
    lines: list[int]
    rows: list[list[str]]
    heads: list[str]
    places: list[int]
    named: bool

    @property
    def features(self) -> range:
        """The columns before the label."""
        return range(len(self.heads) - 1)

    def column(self, index: int) -> str:
        """How messages call a column."""
        place = f"column {self.places[index]}"
        return f"{place} ({self.heads[index]!r})" if self.named else place

    def of(self, index: int) -> list[str]:
        """The cells of a column."""
        return [row[index] for row in self.rows]

    def only(self, kept: list[int]) -> "Cells":
        """Some of the rows."""
        lines, rows = [self.lines[i] for i in kept], [self.rows[i] for i in kept]
        return self._replace(lines=lines, rows=rows)


def read_rows(path: Path) -> list[tuple[int, list[str]]]:
    """The lines of a CSV and their cells, those that hold something."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            return [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(row)]
    except (UnicodeDecodeError, csv.Error) as problem:
        raise ValueError(f"data={str(path)!r} is no CSV in UTF-8: {problem}") from problem


def read_cells(path: Path, label: str | int | None, drop: Sequence[str | int] = ()) -> Cells:
    """The cells, the head apart and the label last, without the columns to `drop`."""
    read = read_rows(path)
    rows = [row for _, row in read]
    width = max(map(len, rows[:1]), default=0)
    named = any(_names_column(rows, one) for one in (label, *drop))
    named = named or _is_head(_label_last(rows, _number_of(label, width)))
    heads = rows[0] if named else []
    read = read[1:] if named else read
    if len(read) < 2 or len(read[0][1]) < 2:
        raise ValueError(f"data={str(path)!r} needs rows of features and a label, with commas.")
    width = len(read[0][1])
    for line, row in read:
        if len(row) != width:
            raise ValueError(
                f"data={str(path)!r}: line {line} has {len(row)} cells, the first row of data "
                f"{width}."
            )
    if named := len(heads) == width:
        names = heads
    else:
        names = [f"column {place}" for place in range(1, width + 1)]
    order = _order(path, names if named else [], width, label, drop)
    return Cells(
        path, [line for line, _ in read], [[row[i] for i in order] for _, row in read],
        [names[i] for i in order], [i + 1 for i in order], named,
    )  # fmt: skip


def _order(
    path: Path, heads: list[str], width: int, label: str | int | None, drop: Sequence[str | int]
) -> list[int]:
    """The places from 0 of the columns that are kept, the label last."""
    chosen = width - 1 if label is None else _place_of(path, heads, width, "label", label)
    dropped = {_place_of(path, heads, width, "drop", column): column for column in drop}
    if chosen in dropped:
        raise ValueError(f"drop={dropped[chosen]!r} is the column of the label; name another one.")
    order = [*(i for i in range(width) if i != chosen and i not in dropped), chosen]
    if len(order) < 2:
        raise ValueError(f"drop={list(drop)!r} leaves no feature of {str(path)!r}.")
    return order


def _number_of(label: str | int | None, width: int) -> int | None:
    """The place, from 0, of a label that is given by a number within the table."""
    if label is None or isinstance(label, bool) or not str(label).strip().isdecimal():
        return None
    place = int(label) - 1
    return place if 0 <= place < width else None


def _names_column(rows: list[list[str]], name: str | int | None) -> bool:
    """Whether the first row is a head because it has this name, which no row below repeats."""
    if not isinstance(name, str) or not rows or name not in rows[0] or name.isdecimal():
        return False
    place = rows[0].index(name)
    return all(place >= len(row) or row[place] != name for row in rows[1:])


def _label_last(rows: list[list[str]], place: int | None) -> list[list[str]]:
    """The rows with the label at the end."""
    if place is None:
        return rows
    return [[*row[:place], *row[place + 1 :], *row[place : place + 1]] for row in rows]


def _place_of(path: Path, heads: list[str], width: int, option: str, column: str | int) -> int:
    """The place from 0 of a column that an option gives by its name, or its number from 1."""
    if not isinstance(column, str):
        check_integer(option, column, at_least=1)
    elif (several := heads.count(column)) == 1:
        return heads.index(column)
    elif several:
        raise ValueError(
            f"{option}={column!r}: {several} columns of {str(path)!r} have this name; give the "
            "number of one, from 1."
        )
    if (place := _number_of(column, width)) is not None:
        return place
    shown = [f"{i} ({name!r})" for i, name in enumerate(heads, start=1)]
    known = (
        f"has the columns {', '.join(shown)}; give a name or a number"
        if heads
        else f"has no names in its first line, and {width} columns; give a number from 1 to {width}"
    )
    raise ValueError(f"{option}={column!r} is no column: {str(path)!r} {known}.")


def _is_head(rows: list[list[str]]) -> bool:
    """Whether the first row names the columns; one with some numbers may be data with a gap."""
    if not rows:
        return False
    first, rest = rows[0], rows[1:]
    if len(first) > 1 and not any(map(is_number, first[:-1])):
        return True
    if not rest or is_number(first[-1]) or is_missing(first[-1]):
        return False
    return all(is_number(row[-1]) for row in rest)


def is_missing(cell: str) -> bool:
    """Whether a cell holds no value."""
    return cell.strip().lower() in MISSING


def is_number(cell: str) -> bool:
    """Whether a cell holds a finite number."""
    try:
        return bool(np.isfinite(float(cell)))
    except ValueError:
        return False


def are_words(cells: Sequence[str]) -> bool:
    """Whether most of the cells are words, and none is infinite."""
    words = sum(not is_number(cell) for cell in cells)
    return 2 * words > len(cells) and not any(map(_is_infinite, cells))


def _is_infinite(cell: str) -> bool:
    try:
        return bool(np.isinf(float(cell)))
    except ValueError:
        return False


def read_labels(path: Path, lines: list[int], cells: list[str], column: str) -> np.ndarray:
    """The labels or targets of a column: numbers, or words that stand for classes."""
    lost = [i for i, cell in enumerate(cells) if is_missing(cell)]
    if lost:
        shown = ", ".join(f"line {lines[i]} ({cells[i]!r})" for i in lost[:5])
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        raise ValueError(
            f"data={str(path)!r}: the label or target, {column}, is missing in {shown}{more}; "
            "write it into the file, or drop these rows (drop_missing=True; --drop-missing on the "
            "command line). fill (--fill) is for features."
        )
    words = [i for i, cell in enumerate(cells) if not is_number(cell)]
    if not words:
        return np.array([float(cell) for cell in cells])
    if 2 * len(words) < len(cells):
        first = words[0]
        raise ValueError(
            f"data={str(path)!r}: line {lines[first]}, {column} holds {cells[first]!r}, while "
            f"{len(cells) - len(words)} of {len(cells)} rows hold a number; targets must be "
            "finite numbers, labels all words or all whole numbers. label (--label) names "
            "another column."
        )
    return np.array(cells)
