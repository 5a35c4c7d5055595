"""Kernels and sketches with their rows of samples on the devices of a mesh.

Both are JAX arrays with a `NamedSharding` over their first axis. Every device differentiates its
own samples and holds their rows of the kernel. Columns are computed some at a time: the features of
a few samples of every device are gathered on all devices and multiplied with each device's own. XLA
distributes products with the result, which are ordinary `jnp.einsum`s.

JAX has no shards of unequal size. So samples are padded while they are differentiated, and a result
whose rows are not divisible by the number of devices is replicated.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxttp._core.checks import check_integer, is_concrete
from jaxttp._core.compile import jit
from jaxttp._core.types import count
from jaxttp.ntk._compiled import Functions, wide
from jaxttp.ntk._plan import KernelPlan
from jaxttp.ntk.layerwise import COLUMN_AXIS

EVERYWHERE = PartitionSpec()


def automatic(mesh: Any) -> Mesh:
    """The same devices with automatic axes, whose shardings the compiler chooses.

    The axes of `jax.make_mesh` are explicit: every product would have to state a sharding.

    Raises:
        TypeError: something that is no mesh of devices.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(
            "mesh must be a jax.sharding.Mesh, such as jax.make_mesh((jax.device_count(),), "
            f"('rows',)); got {type(mesh).__name__}."
        )
    return Mesh(mesh.devices, mesh.axis_names, (AxisType.Auto,) * len(mesh.axis_names))


def several(mesh: Any) -> Mesh | None:
    """A mesh of more than one device, with automatic axes; None for one device or no mesh.

    Raises:
        TypeError: something that is no mesh of devices.
    """
    if mesh is None:
        return None
    mesh = automatic(mesh)
    return mesh if mesh.size > 1 else None


def mesh_of(devices: int | str | None) -> Mesh | None:
    """A mesh of the first devices, with the axis "rows"; None for one device.

    Args:
        devices: how many; "all" of them; None for one, without a mesh.

    Raises:
        ValueError: no such number, or more devices than there are.

    Example:
        >>> mesh_of(None) is None, mesh_of(1) is None
        (True, True)
        >>> mesh_of(0)
        Traceback (most recent call last):
        ...
        ValueError: mesh must be an integer of at least 1; got 0. Or 'all', for every device.
    """
    if devices is None:
        return None
    available = jax.device_count()
    if devices == "all":
        devices = available
    number = check_integer("mesh", devices, at_least=1, hint="Or 'all', for every device.")
    if number > available:
        raise ValueError(
            f"mesh={number} asks for {number} devices, and JAX sees {available} "
            f"({jax.default_backend()}); give at most {available}, or 'all'. (On a CPU XLA_FLAGS="
            f"--xla_force_host_platform_device_count={number} makes virtual ones, for a try.)"
        )
    if number == 1:
        return None
    return jax.make_mesh((number,), ("rows",), devices=jax.devices()[:number])


def put_on_mesh(value: Any, mesh: Mesh, spec: PartitionSpec) -> Array:
    """An array on the mesh; one that this process has in whole, or one that is global already."""
    sharding = NamedSharding(mesh, spec)
    if not is_concrete(value):
        return jax.lax.with_sharding_constraint(value, sharding)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return jit(lambda a: a, out_shardings=sharding)(value)
    return jax.device_put(value, sharding)


def shard_rows(leaf: Any, mesh: Mesh) -> Array:
    """Samples (N, ...) with rows sharded, padded with copies of the first one."""
    missing = -leaf.shape[0] % mesh.size
    if missing:
        module = np if isinstance(leaf, np.ndarray) else jnp
        leaf = module.concatenate([leaf, module.repeat(leaf[:1], missing, axis=0)])
    return put_on_mesh(leaf, mesh, PartitionSpec(mesh.axis_names))


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
) -> Array:
    """The kernel of `empirical_ntk`, rows sharded over all axes of the mesh.

    Args:
        functions: compiled functions for one device.
        plan: of the rows of one device against all columns.
        mesh: of automatic axes.
        leaves: of the parameters, which are put on every device.
        x1: samples (N1, ...).
        x2: samples (N2, ...); None for x1.
        output: "full", "trace" or "diagonal".
        dtype: in which the kernel is summed.
        progress: called with (pairs of samples done, pairs in all).
    """
    leaves = [put_on_mesh(leaf, mesh, EVERYWHERE) for leaf in leaves]
    samples = (len(x1[0]), len(x1[0] if x2 is None else x2[0]))
    first = [shard_rows(leaf, mesh) for leaf in x1]
    second = first if x2 is None else [shard_rows(leaf, mesh) for leaf in x2]
    n1, n2 = (-(-n // mesh.size) for n in samples)  # samples of one device
    rows, size = min(plan.rows, n1), max(1, min(plan.columns // mesh.size, n2))
    options: dict[str, Any] = {"functions": functions, "mesh": mesh}
    is_kept = x2 is None and rows == n1  # then no sample is differentiated twice
    kernel: Any = None
    row_blocks, column_blocks = _block_starts(n1, rows), _block_starts(n2, size)
    for block, i in enumerate(row_blocks):
        features = _features(leaves, first, i, size=rows, chunk=plan.chunk, **options)
        settled(features, mesh)
        for j in column_blocks:
            tile = _tile(leaves, second, features, j, size=size, is_kept=is_kept, **options)
            settled(tile, mesh)
            with wide(dtype):
                kernel = _empty(tile, mesh, n1, n2, output) if kernel is None else kernel
                kernel = _write(kernel, tile, i, j, mesh=mesh, output=output)
            if is_concrete(kernel):
                jax.block_until_ready(kernel)  # else later tiles would be allocated already
        if progress is not None:
            pairs = samples[0] * samples[1]
            progress(pairs * (block + 1) // len(row_blocks), pairs)
    with wide(dtype):
        return _cut(_joined(kernel, output=output), samples, mesh, output)


def sharded_sketch(
    sketch: Callable[..., Array],
    mesh: Mesh,
    leaves: list[Any],
    x: Any,
    draws: Any,
    size: int,
) -> Array:
    """The sketch (N, C, dim) of all samples, rows sharded over all axes of the mesh.

    Args:
        sketch: (leaves, samples, draws) -> sketch of those samples.
        mesh: of automatic axes.
        leaves: of the parameters, which are put on every device.
        x: samples (N, ...).
        draws: of the projection.
        size: samples of a device differentiated at a time.
    """
    n = count(x)
    leaves = [put_on_mesh(leaf, mesh, EVERYWHERE) for leaf in leaves]
    x = jax.tree.map(lambda leaf: shard_rows(leaf, mesh), x)
    whole = _sketch_rows(leaves, x, draws, sketch=sketch, mesh=mesh, size=size)
    return settled(_cut(whole, (n, None), mesh, "trace"), mesh)


def _block_starts(total: int, size: int) -> list[int]:
    """Starts of blocks of one size that cover `total`; the last one may overlap the one before."""
    return [min(low, total - size) for low in range(0, total, size)]


def _on_all(function: Callable, mesh: Mesh, *specs: Any) -> Callable:
    """A function of each device's shards, on all devices at once; results are sharded by rows.

    Gradients of parameters are those of each device's own samples. With `check_vma`, JAX would sum
    them over all devices.
    """
    rows = PartitionSpec(mesh.axis_names)
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)


def _in_chunks(make: Callable[[Any, int], Any], size: int, chunk: int) -> Any:
    """`make(low, count)` of rows 0 to `size`, by chunks; the last one may overlap another."""
    if chunk >= size:
        return make(0, size)
    shapes = jax.eval_shape(lambda: make(0, chunk))
    empty = jax.tree.map(lambda a: jnp.zeros((size, *a.shape[1:]), a.dtype), shapes)

    def add(index: Array, rows: Any) -> Any:
        low = jnp.minimum(index * chunk, size - chunk)
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
        return jax.tree.map(lambda a, b: put(a, b, low), rows, make(low, chunk))

    return jax.lax.fori_loop(0, -(-size // chunk), add, empty)


@functools.partial(jit, static_argnames=("functions", "mesh", "size", "chunk"))
def _features(
    leaves: list[Array], x: list[Array], start: Array, *, functions: Functions, mesh: Mesh,
    size: int, chunk: int,
) -> Any:  # fmt: skip
    """Features of `size` samples of every device, from its `start` on."""

    def own(leaves: list[Array], x: list[Array], start: Array) -> Any:
        make = lambda low, some: functions.features(leaves, x, start + low, size=some)  # noqa: E731
        return _in_chunks(make, size, chunk)

    rows = PartitionSpec(mesh.axis_names)
    return _on_all(own, mesh, EVERYWHERE, rows, EVERYWHERE)(leaves, x, start)


@functools.partial(jit, static_argnames=("functions", "mesh", "size", "is_kept"))
def _tile(
    leaves: list[Array], x: list[Array], features: Any, start: Array, *, functions: Functions,
    mesh: Mesh, size: int, is_kept: bool,
) -> Array:  # fmt: skip
    """Every device's rows against `size` samples of each device, from its `start` on.

    Args:
        leaves: of the parameters.
        x: samples of the columns.
        features: of the rows.
        start: of the columns.
        functions: compiled functions for one device.
        mesh: of automatic axes.
        size: samples of each device.
        is_kept: whether the features of the columns are among those of the rows.
    """

    def own(leaves: list[Array], x: list[Array], row_features: Any, start: Array) -> Array:
        if is_kept:
            cut = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=size)
            columns = jax.tree.map(lambda a: cut(a, start), row_features)
        else:
            columns = functions.features(leaves, x, start, size=size)
        axes = mesh.axis_names
        columns = jax.tree.map(lambda a: jax.lax.all_gather(a, axes, tiled=True), columns)
        return functions.against(leaves, row_features, columns)

    rows = PartitionSpec(mesh.axis_names)
    return _on_all(own, mesh, EVERYWHERE, rows, rows, EVERYWHERE)(leaves, x, features, start)


def _empty(tile: Array, mesh: Mesh, n1: int, n2: int, output: str) -> Array:
    """Zeros into which tiles are written; columns have an axis for the device of their sample."""
    column, shape = COLUMN_AXIS[output], list(tile.shape)
    shape[0], shape[column : column + 1] = n1 * mesh.size, [mesh.size, n2]
    rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jit(lambda: jnp.zeros(shape, tile.dtype), out_shardings=rows)()


@functools.partial(jit, static_argnames=("mesh", "output"), donate_argnums=0)
def _write(kernel: Array, tile: Array, i: Array, j: Array, *, mesh: Mesh, output: str) -> Array:
    """A kernel as `_empty` has it, with a tile at row i and column j of every device."""
    column = COLUMN_AXIS[output]

    def own(kernel: Array, tile: Array, i: Array, j: Array) -> Array:
        shape = list(tile.shape)
        shape[column : column + 1] = [mesh.size, tile.shape[column] // mesh.size]
        start: list[Any] = [0] * kernel.ndim
        start[0], start[column + 1] = i, j
        return jax.lax.dynamic_update_slice(kernel, tile.reshape(shape), start)

    rows = PartitionSpec(mesh.axis_names)
    return _on_all(own, mesh, rows, rows, EVERYWHERE, EVERYWHERE)(kernel, tile, i, j)


@functools.partial(jit, static_argnames="output", donate_argnums=0)
def _joined(kernel: Array, *, output: str) -> Array:
    """A kernel as `_empty` has it, with one axis of columns."""
    column, shape = COLUMN_AXIS[output], list(kernel.shape)
    shape[column : column + 2] = [shape[column] * shape[column + 1]]
    return kernel.reshape(shape)


def _cut(whole: Array, samples: tuple[int, int | None], mesh: Mesh, output: str) -> Array:
    """Without the padding; replicated where the devices do not divide the rows."""
    kept = (slice(samples[0]), *[slice(None)] * (COLUMN_AXIS[output] - 1), slice(samples[1]))
    is_even = samples[0] % mesh.size == 0
    if is_even and samples[1] in (None, whole.shape[COLUMN_AXIS[output]]):
        return whole
    spec = PartitionSpec(mesh.axis_names) if is_even else EVERYWHERE
    return jit(lambda a: a[kept], out_shardings=NamedSharding(mesh, spec))(whole)


@functools.partial(jit, static_argnames=("sketch", "mesh", "size"))
def _sketch_rows(
    leaves: list[Array], x: Any, draws: Any, *, sketch: Callable[..., Array], mesh: Mesh, size: int
) -> Array:
    """The sketch of every device's samples."""

    def own(leaves: list[Array], x: Any, draws: Any) -> Array:
        def make(low: Any, some: int) -> Array:
            part = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, low, some), x)
            return sketch(leaves, part, draws)

        return _in_chunks(make, count(x), size)

    rows = PartitionSpec(mesh.axis_names)
    return _on_all(own, mesh, EVERYWHERE, rows, EVERYWHERE)(leaves, x, draws)


def gathered(kernel: Any) -> Array:
    """All of an array on one device, by way of the host, for what decomposes it.

    Args:
        kernel: an array, on one or several devices, or what NumPy converts to one; a traced array
            is returned as it is.

    Example:
        >>> gathered(jnp.ones((2, 2))).shape
        (2, 2)
    """
    if isinstance(kernel, jax.Array):
        if not is_concrete(kernel) or len(kernel.devices()) == 1:
            return kernel
        if is_by_process(kernel):
            from jax.experimental import multihost_utils  # here, since most have one process

            return jnp.asarray(multihost_utils.process_allgather(kernel, tiled=True))
    return jnp.asarray(np.asarray(kernel))


def is_by_process(value: Any) -> bool:
    """Whether an array is concrete and has shards that this process does not hold."""
    is_array = isinstance(value, jax.Array) and is_concrete(value)
    return is_array and not (value.is_fully_addressable or value.is_fully_replicated)


def of_processes(tree: Any) -> tuple[Any, Mesh | None]:
    """Samples that are distributed over processes, on a mesh of automatic axes, and that mesh.

    Args:
        tree: samples (N, ...), an array or a pytree; of one process they stay as they are.

    Returns:
        The same arrays, and the mesh; None for samples that this process holds in whole.

    Raises:
        ValueError: an array of several processes without a mesh.
    """
    meshes = []

    def on_automatic(leaf: Any) -> Any:
        if not is_by_process(leaf):
            return leaf
        mesh = getattr(leaf.sharding, "mesh", None)
        if not isinstance(leaf.sharding, NamedSharding) or not isinstance(mesh, Mesh):
            raise ValueError(
                f"x lies on several processes by {leaf.sharding}, without a mesh; make it by "
                "jax.make_array_from_process_local_data, with a NamedSharding."
            )
        meshes.append(automatic(mesh))
        sharding = NamedSharding(meshes[-1], leaf.sharding.spec)
        parts = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)

    return jax.tree.map(on_automatic, tree), meshes[0] if meshes else None


def settled(tree: Any, mesh: Mesh) -> Any:
    """The same arrays; on devices of a CPU once they are computed.

    Virtual devices share the threads of a CPU. With several functions in flight, devices that wait
    for each other can hold all threads, and XLA ends the process after 40 seconds (jaxlib 0.10.1).

    Args:
        tree: results of a compiled function with collectives; tracers pass.
        mesh: its devices.
    """
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    if is_cpu and all(map(is_concrete, jax.tree.leaves(tree))):
        jax.block_until_ready(tree)
    return tree
