"""The cells of a CSV: its head, the column of labels, and the numbers that features become."""

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxttp._core.checks import check_integer

MISSING = ("", "?", "na", "n/a", "nan", "null")
"""Cells without a value, in small letters."""
MOST_CLASSES = 100
"""Whole numbers with more values than this are targets, not labels; so many words are a mistake."""
REMEDY = "Fill gaps in and make numbers of words before, for instance with pandas."


class Cells(NamedTuple):
    """The rows of a CSV without its head, the label's column moved to the end.

    Attributes:
        path: the file.
        lines: the line in the file of every row (N,).
        text: the cells (N, D), Python strings.
        labels: how messages call the columns.
    """

    path: Path
    lines: np.ndarray
    text: np.ndarray
    labels: list[str]


def is_missing(cells: np.ndarray) -> np.ndarray:
    """Which cells hold no value."""
    found = [str(cell).strip().lower() in MISSING for cell in cells.reshape(-1)]
    return np.array(found, bool).reshape(cells.shape)


def numbers_of(cells: np.ndarray) -> np.ndarray:
    """Cells as numbers (N,), float64; NaN for those that hold no finite number."""

    def number(cell: str) -> float:
        try:
            return float(cell)
        except ValueError:
            return np.nan

    values = np.array([number(cell) for cell in cells], float)
    return np.where(np.isfinite(values), values, np.nan)


def read_rows(path: Path) -> list[tuple[int, list[str]]]:
    """The lines of a CSV and their cells, those that hold something."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            return [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(row)]
    except (UnicodeDecodeError, csv.Error) as problem:
        raise ValueError(f"data={str(path)!r} is no CSV in UTF-8: {problem}") from problem


def read_cells(path: Path, label: str | int | None) -> Cells:
    """The cells, the head apart and the label last."""
    lines_and_rows = read_rows(path)
    first = lines_and_rows[0][1] if lines_and_rows else []
    place = _number_of(label, len(first))
    place = len(first) - 1 if place is None else place
    has_head = isinstance(label, str) and not label.isdecimal() and label in first
    has_head = has_head or _is_head([row for _, row in lines_and_rows], place)
    data = lines_and_rows[1:] if has_head else lines_and_rows
    if len(data) < 2 or len(data[0][1]) < 2:
        raise ValueError(f"data={str(path)!r} needs rows of features and a label, with commas.")
    width = len(data[0][1])
    for line, row in data:
        if len(row) != width:
            raise ValueError(
                f"data={str(path)!r}: line {line} has {len(row)} cells, the first row of data "
                f"{width}."
            )
    heads = first if has_head and len(first) == width else []
    chosen = width - 1 if label is None else _place_of(path, heads, width, label)
    order = [*(i for i in range(width) if i != chosen), chosen]
    labels = [f"column {i + 1}" + (f" ({heads[i]!r})" if heads else "") for i in order]
    text = np.array([row for _, row in data], object)[:, order]
    lines = np.array([line for line, _ in data])
    return Cells(path, lines, text, labels)


def _is_head(rows: list[list[str]], label: int) -> bool:
    """Whether the first row names the columns; one with some numbers may be data with a gap."""
    if not rows or len(rows[0]) < 2:
        return False
    features = np.array([cell for i, cell in enumerate(rows[0]) if i != label], object)
    if np.all(np.isnan(numbers_of(features))):
        return True
    labels = np.array([row[label] for row in rows if label < len(row)], object)
    is_number = ~np.isnan(numbers_of(labels))
    is_word = not is_number[0] and not is_missing(labels[:1])[0]
    return is_word and len(rows) > 1 and bool(np.all(is_number[1:]))


def _place_of(path: Path, heads: list[str], width: int, label: str | int) -> int:
    """The place from 0 of the label's column, given by its name, or its number from 1."""
    if not isinstance(label, str):
        check_integer("label", label, at_least=1)
    elif (several := heads.count(label)) == 1:
        return heads.index(label)
    elif several:
        raise ValueError(
            f"label={label!r}: {several} columns of {str(path)!r} have this name; give the "
            "number of one, from 1."
        )
    if (place := _number_of(label, width)) is not None:
        return place
    shown = [f"{i} ({name!r})" for i, name in enumerate(heads, start=1)]
    known = (
        f"has the columns {', '.join(shown)}; give a name or a number"
        if heads
        else f"has no names in its first line, and {width} columns; give a number from 1 to {width}"
    )
    raise ValueError(f"label={label!r} is no column: {str(path)!r} {known}.")


def _number_of(column: str | int | None, width: int) -> int | None:
    """The place, from 0, of a column that is given by a number within the table."""
    if column is None or isinstance(column, bool) or not str(column).strip().isdecimal():
        return None
    return int(column) - 1 if 1 <= int(column) <= width else None


def features(table: Cells) -> np.ndarray:
    """All features as numbers (N, D - 1), not scaled.

    Raises:
        ValueError: a cell that is no finite number, by its line and column.
    """
    columns = [numbers_of(table.text[:, i]) for i in range(table.text.shape[1] - 1)]
    values = np.stack(columns, axis=1)
    bad = np.isnan(values)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise ValueError(
            f"data={str(table.path)!r}: {int(bad.sum())} cells of features in {len(bad)} rows are "
            f"no finite numbers; the first is {table.text[row, column]!r} in line "
            f"{table.lines[row]}, {table.labels[column]}. {REMEDY} If it is the label: label "
            "(--label) names it."
        )
    return values


def read_labels(table: Cells) -> np.ndarray:
    """The labels or targets: numbers, or words that stand for classes."""
    text, column = table.text[:, -1], table.labels[-1]
    lost = np.flatnonzero(is_missing(text))
    if len(lost):
        raise ValueError(
            f"data={str(table.path)!r}: the label or target, {column}, is missing in {len(lost)} "
            f"rows, first in line {table.lines[lost[0]]}; leave these rows out of the file."
        )
    values = numbers_of(text)
    words = np.flatnonzero(np.isnan(values))
    if not len(words):
        return values
    if 2 * len(words) < len(text):
        raise ValueError(
            f"data={str(table.path)!r}: line {table.lines[words[0]]}, {column} holds "
            f"{text[words[0]]!r}, while {len(text) - len(words)} of {len(text)} rows hold a "
            "number; targets must be finite numbers, labels all words or all whole numbers. label "
            "(--label) names another column."
        )
    return text.astype(str)
