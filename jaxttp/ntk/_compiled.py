"""The execution of a plan: compiled functions, and kernels of more than one tile.

Where the features of all samples fit into memory they are computed once, and blocks of them are
multiplied with each other. Otherwise the features of one block of rows stay in memory. Those of
each block of columns are computed, multiplied with them and dropped.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxttp._core.checks import is_concrete
from jaxttp._core.compile import jit
from jaxttp._core.products import pull_and_push
from jaxttp.ntk import layerwise
from jaxttp.ntk._plan import KernelPlan
from jaxttp.ntk._products import PRODUCTS, product_of_outer
from jaxttp.ntk._program import NetworkProgram
from jaxttp.ntk._sites import find_sites
from jaxttp.ntk.layerwise import Features, Layers


def structure(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), dtype_of(leaf)), tree)


def dtype_of(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


class Variant(NamedTuple):
    """The static arguments of compiled functions besides shapes; hashable.

    Attributes:
        trainable: which leaves of the parameters the kernel is over.
        forms: (leaf, form) of the short formula that a leaf's part of the kernel takes.
        method: of `empirical_ntk`, chosen.
        output: "full", "trace" or "diagonal".
        dtype: in which the kernel is summed.
    """

    trainable: tuple[bool, ...]
    forms: tuple[tuple[int, str], ...]
    method: str
    output: str
    dtype: str


class Functions(NamedTuple):
    """Compiled functions; `start` arguments are traced integers.

    `leaves` are those of the parameters, then the arrays that the network closes over.

    Attributes:
        whole: (leaves, x1, x2 or None) -> kernel.
        features: (leaves, x, start, size) -> features of rows.
        square: (leaves, row_features) -> features of rows against themselves.
        against: (leaves, row_features, column_features) -> the same against others' features.
    """

    whole: Callable[..., Array]
    features: Callable[..., Any]
    square: Callable[..., Array]
    against: Callable[..., Array]


@functools.lru_cache(maxsize=64)
def compiled(network: NetworkProgram, variant: Variant) -> Functions:
    """The functions for a network, kept by its equations, not by the function that has them."""
    engine: Any = _VectorProducts if variant.method == "vector_product" else _Layerwise

    def whole(leaves: list[Array], x1: list[Array], x2: list[Array] | None) -> Array:
        tool = engine(network, variant, leaves)
        first = tool.features(x1)
        return tool.square(first) if x2 is None else tool.against(first, tool.features(x2))

    def features(leaves: list[Array], x: list[Array], start: Array, size: int) -> Any:
        some = [jax.lax.dynamic_slice_in_dim(leaf, start, size) for leaf in x]
        return engine(network, variant, leaves).features(some)

    def square(leaves: list[Array], row_features: Any) -> Array:
        return engine(network, variant, leaves).square(row_features)

    def against(leaves: list[Array], row_features: Any, column_features: Any) -> Array:
        return engine(network, variant, leaves).against(row_features, column_features)

    return Functions(jit(whole), jit(features, static_argnames="size"), jit(square), jit(against))


def wide(dtype: str) -> contextlib.AbstractContextManager[Any]:
    """Allow float64 in a block, if that is the accumulation's dtype."""
    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


class _Layerwise:
    """Layerwise and Jacobian methods: they differ in the forms alone."""

    def __init__(self, network: NetworkProgram, variant: Variant, leaves: Any) -> None:
        self.variant, self.leaves = variant, leaves
        forms = dict(variant.forms)
        sites = find_sites(network, variant.trainable)
        self.layers = Layers(
            network,
            activation=tuple(site for site in sites if forms[site.leaf] == "activation"),
            gradient=tuple(site for site in sites if forms[site.leaf] == "gradient"),
            direct=tuple(leaf for leaf, form in forms.items() if form == "direct"),
            late=tuple(site for site in sites if forms[site.leaf] == "late gradient"),
        )

    def features(self, x: list[Array]) -> Features:
        return self.layers.features(self.leaves, x)

    def against(self, row_features: Features, column_features: Features | None) -> Array:
        """The kernel in the public layout; for None its upper half, of the rows themselves."""
        output = self.variant.output
        dtype = jnp.dtype(self.variant.dtype)
        with wide(self.variant.dtype):
            kernel = self.layers.kernel(row_features, column_features, output, dtype)
            if output == "trace":
                kernel = kernel / jnp.asarray(self.layers.program.outputs, dtype)
            return layerwise.finish(kernel, output)

    def square(self, row_features: Features) -> Array:
        kernel = self.against(row_features, None)
        with wide(self.variant.dtype):
            return layerwise.mirror(kernel, self.variant.output)


class _VectorProducts:
    """A column of the kernel is J applied to a row of J; no Jacobian is ever formed."""

    def __init__(self, network: NetworkProgram, variant: Variant, leaves: Any) -> None:
        self.network, self.variant, self.leaves = network, variant, leaves

    def _outputs(self, trained: dict[int, Array], x: Sequence[Array]) -> Array:
        leaves: list[Any] = [trained.get(index, leaf) for index, leaf in enumerate(self.leaves)]
        return self.network.batch(leaves, x)

    def features(self, x: list[Array]) -> list[Array]:
        return x

    def against(self, row_features: list[Array], x: list[Array]) -> Array:
        mask = self.variant.trainable
        weights = {i: self.leaves[i] for i, is_trained in enumerate(mask) if is_trained}
        outputs, _, push = pull_and_push(lambda w: self._outputs(w, row_features), weights)
        basis = jnp.eye(outputs.shape[-1], dtype=outputs.dtype)

        def columns(*row: Array) -> Array:
            sample = [leaf[None] for leaf in row]
            _, pull = jax.vjp(lambda w: self._outputs(w, sample)[0], weights)
            return jax.vmap(lambda e: push(pull(e)[0]))(basis)  # (C, n1, C)

        kernel = jax.vmap(columns)(*x).transpose(2, 3, 0, 1)  # (n1, C, n2, C)
        kernel = kernel.astype(self.variant.dtype)
        if self.variant.output == "trace":
            kernel = jnp.einsum("ncmc->nm", kernel) / jnp.asarray(len(basis), kernel.dtype)
        elif self.variant.output == "diagonal":
            kernel = jnp.einsum("ncmc->nmc", kernel)
        return kernel

    def square(self, row_features: list[Array]) -> Array:
        return layerwise.mirror(self.against(row_features, row_features), self.variant.output)


def by_blocks(
    functions: Functions,
    plan: KernelPlan,
    leaves: list[Any],
    x1: list[Array],
    x2: list[Array] | None,
    *,
    output: str,
    dtype: str,
    progress: Callable[[int, int], None] | None = None,
) -> Array:
    """The kernel by blocks of one size; the last one of an axis overlaps the one before.

    `progress` is called with (pairs of samples done, pairs in all).
    """
    is_own, columns = x2 is None, x1 if x2 is None else x2
    n1, n2 = len(x1[0]), len(columns[0])
    row_blocks = [min(low, n1 - plan.rows) for low in range(0, n1, plan.rows)]

    def column_blocks(i: int) -> list[int]:
        """Starts of the blocks of columns for a block of rows, without its own square."""
        first = i + plan.rows if is_own else 0
        return [min(low, n2 - plan.columns) for low in range(first, n2, plan.columns)]

    tiles = sum(len(column_blocks(i)) + is_own for i in row_blocks)
    unfinished = _Unfinished(n1, n2, output, dtype, tiles, progress)
    features = functools.partial(features_of_rows, functions, leaves)
    multiply = functools.partial(against, functions, leaves, output=output, dtype=dtype)
    kept = {i: features(x1, i, plan.rows, plan.chunk) for i in row_blocks if plan.kept}
    for i in row_blocks:
        row_features = kept[i] if kept else features(x1, i, plan.rows, plan.chunk)
        for j in column_blocks(i):
            chunk = min(plan.chunk, plan.columns)
            column_features = kept[j] if kept else features(columns, j, plan.columns, chunk)
            unfinished.write(multiply(row_features, column_features), i, j, also_mirrored=is_own)
        # The square on the diagonal comes last: the tile before it may overlap it and would spoil
        # its exact symmetry.
        if is_own:
            # Half of a product copies its features. Kept and deferred ones leave room for copies.
            is_half = plan.kept or bool(getattr(row_features, "late", None))
            unfinished.write_square(multiply(row_features, row_features, is_half=is_half), i)
        del row_features  # before those of the next block are computed
    return unfinished.kernel


@dataclasses.dataclass
class _Unfinished:
    """A kernel into which tiles are written."""

    n1: int
    n2: int
    output: str
    dtype: str
    tiles: int
    progress: Callable[[int, int], None] | None
    done: int = 0
    kernel: Any = None

    def write(self, tile: Array, i: int, j: int, *, also_mirrored: bool) -> None:
        """Put a tile with its first entry at samples i and j; transposed at j and i as well."""
        axis = layerwise.COLUMN_AXIS[self.output]
        with wide(self.dtype):
            if self.kernel is None:
                shape = list(tile.shape)
                shape[0], shape[axis] = self.n1, self.n2
                self.kernel = jnp.zeros(shape, tile.dtype)
            self.kernel = _write(
                self.kernel, tile, i, j, output=self.output, also_mirrored=also_mirrored
            )
        if is_concrete(self.kernel):
            # Dispatch is asynchronous: without waiting, later blocks would be allocated already.
            jax.block_until_ready(self.kernel)
        if self.progress is not None:
            pairs = self.n1 * self.n2
            self.done += 1
            self.progress(pairs * self.done // self.tiles, pairs)

    def write_square(self, tile: Array, start: int) -> None:
        """Write a square on the diagonal, given by its upper half."""
        with wide(self.dtype):
            tile = _mirrored(tile, output=self.output)
        self.write(tile, start, start, also_mirrored=False)


def against(
    functions: Functions,
    leaves: list[Any],
    row_features: Any,
    column_features: Any,
    *,
    output: str,
    dtype: str,
    is_half: bool = False,
) -> Array:
    """A tile; layers with deferred gradients are multiplied one after the other.

    Args:
        functions: compiled functions.
        leaves: of the parameters.
        row_features: of some samples.
        column_features: of others.
        output: "full", "trace" or "diagonal".
        dtype: in which it is summed.
        is_half: whether both are the same, and only the upper half is computed.
    """
    deferred = getattr(row_features, "late", {})
    tile: Any = None
    if not deferred or row_features.inputs or row_features.gradients:
        first, second = row_features, column_features
        if deferred:
            first, second = first._replace(late={}), second._replace(late={})
        if is_half:
            tile = functions.square(leaves, first)
        else:
            tile = functions.against(leaves, first, second)
    with wide(dtype):
        for leaf, row_pair in deferred.items():
            column_pair = None if is_half else column_features.late[leaf]
            part = product_of_outer(row_pair, column_pair, PRODUCTS[output], dtype)
            part = layerwise.finish(part, output)
            if output == "trace":
                part = part / jnp.asarray(row_pair.cotangents.shape[1], part.dtype)
            tile = part if tile is None else tile + part
            if is_concrete(part):
                jax.block_until_ready(tile)  # else later parts would be allocated already
    return tile


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


@functools.partial(jit, static_argnames=("output", "also_mirrored"), donate_argnames=("kernel",))
def _write(
    kernel: Array, tile: Array, i: Array, j: Array, *, output: str, also_mirrored: bool
) -> Array:
    """Write a tile, and its transpose at the mirrored indices."""

    def put(kernel: Array, tile: Array, row: Array, column: Array) -> Array:
        start: list[Any] = [0] * kernel.ndim
        start[0], start[layerwise.COLUMN_AXIS[output]] = row, column
        return jax.lax.dynamic_update_slice(kernel, tile, start)

    kernel = put(kernel, tile, i, j)
    return put(kernel, layerwise.transposed(tile, output), j, i) if also_mirrored else kernel


_mirrored = jit(layerwise.mirror, static_argnames="output")
