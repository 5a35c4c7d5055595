"""The cells of a CSV: its head, the column of labels, and the numbers that features become."""

import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxttp._core.checks import check_integer

MISSING = ("", "?", "na", "n/a", "nan", "null")
"""Cells without a value, in small letters."""
MOST_CLASSES = 100
"""Whole numbers with more values than this are targets, not labels; so many words are a mistake."""
REMEDY = (
    "Drop these rows (drop_missing=True; --drop-missing on the command line) or fill them in "
    "(fill='median'; --fill median)."
)


@dataclasses.dataclass(frozen=True)
class Cells:
    """The rows of a CSV without its head, the label's column moved to the end.

    Attributes:
        path: the file.
        lines: the line in the file of every row (N,).
        text: the cells (N, D), Python strings.
        heads: names of the columns; "column 3" where there is no head.
        labels: how messages call the columns.
    """

    path: Path
    lines: np.ndarray
    text: np.ndarray
    heads: list[str]
    labels: list[str]

    @property
    def missing(self) -> np.ndarray:
        """Cells without a value (N, D)."""
        return is_missing(self.text)

    def rows(self, kept: np.ndarray) -> "Cells":
        """Some of the rows, by a mask."""
        return dataclasses.replace(self, lines=self.lines[kept], text=self.text[kept])


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


def read_cells(path: Path, label: str | int | None, drop: Sequence[str | int] = ()) -> Cells:
    """The cells, the head apart and the label last, without the columns to `drop`."""
    lines_and_rows = read_rows(path)
    first = lines_and_rows[0][1] if lines_and_rows else []
    place = _number_of(label, len(first))
    place = len(first) - 1 if place is None else place
    has_head = any(isinstance(name, str) and not name.isdecimal() and name in first
                   for name in (label, *drop))  # fmt: skip
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
    order = _order(path, heads, width, label, drop)
    names = heads or [f"column {i}" for i in range(1, width + 1)]
    labels = [f"column {i + 1}" + (f" ({heads[i]!r})" if heads else "") for i in order]
    text = np.array([row for _, row in data], object)[:, order]
    lines = np.array([line for line, _ in data])
    return Cells(path, lines, text, [names[i] for i in order], labels)


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


def _number_of(column: str | int | None, width: int) -> int | None:
    """The place, from 0, of a column that is given by a number within the table."""
    if column is None or isinstance(column, bool) or not str(column).strip().isdecimal():
        return None
    return int(column) - 1 if 1 <= int(column) <= width else None


def without_missing(table: Cells) -> tuple[Cells, str]:
    """The rows in which no value is missing, and how many were dropped, in words."""
    complete = ~np.any(table.missing, axis=1)
    kept, total = int(complete.sum()), len(complete)
    if kept < 2:
        raise ValueError(
            f"data={str(table.path)!r}: {kept} of {total} rows have no missing value; drop the "
            "columns that miss most, or fill them in (fill='median'; --fill median)."
        )
    return table.rows(complete), f"{total - kept} of {total} rows with missing values dropped"


def features(table: Cells, *, fill: str | None, one_hot: bool) -> tuple[np.ndarray, list[str]]:
    """Numbers and indicators of all features (N, W), not scaled, and what was done in words.

    Raises:
        ValueError: missing values and words that nobody said what to do with, cells that are
            neither numbers nor words.
    """
    missing = table.missing[:, :-1]
    if fill is None and missing.any():
        raise ValueError(_missing_message(table, missing))
    parts, widths = [], []
    for index in range(missing.shape[1]):
        cells, gaps = table.text[:, index], missing[:, index]
        if gaps.all():
            raise ValueError(
                f"data={str(table.path)!r}: no row has a value in {table.labels[index]}; take such "
                "a column out of the file."
            )
        values = numbers_of(cells)
        words = _words_of(table, index, values, gaps)
        if not words:
            parts.append(np.where(gaps, _fill_value(values[~gaps], fill), values)[:, None])
            continue
        if not one_hot:
            raise ValueError(
                f"data={str(table.path)!r}: {table.labels[index]} holds words, {len(words)} "
                f"different ones, such as {words[0]!r}. Drop such a column, or encode it: "
                "one_hot=True (--one-hot on the command line) makes one for every word. If it is "
                "the label: label (--label) names it."
            )
        # Words have no median or mean: missing ones become the most frequent word.
        known = np.where(gaps, _fill_value(cells[~gaps].astype(str), "most_frequent"), cells)
        parts.append((known[:, None] == np.array(words, object)).astype(float))
        widths.append(len(words))
    done = []
    if fill is not None:
        kind = "most frequent value" if fill == "most_frequent" else fill
        rows = int(np.sum(np.any(missing, axis=1)))
        done.append(
            f"{int(missing.sum())} missing values in {rows} of {len(missing)} rows filled with the "
            f"column's {kind}"
        )
    if one_hot:
        done.append(f"columns of words: {len(widths)}, as {sum(widths)} indicators")
    return np.concatenate(parts, axis=1), done


def _missing_message(table: Cells, missing: np.ndarray) -> str:
    """Which features miss values, in how many rows, and what would do."""
    counts = missing.sum(axis=0)
    shown = [f"{table.labels[i]} in {counts[i]}" for i in np.flatnonzero(counts)]
    more = f" and {len(shown) - 5} more columns" if len(shown) > 5 else ""
    row, column = np.argwhere(missing)[0]
    return (
        f"data={str(table.path)!r}: values are missing in {int(np.sum(np.any(missing, axis=1)))} "
        f"of {len(missing)} rows: {', '.join(shown[:5])}{more}; the first is "
        f"{table.text[row, column]!r} in line {table.lines[row]}. {REMEDY}"
    )


def _words_of(table: Cells, index: int, values: np.ndarray, gaps: np.ndarray) -> tuple[str, ...]:
    """The different words of a feature in sorted order; none where it holds numbers."""
    cells, known = table.text[:, index], ~gaps
    bad = np.flatnonzero(known & np.isnan(values))
    if not len(bad):
        return ()
    infinite = [cell.lower().lstrip("+-") in ("inf", "infinity") for cell in cells[bad]]
    if any(infinite) or 2 * len(bad) <= known.sum():
        raise ValueError(
            f"data={str(table.path)!r}: line {table.lines[bad[0]]}, {table.labels[index]} holds "
            f"{cells[bad[0]]!r}, while {known.sum() - len(bad)} of {known.sum()} rows hold a "
            "number; features must be finite numbers, or all words. Write a number, or empty the "
            "cell. " + REMEDY
        )
    words = sorted(set(cells[known]))
    if len(words) > MOST_CLASSES:
        raise ValueError(
            f"data={str(table.path)!r}: {table.labels[index]} holds {len(words)} different words, "
            f"such as {words[0]!r}; a column for every word is for up to {MOST_CLASSES}. Drop it."
        )
    return tuple(words)


def _fill_value(known: np.ndarray, fill: str | None) -> float | str:
    """The median, mean or most frequent of known values, of several the first in order."""
    if fill == "most_frequent":
        values, counts = np.unique(known, return_counts=True)
        return values[np.argmax(counts)].item()
    return float(np.median(known) if fill == "median" else np.mean(known))


def read_labels(path: Path, lines: Any, cells: Any, column: str) -> np.ndarray:
    """The labels or targets of a column: numbers, or words that stand for classes."""
    text = np.array(cells, object)
    lost = np.flatnonzero(is_missing(text))
    if len(lost):
        shown = ", ".join(f"line {lines[i]} ({cells[i]!r})" for i in lost[:5])
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        raise ValueError(
            f"data={str(path)!r}: the label or target, {column}, is missing in {shown}{more}; "
            "write it into the file, or drop these rows (drop_missing=True; --drop-missing on the "
            "command line). fill (--fill) is for features."
        )
    values = numbers_of(text)
    words = np.flatnonzero(np.isnan(values))
    if not len(words):
        return values
    if 2 * len(words) < len(cells):
        raise ValueError(
            f"data={str(path)!r}: line {lines[words[0]]}, {column} holds {cells[words[0]]!r}, "
            f"while {len(cells) - len(words)} of {len(cells)} rows hold a number; targets must be "
            "finite numbers, labels all words or all whole numbers. label (--label) names "
            "another column."
        )
    return text.astype(str)
