"""Kernels larger than memory: tiles in a Zarr array, computed one by one, and resumed.

A tile is the kernel of a block of samples with another one. It is computed by one program whatever
was computed before it, so that a run which was killed goes on and ends with the same bits. Beside
the tiles stand their digests (SHA-256 of what the kernel is of, of the tile's place and of its
numbers), each written when its tile is. A tile counts as stored where it can be read and its digest
is right: one that was cut short, changed on the disk or copied from another kernel is computed
again. Writing is atomic (TensorStore writes beside a file and renames).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lineax as lx
import numpy as np

from jaxttp._checks import check_finite, check_number
from jaxttp._types import ApplyFn, Params
from jaxttp.adapters.inputs import check_network
from jaxttp.ntk._plan import KernelPlan
from jaxttp.ntk._shared_store import fill, opened_by_one, own_devices
from jaxttp.ntk._tile_work import COPIES, DEFAULT_BYTES, TileWorker, fingerprint_of, plan_tiles
from jaxttp.ntk._tiles import (
    TileStore,
    found_arrays,
    index_of,
    missing_tiles,
    open_arrays,
    places_of,
    read_ahead,
    turned,
)
from jaxttp.ntk.gram import Job
from jaxttp.ntk.row_sharded import several, whole_on_host
from jaxttp.ntk.streamed import Streamed


@dataclasses.dataclass(frozen=True, eq=False)
class StoredKernel:
    """A kernel on disk, see `store_kernel` and `open_kernel`.

    Attributes:
        path: its folder.
        array: the Zarr array, as TensorStore opens it; ``array[:5].read().result()`` are rows.
        tile: samples on a side of a tile.
        computed: tiles that this call computed, in this process; those of a symmetric kernel serve
            two places.
    """

    path: Path
    array: Any
    tile: int
    computed: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """(M, C, N, C) or (M, N)."""
        return tuple(self.array.shape)

    @property
    def ndim(self) -> int:
        """4, or 2; 3 of diagonals."""
        return len(self.array.shape)

    @property
    def dtype(self) -> np.dtype:
        """Of the numbers."""
        return np.dtype(self.array.dtype.numpy_dtype)

    def __repr__(self) -> str:
        return f"StoredKernel({str(self.path)!r}, shape={self.shape}, dtype={self.dtype})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The whole kernel in memory."""
        del copy
        return np.asarray(self.array.read().result(), dtype)

    def apply(self, vector: Any) -> np.ndarray:
        """Theta v (M, C) for v (N, C), a tile at a time; the next one is read meanwhile.

        Args:
            vector: (N, C), or of a scalar kernel (N,); further axes are those of many vectors, to
                which every tile is read once.
        """
        vector, axis = np.asarray(vector, self.dtype), self.ndim // 2
        inner = self.shape[axis:]
        if self.ndim == 3 or vector.shape[:axis] != inner:
            raise ValueError(f"vector must be {inner}, as the outputs; got {vector.shape}.")
        flat = vector.reshape(inner[0], -1, math.prod(vector.shape[axis:]))
        out = np.zeros((self.shape[0], *flat.shape[1:]), self.dtype)
        for (rows, columns), numbers in self._tiles():
            some = flat[columns].reshape(-1, flat.shape[2])
            moved = numbers.reshape(-1, len(some)) @ some
            out[rows] += moved.reshape(-1, *flat.shape[1:])
        return out.reshape(self.shape[0], *vector.shape[1:])

    def streamed(self) -> Streamed:
        """The kernel as dynamics multiply by it, see `Streamed`.

        Raises:
            ValueError: of diagonals, by which nothing is multiplied.
        """
        if self.ndim == 3:
            raise ValueError(f"kernel {self.shape} is of diagonals; dynamics take full or trace.")
        return Streamed(self, self.dtype.name)

    def operator(self) -> lx.AbstractLinearOperator:
        """Theta as a lineax operator on flat vectors (N C,), for `spectral_density` and others.

        Its products read the whole kernel from the disk, in a call from the compiled program.
        """
        half = self.ndim // 2
        if self.ndim == 3 or self.shape[:half] != self.shape[half:]:
            raise ValueError(f"operator: Theta(x, x) is square; this kernel is {self.shape}.")
        return self.streamed().operator()

    def _tiles(self) -> Iterator[tuple[tuple[slice, slice], np.ndarray]]:
        """Every tile with its place, one ahead being read."""
        places = places_of(self.shape[0], self.shape[self.ndim // 2], self.tile)
        return read_ahead(self.array, places, lambda place: index_of(*place, self.ndim))


def store_kernel(
    apply_fn: ApplyFn,
    params: Params,
    x1: Any,
    x2: Any = None,
    *,
    path: Any,
    output: str = "full",
    method: str = "auto",
    trainable: Any = None,
    tile: int | None = None,
    max_bytes: int | None = None,
    mesh: Any = None,
    accumulation_dtype: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> StoredKernel:
    """The kernel of `empirical_ntk`, computed tile by tile into a Zarr array on disk.

        Theta[n, c, m, d] = sum_w df_c(x1_n)/dw df_d(x2_m)/dw

    Called again with the same arguments it goes on where it was ended, however that was; what is
    stored is read and looked at, not computed again. SIGTERM, as schedulers send it, is heard when
    the tile in work is stored (in the main thread; a second one at once). Any program that reads
    Zarr (version 3) reads the kernel, at ``path/kernel``.

    Args:
        apply_fn: see `empirical_ntk`.
        params: see there.
        x1: see there.
        x2: see there; None for x1, where the tiles above the diagonal are computed, and mirrored.
        path: the folder of the store, which is made if need be.
        output: see `empirical_ntk`.
        method: see there.
        trainable: see there.
        tile: samples on a side of a tile; None for as many as `max_bytes` holds, in tiles of 32 MiB
            at most. A store has one for good.
        max_bytes: bound on the working memory, the samples and parameters apart; 1 GiB when None.
        mesh: a `jax.sharding.Mesh` whose devices compute tiles, each its own rows of them, within
            `max_bytes` each; None for one device. The numbers are the same, and a store that one
            mesh began may be ended by another. In several processes all of them make this call with
            the same arguments and a folder that all of them see; samples of which each has some are
            gathered on every host, since a tile may be of any two. Process 0 makes the store, and
            the call returns when every tile is there.
        accumulation_dtype: see `empirical_ntk`.
        progress: called with (tiles done, tiles in all) after every tile, of several processes in
            each with its own; `jaxttp.print_progress` makes one that tells how long it still takes.

    Returns:
        A `StoredKernel`.

    Raises:
        SystemExit: SIGTERM came, and no handler was there that ended the process.
        ValueError: what `empirical_ntk` refuses; a path that holds another kernel, or the same one
            by another version of JAX; a `max_bytes` in which no tile can be computed; a mesh
            without devices of some process.
        TypeError: a mesh that is none.
        ImportError: without TensorStore (the extra ``store``).

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     kernel = store_kernel(lambda w, x: x @ w, jnp.ones((3, 1)), jnp.eye(3), path=folder)
        ...     np.asarray(kernel)[:, 0, :, 0].tolist()
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    devices = several(mesh)
    own = {0: None} if devices is None else own_devices(devices)
    check_network(apply_fn, params)
    params, x1, x2 = whole_on_host((params, x1, x2))
    for name, value in (("params", params), ("x1", x1), ("x2", x2)):
        check_finite(name, value)
    job = Job.of(apply_fn, params, x1, x2, output, method, trainable, accumulation_dtype, False)
    bound = DEFAULT_BYTES if max_bytes is None else max_bytes
    check_number("max_bytes", bound, above=0)
    tile, plan = plan_tiles(job, method, tile, bound)
    workers = [TileWorker.of(job, plan, tile, device) for device in own.values()]
    name = fingerprint_of(job, plan, tile)
    shape = job.work.n1, *workers[0].inner[0], job.work.n2, *workers[0].inner[1]
    kernel, digests = opened_by_one(
        devices, lambda: open_arrays(Path(path), name, shape, np.dtype(job.dtype), tile)
    )
    store = TileStore(kernel, digests, name, tile)
    tasks = {
        number: functools.partial(_store_tile, store, worker)
        for number, worker in zip(own, workers, strict=True)
    }
    missing = functools.partial(missing_tiles, digests)
    computed = fill("store_kernel", path, devices, _to_do(job, tile), tasks, missing, progress)
    return StoredKernel(Path(path), kernel, tile, computed)


def store_plan(
    apply_fn: ApplyFn,
    params: Params,
    x1: Any,
    x2: Any = None,
    *,
    output: str = "full",
    method: str = "auto",
    trainable: Any = None,
    tile: int | None = None,
    max_bytes: int | None = None,
    mesh: Any = None,
    accumulation_dtype: Any = None,
) -> KernelPlan:
    """What `store_kernel` with the same arguments will do, and in how much memory and disk space.

    Args:
        apply_fn: see `store_kernel`.
        params: see there; `jax.ShapeDtypeStruct` leaves will do.
        x1: see there; `jax.ShapeDtypeStruct` will do.
        x2: see there.
        output: see there.
        method: see there.
        trainable: see there.
        tile: see there.
        max_bytes: see there.
        mesh: see there; the plan is that of one of its devices.
        accumulation_dtype: see there.

    Returns:
        The plan of its tiles: `tile`, `tiles`, `bytes` on the device and `host_bytes` beside them,
        `disk_bytes`; printing it explains it.

    Raises:
        ValueError: a `max_bytes` in which no tile can be computed.

    Example:
        >>> import jax.numpy as jnp
        >>> w, x = jnp.ones((3, 1), "float32"), jnp.ones((50, 3), "float32")
        >>> plan = store_plan(lambda w, x: x @ w, w, x, tile=20)
        >>> plan.tile, plan.tiles, plan.disk_bytes
        (20, 6, 10000)
    """
    job = Job.of(apply_fn, params, x1, x2, output, method, trainable, accumulation_dtype, False)
    bound = DEFAULT_BYTES if max_bytes is None else max_bytes
    check_number("max_bytes", bound, above=0)
    tile, plan = plan_tiles(job, method, tile, bound)
    work = job.work
    size = work.entries * work.itemsize
    tiles, devices = len(_to_do(job, tile)), several(mesh)
    own = 1 if devices is None else len(own_devices(devices))
    return dataclasses.replace(
        plan, tile=tile, tiles=tiles, max_bytes=max_bytes, disk_bytes=work.n1 * work.n2 * size,
        host_bytes=job.bytes + own * COPIES * tile**2 * size,
        devices=1 if devices is None else devices.size,
        flops={name: tiles * count for name, count in plan.flops.items()},
    )  # fmt: skip


def _to_do(job: Job, tile: int) -> list[tuple[slice, slice]]:
    """The places of tiles that are computed; of a symmetric kernel those above the diagonal."""
    places = list(places_of(job.work.n1, job.work.n2, tile))
    if not job.work.symmetric:
        return places
    return [(rows, columns) for rows, columns in places if rows.start <= columns.start]


def _store_tile(store: TileStore, worker: TileWorker, rows: slice, columns: slice) -> bool:
    """See to a tile, and to the one it mirrors; whether it had to be computed."""
    work = worker.job.work
    mirrored = work.symmetric and rows != columns
    numbers, below, computed = store.read(rows, columns), None, False
    if mirrored:
        below = store.read(columns, rows)
    if numbers is None and below is not None:
        numbers = turned(below, work.output)
        store.write(rows, columns, numbers)
    elif numbers is None:
        numbers = worker.compute(rows, columns, mirror=work.symmetric and not mirrored)
        store.write(rows, columns, numbers)
        computed = True
    if mirrored and below is None:
        store.write(columns, rows, turned(numbers, work.output))
    return computed


def open_kernel(path: Any) -> StoredKernel:
    """A kernel that `store_kernel` finished.

    Args:
        path: the folder of the store.

    Raises:
        ValueError: there is none, or it is not finished.
        ImportError: without TensorStore (the extra ``store``).

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = store_kernel(lambda w, x: x @ w, jnp.ones((3, 1)), jnp.eye(3), path=folder)
        ...     open_kernel(folder).shape
        (3, 1, 3, 1)
    """
    kernel, tile = found_arrays(Path(path), "kernel")
    return StoredKernel(Path(path), kernel, tile)


__all__ = ["StoredKernel", "open_kernel", "store_kernel", "store_plan"]
