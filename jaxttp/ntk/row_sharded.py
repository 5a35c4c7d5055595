"""A kernel whose rows lie on the devices of a mesh.

An array of JAX is cut into equal shares, so one of N rows lies on D devices only where D divides N.
The rows and columns of what does not divide are padded here, and products leave the padding out:
every device multiplies its rows, and what is gathered are the N C numbers of the result.
"""

import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxttp._core.checks import is_concrete
from jaxttp._core.compile import jit

SMALL = 256
"""Outputs of a kernel that may be put together on one device: half a megabyte in float64."""


class RowSharded(eqx.Module):
    """Theta (M, C, N, C) or (M, N), a share of the rows on every device of a mesh.

    Attributes:
        padded: rows and columns filled up to multiples of the devices; rows sharded.
        samples: (M, N).
        mesh: of automatic axes; rows are cut over all of them.

    Example:
        >>> import jax
        >>> mesh = automatic(jax.make_mesh((1,), ("rows",)))
        >>> kernel = RowSharded.of(jnp.ones((3, 2, 3, 2)), mesh)
        >>> kernel.shape, kernel.apply(jnp.ones((3, 2))).tolist()[0]
        ((3, 2, 3, 2), [6.0, 6.0])
    """

    padded: Array
    samples: tuple[int, int] = eqx.field(static=True)
    mesh: Mesh = eqx.field(static=True)

    @classmethod
    def of(cls, kernel: "Array | RowSharded", mesh: Mesh) -> "RowSharded":
        """A kernel from `empirical_ntk` on this mesh, whether or not its rows were padded."""
        if isinstance(kernel, RowSharded):
            return kernel
        return cls(kernel, (kernel.shape[0], kernel.shape[kernel.ndim // 2]), mesh)

    @property
    def shape(self) -> tuple[int, ...]:
        """(M, C, N, C) or (M, N), without the padding."""
        (m, n), whole, axis = self.samples, self.padded.shape, self.ndim // 2
        return (m, *whole[1:axis], n, *whole[axis + 1 :])

    @property
    def ndim(self) -> int:
        """4, or 2; 3 of the diagonals Theta[n, c, m, c], which are no kernel to multiply by."""
        return self.padded.ndim

    @property
    def dtype(self) -> Any:
        """Of the numbers."""
        return self.padded.dtype

    @property
    def sharding(self) -> Any:
        """Of the padded rows."""
        return self.padded.sharding

    def astype(self, dtype: Any) -> "RowSharded":
        """The same in other numbers."""
        return RowSharded(self.padded.astype(dtype), self.samples, self.mesh)

    def apply(self, vectors: Float[Array, "*t n c"]) -> Float[Array, "*t m c"]:
        """Theta v for one v (N, C) or many; every device has the result."""
        leading, (n, c) = vectors.shape[:-2], vectors.shape[-2:]
        moved = _product(self.padded, vectors.reshape(-1, n, c), self.samples, self.mesh)
        moved = settled(moved, self.mesh)
        return moved.reshape(*leading, -1, c)

    def some_columns(self, batch: Array) -> "RowSharded":
        """Theta[:, :, batch] (M, C, B, C), by the indices of samples (B,)."""
        axis = self.ndim // 2
        picked = jnp.take(self.padded, batch, axis=axis)
        return RowSharded(picked, (self.samples[0], batch.shape[0]), self.mesh)

    def block(self, rows: np.ndarray, columns: np.ndarray) -> "RowSharded":
        """Theta[rows, :, columns] on the same devices, by the numbers of samples."""
        devices, by_rows = self.mesh.size, PartitionSpec(self.mesh.axis_names)
        rows_filled, columns_filled = (
            np.append(each, np.zeros(-len(each) % devices, int)) for each in (rows, columns)
        )
        sharding = NamedSharding(self.mesh, by_rows)
        picked = _picked(self.padded, rows_filled, columns_filled, sharding)
        return RowSharded(picked, (len(rows), len(columns)), self.mesh)

    def on_one_device(self) -> Array:
        """All of a kernel of at most `SMALL` rows and columns.

        Raises:
            ValueError: a larger one.
        """
        m, c = self.shape[0], self.shape[1] if self.ndim == 4 else 1
        if max(m, self.samples[1]) * c > SMALL:
            raise ValueError(
                f"kernel {self.shape} lies on {self.mesh.size} devices, and what needs all of it "
                "on one (a decomposition, a dense matrix) is not done with it: ask "
                "extreme_eigenvalues, spectral_density or condition_number, follow it by "
                "dynamics='recursion' or 'ode'; or np.asarray(kernel) where a host can hold it."
            )
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return self._cut(jax.lax.with_sharding_constraint(self.padded, everywhere))

    def simplest(self) -> "Array | RowSharded":
        """The array itself, sharded, where the devices divide its rows."""
        if self.padded.shape[0] != self.samples[0]:
            return self
        return self._cut(self.padded)

    def _cut(self, padded: Any) -> Any:
        if (padded.shape[0], padded.shape[padded.ndim // 2]) == self.samples:
            return padded
        (m, n), axis = self.samples, padded.ndim // 2
        return padded[(slice(m), *[slice(None)] * (axis - 1), slice(n))]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The kernel in this host's memory, gathered from all processes."""
        del copy
        return np.asarray(self._cut(on_host(self.padded)), dtype)


@functools.partial(jit, static_argnums=3)
def _picked(padded: Array, rows: Array, columns: Array, sharding: NamedSharding) -> Array:
    found = jnp.take(jnp.take(padded, rows, axis=0), columns, axis=padded.ndim // 2)
    return jax.lax.with_sharding_constraint(found, sharding)


@functools.partial(jit, static_argnums=(2, 3))
def _product(padded: Array, vectors: Array, samples: tuple[int, int], mesh: Mesh) -> Array:
    """(T, M, C) of vectors (T, N, C)."""
    axes, missing = mesh.axis_names, padded.shape[padded.ndim // 2] - samples[1]
    vectors = jnp.pad(vectors, ((0, 0), (0, missing), (0, 0)))

    def of_rows(rows: Array, vectors: Array) -> Array:
        count, n, c = vectors.shape
        if rows.ndim == 2:
            moved = jnp.einsum("mn,tnc->tmc", rows, vectors, precision="highest")
        else:
            flat = rows.reshape(rows.shape[0] * c, n * c)
            moved = jnp.einsum("pq,tq->tp", flat, vectors.reshape(count, -1), precision="highest")
        moved = moved.reshape(count, -1, c)
        return jax.lax.all_gather(moved, axes, axis=1, tiled=True)

    specs = (PartitionSpec(axes), PartitionSpec())
    # What an all_gather gives is the same everywhere, which the check of out_specs does not see.
    run = jax.shard_map(
        of_rows, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False
    )
    return run(padded, vectors)[:, : samples[0]]


def recognised(kernel: Any) -> Any:
    """The kernel, as `RowSharded` where it is an array whose rows lie on all devices of a mesh."""
    if not isinstance(kernel, jax.Array) or not is_concrete(kernel):
        return kernel
    sharding = kernel.sharding
    if kernel.ndim not in (2, 4) or not isinstance(sharding, NamedSharding):
        return kernel
    mesh = sharding.mesh
    if not isinstance(mesh, Mesh) or mesh.size == 1 or len(sharding.device_set) == 1:
        return kernel
    rows, *others = (*sharding.spec, None)
    if rows is None or any(axis is not None for axis in others):
        return kernel
    axes = rows if isinstance(rows, tuple) else (rows,)
    is_over_all = math.prod(mesh.shape[axis] for axis in axes) == mesh.size
    return RowSharded.of(kernel, automatic(mesh)) if is_over_all else kernel


def gathered(kernel: Any) -> Array:
    """All of a kernel on one device, by way of the host, for what decomposes it.

    Args:
        kernel: as `empirical_ntk` gives it, with a mesh or without, or what is like an array; a
            traced one lies where the program that is being made has it.

    Example:
        >>> gathered(jnp.ones((2, 2))).shape
        (2, 2)
    """
    if isinstance(kernel, jax.Array):
        here = not is_concrete(kernel) or len(kernel.devices()) == 1
        return kernel if here else jnp.asarray(on_host(kernel))
    return jnp.asarray(np.asarray(kernel))


def on_host(whole: Array) -> np.ndarray:
    """An array in this host's memory, gathered from all processes; a call that all of them make."""
    if is_by_process(whole):
        from jax.experimental import multihost_utils  # here, since most have one process

        whole = multihost_utils.process_allgather(whole, tiled=True)
    return np.asarray(whole)


def is_by_process(value: Any) -> bool:
    """Whether an array is known to have parts that this process does not have."""
    is_array = isinstance(value, jax.Array) and is_concrete(value)
    return is_array and not (value.is_fully_addressable or value.is_fully_replicated)


def of_processes(tree: Any) -> tuple[Any, Mesh | None]:
    """Samples of which every process has some, on a mesh of automatic axes, and that mesh.

    Args:
        tree: samples (N, ...), an array or a pytree; of one process they stay as they are.

    Returns:
        The same numbers where they lie, and the mesh; None for samples that this process has whole.

    Raises:
        ValueError: an array of several processes without a mesh.
    """
    meshes = []

    def one(leaf: Any) -> Any:
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

    placed = jax.tree.map(one, tree)
    return placed, meshes[0] if meshes else None


def settled(tree: Any, mesh: Mesh) -> Any:
    """The same arrays; on devices of a CPU not before they are there.

    Virtual devices share the threads of a CPU. With some programs in flight, devices that wait for
    each other can hold all threads, and XLA ends the process after 40 seconds (jaxlib 0.10.1).

    Args:
        tree: what a program that sends from device to device gave; tracers pass.
        mesh: it ran on.
    """
    is_here = mesh.devices.flat[0].platform == "cpu"
    if is_here and all(is_concrete(leaf) for leaf in jax.tree.leaves(tree)):
        jax.block_until_ready(tree)
    return tree


def on_many_devices(tree: Any) -> bool:
    """Whether an array of the tree is known to have different parts on different devices."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return any(is_concrete(leaf) and not leaf.sharding.is_fully_replicated for leaf in leaves)


def automatic(mesh: Any) -> Mesh:
    """The same devices with axes of which the compiler chooses the shardings.

    Those that `jax.make_mesh` gives are explicit, under which most of the library's programs would
    have to say a sharding for every product.

    Raises:
        TypeError: something that is no mesh of devices.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(
            "mesh must be a jax.sharding.Mesh, such as jax.make_mesh((jax.device_count(),), "
            f"('rows',)); got {type(mesh).__name__}."
        )
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def several(mesh: Any) -> Mesh | None:
    """A mesh of more than one device, with automatic axes; None for what is one device.

    Raises:
        TypeError: something that is no mesh of devices.
    """
    if mesh is None:
        return None
    found = automatic(mesh)
    return found if found.size > 1 else None


__all__ = ["RowSharded"]
