"""The cells of a CSV: its head, the column of labels, and the numbers that features become."""

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxttp._core.checks import check_integer

MISSING = ("", "?", "na", "n/a", "nan", "null")
"""Cells without a value, in small letters."""
MOST_CLASSES = 100
"""With more distinct values, whole numbers are targets, and words are an error."""
HINT = "Fill gaps in and make numbers of words before, for instance with pandas."


class Cells(NamedTuple):
    """The rows of a CSV without its head, the label's column moved to the end.

    Attributes:
        path: the file.
        line_numbers: of every row in the file (N,).
        text: the cells (N, D), Python strings.
        labels: names of the columns in messages.
    """

    path: Path
    line_numbers: np.ndarray
    text: np.ndarray
    labels: list[str]


def is_missing(cells: np.ndarray) -> np.ndarray:
    """Which cells hold no value."""
    mask = [str(cell).strip().lower() in MISSING for cell in cells.reshape(-1)]
    return np.array(mask, bool).reshape(cells.shape)


def as_numbers(cells: np.ndarray) -> np.ndarray:
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
    """The cells without the head, with the label in the last column."""
    numbered = read_rows(path)
    first = numbered[0][1] if numbered else []
    column = _index_of(label, len(first))
    column = len(first) - 1 if column is None else column
    has_head = isinstance(label, str) and not label.isdecimal() and label in first
    has_head = has_head or _is_head([row for _, row in numbered], column)
    data = numbered[1:] if has_head else numbered
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
    last = width - 1 if label is None else _column_of(path, heads, width, label)
    order = [*(i for i in range(width) if i != last), last]
    labels = [f"column {i + 1}" + (f" ({heads[i]!r})" if heads else "") for i in order]
    text = np.array([row for _, row in data], object)[:, order]
    return Cells(path, np.array([line for line, _ in data]), text, labels)


def _is_head(rows: list[list[str]], label: int) -> bool:
    """Whether the first row names the columns; one with some numbers may be data with a gap."""
    if not rows or len(rows[0]) < 2:
        return False
    features = np.array([cell for i, cell in enumerate(rows[0]) if i != label], object)
    if np.all(np.isnan(as_numbers(features))):
        return True
    labels = np.array([row[label] for row in rows if label < len(row)], object)
    is_number = ~np.isnan(as_numbers(labels))
    is_word = not is_number[0] and not is_missing(labels[:1])[0]
    return is_word and len(rows) > 1 and bool(np.all(is_number[1:]))


def _column_of(path: Path, heads: list[str], width: int, label: str | int) -> int:
    """The index, from 0, of the label's column, given by its name, or its number from 1."""
    if not isinstance(label, str):
        check_integer("label", label, at_least=1)
    elif (several := heads.count(label)) == 1:
        return heads.index(label)
    elif several:
        raise ValueError(
            f"label={label!r}: {several} columns of {str(path)!r} have this name; give the "
            "number of one, from 1."
        )
    if (index := _index_of(label, width)) is not None:
        return index
    shown = [f"{i} ({name!r})" for i, name in enumerate(heads, start=1)]
    hint = f"has no names in its first line, and {width} columns; give a number from 1 to {width}"
    if heads:
        hint = f"has the columns {', '.join(shown)}; give a name or a number"
    raise ValueError(f"label={label!r} is no column: {str(path)!r} {hint}.")


def _index_of(column: str | int | None, width: int) -> int | None:
    """The index, from 0, of a column that is given by a number within the table."""
    if column is None or isinstance(column, bool) or not str(column).strip().isdecimal():
        return None
    return int(column) - 1 if 1 <= int(column) <= width else None


def features(table: Cells) -> np.ndarray:
    """All features as numbers (N, D - 1), not scaled.

    Raises:
        ValueError: a cell that is no finite number, by its line and column.
    """
    values = np.stack([as_numbers(column) for column in table.text[:, :-1].T], axis=1)
    bad = np.isnan(values)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise ValueError(
            f"data={str(table.path)!r}: {int(bad.sum())} cells of features in {len(bad)} rows are "
            f"no finite numbers; the first is {table.text[row, column]!r} in line "
            f"{table.line_numbers[row]}, {table.labels[column]}. {HINT} If it is the label: label "
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
            f"rows, first in line {table.line_numbers[lost[0]]}; leave these rows out of the file."
        )
    values = as_numbers(text)
    is_text = np.flatnonzero(np.isnan(values))
    if not len(is_text):
        return values
    if 2 * len(is_text) < len(text):
        raise ValueError(
            f"data={str(table.path)!r}: line {table.line_numbers[is_text[0]]}, {column} holds "
            f"{text[is_text[0]]!r}, while {len(text) - len(is_text)} of {len(text)} rows hold a "
            "number; targets must be finite numbers, labels all words or all whole numbers. label "
            "(--label) names another column."
        )
    return text.astype(str)
