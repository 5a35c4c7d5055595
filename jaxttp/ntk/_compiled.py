"""The compiled pieces of a kernel computation: features of rows, and products of features."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxttp._core.compile import jit
from jaxttp._core.products import pull_and_push
from jaxttp.ntk import layerwise
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
        joined: whether the parts of all leaves become one kernel, rather than one each.
    """

    trainable: tuple[bool, ...]
    forms: tuple[tuple[int, str], ...]
    method: str
    output: str
    dtype: str
    joined: bool


class Functions(NamedTuple):
    """Compiled pieces of the computation; `start` arguments are traced integers.

    `leaves` are those of the parameters, then the arrays that the network closes over.

    Attributes:
        whole: (leaves, x1, x2 or None) -> kernel.
        features: (leaves, x, start, size) -> features of rows.
        square: (leaves, x, row_features) -> features of rows against themselves.
        within: (leaves, x, row_features, start, size) -> the same against some of themselves.
        stream: (leaves, x, row_features, start, size) -> the same against other samples.
        against: (leaves, x, row_features, column_features) -> the same against others' features.
    """

    whole: Callable[..., dict[str, Array]]
    features: Callable[..., Any]
    square: Callable[..., dict[str, Array]]
    within: Callable[..., dict[str, Array]]
    stream: Callable[..., dict[str, Array]]
    against: Callable[..., dict[str, Array]]


@functools.lru_cache(maxsize=64)
def compiled(program: NetworkProgram, variant: Variant) -> Functions:
    """The pieces for a network, kept by its equations, not by the function that has them."""
    engine: Any = _VectorProducts if variant.method == "vector_product" else _Layerwise

    def whole(leaves: list[Array], x1: list[Array], x2: list[Array] | None) -> dict[str, Array]:
        tool = engine(program, variant, leaves)
        first = tool.features(x1)
        return tool.square(first) if x2 is None else tool.against(first, tool.features(x2))

    def features(leaves: list[Array], x: list[Array], start: Array, size: int) -> Any:
        return engine(program, variant, leaves).features(_take(x, start, size))

    def square(leaves: list[Array], x: list[Array], row_features: Any) -> dict[str, Array]:
        return engine(program, variant, leaves).square(row_features)

    def within(
        leaves: list[Array], x: list[Array], row_features: Any, start: Array, size: int
    ) -> dict[str, Array]:
        part = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, size), row_features)
        return engine(program, variant, leaves).against(row_features, part)

    def stream(
        leaves: list[Array], x: list[Array], row_features: Any, start: Array, size: int
    ) -> dict[str, Array]:
        tool = engine(program, variant, leaves)
        return tool.against(row_features, tool.features(_take(x, start, size)))

    def against(
        leaves: list[Array], x: list[Array], row_features: Any, column_features: Any
    ) -> dict[str, Array]:
        return engine(program, variant, leaves).against(row_features, column_features)

    return Functions(
        jit(whole),
        jit(features, static_argnames="size"),
        jit(square),
        jit(within, static_argnames="size"),
        jit(stream, static_argnames="size"),
        jit(against),
    )


def _take(x: list[Array], start: Array, size: int) -> list[Array]:
    return [jax.lax.dynamic_slice_in_dim(leaf, start, size) for leaf in x]


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
            joined=variant.joined,
        )

    def features(self, x: list[Array]) -> Features:
        return self.layers.features(self.leaves, x)

    def against(self, row_features: Features, other: Features | None) -> dict[str, Array]:
        """The kernel in the public layout; with None of the rows themselves, its upper half."""
        output = self.variant.output
        dtype = jnp.dtype(self.variant.dtype)
        with wide(self.variant.dtype):
            terms = self.layers.kernels(row_features, other, output, dtype)
            if self.variant.joined:
                terms = {"sum": functools.reduce(jnp.add, terms.values())}
            if output == "trace":
                classes = jnp.asarray(self.layers.program.outputs, dtype)
                terms = {name: term / classes for name, term in terms.items()}
            return {name: layerwise.finish(term, output) for name, term in terms.items()}

    def square(self, row_features: Features) -> dict[str, Array]:
        terms = self.against(row_features, None)
        with wide(self.variant.dtype):
            return {name: layerwise.mirror(t, self.variant.output) for name, t in terms.items()}


class _VectorProducts:
    """A column of the kernel is J applied to a row of J; no Jacobian is ever formed."""

    def __init__(self, program: NetworkProgram, variant: Variant, leaves: Any) -> None:
        self.program, self.variant, self.leaves = program, variant, leaves

    def _network(self, chosen: dict[int, Array], x: Sequence[Array]) -> Array:
        leaves: list[Any] = [chosen.get(index, leaf) for index, leaf in enumerate(self.leaves)]
        return self.program.batch(leaves, x)

    def features(self, x: list[Array]) -> list[Array]:
        return x

    def against(self, row_features: list[Array], x: list[Array]) -> dict[str, Array]:
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
        return {"sum": kernel}

    def square(self, row_features: list[Array]) -> dict[str, Array]:
        kernel = self.against(row_features, row_features)["sum"]
        return {"sum": layerwise.mirror(kernel, self.variant.output)}
