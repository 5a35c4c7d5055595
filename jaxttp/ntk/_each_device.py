"""What every device of a mesh does with its share of rows, and parameters cut over the mesh."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

EVERYWHERE = PartitionSpec()


def on_all(function: Callable, mesh: Mesh, *specs: Any) -> Callable:
    """A function of what each device has, on all of them at once; results are shares of rows.

    Gradients of parameters are those of each device's own samples. With the check of what varies,
    JAX would add them up over all devices.

    Args:
        function: of the shares of one device.
        mesh: of automatic axes.
        specs: how each argument lies.
    """
    rows = PartitionSpec(mesh.axis_names)
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)


def some_rows(tree: Any, start: Any, size: int) -> Any:
    """Rows from `start` on, which may be traced, of every array."""
    return jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, size), tree)


def gathered_leaves(leaves: list[Array], specs: tuple[PartitionSpec, ...]) -> list[Array]:
    """Whole parameters of this device's shards of them, within a `shard_map`."""

    def whole(leaf: Array, spec: PartitionSpec) -> Array:
        for axis, names in enumerate(spec):
            if names is not None:
                leaf = jax.lax.all_gather(leaf, names, axis=axis, tiled=True)
        return leaf

    return [whole(*each) for each in zip(leaves, specs, strict=True)]
