"""Data sets on disk as ``.npz`` files with a checksum: read once, preprocessed once."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxttp._core.files import parse_json, replaced
from jaxttp.data._archives import PROBLEMS, read_arrays
from jaxttp.data.columns import Columns
from jaxttp.data.dataset import Dataset


def cached(
    folder: str | os.PathLike[str], settings: Mapping[str, Any], build: Callable[[], Dataset]
) -> Dataset:
    """The data set of these settings: from its file if it is there, else built and written.

    Args:
        folder: of the cache; made if missing.
        settings: everything that decides what `build` returns, as JSON values; "name" begins the
            file's name.
        build: makes the data set.

    Returns:
        The data set; a hit is equal to the bit to what was built.

    Raises:
        ValueError: the file is damaged, or does not match its checksum.

    Example:
        >>> import tempfile
        >>> from jaxttp.data import load_dataset
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     first = cached(folder, {"name": "wine"}, lambda: load_dataset("wine"))
        ...     again = cached(folder, {"name": "wine"}, lambda: 1 / 0)  # not called
        >>> bool((first.x == again.x).all())
        True
    """
    if not isinstance(settings, Mapping):
        raise TypeError(f"settings must be a mapping of JSON values; got {settings!r}.")
    if not callable(build):
        raise TypeError(f"build must be a function that makes the data set; got {build!r}.")
    text = json.dumps(dict(settings), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    stem = str(settings.get("name", "data")).replace("/", "-").replace(":", "-")
    path = Path(folder) / f"{stem}-{digest}.npz"
    if path.is_file():
        return _read_cached(path, text)
    dataset = build()
    meta = {
        "name": dataset.name,
        "description": dataset.description,
        "num_classes": dataset.num_classes,
        "class_names": dataset.class_names,
        "columns": None if dataset.columns is None else dataset.columns.to_json(),
        "settings": text,
    }
    arrays = {"x": dataset.x, "y": dataset.y, "meta": np.array(json.dumps(meta, sort_keys=True))}
    arrays["sha256"] = np.array(_checksum(arrays))
    with replaced(path) as place, place.open("wb") as file:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
    return dataset


def _read_cached(path: Path, settings: str) -> Dataset:
    try:
        arrays = read_arrays(path, ("x", "y", "meta", "sha256"))
        good = str(arrays.pop("sha256")) == _checksum(arrays)
    except PROBLEMS as problem:
        raise ValueError(f"cache file {path} is damaged ({problem}); {_REMEDY}") from problem
    if not good:
        raise ValueError(f"cache file {path} does not match its checksum; {_REMEDY}")
    try:
        meta = parse_json(str(arrays["meta"]))
        own = meta.pop("settings")
        meta["class_names"] = tuple(meta["class_names"])
        if (columns := meta.pop("columns", None)) is not None:  # older files have none
            meta["columns"] = Columns.from_json(columns)
        found = Dataset(x=arrays["x"], y=arrays["y"], **meta)
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"cache file {path} is damaged ({problem}); {_REMEDY}") from problem
    if own != settings:
        raise ValueError(f"cache file {path} is of other settings; {_REMEDY}")
    return found


_REMEDY = "delete it and it is made anew."


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    total = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        total.update(f"{name} {array.dtype} {array.shape}".encode())
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()
