"""Kernels larger than memory: tiles in a Zarr array, computed one by one, and resumed.

A tile is the kernel of a block of samples with another one. It is computed by one program whatever
was computed before it, so that a run which was killed goes on and ends with the same bits. Beside
the tiles stand their digests (SHA-256 of what the kernel is of, of the tile's place and of its
numbers), each written when its tile is. A tile counts as stored where it can be read and its digest
is right: one that was cut short, changed on the disk or copied from another kernel is computed
again. Writing is atomic (TensorStore writes beside a file and renames).
"""

import dataclasses
import hashlib
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxlib.version import __version__ as jaxlib_version
from jaxtyping import Array

from jaxttp._checks import check_finite, check_integer, check_number
from jaxttp._types import ApplyFn, Params
from jaxttp.adapters.inputs import check_network
from jaxttp.ntk._blocks import features_of_rows
from jaxttp.ntk._compiled import compiled
from jaxttp.ntk._plan import KernelPlan
from jaxttp.ntk._tiles import (
    TileStore,
    index_of,
    mirrored_tile,
    open_arrays,
    places_of,
    spec_of,
    tensorstore_module,
    turned,
)
from jaxttp.ntk.gram import Job, cached
from jaxttp.ntk.layerwise import COLUMN_AXIS

_TILE_BYTES = 32 << 20  # of the largest tile that is chosen unasked
_COPIES = 6  # of a tile, on the host and on its way to the disk
_DEFAULT_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True, eq=False)
class StoredKernel:
    """A kernel on disk, see `store_kernel` and `open_kernel`.

    Attributes:
        path: its folder.
        array: the Zarr array, as TensorStore opens it; ``array[:5].read().result()`` are rows.
        tile: samples on a side of a tile.
        computed: tiles that this call computed; those of a symmetric kernel serve two places.
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
            vector: (N, C), or of a scalar kernel (N, ...).
        """
        vector, axis = np.asarray(vector, self.dtype), self.ndim // 2
        inner = self.shape[axis:]
        if self.ndim == 3 or vector.shape[: 1 if axis == 1 else None] != inner:
            raise ValueError(f"vector must be {inner}, as the outputs; got {vector.shape}.")
        flat = vector.reshape(self.shape[axis], -1)
        out = np.zeros((self.shape[0], flat.shape[1]), self.dtype)
        for (rows, columns), numbers in self._tiles():
            some = flat[columns]
            if self.ndim == 4:
                high = numbers.shape[0] * numbers.shape[1]
                moved = numbers.reshape(high, -1) @ some.reshape(-1)
                out[rows] += moved.reshape(numbers.shape[:2])
            else:
                out[rows] += numbers @ some
        return out.reshape(self.shape[0], *vector.shape[1:])

    def operator(self) -> lx.AbstractLinearOperator:
        """Theta as a lineax operator on flat vectors (N C,), for `spectral_density` and others.

        Its products read the whole kernel from the disk, in a call from the compiled program.
        """
        half = self.ndim // 2
        if self.ndim == 3 or self.shape[:half] != self.shape[half:]:
            raise ValueError(f"operator: Theta(x, x) is square; this kernel is {self.shape}.")
        flat = jax.ShapeDtypeStruct((math.prod(self.shape[:half]),), self.dtype)

        def product(vector: Any) -> np.ndarray:
            shape = self.shape[:2] if half == 2 else (self.shape[0],)
            return self.apply(np.asarray(vector).reshape(shape)).reshape(-1)

        def traced(vector: Array) -> Array:
            return jax.pure_callback(product, flat, vector, vmap_method="sequential")

        return lx.FunctionLinearOperator(traced, flat, lx.positive_semidefinite_tag)

    def _tiles(self) -> Iterator[tuple[tuple[slice, slice], np.ndarray]]:
        """Every tile with its place, one ahead being read."""
        axis, ahead = self.ndim // 2, None
        for place in places_of(self.shape[0], self.shape[axis], self.tile):
            reading = place, self.array[index_of(*place, self.ndim)].read()
            if ahead is not None:
                yield ahead[0], ahead[1].result()
            ahead = reading
        if ahead is not None:
            yield ahead[0], ahead[1].result()


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
    accumulation_dtype: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> StoredKernel:
    """The kernel of `empirical_ntk`, computed tile by tile into a Zarr array on disk.

        Theta[n, c, m, d] = sum_w df_c(x1_n)/dw df_d(x2_m)/dw

    Called again with the same arguments it goes on where it was ended, however that was; what is
    stored is read and looked at, not computed again. Any program that reads Zarr (version 3) reads
    the kernel, at ``path/kernel``.

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
        accumulation_dtype: see `empirical_ntk`.
        progress: called with (tiles done, tiles in all) after every tile.

    Returns:
        A `StoredKernel`.

    Raises:
        ValueError: what `empirical_ntk` refuses; a path that holds another kernel, or the same one
            by another version of JAX; a `max_bytes` in which no tile can be computed.
        ImportError: without TensorStore (the extra ``store``).

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     kernel = store_kernel(lambda w, x: x @ w, jnp.ones((3, 1)), jnp.eye(3), path=folder)
        ...     np.asarray(kernel)[:, 0, :, 0].tolist()
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    check_network(apply_fn, params)
    for name, value in (("params", params), ("x1", x1), ("x2", x2)):
        check_finite(name, value)
    job = Job.of(apply_fn, params, x1, x2, output, method, trainable, accumulation_dtype, False)
    bound = _DEFAULT_BYTES if max_bytes is None else max_bytes
    check_number("max_bytes", bound, above=0)
    tile, plan = _plan(job, method, tile, bound)
    worker = _Worker.of(job, plan, tile)
    name = _fingerprint(job, plan, tile)
    shape = job.work.n1, *worker.inner[0], job.work.n2, *worker.inner[1]
    kernel, digests = open_arrays(Path(path), name, shape, np.dtype(job.dtype), tile)
    store = TileStore(kernel, digests, name, tile)
    places = list(places_of(job.work.n1, job.work.n2, tile))
    symmetric = job.work.symmetric
    if symmetric:
        places = [(rows, columns) for rows, columns in places if rows.start <= columns.start]
    computed = 0
    for done, (rows, columns) in enumerate(places, start=1):
        mirrored = symmetric and rows != columns
        numbers, below = store.read(rows, columns), None
        if mirrored:
            below = store.read(columns, rows)
        if numbers is None and below is not None:
            numbers = turned(below, output)
            store.write(rows, columns, numbers)
        elif numbers is None:
            numbers = worker.compute(rows, columns, mirror=symmetric and not mirrored)
            store.write(rows, columns, numbers)
            computed += 1
        if mirrored and below is None:
            store.write(columns, rows, turned(numbers, output))
        del numbers, below
        if progress is not None:
            progress(done, len(places))
    return StoredKernel(Path(path), kernel, tile, computed)


def open_kernel(path: Any) -> StoredKernel:
    """A kernel that `store_kernel` finished.

    Args:
        path: the folder of the store.

    Raises:
        ValueError: there is none, or it is not finished.
        ImportError: without TensorStore (the extra ``store``).

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = store_kernel(lambda w, x: x @ w, jnp.ones((3, 1)), jnp.eye(3), path=folder)
        ...     open_kernel(folder).shape
        (3, 1, 3, 1)
    """
    try:
        kernel, digests = (
            tensorstore_module().open(spec_of(Path(path) / name)).result()
            for name in ("kernel", "digests")
        )
        tile = int(kernel.spec().to_json()["metadata"]["attributes"]["tile"])
    except (ValueError, KeyError) as problem:
        raise ValueError(f"path={str(path)!r} holds no kernel of store_kernel: {problem}") from None
    missing = int(np.sum(~np.any(digests.read().result(), axis=-1)))
    if missing:
        raise ValueError(
            f"path={str(path)!r} lacks {missing} tiles of its kernel; call store_kernel as before, "
            "and it goes on."
        )
    return StoredKernel(Path(path), kernel, tile)


def _plan(job: Job, method: str, tile: int | None, bound: float) -> tuple[int, KernelPlan]:
    """The side of a tile, and how one is computed with its rows' features in memory."""
    work = job.work
    largest = max(work.n1, work.n2)
    given = tile is not None
    if tile is None:
        tile = max(1, math.isqrt(_TILE_BYTES // (work.entries * work.itemsize)))
    tile = min(check_integer("tile", tile, at_least=1), largest)
    while True:
        size = tile**2 * work.entries * work.itemsize
        share = dataclasses.replace(work, n1=tile, n2=tile, symmetric=False, alone=False)
        try:
            plan = dataclasses.replace(job, work=share).plan(method, None, int(bound))
        except ValueError:
            plan = None
        fits = plan is not None and plan.rows == tile and plan.bytes + _COPIES * size <= bound
        if plan is not None and fits:
            return tile, plan
        if given or tile == 1:
            raise ValueError(
                f"max_bytes={bound} does not hold a tile of {tile} samples ({size} bytes, some "
                f"copies of it, and the features of its rows); give more"
                + (", or leave tile out." if given else ".")
            )
        tile = -(-tile // 2)


@dataclasses.dataclass(eq=False)
class _Worker:
    """Computes tiles, and keeps the features of the last block of rows."""

    job: Job
    plan: KernelPlan
    functions: Any
    leaves: list[Array]
    tile: int
    rows: tuple[slice, list[Array], Any] | None = None

    @classmethod
    def of(cls, job: Job, plan: KernelPlan, tile: int) -> "_Worker":
        functions = cached(compiled, job.apply_fn, job.variant(plan))
        return cls(job, plan, functions, [jnp.asarray(leaf) for leaf in job.leaves], tile)

    @property
    def inner(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Axes after those of the rows' samples and of the columns'."""
        c = self.job.work.classes
        return {"full": ((c,), (c,)), "diagonal": ((), (c,)), "trace": ((), ())}[
            self.job.work.output
        ]

    def compute(self, rows: slice, columns: slice, *, mirror: bool) -> np.ndarray:
        """The tile of some rows and columns."""
        job, plan, tile = self.job, self.plan, self.tile
        axis = COLUMN_AXIS[job.work.output]
        with jax.default_matmul_precision("highest"):
            if self.rows is None or self.rows[0] != rows:
                self.rows = None  # dropped before the next ones are there
                x = self._samples(job.rows, rows)
                held = features_of_rows(
                    self.functions, self.leaves, x, 0, tile, min(plan.chunk, tile)
                )
                self.rows = rows, x, held
            _, _, held = self.rows
            x = self._samples(job.rows if job.columns is None else job.columns, columns)
            out = np.zeros(
                (tile, *self.inner[0], tile, *self.inner[1]), np.dtype(job.dtype)
            )  # fmt: skip
            size = min(plan.columns, tile)
            for low in range(0, tile, size):
                j = min(low, tile - size)
                part = self.functions.stream(self.leaves, x, held, j, size=size)["sum"]
                out[(slice(None),) * axis + (slice(j, j + size),)] = np.asarray(part)
        high, wide = rows.stop - rows.start, columns.stop - columns.start
        cut = out[(slice(high),) + (slice(None),) * (axis - 1) + (slice(wide),)]
        return mirrored_tile(cut, job.work.output) if mirror else np.ascontiguousarray(cut)

    def _samples(self, leaves: list[Any], rows: slice) -> list[Array]:
        """Samples of a block; the last one repeats its last sample to be as long as the others."""
        missing = self.tile - (rows.stop - rows.start)
        some = [np.asarray(leaf[rows]) for leaf in leaves]
        return [jnp.asarray(np.concatenate([a, np.repeat(a[-1:], missing, 0)])) for a in some]


def _fingerprint(job: Job, plan: KernelPlan, tile: int) -> str:
    """What a kernel's numbers depend on: network, parameters, samples, plan and versions."""
    samples = jax.tree.unflatten(
        job.sample_treedef,
        [jax.ShapeDtypeStruct((1, *np.shape(leaf)[1:]), leaf.dtype) for leaf in job.rows],
    )
    params = jax.tree.unflatten(job.treedef, [jnp.asarray(leaf) for leaf in job.leaves])
    network = jax.make_jaxpr(job.apply_fn)(params, samples)
    text = re.sub(r"0x[0-9a-f]+", "", str(network))  # functions that are no part of the maths
    device = jax.devices()[0]
    said = (
        text, job.work.trainable, job.work.output, job.dtype, plan.method, dict(plan.forms),
        plan.columns, plan.chunk, tile, jax.__version__, jaxlib_version, device.device_kind,
    )  # fmt: skip
    found = hashlib.sha256(repr(said).encode())
    groups = (network.consts, job.leaves, job.rows, job.columns or [])
    for number, leaves in enumerate(groups):
        for leaf in leaves:
            host = np.asarray(leaf)
            found.update(f"{number} {host.dtype} {host.shape}".encode())
            found.update(np.ascontiguousarray(host).data)
    return found.hexdigest()


__all__ = ["StoredKernel", "open_kernel", "store_kernel"]
