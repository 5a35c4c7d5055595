"""The empirical neural tangent kernel, Θ = J Jᵀ: one entrance, the method chosen by cost.

    Θ[n, c, m, d] = <df_c(x1_n)/dw, df_d(x2_m)/dw>

The plan (method, form of each layer, block sizes) is made first, from shapes alone; see
`ntk_plan`. A kernel that fits is computed in one piece. A larger one is cut into blocks of rows
whose features are held, against which blocks of columns are streamed; only the upper triangle of a
symmetric kernel is computed.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from jaxttp._checks import check_choice, check_finite
from jaxttp._samples import count, leaf_shapes
from jaxttp._types import ApplyFn, Params
from jaxttp.adapters.inputs import check_network, check_samples, traced_outputs
from jaxttp.adapters.outputs import check_per_sample
from jaxttp.ntk._blocks import by_blocks
from jaxttp.ntk._compiled import Variant, compiled, dtype_of, structure
from jaxttp.ntk._costs import Workload
from jaxttp.ntk._plan import KernelPlan, make_plan
from jaxttp.ntk._program import NetworkProgram, trace
from jaxttp.ntk._select import leaf_paths, select_leaves
from jaxttp.ntk._sharded import sharded_kernel
from jaxttp.ntk._shares import plan_on
from jaxttp.ntk._sites import find_sites
from jaxttp.ntk.row_sharded import RowSharded, several

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
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """The kernel Θ(x1, x2) of any network, exact to rounding.

        Θ[n, c, m, d] = sum_w df_c(x1_n)/dw df_d(x2_m)/dw

    It is symmetric to the last bit and positive semi-definite up to rounding when x2 is left out
    (`jaxttp.ntk.psd_report` gives the smallest eigenvalue), and does not depend on `batch_size`
    beyond rounding. Matrix products run at the highest precision.

    Args:
        apply_fn: ``(params, x (N, ...)) -> outputs (N, C)``; row i depends on row i of x alone.
        params: pytree of arrays; the integer ones are never trainable.
        x1: inputs (N1, ...), an array or a pytree of arrays with N1 rows each.
        x2: inputs (N2, ...); None for x1.
        output: "full" (N1, C, N2, C); "trace" (N1, N2), the mean over c of Θ[n, c, m, c];
            "diagonal" (N1, N2, C), the Θ[n, c, m, c] themselves.
        method: "layerwise" (no per-sample gradient of dense layers), "jacobian" (streamed
            per-sample gradients), "vector_product" (a jvp of a vjp for each column) or "auto", the
            cheapest by the cost model; all agree.
        trainable: which parameters count: None for all, a pytree of bools (a prefix is enough), or
            a predicate on the path, such as ``lambda path: path.startswith("head/")``.
        batch_size: samples at a time; None to let the plan decide.
        max_bytes: bound on the peak memory, the result included; None for 4 GiB beside the result.
        mesh: a `jax.sharding.Mesh` over whose devices the rows are sharded, parameters being on
            all of them; None for one device. `max_bytes` is then that of one device. Where the
            devices do not divide N1 the result is a `jaxttp.ntk.RowSharded`, which goes wherever a
            kernel does.
        accumulation_dtype: dtype of the sums and of the result, "float32" or "float64"; None for
            the network's (at least float32). "float64" needs no global switch.
        per_layer: return a dict from parameter path to its kernel; they sum to the whole.
        progress: called with (pairs of samples done, pairs in all) after every tile.

    Returns:
        The kernel, or a dict of kernels if `per_layer`.

    Raises:
        ValueError: an unknown option, x1 and x2 that do not match, values that are not finite,
            nothing trainable, outputs that are not (N, C) or depend on other samples, or a
            `max_bytes` that cannot be kept (the least that can is stated, and the fewest devices
            with which it can).

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
    check_network(apply_fn, params)
    for name, value in (("params", params), ("x1", x1)):
        check_finite(name, value)
    _count_samples("x1", x1)
    check_per_sample(apply_fn, params, _as_samples("x1", x1))
    return kernel_of(
        apply_fn, params, x1, x2, output=output, method=method, trainable=trainable,
        batch_size=batch_size, max_bytes=max_bytes, mesh=mesh,
        accumulation_dtype=accumulation_dtype, per_layer=per_layer, progress=progress,
    )  # fmt: skip


def kernel_of(
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
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """`empirical_ntk` of a network whose outputs are known to be of one sample each."""
    devices = several(mesh)
    check_network(apply_fn, params)
    for name, value in (("params", params), ("x1", x1), ("x2", x2)):
        check_finite(name, value)
    job = Job.of(apply_fn, params, x1, x2, output, method, trainable, accumulation_dtype, per_layer)
    plan = job.plan_on(devices, method, batch_size, max_bytes)
    if devices is None:
        result: dict[str, Any] = _compute(job, plan, progress)
    else:
        result = _compute_sharded(job, plan, devices, progress)
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
    mesh: Any = None,
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
        mesh: see `empirical_ntk`; the plan is that of one of its devices.
        accumulation_dtype: see `empirical_ntk`.
        per_layer: see `empirical_ntk`.

    Returns:
        The plan; printing it explains it.

    Raises:
        ValueError: a `max_bytes` that cannot be kept (the least that can is stated, and the fewest
            devices with which it can).

    Example:
        >>> import jax.numpy as jnp
        >>> plan = ntk_plan(lambda p, x: x @ p, jnp.ones((300, 10)), jnp.ones((64, 300)))
        >>> plan.method, plan.rows
        ('layerwise', 64)
    """
    job = Job.of(apply_fn, params, x1, x2, output, method, trainable, accumulation_dtype, per_layer)
    return job.plan_on(several(mesh), method, batch_size, max_bytes)


def _as_samples(name: str, x: Any) -> Any:
    """Mappings as dicts of arrays; shapes, arrays and other pytrees as they are."""
    leaves = jax.tree.leaves(x)
    if isinstance(x, Mapping) and not any(isinstance(a, jax.ShapeDtypeStruct) for a in leaves):
        return check_samples(name, x)
    return x


def _count_samples(name: str, x: Any) -> int:
    remedy = " Make lists one array: np.asarray(x)." if isinstance(x, list | tuple) else ""
    shapes = leaf_shapes(x, name)
    if not shapes or any(not shape or shape[0] == 0 for shape in shapes.values()):
        found = ", ".join(dict.fromkeys(map(str, shapes.values()))) or "no array"
        raise ValueError(f"{name} must be (N, ...) with at least one sample; got {found}.{remedy}")
    try:
        return count(x, name)
    except ValueError as problem:
        raise ValueError(f"{problem}{remedy}") from None


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
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
    ) -> "Job":
        """What `empirical_ntk` is asked for, checked."""
        check_choice("output", output, _OUTPUTS)
        check_choice("method", method, _METHODS)
        x1, x2 = _as_samples("x1", x1), _as_samples("x2", x2)
        n1 = _count_samples("x1", x1)
        n2 = n1 if x2 is None else _count_samples("x2", x2)
        first, sample_treedef = jax.tree.flatten(x1)
        second = None if x2 is None else jax.tree.leaves(x2)
        if second is not None:
            one, two = ([(jnp.shape(a)[1:], dtype_of(a)) for a in rows] for rows in (first, second))
            if jax.tree.structure(x2) != sample_treedef or one != two:
                raise ValueError(
                    f"x2 must look like x1 but for its length; got {two}, x1 has {one}."
                )
        leaves, treedef = jax.tree.flatten(params)
        mask = select_leaves(params, trainable)
        structs = tuple((s.shape, s.dtype) for s in jax.tree.leaves(structure(leaves)))
        samples = tuple((jnp.shape(a)[1:], dtype_of(a)) for a in first)
        try:
            program, sites = cached(
                _analyse, apply_fn, treedef, structs, sample_treedef, samples, mask, _config()
            )
        except Exception:
            traced_outputs(apply_fn, params, x1)  # where the reason is known: raises in one line
            raise
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

    def on_each(self, devices: int) -> "Job":
        """The share of one of so many devices: its rows against all columns."""
        work = self.work
        if devices == 1:
            return self
        rows, columns = -(-work.n1 // devices), devices * -(-work.n2 // devices)
        share = dataclasses.replace(work, n1=rows, n2=columns, symmetric=False, alone=False)
        return dataclasses.replace(self, work=share)

    def plan_on(
        self, mesh: Mesh | None, method: str, batch_size: int | None, max_bytes: int | None
    ) -> KernelPlan:
        """The plan of one of the devices of a mesh."""

        def plan(devices: int) -> KernelPlan:
            found = self.on_each(devices).plan(method, batch_size, max_bytes)
            return dataclasses.replace(found, devices=devices, host_bytes=self.bytes)

        return plan_on(1 if mesh is None else mesh.size, plan, self.work.n1)

    @property
    def bytes(self) -> int:
        """Samples and parameters, in the host's memory."""
        given = [*self.leaves, *self.rows, *(self.columns or [])]
        return sum(math.prod(jnp.shape(leaf)) * dtype_of(leaf).itemsize for leaf in given)

    def variant(self, plan: KernelPlan) -> Variant:
        """The static side of the compiled functions."""
        index = {path: leaf for leaf, path in enumerate(self.work.paths)}
        forms = tuple((index[path], form) for path, form in plan.forms.items())
        return Variant(
            self.treedef, self.sample_treedef, self.work.trainable, forms, plan.method,
            self.work.output, self.dtype, not self.per_layer,
        )  # fmt: skip


def workload(apply_fn: ApplyFn, params: Params, x: Any, trainable: Any = None) -> Workload:
    """Of a network's exact kernel with itself: its program, its sites and the shapes."""
    return Job.of(apply_fn, params, x, None, "full", "auto", trainable, None, False).work


def _accumulation_dtype(wanted: Any, network: Any) -> str:
    if wanted is None:
        narrow = jnp.dtype(network).itemsize < jnp.dtype(jnp.float32).itemsize
        return jnp.dtype(jnp.float32 if narrow else network).name
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


def cached(function: Callable[..., Any], apply_fn: ApplyFn, *rest: Any) -> Any:
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
) -> tuple[NetworkProgram, Any]:
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


def _compute(
    job: Job, plan: KernelPlan, progress: Callable[[int, int], None] | None = None
) -> dict[str, Array]:
    functions = cached(compiled, job.apply_fn, job.variant(plan))
    leaves = [jnp.asarray(leaf) for leaf in job.leaves]
    x1 = [jnp.asarray(leaf) for leaf in job.rows]
    x2 = None if job.columns is None else [jnp.asarray(leaf) for leaf in job.columns]
    n1, n2, output = job.work.n1, job.work.n2, job.work.output
    with jax.default_matmul_precision("highest"):
        if plan.chunk >= max(n1, n2):
            return functions.whole(leaves, x1, x2)
        return by_blocks(
            functions, plan, leaves, x1, x2, n1, n2, output, job.dtype,
            joined=not job.per_layer, progress=progress,
        )  # fmt: skip


def _compute_sharded(
    job: Job, plan: KernelPlan, mesh: Mesh, progress: Callable[[int, int], None] | None
) -> dict[str, Array | RowSharded]:
    functions = cached(compiled, job.apply_fn, job.variant(plan))
    with jax.default_matmul_precision("highest"):
        found = sharded_kernel(
            functions, plan, mesh, job.leaves, job.rows, job.columns, output=job.work.output,
            dtype=job.dtype, progress=progress,
        )  # fmt: skip
    return {name: kernel.simplest() for name, kernel in found.items()}
