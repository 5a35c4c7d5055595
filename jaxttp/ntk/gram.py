"""The empirical neural tangent kernel, Θ = J Jᵀ: one entrance, the method chosen by cost.

    Θ[n, c, m, d] = <df_c(x1_n)/dw, df_d(x2_m)/dw>

The plan (method, form of each layer, block sizes) is made first, from shapes alone; see
`ntk_plan`. A kernel that fits into memory is computed by one compiled function. A larger one is cut
into blocks of rows whose features are kept, against which blocks of columns are streamed. Only the
upper triangle of a symmetric kernel is computed.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from jaxttp._core.checks import check_choice, check_finite
from jaxttp._core.traced import network_of
from jaxttp._core.types import ApplyFn, Params, count, leaf_paths, leaf_shapes, select_leaves
from jaxttp.adapters.inputs import check_network, check_samples, traced_outputs
from jaxttp.adapters.outputs import check_gradients, check_per_sample
from jaxttp.ntk._compiled import Variant, by_blocks, compiled, dtype_of, structure
from jaxttp.ntk._plan import KernelPlan, Workload, devices_of, make_plan, room_on
from jaxttp.ntk._program import trace
from jaxttp.ntk._sites import find_sites
from jaxttp.ntk.sharded import several, sharded_kernel

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
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """The kernel Θ(x1, x2) of any network, exact to rounding.

        Θ[n, c, m, d] = sum_w df_c(x1_n)/dw df_d(x2_m)/dw

    It is symmetric to the last bit and positive semi-definite up to rounding when x2 is left out,
    and does not depend on `batch_size` beyond rounding. Matrix products run at the highest
    precision.

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
        max_bytes: bound on the peak memory, the result included; None for 4 GiB beside the result,
            or less where there is less.
        mesh: a `jax.sharding.Mesh` over whose devices the rows are sharded, parameters being on
            all of them; None for one device. `max_bytes` is then that of one device. Where the
            devices do not divide N1 each has the whole result.
        progress: called with (pairs of samples done, pairs in all) after every tile.

    Returns:
        The kernel.

    Raises:
        ValueError: an unknown option, x1 and x2 that do not match, values or gradients that are
            not finite, nothing trainable, outputs that are not (N, C) or depend on other samples, a
            kernel that the memory there is does not hold (what fits is named), or a `max_bytes`
            that cannot be kept (the least that can is stated).

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
    x1, x2 = _as_samples("x1", x1), _as_samples("x2", x2)
    for name, value in (("params", params), ("x1", x1)):
        check_finite(name, value)
    _count_samples("x1", x1)
    check_per_sample(apply_fn, params, x1)
    kernel = kernel_of(
        apply_fn, params, x1, x2, output=output, method=method, trainable=trainable,
        batch_size=batch_size, max_bytes=max_bytes, mesh=mesh, progress=progress,
    )  # fmt: skip
    mask = select_leaves(params, trainable)
    for name, samples in (("x1", x1), ("x2", x2)):
        if samples is not None:
            check_gradients(apply_fn, params, samples, kernel, trainable=mask, name=name)
    return kernel


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
    sums: str = "float32",
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """`empirical_ntk` of a network whose outputs are known to be of one sample each.

    Sums and result are of the dtype `sums`, or of the network's where that is wider; "float64"
    needs no global switch.
    """
    devices = several(mesh)
    check_network(apply_fn, params)
    for name, value in (("params", params), ("x1", x1), ("x2", x2)):
        check_finite(name, value)
    job = Job.of(apply_fn, params, x1, x2, output, method, trainable, sums)
    plan = job.plan_on(devices, method, batch_size, max_bytes)
    if max_bytes is None:
        plan = _within_memory(job, plan, devices, method, batch_size)
    if devices is None:
        return _compute(job, plan, progress)
    with jax.default_matmul_precision("highest"):
        return sharded_kernel(
            compiled(job.work.program, job.variant(plan)), plan, devices, job.leaves, job.rows,
            job.columns, output=job.work.output, dtype=job.dtype, progress=progress,
        )  # fmt: skip


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
) -> KernelPlan:
    """The plan of `empirical_ntk` with the same arguments; only shapes are used.

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

    Returns:
        The plan; printing it explains it.

    Raises:
        ValueError: a `max_bytes` that cannot be kept (the least that can is stated).

    Example:
        >>> import jax.numpy as jnp
        >>> plan = ntk_plan(lambda p, x: x @ p, jnp.ones((300, 10)), jnp.ones((64, 300)))
        >>> plan.method, plan.rows
        ('layerwise', 64)
    """
    job = Job.of(apply_fn, params, x1, x2, output, method, trainable)
    return job.plan_on(several(mesh), method, batch_size, max_bytes)


def _as_samples(name: str, x: Any) -> Any:
    """Mappings as dicts of arrays; shapes, arrays and other pytrees as they are."""
    leaves = jax.tree.leaves(x)
    if isinstance(x, Mapping) and not any(isinstance(a, jax.ShapeDtypeStruct) for a in leaves):
        return check_samples(name, x)
    return x


def _count_samples(name: str, x: Any) -> int:
    hint = " Make lists one array: np.asarray(x)." if isinstance(x, list | tuple) else ""
    shapes = leaf_shapes(x, name)
    if not shapes or any(not shape or shape[0] == 0 for shape in shapes.values()):
        listed = ", ".join(dict.fromkeys(map(str, shapes.values()))) or "no array"
        raise ValueError(f"{name} must be (N, ...) with at least one sample; got {listed}.{hint}")
    try:
        return count(x, name)
    except ValueError as problem:
        raise ValueError(f"{problem}{hint}") from None


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """Checked arguments; `leaves` are those of the parameters, then the arrays of the closure."""

    leaves: list[Any]
    rows: list[Any]
    columns: list[Any] | None
    work: Workload
    dtype: str

    @classmethod
    def of(
        cls,
        apply_fn: ApplyFn,
        params: Params,
        x1: Any,
        x2: Any = None,
        output: str = "full",
        method: str = "auto",
        trainable: Any = None,
        sums: str = "float32",
    ) -> "Job":
        """The arguments of `empirical_ntk`, checked."""
        check_choice("output", output, _OUTPUTS)
        check_choice("method", method, _METHODS)
        x1, x2 = _as_samples("x1", x1), _as_samples("x2", x2)
        n1 = _count_samples("x1", x1)
        n2 = n1 if x2 is None else _count_samples("x2", x2)
        rows, treedef = jax.tree.flatten(x1)
        columns = None if x2 is None else jax.tree.leaves(x2)
        row_shapes = [(jnp.shape(a)[1:], dtype_of(a)) for a in rows]
        if columns is not None:
            column_shapes = [(jnp.shape(a)[1:], dtype_of(a)) for a in columns]
            if jax.tree.structure(x2) != treedef or row_shapes != column_shapes:
                raise ValueError(
                    f"x2 must look like x1 but for its length; got {column_shapes}, x1 has "
                    f"{row_shapes}."
                )
        mask = select_leaves(params, trainable)
        sample = jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(*s) for s in row_shapes])
        try:
            with jax.default_matmul_precision("highest"):
                traced = network_of(apply_fn).once(trace, structure(params), sample)
        except Exception:
            traced_outputs(apply_fn, params, x1)  # raises in one line where the reason is known
            raise
        network = traced.program
        dtype = max(network.avals[network.output].dtype, jnp.dtype(sums), key=lambda d: d.itemsize)
        work = Workload(
            network, find_sites(network, mask), leaf_paths(params), mask, n1, n2, x2 is None,
            output, dtype.itemsize,
        )  # fmt: skip
        return cls([*jax.tree.leaves(params), *traced.constants], rows, columns, work, str(dtype))

    def plan_on(
        self, mesh: Mesh | None, method: str, batch_size: int | None, max_bytes: int | None
    ) -> KernelPlan:
        """The plan of one of the devices of a mesh: its rows against all columns."""
        work, devices = self.work, 1 if mesh is None else mesh.size
        if devices > 1:
            rows, columns = -(-work.n1 // devices), devices * -(-work.n2 // devices)
            work = dataclasses.replace(work, n1=rows, n2=columns, symmetric=False, alone=False)
        if method == "auto" and work.program.avals[work.program.output].dtype != self.dtype:
            method = "layerwise"  # vector products do not accumulate in a wider dtype
        plan = make_plan(work, method, batch_size, max_bytes)
        return dataclasses.replace(plan, devices=devices)

    def variant(self, plan: KernelPlan) -> Variant:
        """The static side of the compiled functions."""
        index = {path: leaf for leaf, path in enumerate(self.work.paths)}
        forms = tuple((index[path], form) for path, form in plan.forms.items())
        return Variant(self.work.trainable, forms, plan.method, self.work.output, self.dtype)


def workload(apply_fn: ApplyFn, params: Params, x: Any, trainable: Any = None) -> Workload:
    """The workload of a network's exact kernel with itself."""
    return Job.of(apply_fn, params, x, trainable=trainable).work


def _within_memory(
    job: Job, plan: KernelPlan, mesh: Mesh | None, method: str, batch_size: int | None
) -> KernelPlan:
    """The plan, or one with smaller blocks where the memory there is would not hold it.

    Raises:
        ValueError: it holds none.
    """
    arrays = [*job.leaves, *job.rows, *(job.columns or [])]
    room = room_on(devices_of(arrays) if mesh is None else mesh.local_devices[:1])
    if room is None or plan.bytes <= room:
        return plan
    smaller = job.plan_on(mesh, method, None, room)
    return smaller if batch_size is None else plan


def _compute(
    job: Job, plan: KernelPlan, progress: Callable[[int, int], None] | None = None
) -> Array:
    functions = compiled(job.work.program, job.variant(plan))
    leaves = [leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf) for leaf in job.leaves]
    x1 = [jnp.asarray(leaf) for leaf in job.rows]
    x2 = None if job.columns is None else [jnp.asarray(leaf) for leaf in job.columns]
    with jax.default_matmul_precision("highest"):
        # One compiled function would form all deferred gradients at once.
        is_deferred = "late gradient" in plan.forms.values()
        if plan.chunk >= max(job.work.n1, job.work.n2) and not is_deferred:
            return functions.whole(leaves, x1, x2)
        return by_blocks(
            functions, plan, leaves, x1, x2, output=job.work.output, dtype=job.dtype,
            progress=progress,
        )  # fmt: skip
