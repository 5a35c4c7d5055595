"""Which method, which form for each layer, how many samples at a time: decided before any work."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

from jaxttp._core.checks import check_integer
from jaxttp._core.results import RESULT
from jaxttp.ntk._costs import Workload, choose_forms, method_costs
from jaxttp.ntk._memory import Blocks, Memory, largest, readable

DEFAULT_WORK_BYTES = 4 << 30


@dataclasses.dataclass(frozen=True)
class KernelPlan:
    """How a kernel will be computed, and why; `print` shows it readably.

    Attributes:
        method: "layerwise", "jacobian" or "vector_product".
        reason: why that method.
        forms: by parameter path, "activation" (no weight gradient is formed), "gradient" (formed
            from patches), "late gradient" (formed anew in every product, some columns at a time),
            "direct" (ordinary per-sample differentiation), "with weight" (a bias served by its
            layer's own products).
        rows: samples of x1 whose features stay in memory at a time.
        columns: samples of x2 whose features are computed against them at a time, and dropped.
        chunk: samples differentiated at a time.
        kept: whether the features of all samples stay in memory, so that each is differentiated
            once; else those of the columns are computed anew for every block of rows.
        flops: estimated floating-point operations of each method that was considered.
        forward: the same of one sample's way forward through the network.
        kernel_bytes: size of the result.
        bytes: estimated peak, the result included; on a mesh that of one device, and of its rows.
        max_bytes: the bound that was kept, None for the default working space.
        devices: that share the rows.
        outputs: differentiated at a time, where the trace or the diagonal of all of them at once
            would not fit; None for all.
        host_bytes: samples and parameters as they were given.
    """

    method: str
    reason: str
    forms: Mapping[str, str]
    rows: int
    columns: int
    chunk: int
    kept: bool
    flops: Mapping[str, float]
    forward: float
    kernel_bytes: int
    bytes: int
    max_bytes: int | None
    devices: int = 1
    outputs: int | None = None
    host_bytes: int = 0

    plot, _repr_html_, __repr__ = RESULT

    def __str__(self) -> str:
        costs = ", ".join(f"{name} {flops:.2e}" for name, flops in self.flops.items())
        once = ", all features kept" if self.kept else ""
        once += f", {self.outputs} outputs at a time" if self.outputs else ""
        blocks = f"{self.rows} rows x {self.columns} columns, {self.chunk} samples at a time"
        each = f" on each of {self.devices} devices" if self.devices > 1 else ""
        what = "kernel" if self.devices == 1 else "its part of the kernel"
        lines = [
            f"kernel by {self.method}: {self.reason}",
            f"operations: {costs}",
            f"blocks: {blocks}{once}",
            f"memory: about {readable(self.bytes)}{each}, {what} {readable(self.kernel_bytes)}; "
            f"{readable(self.host_bytes)} on the host",
        ]
        width = max((len(path) for path in self.forms), default=0)
        lines += [f"  {path:<{width}}  {form}" for path, form in self.forms.items()]
        return "\n".join(lines)


def make_plan(
    work: Workload,
    method: str,
    batch_size: int | None,
    max_bytes: int | None,
    layers: int,
) -> KernelPlan:
    """The plan that `empirical_ntk` carries out.

    A trace or a diagonal that fits only so is computed some outputs at a time: as many as leave
    room for all samples at once, which share the way back through a last layer, or at least for
    each to be differentiated once.

    Raises:
        ValueError: `max_bytes` cannot be kept; the message states the least that can.
    """
    bound = work.bytes(layers) + DEFAULT_WORK_BYTES if max_bytes is None else max_bytes

    def plan(outputs: int | None) -> KernelPlan:
        some = dataclasses.replace(work, outputs=outputs)
        return _plan_together(some, method, batch_size, max_bytes, bound, layers)

    def fits(outputs: int | None, wanted: Callable[[KernelPlan], bool]) -> bool:
        try:
            made = plan(outputs)
        except ValueError:
            return False
        return made.bytes <= bound and wanted(made)

    orders: tuple[Callable[[KernelPlan], bool], ...] = (
        lambda made: made.chunk >= max(work.n1, work.n2),
        lambda made: made.kept or made.rows == work.n1,
        lambda made: True,
    )
    if work.output == "full" or not work.alone or work.classes == 1 or fits(None, orders[-1]):
        return plan(None)
    several = (largest(work.classes, functools.partial(fits, wanted=one)) for one in orders)
    found = (some for some, one in zip(several, orders, strict=True) if fits(some, one))
    return plan(next(found, 1))


def _plan_together(
    work: Workload,
    method: str,
    batch_size: int | None,
    max_bytes: int | None,
    bound: int,
    layers: int,
) -> KernelPlan:
    """The plan of so many outputs at a time as the workload says."""
    costs = method_costs(work)
    method, reason = _choose_method(work, method, costs)
    forms = choose_forms(work, method)
    memory = Memory.of(work, method, forms, layers)
    later = None
    if batch_size is None and work.alone and not memory.in_one_piece(bound):
        later = _late_plan(work, method, layers, bound)
    if later is not None:
        forms, memory, blocks = later
    elif batch_size is not None:
        size = check_integer("batch_size", batch_size, at_least=1)
        blocks = Blocks(min(size, work.n1), min(size, work.n2), size)
        needed = memory.total(*blocks)
        if max_bytes is not None and needed > max_bytes:
            raise ValueError(
                f"max_bytes={max_bytes} does not hold batch_size={batch_size}, which needs about "
                f"{needed} bytes; leave batch_size out, and it follows from max_bytes."
            )
    else:
        blocks = memory.fit(bound, strict=max_bytes is not None)
    return KernelPlan(
        method=method,
        reason=reason,
        forms={work.paths[leaf]: form for leaf, form in forms.items()},
        rows=blocks.rows,
        columns=blocks.columns,
        chunk=blocks.chunk,
        kept=blocks.kept,
        flops=costs,
        forward=work.forward,
        kernel_bytes=work.bytes(layers),
        bytes=memory.total(*blocks),
        max_bytes=max_bytes,
        outputs=work.outputs,
    )


def _late_plan(
    work: Workload, method: str, layers: int, bound: int
) -> "tuple[dict[int, str], Memory, Blocks] | None":
    """Forms, memory and blocks with gradients that wait, if any do and there is room."""
    forms = choose_forms(work, method, late=True)
    if "late gradient" not in forms.values():
        return None
    memory = Memory.of(work, method, forms, layers)
    blocks = memory.fit_late(bound)
    return None if blocks is None else (forms, memory, blocks)


def _choose_method(work: Workload, method: str, costs: Mapping[str, float]) -> tuple[str, str]:
    if method != "auto":
        return method, "asked for"
    if not any(form != "direct" for form in choose_forms(work, "layerwise").values()):
        costs = {name: cost for name, cost in costs.items() if name != "layerwise"}
    best = min(costs, key=lambda name: costs[name])
    rest = {name: cost for name, cost in costs.items() if name != best}
    second = min(rest, key=lambda name: rest[name])
    ratio = rest[second] / max(costs[best], 1.0)
    return best, f"the fewest operations, {ratio:.1f}x fewer than {second}"
