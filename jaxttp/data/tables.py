"""A table of one's own, from a CSV or NPZ file."""

import os
import zipfile
from pathlib import Path

import numpy as np

from jaxttp._core.checks import check_choice, check_instance, check_used
from jaxttp.data._cells import MOST_CLASSES, features, is_missing, read_cells, read_labels
from jaxttp.data.dataset import Dataset, standardized
from jaxttp.data.registry import dataset_names, load_dataset

PROBLEMS = (
    KeyError, ValueError, TypeError, EOFError, OSError, MemoryError, RuntimeError,
    zipfile.BadZipFile,
)  # fmt: skip
"""Exceptions of a damaged archive while it is read."""


SUFFIXES = (".csv", ".npz")


def is_table(name: str) -> bool:
    """Whether a data set's name is a path of a table.

    Example:
        >>> is_table("own.csv"), is_table("wine")
        (True, False)
    """
    check_instance("name", name, str, "dataset_names, or a path")
    return name.lower().endswith(SUFFIXES)


def load_table(
    path: str | os.PathLike[str],
    *,
    label: str | int | None = None,
    targets: bool | None = None,
) -> Dataset:
    r"""A data set from a file: CSV with a label or target in each row, or NPZ with x and y.

    Words and whole numbers (up to 100 different ones) are labels, other numbers are targets;
    features are numbers, and nothing may be missing. A first line of CSV without a number among its
    features, or with the only label that is none, or with the name of the `label`, names the
    columns. Features of tables and targets get mean 0 and deviation 1; arrays of higher rank stay
    as they are, but for pixels of eight bits (uint8), which are divided by 255. The description
    says what was done.

    Args:
        path: the file.
        label: of a CSV, the column of labels or targets: its name in the first line, or its number
            from 1; the last when None. The description says which was taken, and for what.
        targets: True takes whole numbers for targets, such as an age; False takes rows y (N, K) of
            an NPZ with a single 1 each for classes. By the rule above when None.

    Returns:
        The data set.

    Raises:
        ValueError: no such file, no table in it, rows of different lengths, no such column as
            `label`, cells that are missing or no finite numbers (by line and column), more than 100
            words as labels; `label` for an NPZ, where it would do nothing.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "own.csv").write_text("w,h,kind\n1,2,a\n3,4,b\n5,7,a\n")
        ...     load_table(f"{folder}/own.csv")
        Dataset('own.csv': x (3, 2), 2 classes)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "own.csv").write_text("kind,w\na,1\nb,3\na,5\n")
        ...     print(load_table(f"{folder}/own.csv", label="kind").description)
        own.csv, 2 classes ('a' 2, 'b' 1) from column 1 ('kind'), features of mean 0 ...
    """
    path = Path(path)
    check_choice("targets", targets, (None, True, False))
    if not path.is_file():
        raise ValueError(f"data={str(path)!r} is not a file.")
    if path.suffix.lower() == ".csv":
        table = read_cells(path, label)
        x, y, source = features(table), read_labels(table), f" from {table.labels[-1]}"
    else:
        check_used("label", label, False, "it is for a CSV")
        (x, y), source = _read_npz(path), ""
    done: list[str] = []
    scaled: list[str] = []
    if x.ndim == 2:
        x, scaled = standardized(x), ["features"]
    elif x.dtype == np.uint8 and x.max(initial=0) > 1:
        x = x / 255
        done.append("x divided by 255")
    else:
        done.append("x as it is")
    if targets is False:
        y = _from_one_hot(y)
    is_regression = y.ndim == 2 or (targets is True and y.dtype.kind != "U")
    names = None if is_regression else class_labels(path, y)
    classes: tuple[str, ...] = ()
    if names is None:
        y = standardized(y.reshape(len(y), -1)).astype(np.float32)
        done.append(f"a regression of numbers{source}")
        scaled.append("targets")
    else:
        y, classes = encode_labels(names, y)
        counts = [f"{name!r} {n}" for name, n in zip(classes, np.bincount(y), strict=True)]
        listed = f" ({', '.join(counts)})" if len(counts) <= 6 else ""
        done.append(f"{len(names)} classes{listed}{source}")
    if scaled:
        done.append(f"{' and '.join(scaled)} of mean 0 and deviation 1")
    description = ", ".join([path.name, *done]) + "."
    return Dataset(x.astype(np.float32), y, path.name, description, len(classes) or None, classes)


def load_whole(name: str, *, label: str | int | None = None) -> Dataset:
    """A bundled data set or a table of one's own, all of its samples.

    Args:
        name: one of `jaxttp.data.dataset_names`, or a file for `load_table`.
        label: of a CSV, as in `load_table`.

    Returns:
        The data set.

    Raises:
        ValueError: an unknown name; what `load_table` and `load_dataset` refuse; `label` without
            a CSV.

    Example:
        >>> load_whole("wine")
        Dataset('wine': x (178, 13), 3 classes)
    """
    if is_table(name):
        return load_table(name, label=label)
    check_used("label", label, False, "it is for a CSV of your own")
    return load_dataset(check_choice("data", name, dataset_names()))


def _from_one_hot(y: np.ndarray) -> np.ndarray:
    """Labels (N,) of rows (N, K) with a single 1 each, and 0 elsewhere; other y as they are."""
    if y.ndim != 2 or y.dtype.kind == "U":
        return y
    is_one_hot = np.all((y == 0) | (y == 1)) and np.all(np.sum(y != 0, axis=1) == 1)
    return np.argmax(y, axis=1) if is_one_hot else y


def _read_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The finite arrays x (N, ...) and y (N,) or (N, K)."""
    try:
        with np.load(path, allow_pickle=False) as file:
            x, y = np.asarray(file["x"]), np.asarray(file["y"])
    except PROBLEMS as problem:
        raise ValueError(f"data={str(path)!r} needs the arrays x and y: {problem}") from problem
    for name, array in (("x", x), ("y", y)):
        is_real = array.dtype.kind in "biuf"
        if not is_real and (name == "x" or array.dtype.kind != "U"):
            raise ValueError(f"data={str(path)!r}: {name} holds {array.dtype}, not real numbers.")
        if is_real and not np.all(np.isfinite(array)):
            raise ValueError(f"data={str(path)!r}: {name} holds what is not finite.")
    if y.dtype.kind == "U" and len(lost := np.flatnonzero(is_missing(y))):
        raise ValueError(
            f"data={str(path)!r}: y[{lost[0]}] holds {str(y.reshape(-1)[lost[0]])!r}, {len(lost)} "
            f"of {y.size} labels are missing; fill them in, or leave them out."
        )
    if len(x) < 2 or x.ndim < 2 or y.ndim not in (1, 2) or len(x) != len(y):
        raise ValueError(
            f"data={str(path)!r} needs x (N, ...) and y (N,) or (N, K) of one length, at least 2; "
            f"got {x.shape} and {y.shape}."
        )
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim == 2 and y.dtype.kind == "U":
        raise ValueError(f"data={str(path)!r}: y {y.shape} holds words; labels are (N,).")
    return x, y


def encode_labels(names: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels 0..K-1 of the classes `names`, and the names as text."""
    text = [str(int(name) if names.dtype.kind == "f" else name) for name in names]
    return np.searchsorted(names, y).astype(np.int32), tuple(text)


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
    floats = np.asarray(y, np.float64)
    if len(values) <= MOST_CLASSES and np.max(np.abs(floats), initial=0) >= 2**53:
        raise ValueError(
            f"data={str(path)!r} has labels or targets as large as {np.max(np.abs(floats)):g}: "
            f"from {2**53} on whole numbers are not told apart. Write classes as words."
        )
    whole = bool(np.all(y == np.round(floats)))
    return values.astype(np.float64) if whole and len(values) <= MOST_CLASSES else None
