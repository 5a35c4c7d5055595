"""Arrays of an npz file from anywhere: no pickle, and no more memory than the file is long."""

import os
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np

LARGEST = 2**26
"""Bytes that any archive may unpack to, however small it is."""
DENSEST = 100
"""Times the file's own length that it may unpack to; pixels and counts shrink a few dozen times."""
PROBLEMS = (
    KeyError, ValueError, TypeError, EOFError, OSError, MemoryError, NotImplementedError,
    RuntimeError, zipfile.BadZipFile,
)  # fmt: skip
"""What a damaged or hostile archive raises while it is read."""


def read_arrays(path: str | os.PathLike[str], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Some arrays of an npz file.

    Args:
        path: the file.
        names: of the arrays.

    Returns:
        The arrays by name.

    Raises:
        ValueError: it unpacks to over a hundred times its own length and over 64 MiB, or an array
            says that it is longer than what the archive holds of it; besides all of `PROBLEMS`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.savez(f"{folder}/a.npz", x=np.arange(3))
        ...     read_arrays(f"{folder}/a.npz", ["x"])
        {'x': array([0, 1, 2])}
    """
    limit = max(LARGEST, DENSEST * os.path.getsize(path))
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: entry.file_size for entry in archive.infolist()}
        total = sum(entries.get(f"{name}.npy", 0) for name in names)
        if total > limit:
            raise ValueError(f"it unpacks to {total} bytes, of a file of {os.path.getsize(path)}.")
        for name in names:
            with archive.open(f"{name}.npy") as file:
                _check_header(name, file, entries[f"{name}.npy"])
    with np.load(path, allow_pickle=False) as file:
        return {name: np.asarray(file[name]) for name in names}


def _check_header(name: str, file: Any, size: int) -> None:
    """Raise `ValueError` where an array's header speaks of more bytes than there are."""
    version = np.lib.format.read_magic(file)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read is None:
        raise ValueError(f"{name} is an array of the unknown version {version}.")
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ValueError(
            f"{name} {shape} is an array of Python objects (pickled), which is not read; save it "
            f"as text, {name}.astype(str), or as numbers."
        )
    wanted = int(np.prod([int(length) for length in shape], dtype=object)) * dtype.itemsize
    if wanted > size:
        raise ValueError(f"{name} {shape} would be {wanted} bytes; the archive has {size} of it.")
