"""The execution of a plan: compiled pieces, and kernels too large for one piece, tile by tile.

Where the features of all samples fit into memory they are computed once, and blocks of them are
multiplied with each other. Else those of a block of rows stay in memory, while those of one block
of columns after the other are computed, multiplied with them and dropped.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
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
    """Which of the many possible programs is compiled: all it depends on but shapes; hashable.

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
    """Compiled pieces of the computation; `start` arguments are traced integers.

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
def compiled(program: NetworkProgram, variant: Variant) -> Functions:
    """The pieces for a network, kept by its equations, not by the function that has them."""
    engine: Any = _VectorProducts if variant.method == "vector_product" else _Layerwise

    def whole(leaves: list[Array], x1: list[Array], x2: list[Array] | None) -> Array:
        tool = engine(program, variant, leaves)
        first = tool.features(x1)
        return tool.square(first) if x2 is None else tool.against(first, tool.features(x2))

    def features(leaves: list[Array], x: list[Array], start: Array, size: int) -> Any:
        some = [jax.lax.dynamic_slice_in_dim(leaf, start, size) for leaf in x]
        return engine(program, variant, leaves).features(some)

    def square(leaves: list[Array], row_features: Any) -> Array:
        return engine(program, variant, leaves).square(row_features)

    def against(leaves: list[Array], row_features: Any, column_features: Any) -> Array:
        return engine(program, variant, leaves).against(row_features, column_features)

    return Functions(
        jit(whole),
        jit(features, static_argnames="size"),
        jit(square),
        jit(against),
    )


@contextlib.contextmanager
def wide(dtype: str) -> Iterator[None]:
    """Allow float64 for a while, if that is the accumulation's dtype."""
    if dtype == "float64":
        with jax.enable_x64(True):
            yield
    else:
        yield


class _Layerwise:
    """Layerwise and Jacobian methods: they differ in the forms alone."""

    def __init__(self, program: NetworkProgram, variant: Variant, leaves: Any) -> None:
        self.variant, self.leaves = variant, leaves
        forms = dict(variant.forms)
        sites = find_sites(program, variant.trainable)
        self.layers = Layers(
            program,
            activation=tuple(site for site in sites if forms[site.leaf] == "activation"),
            gradient=tuple(site for site in sites if forms[site.leaf] == "gradient"),
            direct=tuple(leaf for leaf, form in forms.items() if form == "direct"),
            late=tuple(site for site in sites if forms[site.leaf] == "late gradient"),
        )

    def features(self, x: list[Array]) -> Features:
        return self.layers.features(self.leaves, x)

    def against(self, row_features: Features, other: Features | None) -> Array:
        """The kernel in the public layout; with None of the rows themselves, its upper half."""
        output = self.variant.output
        dtype = jnp.dtype(self.variant.dtype)
        with wide(self.variant.dtype):
            kernel = self.layers.kernel(row_features, other, output, dtype)
            if output == "trace":
                kernel = kernel / jnp.asarray(self.layers.program.outputs, dtype)
            return layerwise.finish(kernel, output)

    def square(self, row_features: Features) -> Array:
        kernel = self.against(row_features, None)
        with wide(self.variant.dtype):
            return layerwise.mirror(kernel, self.variant.output)


class _VectorProducts:
    """A column of the kernel is J applied to a row of J; no Jacobian is ever formed."""

    def __init__(self, program: NetworkProgram, variant: Variant, leaves: Any) -> None:
        self.program, self.variant, self.leaves = program, variant, leaves

    def _network(self, chosen: dict[int, Array], x: Sequence[Array]) -> Array:
        leaves: list[Any] = [chosen.get(index, leaf) for index, leaf in enumerate(self.leaves)]
        return self.program.batch(leaves, x)

    def features(self, x: list[Array]) -> list[Array]:
        return x

    def against(self, row_features: list[Array], x: list[Array]) -> Array:
        mask = self.variant.trainable
        chosen = {i: self.leaves[i] for i, wanted in enumerate(mask) if wanted}
        outputs, _, push = pull_and_push(lambda leaves: self._network(leaves, row_features), chosen)
        basis = jnp.eye(outputs.shape[-1], dtype=outputs.dtype)

        def columns(*row: Array) -> Array:
            one = [leaf[None] for leaf in row]
            _, pull = jax.vjp(lambda leaves: self._network(leaves, one)[0], chosen)
            return jax.vmap(lambda e: push(pull(e)[0]))(basis)  # (C, n1, C)

        kernel = jax.vmap(columns)(*x).transpose(2, 3, 0, 1)  # (n1, C, n2, C)
        kernel = kernel.astype(self.variant.dtype)
        if self.variant.output == "trace":
            kernel = jnp.einsum("ncmc->nm", kernel) / jnp.asarray(len(basis), kernel.dtype)
        elif self.variant.output == "diagonal":
            kernel = jnp.einsum("ncmc->nmc", kernel)
        return kernel

    def square(self, row_features: list[Array]) -> Array:
        kernel = self.against(row_features, row_features)
        return layerwise.mirror(kernel, self.variant.output)


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
    is_own, others = x2 is None, x1 if x2 is None else x2
    n1, n2 = len(x1[0]), len(others[0])
    starts = [min(low, n1 - plan.rows) for low in range(0, n1, plan.rows)]

    def columns_beside(i: int) -> list[int]:
        """Where the columns of a block of rows start, those of its own square apart."""
        first = i + plan.rows if is_own else 0
        return [min(low, n2 - plan.columns) for low in range(first, n2, plan.columns)]

    tiles = sum(len(columns_beside(i)) + is_own for i in starts)
    if plan.kept:
        tiles = len(starts) * (len(starts) + 1) // 2
    found = _Unfinished(n1, n2, output, dtype, tiles, progress)
    features = functools.partial(features_of_rows, functions, leaves)
    multiply = functools.partial(against, functions, leaves, output=output, dtype=dtype)
    # The square on the diagonal comes last: a tile beside it may reach back into it and, computed
    # in another order, would spoil its exact symmetry.
    if plan.kept:
        held = []
        for j in starts:
            held.append(features(x1, j, plan.rows, plan.chunk))
            for i, row_features in zip(starts[: len(held) - 1], held, strict=False):
                found.write(multiply(row_features, held[-1]), i, j, also_mirrored=True)
            found.write_square(multiply(held[-1], held[-1], is_half=True), j)
        return found.kernel
    for i in starts:
        row_features = features(x1, i, plan.rows, plan.chunk)
        for j in columns_beside(i):
            column_features = features(others, j, plan.columns, min(plan.chunk, plan.columns))
            found.write(multiply(row_features, column_features), i, j, also_mirrored=is_own)
        if is_own:
            # Half of a product takes copies of its features, for which there is no room where a
            # block is as large as memory allows; gradients that wait have none.
            is_half = bool(getattr(row_features, "late", None))
            found.write_square(multiply(row_features, row_features, is_half=is_half), i)
        del row_features  # before those of the next block are computed
    return found.kernel


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
            # Dispatch is asynchronous: without waiting, blocks to come would be allocated already.
            jax.block_until_ready(self.kernel)
        if self.progress is not None:
            pairs = self.n1 * self.n2
            self.done += 1
            self.progress(pairs * self.done // self.tiles, pairs)

    def write_square(self, tile: Array, start: int) -> None:
        """Put a square on the diagonal, of which the upper half counts."""
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
    """A tile; layers whose gradients wait are multiplied one after the other.

    Args:
        functions: compiled pieces.
        leaves: of the parameters.
        row_features: of some samples.
        column_features: of others.
        output: "full", "trace" or "diagonal".
        dtype: in which it is summed.
        is_half: whether the others are the same, and only the upper half is wanted.
    """
    waiting = getattr(row_features, "late", {})
    tile: Any = None
    if not waiting or row_features.inputs or row_features.gradients:
        first, second = (
            one._replace(late={}) if waiting else one for one in (row_features, column_features)
        )
        tile = (
            functions.square(leaves, first) if is_half
            else functions.against(leaves, first, second)
        )  # fmt: skip
    with wide(dtype):
        for leaf, pair in waiting.items():
            other = None if is_half else column_features.late[leaf]
            part = product_of_outer(pair, other, PRODUCTS[output], dtype)
            part = layerwise.finish(part, output)
            if output == "trace":
                part = part / jnp.asarray(pair.cotangents.shape[1], part.dtype)
            tile = part if tile is None else tile + part
            if is_concrete(part):
                jax.block_until_ready(tile)  # else pieces to come would be allocated already
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
    """Put a tile in place, and its transpose in the mirrored place."""

    def put(kernel: Array, tile: Array, row: Array, column: Array) -> Array:
        start: list[Any] = [0] * kernel.ndim
        start[0], start[layerwise.COLUMN_AXIS[output]] = row, column
        return jax.lax.dynamic_update_slice(kernel, tile, start)

    kernel = put(kernel, tile, i, j)
    return put(kernel, layerwise.transposed(tile, output), j, i) if also_mirrored else kernel


_mirrored = jit(layerwise.mirror, static_argnames="output")
