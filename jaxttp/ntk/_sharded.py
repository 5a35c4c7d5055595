"""A kernel on many devices: every device differentiates its samples and computes its rows.

The samples are sharded as the kernel's rows are. A symmetric kernel goes around a ring (see
`_ring`) where a device has room for the features of another. Else a turn of the loop takes the
features of a few samples of every device, gathers them on all, and multiplies each device's rows
with them, both triangles: all that travels are features, once for every block of rows that a device
holds. Nothing is ever put together on one device, and no sample is differentiated twice where its
features can stay.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxttp._core.checks import is_concrete
from jaxttp._core.compile import jit
from jaxttp.ntk import _ring
from jaxttp.ntk._compiled import Functions, wide
from jaxttp.ntk._each_device import EVERYWHERE, gathered_leaves, on_all, some_rows
from jaxttp.ntk._plan import KernelPlan
from jaxttp.ntk.layerwise import COLUMN_AXIS
from jaxttp.ntk.row_sharded import RowSharded, settled


def share_of(samples: int, mesh: Mesh) -> int:
    """The samples of one device, those that fill up included."""
    return math.ceil(samples / mesh.size)


def sharded_kernel(
    functions: Functions,
    plan: KernelPlan,
    mesh: Mesh,
    leaves: list[Any],
    x1: list[Any],
    x2: list[Any] | None,
    *,
    output: str,
    dtype: str,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, RowSharded]:
    """The kernel of `empirical_ntk`, rows sharded over all axes of the mesh.

    Args:
        functions: compiled pieces for one device.
        plan: of the rows of one device against all columns.
        mesh: of automatic axes.
        leaves: of the parameters; those with shards on this mesh keep them, see `stay`.
        x1: samples (N1, ...).
        x2: samples (N2, ...); None for x1.
        output: "full", "trace" or "diagonal".
        dtype: in which the kernel is summed.
        progress: called with (pairs of samples done, pairs in all).
    """
    leaves, specs = stay(leaves, mesh)
    pieces = _pieces(functions, mesh, output, specs)
    samples = (len(x1[0]), len(x1[0] if x2 is None else x2[0]))
    first = [shard_rows(leaf, mesh) for leaf in x1]
    second = first if x2 is None else [shard_rows(leaf, mesh) for leaf in x2]
    mine, theirs = (share_of(n, mesh) for n in samples)
    rows = min(plan.rows, mine)
    size = max(1, min(plan.columns // mesh.size, theirs))
    is_kept = x2 is None and rows == mine
    kernels: dict[str, Array] = {}
    pairs = -(-mine // rows) * -(-theirs // size)

    def tell(done: int, turns: int = pairs) -> None:
        if progress is not None:
            progress(samples[0] * samples[1] * done // turns, samples[0] * samples[1])

    held = (
        _features(pieces, mesh, leaves, first, 0, rows, min(plan.chunk, rows)) if is_kept else None
    )
    features = sum(leaf.nbytes for leaf in jax.tree.leaves(held)) // mesh.size
    if is_kept and _ring.fits(plan, features):
        kernels = _ring.around(
            functions, mesh, (leaves, first, held), specs, columns=plan.columns,
            output=output, dtype=dtype, empty=lambda block: _empty(block, mesh, mine, mine, output),
            progress=lambda done: tell(done, mesh.size // 2 + 1),
        )  # fmt: skip
        return _finished(kernels, samples, mesh, output, dtype)
    done = 0
    for i in _ring.starts(mine, rows):
        if held is None:
            held = _features(pieces, mesh, leaves, first, i, rows, min(plan.chunk, rows))
        for j in _ring.starts(theirs, size):
            if is_kept:
                others = pieces.some(held, j, size=size)
            else:
                others = pieces.features(leaves, second, j, size=size)
            others = settled(others, mesh)
            tiles = settled(pieces.tiles(leaves, first, held, others), mesh)
            with wide(dtype):
                for name, tile in tiles.items():
                    if name not in kernels:
                        kernels[name] = _empty(tile, mesh, mine, theirs, output)
                    kernels[name] = pieces.write(kernels[name], tile, i, j)
            if all(is_concrete(kernel) for kernel in kernels.values()):
                jax.block_until_ready(kernels)  # else blocks to come would be allocated already
            done += 1
            tell(done)
        held = None
    return _finished(kernels, samples, mesh, output, dtype)


def _finished(
    kernels: dict[str, Array], samples: tuple[int, int], mesh: Mesh, output: str, dtype: str
) -> dict[str, RowSharded]:
    with wide(dtype):
        whole = {name: _joined(kernel, output) for name, kernel in kernels.items()}
    return {name: RowSharded(kernel, samples, mesh) for name, kernel in whole.items()}


def place(value: Any, mesh: Mesh, spec: PartitionSpec) -> Array:
    """An array on the mesh; one that this process has in whole, or one that is global already."""
    sharding = NamedSharding(mesh, spec)
    if not is_concrete(value):
        return jax.lax.with_sharding_constraint(value, sharding)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return jit(lambda a: a, out_shardings=sharding)(value)
    host = np.asarray(value)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype))
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def stay(leaves: list[Any], mesh: Mesh) -> tuple[list[Array], tuple[PartitionSpec, ...]]:
    """Parameters on a mesh, and how they lie there: in shards where they do so already.

    Such as those of a network that trains so ("fully sharded data parallel"). They are gathered
    within the programs that differentiate (`gathered_leaves`), and dropped at their end. All others
    are put on every device.

    Args:
        leaves: of the parameters.
        mesh: of automatic axes.
    """
    placed, specs = [], []
    for leaf in leaves:
        spec = _own_spec(leaf, mesh)
        if spec == EVERYWHERE:
            placed.append(place(leaf, mesh, spec))
        else:  # the same shards where they are, by the same axes
            parts = [shard.data for shard in leaf.addressable_shards]
            sharding = NamedSharding(mesh, spec)
            placed.append(jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts))
        specs.append(spec)
    return placed, tuple(specs)


def _own_spec(leaf: Any, mesh: Mesh) -> PartitionSpec:
    """The spec of an array that is cut over this mesh; that of every device for all others."""
    sharding = leaf.sharding if isinstance(leaf, jax.Array) and is_concrete(leaf) else None
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return EVERYWHERE
    is_here = (
        sharding.mesh.axis_names == mesh.axis_names
        and isinstance(sharding.mesh, Mesh)
        and np.array_equal(sharding.mesh.devices, mesh.devices)
    )
    return sharding.spec if is_here else EVERYWHERE


def shard_rows(leaf: Any, mesh: Mesh) -> Array:
    """Samples (N, ...) with rows sharded; filled up by copies of the first one."""
    spec, missing = PartitionSpec(mesh.axis_names), -leaf.shape[0] % mesh.size
    if missing == 0:
        return place(leaf, mesh, spec)
    if is_concrete(leaf) and not (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
        host = np.asarray(leaf)
        return place(np.concatenate([host, np.repeat(host[:1], missing, axis=0)]), mesh, spec)
    filled = jnp.concatenate([leaf, jnp.repeat(leaf[:1], missing, axis=0)])
    return place(filled, mesh, spec)


class _Pieces(NamedTuple):
    """`Functions` on all devices at once; `start` arguments are places in a device's share.

    Attributes:
        features: (leaves, x, start, size) -> features of rows.
        some: (features, start, size) -> those of a few rows.
        put: (features, part, start) -> the features with a part of them written.
        tiles: (leaves, x, row features, column features) -> each device's rows against all columns.
        write: (kernel, tile, row, column) -> the kernel with the tile written.
    """

    features: Callable[..., Any]
    some: Callable[..., Any]
    put: Callable[..., Any]
    tiles: Callable[..., dict[str, Array]]
    write: Callable[..., Array]


@functools.lru_cache(maxsize=64)
def _pieces(
    functions: Functions, mesh: Mesh, output: str, specs: tuple[PartitionSpec, ...]
) -> _Pieces:
    axes, column = mesh.axis_names, COLUMN_AXIS[output]
    rows = PartitionSpec(axes)

    @functools.partial(jit, static_argnames="size")
    def features(leaves: list[Any], x: list[Array], start: Array, size: int) -> Any:
        def own(leaves: list[Any], x: list[Array], start: Array) -> Any:
            return functions.features(gathered_leaves(leaves, specs), x, start, size=size)

        return on_all(own, mesh, list(specs), rows, EVERYWHERE)(leaves, x, start)

    @functools.partial(jit, static_argnames="size")
    def some(held: Any, start: Array, size: int) -> Any:
        def own(held: Any, start: Array) -> Any:
            return some_rows(held, start, size)

        return on_all(own, mesh, rows, EVERYWHERE)(held, start)

    @functools.partial(jit, donate_argnums=0)
    def put(held: Any, part: Any, start: Array) -> Any:
        def own(held: Any, part: Any, start: Array) -> Any:
            return jax.tree.map(
                lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, start, 0), held, part
            )

        return on_all(own, mesh, rows, rows, EVERYWHERE)(held, part, start)

    @jit
    def tiles(leaves: list[Any], x: list[Array], held: Any, others: Any) -> dict[str, Array]:
        def own(leaves: list[Any], x: list[Array], held: Any, others: Any) -> Any:
            gathered = jax.tree.map(lambda a: jax.lax.all_gather(a, axes, tiled=True), others)
            return functions.against(gathered_leaves(leaves, specs), x, held, gathered)

        return on_all(own, mesh, list(specs), rows, rows, rows)(leaves, x, held, others)

    @functools.partial(jit, donate_argnums=0)
    def write(kernel: Array, tile: Array, i: Array, j: Array) -> Array:
        def own(kernel: Array, tile: Array, i: Array, j: Array) -> Array:
            shape = list(tile.shape)
            shape[column : column + 1] = [mesh.size, tile.shape[column] // mesh.size]
            start: list[Any] = [0] * kernel.ndim
            start[0], start[column + 1] = i, j
            return jax.lax.dynamic_update_slice(kernel, tile.reshape(shape), start)

        return on_all(own, mesh, rows, rows, EVERYWHERE, EVERYWHERE)(kernel, tile, i, j)

    return _Pieces(features, some, put, tiles, write)


def _features(
    pieces: _Pieces, mesh: Mesh, leaves: list[Any], x: list[Array], start: int, rows: int,
    chunk: int,
) -> Any:  # fmt: skip
    """Features of a block of every device's rows, differentiated a chunk at a time."""
    held: Any = None
    if chunk >= rows:
        return settled(pieces.features(leaves, x, start, size=rows), mesh)
    for offset in _ring.starts(rows, chunk):
        part = pieces.features(leaves, x, start + offset, size=chunk)
        if held is None:
            held = jax.tree.map(lambda a: _zeros(a, (rows, *a.shape[1:]), chunk), part)
        held = jax.block_until_ready(pieces.put(held, part, offset))
    return held


def _zeros(like: Array, shape: tuple[int, ...], chunk: int) -> Array:
    """Zeros sharded as an array whose devices have `chunk` rows each, with other rows."""
    shape = (like.shape[0] // chunk * shape[0], *shape[1:])
    return jit(lambda: jnp.zeros(shape, like.dtype), out_shardings=like.sharding)()


def _empty(tile: Array, mesh: Mesh, mine: int, theirs: int, output: str) -> Array:
    """Where tiles of that kind are written: columns by the device of their sample."""
    column, shape = COLUMN_AXIS[output], list(tile.shape)
    shape[0], shape[column : column + 1] = mine * mesh.size, [mesh.size, theirs]
    rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jit(lambda: jnp.zeros(shape, tile.dtype), out_shardings=rows)()


@functools.partial(jit, static_argnames="output", donate_argnums=0)
def _joined(kernel: Array, output: str) -> Array:
    column, shape = COLUMN_AXIS[output], list(kernel.shape)
    shape[column : column + 2] = [shape[column] * shape[column + 1]]
    return kernel.reshape(shape)
