"""Tiles on disk: two Zarr arrays, of numbers and of the digests that say whose they are.

TensorStore writes beside a file and renames, so that each is there whole or not at all, and keeps a
checksum with it, so that one which was cut short or changed cannot be read.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxttp.ntk.layerwise import COLUMN_AXIS

T = TypeVar("T")
_DIGEST = 32
_READ_BYTES = 1 << 16
"""Of rows of a sketch that are read together, at most, where one row has fewer."""
_WHOLE = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]


@dataclasses.dataclass(frozen=True, eq=False)
class TileStore:
    """Tiles, and the digests that say whose they are."""

    kernel: Any
    digests: Any
    name: str
    tile: int

    def read(self, rows: slice, columns: slice) -> np.ndarray | None:
        """A tile, or None where there is none that is whole and ours."""
        try:
            kept = self.digests[self._place(rows, columns)].read().result()
            if not kept.any():
                return None
            numbers = self.kernel[index_of(rows, columns, len(self.kernel.shape))].read().result()
        except ValueError:  # cut short, or changed
            return None
        good = kept.tobytes() == self._digest(rows, columns, numbers)
        return numbers if good else None

    def write(self, rows: slice, columns: slice, numbers: np.ndarray) -> None:
        """A tile, then its digest, each whole or not at all."""
        self.kernel[index_of(rows, columns, len(self.kernel.shape))].write(numbers).result()
        digest = np.frombuffer(self._digest(rows, columns, numbers), np.uint8)
        self.digests[self._place(rows, columns)].write(digest).result()

    def _place(self, rows: slice, columns: slice) -> tuple[int, int]:
        return rows.start // self.tile, columns.start // self.tile

    def _digest(self, rows: slice, columns: slice, numbers: np.ndarray) -> bytes:
        found = hashlib.sha256(f"{self.name} {rows.start} {columns.start} ".encode())
        found.update(np.ascontiguousarray(numbers).data)
        return found.digest()


def tensorstore_module() -> Any:
    try:
        import tensorstore  # here, since few need it
    except ImportError:
        raise ImportError(
            "a kernel or a sketch in a store needs TensorStore: pip install 'jaxttp[store]'."
        ) from None
    return tensorstore


def spec_of(path: Path) -> dict[str, Any]:
    return {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path.absolute()}/"}}


def open_arrays(
    path: Path, name: str, shape: tuple[int, ...], dtype: np.dtype, tile: int, what: str = "kernel"
) -> tuple[Any, Any]:
    """The arrays of tiles and digests, made or found.

    Args:
        path: the folder.
        name: what the numbers depend on.
        shape: of a kernel, or of a sketch (N, C, k), whose tiles are rows.
        dtype: of the numbers.
        tile: samples on a side of a tile.
        what: "kernel" or "sketch".
    """
    store, axis = tensorstore_module(), len(shape) // 2
    chunk = list(shape)
    chunk[0] = tile
    if what == "kernel":
        chunk[axis] = tile
    counts = [-(-shape[0] // tile), -(-shape[axis] // chunk[axis]), _DIGEST]
    attributes = {what: name, "tile": tile}
    found = []
    for part, size, piece, kind, empty in (
        (what, list(shape), chunk, dtype.name, "NaN"),
        ("digests", counts, [1, 1, _DIGEST], "uint8", 0),
    ):
        metadata = {
            "shape": size,
            "data_type": kind,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": piece}},
            "codecs": _by_rows(piece, dtype) if part == "sketch" else _WHOLE,
            "fill_value": empty,
            "attributes": attributes,
        }
        # What one byte long has no byte order.
        if kind == "uint8":
            metadata["codecs"] = [{"name": "bytes"}, {"name": "crc32c"}]
        spec = {**spec_of(path / part), "metadata": metadata}
        try:
            found.append(store.open(spec, create=True, open=True).result())
        except ValueError as problem:
            reason = str(problem).partition(" [tensorstore_spec")[0]
            raise ValueError(
                f"path={str(path)!r} holds another {what} (other parameters, samples, options, "
                f"tiles or versions) or cannot be read: {reason}. Give another path, or delete it."
            ) from None
    return found[0], found[1]


def found_arrays(path: Path, what: str) -> tuple[Any, int]:
    """The numbers of a finished store, and the samples on a side of a tile.

    Raises:
        ValueError: there is none, or it is not finished.
    """
    try:
        numbers, digests = (
            tensorstore_module().open(spec_of(path / name)).result() for name in (what, "digests")
        )
        tile = int(numbers.spec().to_json()["metadata"]["attributes"]["tile"])
    except (ValueError, KeyError) as problem:
        raise ValueError(f"path={str(path)!r} holds no {what} of store_{what}: {problem}") from None
    missing = missing_tiles(digests)
    if missing:
        raise ValueError(
            f"path={str(path)!r} lacks {missing} tiles of its {what}; call store_{what} as before, "
            "and it goes on."
        )
    return numbers, tile


def _by_rows(chunk: list[int], dtype: np.dtype) -> list[dict[str, Any]]:
    """Codecs of tiles of which a few rows are read, with a checksum for every few of them."""
    row = math.prod(chunk[1:]) * dtype.itemsize
    most = max(1, _READ_BYTES // row)
    size = max(size for size in range(1, min(most, chunk[0]) + 1) if chunk[0] % size == 0)
    configuration = {
        "chunk_shape": [size, *chunk[1:]],
        "codecs": _WHOLE,
        "index_codecs": _WHOLE,
    }
    return [{"name": "sharding_indexed", "configuration": configuration}]


def missing_tiles(digests: Any) -> int:
    """How many tiles have no digest yet."""
    return int(np.sum(~np.any(digests.read().result(), axis=-1)))


def read_ahead(
    array: Any, places: Iterable[T], index: Callable[[T], Any]
) -> Iterator[tuple[T, Any]]:
    """What stands at some places, each with its place; the next one is read meanwhile.

    Args:
        array: as TensorStore opens it.
        places: of what is read.
        index: of the array, by the place.
    """
    ahead = None
    for place in places:
        reading = place, array[index(place)].read()
        if ahead is not None:
            yield ahead[0], ahead[1].result()
        ahead = reading
    if ahead is not None:
        yield ahead[0], ahead[1].result()


def places_of(n1: int, n2: int, tile: int) -> Iterator[tuple[slice, slice]]:
    """The tiles, row by row."""
    for i in range(0, n1, tile):
        for j in range(0, n2, tile):
            yield slice(i, min(i + tile, n1)), slice(j, min(j + tile, n2))


def index_of(rows: slice, columns: slice, ndim: int) -> tuple[slice, ...]:
    return (rows, *[slice(None)] * (ndim // 2 - 1), columns)


def turned(numbers: np.ndarray, output: str) -> np.ndarray:
    """The tile at the mirrored place."""
    axes = (2, 3, 0, 1) if output == "full" else (1, 0, 2)[: numbers.ndim]
    return np.ascontiguousarray(numbers.transpose(axes))


def mirrored_tile(numbers: np.ndarray, output: str) -> np.ndarray:
    """A tile on the diagonal, made exactly symmetric."""
    size = math.prod(numbers.shape[: COLUMN_AXIS[output]])
    upper = np.triu(np.ones((size, size), bool))
    upper = upper.reshape(numbers.shape) if output == "full" else upper
    if numbers.ndim == 3:
        upper = upper[..., None]
    return np.where(upper, numbers, turned(numbers, output))
