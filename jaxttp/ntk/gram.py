"""The empirical neural tangent kernel, Θ = J Jᵀ: one entrance, the method chosen by cost.

    Θ[n, c, m, d] = <df_c(x1_n)/dw, df_d(x2_m)/dw>

The plan (method, form of each layer, block sizes) is made first, from shapes alone; see
`ntk_plan`. A kernel that fits is computed in one piece. A larger one is cut into blocks of rows
whose features are held, against which blocks of columns are streamed; only the upper triangle of a
symmetric kernel is computed.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxttp._checks import check_choice, is_concrete
from jaxttp._types import ApplyFn, Params
from jaxttp.ntk import layerwise
from jaxttp.ntk._plan import STRIPS, KernelPlan, Workload, make_plan
from jaxttp.ntk._products import pull_and_push
from jaxttp.ntk._program import Program, trace
from jaxttp.ntk._select import leaf_paths, select_leaves
from jaxttp.ntk._sites import find_sites
from jaxttp.ntk.layerwise import Features, Layers

Output = Literal["full", "trace", "diagonal"]
_OUTPUTS = ("full", "trace", "diagonal")
_METHODS = ("auto", "layerwise", "jacobian", "vector_product")


def empirical_ntk(
    apply_fn: ApplyFn,
    params: Params,
    x1: Any,
    x2: Any = None,
    *,
    output: str = "full",
    method: str = "auto",
    trainable: Any = None,
    batch_size: int | None = None,
    max_bytes: int | None = None,
    mesh: Any = None,
    accumulation_dtype: Any = None,
    per_layer: bool = False,
) -> Any:
    """The kernel Θ(x1, x2) of any network, exact to rounding.

        Θ[n, c, m, d] = sum_w df_c(x1_n)/dw df_d(x2_m)/dw

    It is symmetric to the last bit and positive semi-definite up to rounding when x2 is left out
    (`jaxttp.ntk.psd_report` gives the smallest eigenvalue), and does not depend on `batch_size`
    beyond rounding. Matrix products run at the highest precision.

    Args:
        apply_fn: ``(params, x (N, ...)) -> outputs (N, C)``; row i depends on row i of x alone.
        params: pytree of arrays; the integer ones are never trainable.
        x1: inputs (N1, ...), an array or a pytree of arrays with that leading axis.
        x2: inputs (N2, ...); None for x1.
        output: "full" (N1, C, N2, C); "trace" (N1, N2), the mean over c of Θ[n, c, m, c];
            "diagonal" (N1, N2, C), the Θ[n, c, m, c] themselves.
        method: "layerwise" (no per-sample gradient of dense layers), "jacobian" (streamed
            per-sample gradients), "vector_product" (a jvp of a vjp for each column) or "auto", the
            cheapest by the cost model; all agree.
        trainable: which parameters count: None for all, a pytree of bools (a prefix is enough), or
            a predicate on the path, such as ``lambda path: path.startswith("head/")``.
        batch_size: samples at a time; None to let the plan decide.
        max_bytes: bound on the peak memory, the result included; None for 2 GiB beside the result.
        mesh: a device mesh of one device, or None.
        accumulation_dtype: dtype of the sums and of the result, "float32" or "float64"; None for
            the network's (at least float32). "float64" needs no global switch.
        per_layer: return a dict from parameter path to its kernel; they sum to the whole.

    Returns:
        The kernel, or a dict of kernels if `per_layer`.

    Raises:
        ValueError: an unknown option, x1 and x2 that do not match, nothing trainable, outputs that
            are not (N, C), or a `max_bytes` that cannot be kept (the least that can is stated).

    Example:
        >>> import jax.numpy as jnp
        >>> def linear(params, x):
        ...     return x @ params["w"]
        >>> x = jnp.array([[1.0, 0.0], [1.0, 2.0]])
        >>> empirical_ntk(linear, {"w": jnp.ones((2, 1))}, x)[:, 0, :, 0].tolist()
        [[1.0, 1.0], [1.0, 5.0]]

    Source:
        TTP section 3; the layerwise contraction is derived in `jaxttp.ntk.layerwise`.
    """
    _check_mesh(mesh)
    job = _Job.of(
        apply_fn, params, x1, x2, output, method, trainable, accumulation_dtype, per_layer
    )
    plan = job.plan(method, batch_size, max_bytes)
    result = _compute(job, plan)
    if per_layer:
        return {job.work.paths[int(name)]: kernel for name, kernel in result.items()}
    return result["sum"]


def ntk_plan(
    apply_fn: ApplyFn,
    params: Params,
    x1: Any,
    x2: Any = None,
    *,
    output: str = "full",
    method: str = "auto",
    trainable: Any = None,
    batch_size: int | None = None,
    max_bytes: int | None = None,
    accumulation_dtype: Any = None,
    per_layer: bool = False,
) -> KernelPlan:
    """What `empirical_ntk` with the same arguments will do, and why; only shapes are looked at.

    Args:
        apply_fn: see `empirical_ntk`.
        params: see `empirical_ntk`; `jax.ShapeDtypeStruct` leaves will do.
        x1: see `empirical_ntk`; `jax.ShapeDtypeStruct` will do.
        x2: see `empirical_ntk`.
        output: see `empirical_ntk`.
        method: see `empirical_ntk`.
        trainable: see `empirical_ntk`.
        batch_size: see `empirical_ntk`.
        max_bytes: see `empirical_ntk`.
        accumulation_dtype: see `empirical_ntk`.
        per_layer: see `empirical_ntk`.

    Returns:
        The plan; printing it explains it.

    Example:
        >>> import jax.numpy as jnp
        >>> plan = ntk_plan(lambda p, x: x @ p, jnp.ones((300, 10)), jnp.ones((64, 300)))
        >>> plan.method, plan.rows
        ('layerwise', 64)
    """
    job = _Job.of(
        apply_fn, params, x1, x2, output, method, trainable, accumulation_dtype, per_layer
    )
    return job.plan(method, batch_size, max_bytes)


def _check_mesh(mesh: Any) -> None:
    if mesh is not None and getattr(mesh, "size", 1) != 1:
        raise NotImplementedError(
            f"mesh: this version computes a kernel on one device; got a mesh of {mesh.size}."
        )


def _struct(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), _dtype(leaf)), tree)


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def _length(name: str, x: Any) -> int:
    leaves = jax.tree.leaves(x)
    lengths = {jnp.shape(leaf)[0] if jnp.ndim(leaf) else None for leaf in leaves}
    length = next(iter(lengths), None)
    if len(lengths) != 1 or not length:
        shapes = ", ".join(str(jnp.shape(leaf)) for leaf in leaves) or "no array"
        raise ValueError(f"{name} must be (N, ...) with at least one sample; got {shapes}.")
    return length


class _Settings(NamedTuple):
    """What a compiled function depends on, beside shapes; hashable."""

    treedef: Any
    sample_treedef: Any
    trainable: tuple[bool, ...]
    forms: tuple[tuple[int, str], ...]
    method: str
    output: str
    dtype: str
    joined: bool


@dataclasses.dataclass(frozen=True, eq=False)
class _Job:
    """Checked arguments."""

    apply_fn: ApplyFn
    leaves: list[Any]
    treedef: Any
    rows: list[Any]
    columns: list[Any] | None
    sample_treedef: Any
    work: Workload
    dtype: str
    per_layer: bool

    @classmethod
    def of(
        cls,
        apply_fn: ApplyFn,
        params: Params,
        x1: Any,
        x2: Any,
        output: str,
        method: str,
        trainable: Any,
        accumulation_dtype: Any,
        per_layer: bool,
    ) -> "_Job":
        check_choice("output", output, _OUTPUTS)
        check_choice("method", method, _METHODS)
        n1 = _length("x1", x1)
        n2 = n1 if x2 is None else _length("x2", x2)
        first, sample_treedef = jax.tree.flatten(x1)
        second = None if x2 is None else jax.tree.leaves(x2)
        if second is not None:
            one, two = ([(jnp.shape(a)[1:], _dtype(a)) for a in rows] for rows in (first, second))
            if jax.tree.structure(x2) != sample_treedef or one != two:
                raise ValueError(
                    f"x2 must look like x1 but for its length; got {two}, x1 has {one}."
                )
        leaves, treedef = jax.tree.flatten(params)
        mask = select_leaves(params, trainable)
        structs = tuple((s.shape, s.dtype) for s in jax.tree.leaves(_struct(leaves)))
        samples = tuple((jnp.shape(a)[1:], _dtype(a)) for a in first)
        program, sites = _cached(
            _analyse, apply_fn, treedef, structs, sample_treedef, samples, mask, _config()
        )
        network = program.avals[program.output].dtype
        dtype = _accumulation_dtype(accumulation_dtype, network)
        if method == "vector_product" and (per_layer or jnp.dtype(dtype) != network):
            option = "per_layer" if per_layer else "accumulation_dtype"
            raise ValueError(
                f"{option} is not for method='vector_product', which never sees a layer; "
                "use 'layerwise' or 'jacobian'."
            )
        work = Workload(
            program, sites, leaf_paths(params), mask, n1, n2, x2 is None, output,
            jnp.dtype(dtype).itemsize,
        )  # fmt: skip
        return cls(apply_fn, leaves, treedef, first, second, sample_treedef, work, dtype, per_layer)

    def plan(self, method: str, batch_size: int | None, max_bytes: int | None) -> KernelPlan:
        """The plan for this job."""
        layers = sum(self.work.trainable) if self.per_layer else 1
        network = self.work.program.avals[self.work.program.output].dtype
        if method == "auto" and (self.per_layer or jnp.dtype(self.dtype) != network):
            method = "layerwise"
        return make_plan(self.work, method, batch_size, max_bytes, layers)

    def settings(self, plan: KernelPlan) -> _Settings:
        """The static side of the compiled functions."""
        index = {path: leaf for leaf, path in enumerate(self.work.paths)}
        forms = tuple((index[path], form) for path, form in plan.forms.items())
        return _Settings(
            self.treedef, self.sample_treedef, self.work.trainable, forms, plan.method,
            self.work.output, self.dtype, not self.per_layer,
        )  # fmt: skip


def _accumulation_dtype(wanted: Any, network: Any) -> str:
    if wanted is None:
        return jnp.dtype(jnp.promote_types(network, jnp.float32)).name
    name = jnp.dtype(wanted).name
    check_choice("accumulation_dtype", name, ("float32", "float64"))
    if jnp.dtype(name).itemsize < jnp.dtype(network).itemsize:
        raise ValueError(
            f"accumulation_dtype={name!r} is narrower than the network's {network}; "
            "convert the parameters and inputs instead."
        )
    return name


def _config() -> Hashable:
    """Settings of JAX under which a traced program would differ."""
    return jax.dtypes.canonicalize_dtype("float64").name


def _cached(function: Callable[..., Any], apply_fn: ApplyFn, *rest: Any) -> Any:
    """`function(apply_fn, *rest)` from its bounded cache, or anew if something has no hash."""
    try:
        hash((apply_fn, rest))
    except TypeError:
        return function.__wrapped__(apply_fn, *rest)  # type: ignore[attr-defined]
    return function(apply_fn, *rest)


@functools.lru_cache(maxsize=128)
def _analyse(
    apply_fn: ApplyFn,
    treedef: Any,
    structs: Any,
    sample_treedef: Any,
    samples: Any,
    mask: tuple[bool, ...],
    config: Hashable,
) -> tuple[Program, Any]:
    """The program and its sites, for planning: shapes only, the constants are dropped."""
    del config
    with jax.default_matmul_precision("highest"):
        program = trace(
            apply_fn,
            jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(*s) for s in structs]),
            jax.tree.unflatten(sample_treedef, [jax.ShapeDtypeStruct(*s) for s in samples]),
        )
    sites = find_sites(program, mask)
    return dataclasses.replace(program, constants={}), sites


class _Functions(NamedTuple):
    """Compiled pieces of the computation; `start` arguments are traced integers.

    Attributes:
        whole: (leaves, x1, x2 or None) -> kernel.
        features: (leaves, x, start, size) -> features of rows.
        square: (leaves, x, held) -> held features against themselves.
        within: (leaves, x, held, start, size) -> held features against some of themselves.
        stream: (leaves, x, held, start, size) -> held features against other rows.
    """

    whole: Callable[..., dict[str, Array]]
    features: Callable[..., Any]
    square: Callable[..., dict[str, Array]]
    within: Callable[..., dict[str, Array]]
    stream: Callable[..., dict[str, Array]]


@functools.lru_cache(maxsize=64)
def _compiled(apply_fn: ApplyFn, settings: _Settings) -> _Functions:
    engine: Any = _VectorProducts if settings.method == "vector_product" else _Layerwise

    def whole(leaves: list[Array], x1: list[Array], x2: list[Array] | None) -> dict[str, Array]:
        tool = engine(apply_fn, settings, leaves, x1)
        first = tool.features(x1)
        return tool.square(first) if x2 is None else tool.against(first, tool.features(x2))

    def features(leaves: list[Array], x: list[Array], start: Array, size: int) -> Any:
        return engine(apply_fn, settings, leaves, x).features(_take(x, start, size))

    def square(leaves: list[Array], x: list[Array], held: Any) -> dict[str, Array]:
        return engine(apply_fn, settings, leaves, x).square(held)

    def within(
        leaves: list[Array], x: list[Array], held: Any, start: Array, size: int
    ) -> dict[str, Array]:
        part = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, size), held)
        return engine(apply_fn, settings, leaves, x).against(held, part)

    def stream(
        leaves: list[Array], x: list[Array], held: Any, start: Array, size: int
    ) -> dict[str, Array]:
        tool = engine(apply_fn, settings, leaves, x)
        return tool.against(held, tool.features(_take(x, start, size)))

    return _Functions(
        jax.jit(whole),
        jax.jit(features, static_argnames="size"),
        jax.jit(square),
        jax.jit(within, static_argnames="size"),
        jax.jit(stream, static_argnames="size"),
    )


def _take(x: list[Array], start: Array, size: int) -> list[Array]:
    return [jax.lax.dynamic_slice_in_dim(leaf, start, size) for leaf in x]


@contextlib.contextmanager
def _wide(dtype: str) -> Iterator[None]:
    """Allow float64 for a while, if that is the accumulation's dtype."""
    if dtype == "float64":
        with jax.enable_x64(True):
            yield
    else:
        yield


class _Layerwise:
    """Layerwise and Jacobian methods: they differ in the forms alone."""

    def __init__(self, apply_fn: ApplyFn, settings: _Settings, leaves: Any, x: Any) -> None:
        self.settings, self.leaves = settings, leaves
        samples = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in x]
        program = trace(
            apply_fn,
            _struct(jax.tree.unflatten(settings.treedef, leaves)),
            jax.tree.unflatten(settings.sample_treedef, samples),
        )
        forms = dict(settings.forms)
        sites = find_sites(program, settings.trainable)
        self.layers = Layers(
            program,
            activation=tuple(site for site in sites if forms[site.leaf] == "activation"),
            gradient=tuple(site for site in sites if forms[site.leaf] == "gradient"),
            direct=tuple(leaf for leaf, form in forms.items() if form == "direct"),
            joined=settings.joined,
        )

    def features(self, x: list[Array]) -> Features:
        return self.layers.features(self.leaves, x)

    def _contract(self, first: Features, second: Features) -> dict[str, Array]:
        output = self.settings.output
        dtype = jnp.dtype(self.settings.dtype)
        with _wide(self.settings.dtype):
            terms = self.layers.kernels(first, second, output, dtype)
            if self.settings.joined:
                terms = {"sum": functools.reduce(jnp.add, terms.values())}
            if output == "trace":
                classes = jnp.asarray(self.layers.program.outputs, dtype)
                terms = {name: term / classes for name, term in terms.items()}
        return terms

    def square(self, held: Features) -> dict[str, Array]:
        rows = jax.tree.leaves(held)[0].shape[0]
        strips = STRIPS if rows >= 8 else 1
        with _wide(self.settings.dtype):
            return layerwise.square(held, self._contract, self.settings.output, rows, strips)

    def against(self, held: Features, other: Features) -> dict[str, Array]:
        terms = self._contract(held, other)
        with _wide(self.settings.dtype):
            output = self.settings.output
            return {name: layerwise.finish(term, output) for name, term in terms.items()}


class _VectorProducts:
    """A column of the kernel is J applied to a row of J; no Jacobian is ever formed."""

    def __init__(self, apply_fn: ApplyFn, settings: _Settings, leaves: Any, x: Any) -> None:
        del x
        self.apply_fn, self.settings, self.leaves = apply_fn, settings, leaves

    def _network(self, chosen: dict[int, Array], x: list[Array]) -> Array:
        leaves = [chosen.get(index, leaf) for index, leaf in enumerate(self.leaves)]
        params = jax.tree.unflatten(self.settings.treedef, leaves)
        return self.apply_fn(params, jax.tree.unflatten(self.settings.sample_treedef, x))

    def features(self, x: list[Array]) -> list[Array]:
        return x

    def against(self, held: list[Array], x: list[Array]) -> dict[str, Array]:
        mask = self.settings.trainable
        chosen = {i: leaf for i, leaf in enumerate(self.leaves) if mask[i]}
        outputs, _, push = pull_and_push(lambda leaves: self._network(leaves, held), chosen)
        basis = jnp.eye(outputs.shape[-1], dtype=outputs.dtype)

        def columns(*row: Array) -> Array:
            one = [leaf[None] for leaf in row]
            _, pull = jax.vjp(lambda leaves: self._network(leaves, one)[0], chosen)
            return jax.vmap(lambda e: push(pull(e)[0]))(basis)  # (C, n1, C)

        kernel = jax.vmap(columns)(*x).transpose(2, 3, 0, 1)  # (n1, C, n2, C)
        kernel = kernel.astype(self.settings.dtype)
        if self.settings.output == "trace":
            kernel = jnp.einsum("ncmc->nm", kernel) / jnp.asarray(len(basis), kernel.dtype)
        elif self.settings.output == "diagonal":
            kernel = jnp.einsum("ncmc->nmc", kernel)
        return {"sum": kernel}

    def square(self, held: list[Array]) -> dict[str, Array]:
        kernel = self.against(held, held)["sum"]
        return {"sum": layerwise.mirror(kernel, self.settings.output)}


def _compute(job: _Job, plan: KernelPlan) -> dict[str, Array]:
    functions = _cached(_compiled, job.apply_fn, job.settings(plan))
    leaves = [jnp.asarray(leaf) for leaf in job.leaves]
    x1 = [jnp.asarray(leaf) for leaf in job.rows]
    x2 = None if job.columns is None else [jnp.asarray(leaf) for leaf in job.columns]
    n1, n2, output = job.work.n1, job.work.n2, job.work.output
    with jax.default_matmul_precision("highest"):
        if plan.chunk >= max(n1, n2):
            return functions.whole(leaves, x1, x2)
        return _by_blocks(functions, plan, leaves, x1, x2, n1, n2, output, job.dtype)


def _by_blocks(
    functions: _Functions,
    plan: KernelPlan,
    leaves: list[Array],
    x1: list[Array],
    x2: list[Array] | None,
    n1: int,
    n2: int,
    output: str,
    dtype: str,
) -> dict[str, Array]:
    """Blocks of rows held, blocks of columns streamed; the last block overlaps the one before."""
    kernels: dict[str, Array] = {}
    symmetric, columns = x2 is None, x1 if x2 is None else x2

    def write(tiles: dict[str, Array], i: int, j: int, also_mirrored: bool) -> None:
        with _wide(dtype):
            for name, tile in tiles.items():
                if name not in kernels:
                    shape = list(tile.shape)
                    shape[0], shape[layerwise.COLUMN_AXIS[output]] = n1, n2
                    kernels[name] = jnp.zeros(shape, tile.dtype)
                kernels[name] = _write(
                    kernels[name], tile, i, j, output=output, also_mirrored=also_mirrored
                )
        if all(is_concrete(kernel) for kernel in kernels.values()):
            # Dispatch is asynchronous: without waiting, blocks to come would be allocated already.
            jax.block_until_ready(kernels)

    for low in range(0, n1, plan.rows):
        i = min(low, n1 - plan.rows)
        held = _held(functions, leaves, x1, i, plan.rows, plan.chunk)
        if symmetric and plan.rows == n1:
            return functions.square(leaves, x1, held)
        if symmetric:
            size = min(plan.columns, plan.rows)
            for column in range(0, plan.rows, size):
                j = min(column, plan.rows - size)
                write(functions.within(leaves, x1, held, j, size=size), i, i + j, False)
            with _wide(dtype):
                for name, kernel in kernels.items():
                    kernels[name] = _mirror_block(kernel, i, size=plan.rows, output=output)
        first = i + plan.rows if symmetric else 0
        for column in range(first, n2, plan.columns):
            j = min(column, n2 - plan.columns)
            tiles = functions.stream(leaves, columns, held, j, size=plan.columns)
            # The overlap with the square block just written must not spoil its symmetry.
            if symmetric and j < first:
                tiles = {name: _columns(t, first - j, output) for name, t in tiles.items()}
                j = first
            write(tiles, i, j, symmetric)
        del held
    return kernels


def _held(
    functions: _Functions, leaves: list[Array], x: list[Array], start: int, rows: int, chunk: int
) -> Any:
    """Features of a block of rows, differentiated a chunk at a time.

    The loop is Python's: inside XLA it was several times slower on a CPU (ResNet20).
    """
    if chunk >= rows:
        return functions.features(leaves, x, start, size=rows)
    held: Any = None
    for low in range(0, rows, chunk):
        offset = min(low, rows - chunk)
        part = functions.features(leaves, x, start + offset, size=chunk)
        if held is None:
            held = jax.tree.map(lambda a: jnp.zeros((rows, *a.shape[1:]), a.dtype), part)
        held = jax.block_until_ready(_put(held, part, offset))
    return held


@functools.partial(jax.jit, donate_argnums=0)
def _put(held: Any, part: Any, offset: Array) -> Any:
    return jax.tree.map(
        lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, offset, 0), held, part
    )


def _columns(tile: Array, skip: int, output: str) -> Array:
    return jax.lax.slice_in_dim(
        tile, skip, tile.shape[layerwise.COLUMN_AXIS[output]], axis=layerwise.COLUMN_AXIS[output]
    )


@functools.partial(
    jax.jit, static_argnames=("output", "also_mirrored"), donate_argnames=("kernel",)
)
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


@functools.partial(jax.jit, static_argnames=("size", "output"), donate_argnames=("kernel",))
def _mirror_block(kernel: Array, start: Array, *, size: int, output: str) -> Array:
    """Make a square block on the diagonal exactly symmetric, in place."""
    columns = layerwise.COLUMN_AXIS[output]
    starts: list[Any] = [0] * kernel.ndim
    starts[0] = starts[columns] = start
    sizes = list(kernel.shape)
    sizes[0] = sizes[columns] = size
    block = layerwise.mirror(jax.lax.dynamic_slice(kernel, starts, sizes), output)
    return jax.lax.dynamic_update_slice(kernel, block, starts)
