"""Sketches of the Jacobian on many devices.

Every device projects the gradients of its own samples. The sketch is then laid out by columns, a
share of the projection's width on each device: a product with outputs, or with those of a batch,
has to add up N C or B C numbers in the end, whichever samples they are of and however many there
are, and no row of the sketch ever travels.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxttp._core.compile import jit
from jaxttp._core.samples import count, take
from jaxttp.ntk._each_device import EVERYWHERE, gathered_leaves
from jaxttp.ntk._sharded import shard_rows, share_of, stay
from jaxttp.ntk.row_sharded import settled


def check_width(dim: int, mesh: Mesh) -> None:
    """Refuse a width that the devices do not divide."""
    if dim % mesh.size:
        near = -(-dim // mesh.size) * mesh.size
        raise ValueError(
            f"dim={dim} must be a multiple of the {mesh.size} devices of mesh, a share of the "
            f"columns for each; {near} is."
        )


def sharded_sketch(
    sketch: Callable[..., Array],
    mesh: Mesh,
    leaves: list[Any],
    x: Any,
    draws: Any,
    size: int,
) -> Array:
    """The sketch (N, C, dim) of all samples, columns sharded over all axes of the mesh.

    Args:
        sketch: (leaves, samples, draws) -> sketch of those samples.
        mesh: of automatic axes; its size divides dim.
        leaves: of the parameters; those with shards on this mesh keep them, see `stay`.
        x: samples (N, ...).
        draws: of the projection.
        size: samples of a device differentiated at a time.
    """
    n, each = count(x), share_of(count(x), mesh)
    size = min(size, each)
    leaves, specs = stay(leaves, mesh)
    x = jax.tree.map(lambda leaf: shard_rows(leaf, mesh), x)
    parts = []
    for low in range(0, each, size):
        part = _part(sketch, mesh, min(size, each - low), specs)(leaves, x, draws, low)
        parts.append(settled(part, mesh))
    return settled(_by_columns(parts, n, mesh), mesh)


@functools.lru_cache(maxsize=64)
def _part(
    sketch: Callable[..., Array], mesh: Mesh, size: int, leaf_specs: tuple[PartitionSpec, ...]
) -> Callable[..., Array]:
    """A few samples of every device."""
    rows = PartitionSpec(mesh.axis_names)

    def own(leaves: list[Any], x: Any, draws: Any, low: Array) -> Array:
        some = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, low, size), x)
        return sketch(gathered_leaves(leaves, leaf_specs), some, draws)

    specs = (list(leaf_specs), rows, EVERYWHERE, EVERYWHERE)
    return jit(jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False))


@functools.partial(jit, static_argnums=(1, 2))
def _by_columns(parts: list[Array], n: int, mesh: Mesh) -> Array:
    """Rows of every device, in parts, as columns on every device."""
    rows = PartitionSpec(mesh.axis_names)
    columns = PartitionSpec(None, None, mesh.axis_names)

    def own(*parts: Array) -> Array:
        whole = jnp.concatenate(parts)
        return jax.lax.all_to_all(whole, mesh.axis_names, 2, 0, tiled=True)

    run = jax.shard_map(own, mesh=mesh, in_specs=rows, out_specs=columns, check_vma=False)
    whole = jax.lax.with_sharding_constraint(run(*parts), NamedSharding(mesh, columns))
    return take(whole, slice(n))
