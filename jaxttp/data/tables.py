"""A table of one's own, from a CSV or NPZ file."""

import csv
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxttp._checks import check_choice, check_instance, check_used
from jaxttp.data._archives import PROBLEMS, read_arrays
from jaxttp.data._standardized import standardized
from jaxttp.data.dataset import Dataset
from jaxttp.data.registry import dataset_names, load_dataset

SUFFIXES = (".csv", ".npz")
MOST_CLASSES = 100
"""Whole numbers with more values than this are targets, not labels; so many words are a mistake."""
SHOWN_CLASSES = 6
"""So many are named, with their rows, where a table is described."""
MISSING = ("", "?", "na", "n/a", "nan", "null")
"""What stands for a value that is not known, in small letters."""


def is_table(name: str) -> bool:
    """Whether a data set's name is that of a file with a table.

    Example:
        >>> is_table("own.csv"), is_table("wine")
        (True, False)
    """
    check_instance("name", name, str, "dataset_names, or a path")
    return name.lower().endswith(SUFFIXES)


def load_table(
    path: str | os.PathLike[str], *, drop_missing: bool = False, one_hot: bool = False
) -> Dataset:
    r"""A data set from a file: CSV with the label or target last, or NPZ with x and y.

    Words and whole numbers (up to 100 different ones) are labels, other numbers are targets; none
    may be missing. A first line of CSV without a number among its features, or with the only label
    that is none, names the columns. Features of tables, indicators too, and targets get mean 0 and
    deviation 1; arrays of higher rank stay as they are.

    Args:
        path: the file.
        drop_missing: of a CSV, leave out the rows in which a value is missing (empty, "?", "NA",
            "N/A", "nan", "null"); the description says how many. An error when False.
        one_hot: of a CSV, put an indicator column for every word, in sorted order, in place of
            a feature whose values are words. An error when False.

    Returns:
        The data set.

    Raises:
        ValueError: no such file, no table in it, rows of different lengths, missing values and
            features of words (named by column and counted), what is not a number or not finite
            otherwise, labels that are numbers for the most part, or more than 100 words; an option
            for an NPZ, where it would do nothing.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "own.csv").write_text("w,h,kind\n1,2,a\n3,4,b\n5,7,a\n")
        ...     load_table(f"{folder}/own.csv")
        Dataset('own.csv': x (3, 2), 2 classes)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "own.csv").write_text("w,sex,kind\n1,f,a\n3,m,b\n?,f,b\n5,m,a\n")
        ...     found = load_table(f"{folder}/own.csv", drop_missing=True, one_hot=True)
        >>> found.x.shape
        (3, 3)
        >>> print(found.description)
        own.csv, 1 of 4 rows with missing values dropped, 1 column of words as 2 indicators, ...
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"data={str(path)!r} is not a file.")
    done: list[str] = []
    column = ""
    if path.suffix.lower() == ".csv":
        x, y, column = _from_csv(path, done, drop_missing=drop_missing, one_hot=one_hot)
    else:
        for name, value in (("drop_missing", drop_missing), ("one_hot", one_hot)):
            check_used(name, value or None, False, "it is for the cells of a CSV")
        x, y = _from_npz(path)
    if len(x) < 2 or x.ndim < 2 or y.ndim not in (1, 2) or len(x) != len(y):
        raise ValueError(
            f"data={str(path)!r} needs x (N, ...) and y (N,) or (N, K) of one length, at least 2; "
            f"got {x.shape} and {y.shape}."
        )
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim == 2 and y.dtype.kind == "U":
        raise ValueError(f"data={str(path)!r}: y {y.shape} holds words; labels are (N,).")
    if x.ndim == 2:
        x = standardized(x)
    names = None if y.ndim == 2 else class_labels(path, y)
    source = f" from {column}" if column else ""

    def words(target: str) -> str:
        return ", ".join([path.name, *done, target + source, "features of mean 0 and deviation 1."])

    if names is None:
        targets = np.asarray(y, np.float64).reshape(len(y), -1)
        return Dataset(x.astype(np.float32), standardized(targets).astype(np.float32), path.name,
                       words("a regression of numbers"))  # fmt: skip
    labels = np.searchsorted(names, y).astype(np.int32)
    shown = tuple(str(int(name)) if names.dtype.kind == "f" else str(name) for name in names)
    rows = [f"{name!r} {count}" for name, count in zip(shown, np.bincount(labels), strict=True)]
    classes = f"{len(names)} classes"
    classes += f" ({', '.join(rows)})" if len(rows) <= SHOWN_CLASSES else ""
    return Dataset(x.astype(np.float32), labels, path.name, words(classes), len(names), shown)


def load_whole(name: str, *, drop_missing: bool = False, one_hot: bool = False) -> Dataset:
    """A bundled data set or a table of one's own, all of its samples.

    Args:
        name: one of `jaxttp.data.dataset_names`, or a file for `load_table`.
        drop_missing: see `load_table`; for a CSV alone.
        one_hot: likewise.

    Returns:
        The data set.

    Raises:
        ValueError: an unknown name; what `load_table` and `load_dataset` refuse; an option for a
            CSV without one.

    Example:
        >>> load_whole("wine")
        Dataset('wine': x (178, 13), 3 classes)
    """
    options = {"drop_missing": drop_missing, "one_hot": one_hot}
    if is_table(name):
        return load_table(name, **options)
    for option, value in options.items():
        check_used(option, value or None, False, "it is for a CSV of your own")
    return load_dataset(check_choice("data", name, dataset_names()))


class _Cells(NamedTuple):
    """The rows of a CSV without its head: their lines in the file, their cells, columns' names."""

    path: Path
    lines: list[int]
    rows: list[list[str]]
    names: list[str]

    def column(self, index: int) -> str:
        """How messages call a column."""
        return self.names[index] if self.names else f"column {index + 1}"

    def only(self, kept: list[int]) -> "_Cells":
        """Some of the rows."""
        lines, rows = [self.lines[i] for i in kept], [self.rows[i] for i in kept]
        return self._replace(lines=lines, rows=rows)


def _from_csv(
    path: Path, done: list[str], *, drop_missing: bool, one_hot: bool
) -> tuple[np.ndarray, np.ndarray, str]:
    """Features, labels and the column of these; what was done to the others is added to `done`."""
    table = _read_csv(path)
    if drop_missing:
        total = len(table.rows)
        table = table.only(
            [i for i, row in enumerate(table.rows) if not any(map(_is_missing, row))]
        )
        done.append(f"{total - len(table.rows)} of {total} rows with missing values dropped")
        if len(table.rows) < 2:
            raise ValueError(
                f"data={str(path)!r}: {len(table.rows)} of {total} rows have no missing value; "
                "drop the columns that miss most, or fill them in."
            )
    _refuse_cells(table, one_hot)
    parts, encoded = [], 0
    for index in range(len(table.rows[0]) - 1):
        cells = [row[index] for row in table.rows]
        if _is_column_of_words(table, index, cells):
            parts.append(_indicators(table, index, cells))
            encoded += 1
        else:
            parts.append(np.array([[float(cell)] for cell in cells]))
    if one_hot:
        width = sum(part.shape[1] for part in parts) - (len(parts) - encoded)
        columns = f"{encoded} column{'' if encoded == 1 else 's'} of words"
        done.append(f"{columns} as {width} indicators" if encoded else "no column of words")
    labels = last_column(path, table.lines, [row[-1] for row in table.rows])
    return np.concatenate(parts, axis=1), labels, table.column(len(table.rows[0]) - 1)


def read_rows(path: Path) -> list[tuple[int, list[str]]]:
    """The lines of a CSV and their cells, those that hold something."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            return [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(row)]
    except (UnicodeDecodeError, csv.Error) as problem:
        raise ValueError(f"data={str(path)!r} is no CSV in UTF-8: {problem}") from problem


def _read_csv(path: Path) -> _Cells:
    """All cells, the head apart."""
    read = read_rows(path)
    names: list[str] = []
    if _is_head([row for _, row in read]):
        names = [f"column {i} ({name!r})" for i, name in enumerate(read[0][1], start=1)]
        read = read[1:]
    lines, rows = [line for line, _ in read], [row for _, row in read]
    if len(rows) < 2 or len(rows[0]) < 2:
        raise ValueError(f"data={str(path)!r} needs rows of features and a label, with commas.")
    for line, row in read:
        if len(row) != len(rows[0]):
            raise ValueError(
                f"data={str(path)!r}: line {line} has {len(row)} cells, the first row of data "
                f"{len(rows[0])}."
            )
    return _Cells(path, lines, rows, names if len(names) == len(rows[0]) else [])


def _refuse_cells(table: _Cells, one_hot: bool) -> None:
    """Name all at once what nobody said what to do with: missing values, and words."""
    problems = [_missing_in(table), None if one_hot else _words_in(table)]
    found = [problem for problem in problems if problem]
    if found:
        raise ValueError(f"data={str(table.path)!r}: {' And '.join(found)}")


def _missing_in(table: _Cells) -> str | None:
    """The features in which values are missing, with their rows counted, and what would do."""
    gaps = {
        index: [i for i, row in enumerate(table.rows) if _is_missing(row[index])]
        for index in range(len(table.rows[0]) - 1)
    }
    gaps = {index: rows for index, rows in gaps.items() if rows}
    if not gaps:
        return None
    shown = [f"{table.column(index)} in {len(rows)}" for index, rows in gaps.items()]
    index, rows = next(iter(gaps.items()))
    count = len(set().union(*map(set, gaps.values())))
    return (
        f"values are missing in {count} of {len(table.rows)} rows: {_first_five(shown)}; the first "
        f"is {table.rows[rows[0]][index]!r} in line {table.lines[rows[0]]}. Drop these rows "
        "(drop_missing=True; --drop-missing on the command line) or fill them in."
    )


def _words_in(table: _Cells) -> str | None:
    """The features whose values are words, with the different ones counted, and what would do."""
    shown = []
    for index in range(len(table.rows[0]) - 1):
        cells = [(i, row[index]) for i, row in enumerate(table.rows) if not _is_missing(row[index])]
        words = [(i, cell) for i, cell in cells if not _is_number(cell)]
        if _are_words([cell for _, cell in cells]):
            (row, first), values = words[0], len({cell for _, cell in cells})
            shown.append(
                f"{table.column(index)} holds words, {values} different ones in {len(cells)} rows, "
                f"such as {first!r} in line {table.lines[row]}"
            )
    if not shown:
        return None
    return (
        f"{_first_five(shown)}. Drop such a column, or encode it: one_hot=True (--one-hot on the "
        "command line) makes one for every word."
    )


def _first_five(shown: list[str]) -> str:
    """The first five of a list in words, and how many more there are."""
    more = f" and {len(shown) - 5} more columns" if len(shown) > 5 else ""
    return ", ".join(shown[:5]) + more


def _is_column_of_words(table: _Cells, index: int, cells: list[str]) -> bool:
    """Whether a feature's values are words; refused where only some are."""
    words = [i for i, cell in enumerate(cells) if not _is_number(cell)]
    if not words:
        return False
    first = words[0]
    if not _are_words(cells):
        raise ValueError(
            f"data={str(table.path)!r}: line {table.lines[first]}, {table.column(index)} holds "
            f"{cells[first]!r}, while {len(cells) - len(words)} of {len(cells)} rows hold a "
            "number; features must be finite numbers, or all words. Write a number, or empty "
            "the cell and leave such rows out (drop_missing=True; --drop-missing)."
        )
    return True


def _indicators(table: _Cells, index: int, cells: list[str]) -> np.ndarray:
    """A column for every word of a feature, in sorted order."""
    values = sorted(set(cells))
    if len(values) > MOST_CLASSES:
        raise ValueError(
            f"data={str(table.path)!r}: {table.column(index)} holds {len(values)} different words, "
            f"such as {values[0]!r}; a column for every word is for up to {MOST_CLASSES}. Drop it."
        )
    return (np.array(cells)[:, None] == np.array(values)).astype(float)


def last_column(path: Path, lines: list[int], cells: list[str]) -> np.ndarray:
    """The labels or targets: numbers, or words that stand for classes."""
    lost = [i for i, cell in enumerate(cells) if _is_missing(cell)]
    if lost:
        shown = ", ".join(f"line {lines[i]} ({cells[i]!r})" for i in lost[:5])
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        raise ValueError(
            f"data={str(path)!r}: the last column, the label or target, is missing in {shown}{more}"
            "; fill it in, or drop these rows (drop_missing=True; --drop-missing on the command "
            "line)."
        )
    words = [i for i, cell in enumerate(cells) if not _is_number(cell)]
    if not words:
        return np.array([float(cell) for cell in cells])
    if 2 * len(words) < len(cells):
        first = words[0]
        raise ValueError(
            f"data={str(path)!r}: line {lines[first]} ends with {cells[first]!r}, while "
            f"{len(cells) - len(words)} of {len(cells)} rows end with a number; targets must be "
            "finite numbers, labels all words or all whole numbers."
        )
    return np.array(cells)


def _from_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        x, y = read_arrays(path, ("x", "y")).values()
    except PROBLEMS as problem:
        raise ValueError(f"data={str(path)!r} needs the arrays x and y: {problem}") from problem
    for name, array in (("x", x), ("y", y)):
        numbers = np.issubdtype(array.dtype, np.number) or array.dtype == np.bool_
        if (name == "x" or array.dtype.kind != "U") and not numbers:
            raise ValueError(f"data={str(path)!r}: {name} holds {array.dtype}, not numbers.")
        if numbers and not np.all(np.isfinite(array)):
            raise ValueError(f"data={str(path)!r}: {name} holds what is not finite.")
    if y.dtype.kind == "U" and y.ndim < 3:
        lost = [i for i, label in enumerate(y.reshape(-1)) if _is_missing(str(label))]
        if lost:
            raise ValueError(
                f"data={str(path)!r}: y[{lost[0]}] holds {str(y.reshape(-1)[lost[0]])!r}, "
                f"{len(lost)} of {y.size} labels are missing; fill them in, or leave them out."
            )
    return x.astype(np.float64), y


def _is_head(rows: list[list[str]]) -> bool:
    """Whether the first row names the columns; one with some numbers may be data with a gap."""
    if not rows:
        return False
    first, rest = rows[0], rows[1:]
    if len(first) > 1 and not any(map(_is_number, first[:-1])):
        return True
    if not rest or _is_number(first[-1]) or _is_missing(first[-1]):
        return False
    return all(_is_number(row[-1]) for row in rest)


def _is_missing(cell: str) -> bool:
    return cell.strip().lower() in MISSING


def _is_number(cell: str) -> bool:
    try:
        return bool(np.isfinite(float(cell)))
    except ValueError:
        return False


def _are_words(cells: list[str]) -> bool:
    """Whether most of the cells are words, and none is infinite."""
    words = sum(not _is_number(cell) for cell in cells)
    return 2 * words > len(cells) and not any(map(_is_infinite, cells))


def _is_infinite(cell: str) -> bool:
    try:
        return bool(np.isinf(float(cell)))
    except ValueError:
        return False


def class_labels(path: Path, y: np.ndarray) -> np.ndarray | None:
    """The labels in their order; None where y are targets."""
    values = np.unique(y)
    if y.dtype.kind == "U":
        if len(values) > MOST_CLASSES:
            raise ValueError(
                f"data={str(path)!r} has {len(values)} different words as labels, such as "
                f"{str(values[0])!r}; a table has up to {MOST_CLASSES} classes, and targets are "
                "numbers."
            )
        return values
    whole = bool(np.all(y == np.round(np.asarray(y, np.float64))))
    return values.astype(np.float64) if whole and len(values) <= MOST_CLASSES else None
