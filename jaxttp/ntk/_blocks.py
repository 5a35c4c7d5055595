"""Kernels that are too large for one piece, tile by tile.

Where the features of all samples fit into memory they are computed once, and blocks of them are
multiplied with each other. Else those of a block of rows stay in memory, while those of one block
of columns after the other are computed, multiplied with them and dropped.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxttp._core.checks import is_concrete
from jaxttp._core.compile import jit
from jaxttp.ntk import layerwise
from jaxttp.ntk._compiled import Functions, wide
from jaxttp.ntk._late import product_of_outer
from jaxttp.ntk._plan import KernelPlan
from jaxttp.ntk._rows import PRODUCTS


def by_blocks(
    functions: Functions,
    plan: KernelPlan,
    leaves: list[Any],
    x1: list[Array],
    x2: list[Array] | None,
    n1: int,
    n2: int,
    output: str,
    dtype: str,
    *,
    joined: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Array]:
    """The kernel by blocks of one size; the last one of an axis overlaps the one before.

    `progress` is called with (pairs of samples done, pairs in all).
    """
    found = _Unfinished(n1, n2, output, dtype, _pairs(plan, n1, n2, x2 is None), progress)
    multiply = functools.partial(
        against, functions, leaves, x1, output=output, dtype=dtype, joined=joined
    )
    starts = [min(low, n1 - plan.rows) for low in range(0, n1, plan.rows)]
    if plan.kept:
        held = []
        for j in starts:  # what overlaps in the last block is written again with its own square
            held.append(features_of_rows(functions, leaves, x1, j, plan.rows, plan.chunk))
            for i, row_features in zip(starts, held, strict=False):
                tiles = multiply(row_features, held[-1])
                found.write(tiles, i, j, also_mirrored=i != j)
            found.make_symmetric(j, plan.rows)
        return found.kernels
    symmetric, columns = x2 is None, x1 if x2 is None else x2
    for i in starts:
        row_features = features_of_rows(functions, leaves, x1, i, plan.rows, plan.chunk)
        waits = bool(getattr(row_features, "late", None))
        if symmetric and plan.rows == n1 and not waits:
            return functions.square(leaves, x1, row_features)
        if symmetric and waits:
            tiles = multiply(row_features, row_features)
            found.write(tiles, i, i, also_mirrored=False)
            found.make_symmetric(i, plan.rows)
        elif symmetric:
            size = min(plan.columns, plan.rows)
            for column in range(0, plan.rows, size):
                j = min(column, plan.rows - size)
                tiles = functions.within(leaves, x1, row_features, j, size=size)
                found.write(tiles, i, i + j, also_mirrored=False)
            found.make_symmetric(i, plan.rows)
        first = i + plan.rows if symmetric else 0
        for column in range(first, n2, plan.columns):
            j = min(column, n2 - plan.columns)
            if waits:
                others = features_of_rows(
                    functions, leaves, columns, j, plan.columns, min(plan.chunk, plan.columns)
                )
                tiles = multiply(row_features, others)
            else:
                tiles = functions.stream(leaves, columns, row_features, j, size=plan.columns)
            # The last tile may reach back into the square block just written. That part is cut off:
            # computed in another order, it would spoil the exact symmetry of the block.
            if symmetric and j < first:
                tiles = {name: _columns(t, first - j, output) for name, t in tiles.items()}
                j = first
            found.write(tiles, i, j, also_mirrored=symmetric)
        del row_features
    if progress is not None:  # tiles that were cut have fewer pairs than were counted on
        progress(found.pairs, found.pairs)
    return found.kernels


def _pairs(plan: KernelPlan, n1: int, n2: int, symmetric: bool) -> int:
    """Pairs of samples to compute: those below the diagonal are copied from above it."""
    if symmetric:
        return sum(plan.rows * (n1 - low) for low in range(0, n1, plan.rows))
    return n1 * n2


@dataclasses.dataclass
class _Unfinished:
    """A kernel, one array or one a layer, into which tiles are written."""

    n1: int
    n2: int
    output: str
    dtype: str
    pairs: int
    progress: Callable[[int, int], None] | None
    done: int = 0
    kernels: dict[str, Array] = dataclasses.field(default_factory=dict)

    def write(self, tiles: dict[str, Array], i: int, j: int, *, also_mirrored: bool) -> None:
        """Put tiles with their first entry at samples i and j; transposed at j and i as well."""
        axis = layerwise.COLUMN_AXIS[self.output]
        with wide(self.dtype):
            for name, tile in tiles.items():
                if name not in self.kernels:
                    shape = list(tile.shape)
                    shape[0], shape[axis] = self.n1, self.n2
                    self.kernels[name] = jnp.zeros(shape, tile.dtype)
                self.kernels[name] = _write(
                    self.kernels[name], tile, i, j, output=self.output, also_mirrored=also_mirrored
                )
        if all(is_concrete(kernel) for kernel in self.kernels.values()):
            # Dispatch is asynchronous: without waiting, blocks to come would be allocated already.
            jax.block_until_ready(self.kernels)
        if self.progress is not None:
            tile = next(iter(tiles.values()))
            self.done = min(self.pairs, self.done + tile.shape[0] * tile.shape[axis])
            self.progress(self.done, self.pairs)

    def make_symmetric(self, start: int, size: int) -> None:
        """Make a square block on the diagonal exactly symmetric."""
        with wide(self.dtype):
            for name, kernel in self.kernels.items():
                self.kernels[name] = _mirror_block(kernel, start, size=size, output=self.output)


def against(
    functions: Functions,
    leaves: list[Any],
    x: list[Array],
    row_features: Any,
    column_features: Any,
    *,
    output: str,
    dtype: str,
    joined: bool,
) -> dict[str, Array]:
    """A tile; layers whose gradients wait are multiplied one after the other.

    Args:
        functions: compiled pieces.
        leaves: of the parameters.
        x: samples, for their shapes.
        row_features: of some samples.
        column_features: of others; with the same object only the upper half counts.
        output: "full", "trace" or "diagonal".
        dtype: in which the kernel is summed.
        joined: whether the parts of all layers become one kernel.
    """
    waiting = getattr(row_features, "late", {})
    is_own = row_features is column_features
    tiles: dict[str, Array] = {}
    if not waiting or row_features.inputs or row_features.gradients:
        rest = [
            one._replace(late={}) if waiting else one for one in (row_features, column_features)
        ]
        found = (
            functions.square(leaves, x, rest[0]) if is_own
            else functions.against(leaves, x, *rest)
        )  # fmt: skip
        tiles = dict(found)
    with wide(dtype):
        for leaf, pair in waiting.items():
            other = None if is_own else column_features.late[leaf]
            part = product_of_outer(pair, other, PRODUCTS[output], dtype)
            part = layerwise.finish(part, output)
            if output == "trace":
                part = part / jnp.asarray(pair.cotangents.shape[1], part.dtype)
            name = "sum" if joined else str(leaf)
            tiles[name] = tiles[name] + part if name in tiles else part
            if is_concrete(part):
                jax.block_until_ready(tiles[name])  # else pieces to come would be allocated already
    return tiles


def features_of_rows(
    functions: Functions, leaves: list[Any], x: list[Array], start: int, rows: int, chunk: int
) -> Any:
    """Features of a block of rows, differentiated a chunk at a time.

    The loop is Python's: inside XLA it was several times slower on a CPU (ResNet20).
    """
    if chunk >= rows:
        return functions.features(leaves, x, start, size=rows)
    row_features: Any = None
    for low in range(0, rows, chunk):
        offset = min(low, rows - chunk)
        part = functions.features(leaves, x, start + offset, size=chunk)
        if row_features is None:
            row_features = jax.tree.map(lambda a: jnp.zeros((rows, *a.shape[1:]), a.dtype), part)
        row_features = jax.block_until_ready(_put(row_features, part, offset))
    return row_features


@functools.partial(jit, donate_argnums=0)
def _put(row_features: Any, part: Any, offset: Array) -> Any:
    return jax.tree.map(
        lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, offset, 0), row_features, part
    )


def _columns(tile: Array, skip: int, output: str) -> Array:
    return jax.lax.slice_in_dim(
        tile, skip, tile.shape[layerwise.COLUMN_AXIS[output]], axis=layerwise.COLUMN_AXIS[output]
    )


@functools.partial(jit, static_argnames=("output", "also_mirrored"), donate_argnames=("kernel",))
def _write(
    kernel: Array, tile: Array, i: Array, j: Array, *, output: str, also_mirrored: bool
) -> Array:
    """Put a tile in place, and its transpose in the mirrored place."""

    def put(kernel: Array, tile: Array, row: Array, column: Array) -> Array:
        start: list[Any] = [0] * kernel.ndim
        start[0], start[layerwise.COLUMN_AXIS[output]] = row, column
        return jax.lax.dynamic_update_slice(kernel, tile, start)

    kernel = put(kernel, tile, i, j)
    return put(kernel, layerwise.transposed(tile, output), j, i) if also_mirrored else kernel


@functools.partial(jit, static_argnames=("size", "output"), donate_argnames=("kernel",))
def _mirror_block(kernel: Array, start: Array, *, size: int, output: str) -> Array:
    """Make a square block on the diagonal exactly symmetric, in place."""
    columns = layerwise.COLUMN_AXIS[output]
    starts: list[Any] = [0] * kernel.ndim
    starts[0] = starts[columns] = start
    sizes = list(kernel.shape)
    sizes[0] = sizes[columns] = size
    block = layerwise.mirror(jax.lax.dynamic_slice(kernel, starts, sizes), output)
    return jax.lax.dynamic_update_slice(kernel, block, starts)
