"""Sketches larger than memory: rows in a Zarr array, block by block, resumed as kernels are.

A sketch S (N, C, k) of 20,000 samples of five classes at k = 4,096 takes 1.6 GB in float32, where
the kernel that it stands for would take 40. A step of mini-batches reads the batch's rows alone.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jaxttp._checks import check_integer, check_key, check_number
from jaxttp._samples import count, take
from jaxttp._types import ApplyFn, Params
from jaxttp.adapters.inputs import check_network, check_samples
from jaxttp.ntk._shared_store import fill, opened_by_one, own_devices
from jaxttp.ntk._tile_work import (
    COPIES,
    DEFAULT_BYTES,
    TILE_BYTES,
    identity_of,
    on_device,
    padded,
)
from jaxttp.ntk._tiles import TileStore, found_arrays, missing_tiles, open_arrays, read_ahead
from jaxttp.ntk.row_sharded import several, whole_on_host
from jaxttp.ntk.sketch import DRAWN, Projection, check_rows
from jaxttp.ntk.streamed import Streamed


@dataclasses.dataclass(frozen=True, eq=False)
class StoredSketch:
    """A sketch S (N, C, k) on disk, see `store_sketch` and `open_sketch`.

    Attributes:
        path: its folder.
        array: the Zarr array, as TensorStore opens it.
        tile: samples of a block.
        computed: blocks that this call computed, in this process.
    """

    path: Path
    array: Any
    tile: int
    computed: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """(N, C, k)."""
        n, classes, dim = self.array.shape
        return n, classes, dim

    @property
    def dtype(self) -> np.dtype:
        """Of the numbers."""
        return np.dtype(self.array.dtype.numpy_dtype)

    def __repr__(self) -> str:
        return f"StoredSketch({str(self.path)!r}, shape={self.shape}, dtype={self.dtype})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The whole sketch in memory."""
        del copy
        return np.asarray(self.array.read().result(), dtype)

    def rows(self, samples: Any) -> np.ndarray:
        """S[samples] (B, C, k) of a slice or of indices (B,)."""
        return np.asarray(self.array[samples].read().result())

    def blocks(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Every block with its place, one ahead being read."""
        n = self.shape[0]
        places = (slice(low, min(low + self.tile, n)) for low in range(0, n, self.tile))
        return read_ahead(self.array, places, lambda place: place)

    def kernel(self, columns: "StoredSketch | None" = None) -> "StoredFactors":
        """S S'^T, the kernel with the samples of another sketch by the same key, or with its own.

        Args:
            columns: S' (N', C, k); itself when None.

        Raises:
            ValueError: a sketch of another width or number of classes.
        """
        other = self if columns is None else columns
        if other.shape[1:] != self.shape[1:]:
            raise ValueError(
                f"columns is a sketch {other.shape}, and this one is {self.shape}; make both with "
                "the same key and dim."
            )
        return StoredFactors(self, other)


@dataclasses.dataclass(frozen=True, eq=False)
class StoredFactors:
    """Theta = A B^T (M, C, N, C) whose factors lie on a disk.

    It goes to `recursion`, `gradient_flow` and `sweep_kernel` in the place of a kernel. A product
    reads B once and A once, whatever the number of vectors; a step of mini-batches in `recursion`,
    where both are one sketch, the rows of the batch.

    Attributes:
        left: A (M, C, k).
        right: B (N, C, k).
    """

    left: StoredSketch
    right: StoredSketch

    @property
    def shape(self) -> tuple[int, ...]:
        """(M, C, N, C)."""
        return (*self.left.shape[:2], *self.right.shape[:2])

    @property
    def ndim(self) -> int:
        """4."""
        return 4

    @property
    def dtype(self) -> np.dtype:
        """Of the numbers."""
        return self.left.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The kernel itself in memory."""
        del copy
        left, right = (
            np.asarray(each).reshape(-1, each.shape[2]) for each in (self.left, self.right)
        )
        return np.asarray((left @ right.T).reshape(self.shape), dtype)

    def apply(self, vector: Any) -> np.ndarray:
        """Theta v (M, C) for v (N, C); further axes are those of many vectors.

        Raises:
            ValueError: another shape.
        """
        vector = np.asarray(vector, self.dtype)
        if vector.shape[:2] != self.right.shape[:2]:
            raise ValueError(
                f"vector must be {self.right.shape[:2]}, as the outputs; got {vector.shape}."
            )
        flat = vector.reshape(*vector.shape[:2], -1)
        image = np.zeros((self.right.shape[2], flat.shape[2]), self.dtype)
        for rows, numbers in self.right.blocks():
            block = numbers.reshape(-1, numbers.shape[2])
            image += block.T @ flat[rows].reshape(len(block), -1)
        moved = self.outputs(image.T)
        return np.moveaxis(moved, 0, -1).reshape(self.left.shape[0], *vector.shape[1:])

    def outputs(self, places: Any) -> np.ndarray:
        """A a (T, M, C) of many a (T, k), in one reading."""
        places = np.asarray(places, self.dtype)
        m, classes, dim = self.left.shape
        out = np.empty((len(places), m, classes), self.dtype)
        for rows, numbers in self.left.blocks():
            moved = places @ numbers.reshape(-1, dim).T
            out[:, rows] = moved.reshape(len(places), -1, classes)
        return out

    def streamed(self) -> Streamed:
        """The kernel as dynamics multiply by it, see `Streamed`."""
        return Streamed(self, self.dtype.name)

    def operator(self) -> Any:
        """Theta as a lineax operator on flat vectors (N C,), for `spectral_density` and others.

        Raises:
            ValueError: the kernel of two sets of samples, which is not square.
        """
        if self.left is not self.right:
            raise ValueError(f"operator: Theta(x, x) is square; this kernel is {self.shape}.")
        return self.streamed().operator()


def store_sketch(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    *,
    path: Any,
    key: Array,
    dim: int,
    kind: str = "countsketch",
    trainable: Any = None,
    tile: int | None = None,
    max_bytes: int | None = None,
    mesh: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> StoredSketch:
    """The sketch of `sketch_jacobian`, computed block by block into a Zarr array on disk.

        S[n, c] = J[n, c] R,     E[S S^T] = Theta

    Called again with the same arguments it goes on where it was ended, as `store_kernel` does, with
    the same digests, SIGTERM and refusals. Any program that reads Zarr (version 3) reads the
    sketch, at ``path/sketch``.

    Args:
        apply_fn: see `sketch_jacobian`.
        params: see there.
        x: see there.
        path: the folder of the store, which is made if need be.
        key: see `sketch_jacobian`; sketches of two sets of samples with one key give their kernel.
        dim: see there.
        kind: see there.
        trainable: see there.
        tile: samples of a block; None for as many as `max_bytes` holds, in blocks of 32 MiB at
            most. A store has one for good.
        max_bytes: bound on the working memory, the samples and parameters apart; 1 GiB when None.
        mesh: a `jax.sharding.Mesh` whose devices compute blocks, see `store_kernel`.
        progress: called with (blocks done, blocks in all) after every block.

    Returns:
        A `StoredSketch`; ``.kernel()`` goes to the functions of `jaxttp.dynamics`.

    Raises:
        SystemExit: SIGTERM came, and no handler was there that ended the process.
        ValueError: what `sketch_jacobian` refuses; a path that holds another sketch; a `max_bytes`
            in which the work on one sample does not fit.
        ImportError: without TensorStore (the extra ``store``).

    Example:
        >>> import tempfile
        >>> import jax, jax.numpy as jnp
        >>> from jaxttp.ntk import sketch_jacobian
        >>> f, w, x = lambda w, x: x @ w, jnp.ones((50, 2)), jnp.ones((3, 50))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     kept = store_sketch(f, w, x, path=folder, key=jax.random.key(0), dim=8)
        ...     inner = np.asarray(kept)
        >>> bool(np.allclose(inner, sketch_jacobian(f, w, x, key=jax.random.key(0), dim=8)))
        True
    """
    devices = several(mesh)
    own = {0: None} if devices is None else own_devices(devices)
    check_network(apply_fn, params)
    check_key(key, optional=False)
    params, x = whole_on_host((params, x))
    x = check_samples("x", x)
    check_rows(apply_fn, params, x)
    bound = DEFAULT_BYTES if max_bytes is None else max_bytes
    check_number("max_bytes", bound, above=0)
    outputs = jax.eval_shape(apply_fn, params, x)
    shape = count(x), outputs.shape[1], check_integer("dim", dim, at_least=1)
    first = Projection.of(apply_fn, params, take(x, slice(1)), key, dim, kind, trainable, 1)
    one = jax.eval_shape(first.rows, take(x, slice(1)))
    row = math.prod(one.shape) * one.dtype.itemsize
    tile, batch = _tile_of(shape[0], row, first.sample_bytes, tile, bound)
    said = first.mask, dim, kind, jax.random.key_data(key).tolist(), tile, batch, DRAWN
    name = identity_of(apply_fn, params, x, said)
    numbers, digests = opened_by_one(
        devices,
        lambda: open_arrays(Path(path), name, shape, np.dtype(one.dtype), tile, "sketch"),
    )
    store = TileStore(numbers, digests, name, tile)
    places = [
        (slice(low, min(low + tile, shape[0])), slice(0, shape[1]))
        for low in range(0, shape[0], tile)
    ]
    work = first._replace(batch_size=batch)
    tasks = {
        number: functools.partial(_store_rows, store, _on(device, work), x, tile, device)
        for number, device in own.items()
    }
    missing = functools.partial(missing_tiles, digests)
    computed = fill("store_sketch", path, devices, places, tasks, missing, progress)
    return StoredSketch(Path(path), numbers, tile, computed)


def _tile_of(n: int, row: int, work: int, tile: int | None, bound: float) -> tuple[int, int]:
    """Samples of a block, and of those differentiated at a time.

    Args:
        n: samples.
        row: bytes of one sample's rows of the sketch.
        work: bytes of the work on one sample.
        tile: samples of a block that are asked for, or None.
        bound: on the bytes of all.
    """
    size = max(1, min(TILE_BYTES, int(bound) // (2 * COPIES)) // row)
    size = min(n, size if tile is None else check_integer("tile", tile, at_least=1))
    left = bound - COPIES * size * row
    batch = min(size, int(left // (work + row)))
    if batch < 1:
        raise ValueError(
            f"max_bytes={bound} does not hold a block of {size} samples ({size * row} bytes, some "
            f"copies of it, and {work} bytes of work on one sample); give at least "
            f"{COPIES * row + work + row}."
        )
    return size, batch


def _on(device: Any, work: Projection) -> Projection:
    """A projection whose parameters lie on a device."""
    if device is None:
        return work
    put = functools.partial(jax.device_put, device=device)
    leaves, draws = jax.tree.map(put, (work.leaves, work.draws))
    return work._replace(leaves=leaves, draws=draws)


def _store_rows(
    store: TileStore, work: Projection, x: Any, tile: int, device: Any, rows: slice, classes: slice
) -> bool:
    """See to a block; whether it had to be computed."""
    if store.read(rows, classes) is not None:
        return False
    samples = jax.tree.map(lambda leaf: on_device(device, padded(leaf, rows, tile)), x)
    with jax.default_matmul_precision("highest"):
        found = np.asarray(work.all_rows(samples))
    store.write(rows, classes, found[: rows.stop - rows.start])
    return True


def open_sketch(path: Any) -> StoredSketch:
    """A sketch that `store_sketch` finished.

    Args:
        path: the folder of the store.

    Raises:
        ValueError: there is none, or it is not finished.
        ImportError: without TensorStore (the extra ``store``).

    Example:
        >>> import tempfile
        >>> import jax, jax.numpy as jnp
        >>> f, w, x = lambda w, x: x @ w, jnp.ones((50, 2)), jnp.ones((3, 50))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = store_sketch(f, w, x, path=folder, key=jax.random.key(0), dim=8)
        ...     open_sketch(folder).shape
        (3, 2, 8)
    """
    numbers, tile = found_arrays(Path(path), "sketch")
    return StoredSketch(Path(path), numbers, tile)


__all__ = ["StoredFactors", "StoredSketch", "open_sketch", "store_sketch"]
