"""The plan of a kernel: its method, the form of each layer, how many samples at a time.

Operations are counted from shapes, and the fewest decide. An elementwise pass over a kernel-sized
array counts as `Rates.elementwise` operations an entry, because it is bound by memory. Products of
small matrices, of a sample with a block of rows, count `Rates.small` times: they run at a lower
rate. Without this factor, 3 x 3 convolutions of ResNet-18 on 8 x 8 pixels would take the activation
form, which is slower there than the gradient form.

The memory model counts live arrays; `Rates.headroom` covers XLA's temporaries.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
from jaxtyping import Array

from jaxttp._core.checks import check_integer, is_concrete
from jaxttp._core.process import host_memory
from jaxttp._core.results import RESULT
from jaxttp._core.xla_cpu.steps import ProgramStep
from jaxttp.ntk._products import SIZES, goes_by_rows, rows_at_once
from jaxttp.ntk._program import NetworkProgram
from jaxttp.ntk._sites import Site


@dataclasses.dataclass(frozen=True)
class Rates:
    """Measured costs of operations and memory, on two cores of a CPU.

    Attributes:
        elementwise: operations of a matrix product that take as long as an entry of a fused
            multiply-add over a large array.
        small: how many times longer products of small matrices take.
        headroom: of peaks measured on CPUs and GPUs over those counted.
        unblocked: bytes of working memory of a kernel that is computed without blocks, at most.
        work: bytes of working memory where no bound is given.
        differentiated: bytes, at most, of the samples differentiated at a time.
        compiler: bytes that the compiler takes, at most.
        sides: rows of a square block whose features are kept: larger blocks leave a CPU's cache,
            products of smaller ones are slow.
        few: rows of a block from which on deferred gradients are not formed too often.
    """

    elementwise: float = 32
    small: float = 1.5
    headroom: float = 1.35
    unblocked: int = 1 << 30
    work: int = 4 << 30
    differentiated: int = 512 << 20
    compiler: int = 256 << 20
    sides: tuple[int, ...] = (192, 64)
    few: int = 12


RATES = Rates()


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """A traced network, its sites and the shapes of a kernel.

    Attributes:
        program: the single-sample network.
        sites: from `find_sites`.
        paths: the path of each leaf.
        trainable: which leaves count.
        n1: rows of the kernel, in samples.
        n2: columns of the kernel, in samples.
        symmetric: whether x2 is x1.
        output: "full", "trace" or "diagonal".
        itemsize: bytes of a number of the kernel.
        alone: whether one device computes all of it, so that gradients may be deferred.
    """

    program: NetworkProgram
    sites: tuple[Site, ...]
    paths: tuple[str, ...]
    trainable: tuple[bool, ...]
    n1: int
    n2: int
    symmetric: bool
    output: str
    itemsize: int
    alone: bool = True

    @property
    def classes(self) -> int:
        """The number of outputs, C."""
        return self.program.outputs

    @property
    def trained(self) -> list[int]:
        """The trainable leaves."""
        return [leaf for leaf, is_trained in enumerate(self.trainable) if is_trained]

    @property
    def is_repeated(self) -> bool:
        """Whether last layers alone are trained, so that the kernel is K ⊗ I_C."""
        heads = {leaf for site in self.sites if site.is_head for leaf in (site.leaf, site.bias)}
        return heads.issuperset(self.trained)

    @property
    def samples(self) -> int:
        """Samples to differentiate once."""
        return self.n1 if self.symmetric else self.n1 + self.n2

    @property
    def forward(self) -> float:
        """Estimated operations of one sample's forward pass."""
        return sum(_step_flops(step) for step in self.program.steps)

    @property
    def class_pairs(self) -> int:
        """Pairs of classes to compute for a pair of samples."""
        return self.classes**2 if self.output == "full" else self.classes

    @property
    def entries(self) -> int:
        """Entries of the kernel for a pair of samples."""
        return {"full": self.classes**2, "diagonal": self.classes, "trace": 1}[self.output]

    @property
    def bytes(self) -> int:
        """The size of the kernel."""
        return self.n1 * self.n2 * self.entries * self.itemsize

    def leaf_size(self, leaf: int) -> int:
        """The number of parameters of a leaf."""
        return math.prod(self.program.avals[self.program.parameters[leaf]].shape)

    @property
    def size(self) -> int:
        """The number of trainable parameters."""
        return sum(map(self.leaf_size, self.trained))


def choose_forms(work: Workload, method: str, *, late: bool = False) -> dict[int, str]:
    """The cheapest form for each trainable leaf; all direct for the plain Jacobian.

    With `late`, gradients are deferred wherever their factors are smaller.
    """
    forms = dict.fromkeys(work.trained, "direct")
    if method != "layerwise":
        return forms
    for site in work.sites:
        activation, gradient = _activation_cost(work, site), _gradient_cost(work, site)
        if activation <= gradient:
            forms[site.leaf] = "activation"
            if site.bias is not None:
                forms[site.bias] = "with weight"
        elif site.kind != "embedding":
            is_smaller = outer_size(work, site) < work.classes * site.size
            is_late = late and site.groups == 1 and is_smaller
            forms[site.leaf] = "late gradient" if is_late else "gradient"
    return forms


def outer_size(work: Workload, site: Site) -> int:
    """Numbers of a sample from which a site's gradients can be formed."""
    return site.input_size + work.classes * site.cotangent_size


def _activation_cost(work: Workload, site: Site) -> float:
    pairs, c = work.n1 * work.n2, work.classes
    rowwise = goes_by_rows(site.positions, c, work.output)
    if site.positions == 1 and site.groups == 1:
        fraction = _fraction_of_product(work)
    elif rowwise:
        fraction = 0.5 * (1 + rows_at_once(work.n1, site.positions, site.fan_out) / work.n1)
    else:
        fraction = (site.positions + 1) / (2 * site.positions)
    fraction = fraction if work.symmetric else 1.0
    similarity = 2.0 if site.kind == "embedding" else 2.0 * site.fan_in
    if rowwise:  # sample after sample against blocks of rows
        products = 2.0 * c * site.fan_out * (1 + c / site.positions)
        per_pair = site.groups * site.positions**2 * (similarity + products)
        return pairs * (RATES.small * fraction * per_pair + RATES.elementwise * work.entries)
    products = 0 if site.is_head else 2 * work.class_pairs * site.fan_out
    per_position = similarity + products + RATES.elementwise * work.entries
    return pairs * site.groups * fraction * site.positions**2 * per_position


def _gradient_cost(work: Workload, site: Site) -> float:
    forming = 2 * work.samples * work.classes * site.size * site.positions
    if site.kind == "embedding":  # a scatter into a table of zeros
        forming = RATES.elementwise * work.samples * work.classes * site.size
    return forming + _product_cost(work, site.size)


def _product_cost(work: Workload, size: int) -> float:
    per_pair = 2 * work.class_pairs * size + RATES.elementwise * work.entries
    return work.n1 * work.n2 * _fraction_of_product(work) * per_pair


def _fraction_of_product(work: Workload) -> float:
    """How much of a product of gradients is computed."""
    return SIZES.half if work.symmetric and work.output != "diagonal" else 1.0


def method_costs(work: Workload) -> dict[str, float]:
    """Estimated operations of each method."""
    forward, c = work.forward, work.classes
    sites = {site.leaf: site for site in work.sites}
    layerwise = work.samples * forward * (1 + c * (not work.is_repeated))
    for leaf, form in choose_forms(work, "layerwise").items():
        size = work.leaf_size(leaf)
        if form == "direct":
            layerwise += work.samples * c * size + _product_cost(work, size)
        elif form != "with weight":
            cost = _activation_cost if form == "activation" else _gradient_cost
            layerwise += cost(work, sites[leaf])
    jacobian = work.samples * forward * (1 + 2 * c) + _product_cost(work, work.size)
    half = 0.5 if work.symmetric else 1.0
    products = half * work.n1 * work.n2 * c * 2 * forward + 3 * work.n2 * c * forward
    products += half * work.n1 * work.n2 * work.entries * RATES.elementwise
    # A column's weight tangent is read and written once for each block of rows.
    products += work.n2 * c * work.size * RATES.elementwise
    return {"layerwise": layerwise, "jacobian": jacobian, "vector_product": products}


def _step_flops(step: ProgramStep) -> float:
    out = math.prod(step.equation.outvars[0].aval.shape) if step.equation.outvars else 0
    if step.name == "dot_general":
        (contracting, _), _ = step.params["dimension_numbers"]
        return 2.0 * out * math.prod(step.shape(0)[axis] for axis in contracting)
    if step.name == "conv_general_dilated":
        spec = step.params["dimension_numbers"].rhs_spec
        return 2.0 * out * math.prod(step.shape(1)) / step.shape(1)[spec[0]]
    inner = 0.0
    for value in step.params.values():
        body = getattr(value, "jaxpr", None)
        if body is not None and hasattr(body, "eqns"):
            steps = [ProgramStep(eqn, (), ()) for eqn in body.eqns]
            inner += step.params.get("length", 1) * sum(map(_step_flops, steps))
    return inner + out


class Blocks(NamedTuple):
    """How a kernel is cut, see `KernelPlan`."""

    rows: int
    columns: int
    chunk: int
    kept: bool = False


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes: of the result, of a sample's features, of differentiating one sample.

    Features in activation form are `copied` for the products of a tile, and so are those of
    deferred gradients, of one layer at a time (`copied_late`).
    """

    work: Workload
    method: str
    result: int
    per_sample: int
    copied: int
    transient: int
    entry: int
    copied_late: int

    @classmethod
    def of(cls, work: Workload, method: str, forms: Mapping[int, str]) -> "Memory":
        network, c = work.program, work.classes
        width = max(network.avals[network.output].dtype.itemsize, 4)
        entry = work.entries * work.itemsize
        outputs = [
            math.prod(var.aval.shape) * getattr(var.aval.dtype, "itemsize", 4)
            for step in network.steps
            for var in step.equation.outvars
            if hasattr(var.aval, "shape")
        ]
        forward, largest = sum(outputs), max(outputs, default=0)
        sites = {site.leaf: site for site in work.sites}
        per_sample, copied, patches, deferred, copied_late = 0, 0, 0, 0, 0
        for leaf, form in forms.items():
            if form in ("direct", "gradient"):
                per_sample += c * work.leaf_size(leaf)
            if form == "gradient":
                patches = max(patches, sites[leaf].input_size)
            if form == "activation":
                site = sites[leaf]
                copied += site.compared_size + c * site.cotangent_size * (not site.is_head)
            if form == "late gradient":
                site = sites[leaf]
                deferred += outer_size(work, site)
                copied_late = max(copied_late, c * (site.input_size + site.cotangent_size))
        per_sample += copied + deferred
        # All values of the forward pass, a few cotangents, patches of a layer, and the features
        # twice: as they are computed, and in the block that they are copied to.
        backward = 0 if method == "layerwise" and work.is_repeated else 4 * c * largest
        transient = forward + backward + width * (patches + 7 * per_sample // 4)
        if method == "vector_product":
            per_sample, transient = forward // width, 2 * c * work.size * width
        return cls(
            work, method, work.bytes, width * per_sample, width * copied,
            int(transient), entry, width * copied_late,
        )  # fmt: skip

    def total(self, rows: int, columns: int, chunk: int, kept: bool = False) -> int:
        """Estimated peak for these blocks; features that are copied as strips count twice."""
        work = self.work
        side = rows * (rows if work.symmetric else columns) * self.entry
        if self.method == "vector_product":
            # Every column takes a tangent of the weights and a forward pass over all rows with it.
            live = 2 * columns * work.classes * rows * self.per_sample + columns * self.transient
            return int(self.result + RATES.headroom * (3 * side + live))
        if chunk >= max(work.n1, work.n2) and not self.copied_late:
            copies = 3.5 if work.symmetric else 2.0  # a square: as strips, joined, and mirrored
            features = RATES.headroom * copies * self.per_sample * max(work.n1, work.n2)
            scratch = 3.0 * side
        else:
            features = 1.15 * self.per_sample * (work.n1 if kept else rows + columns)
            scratch = 5.0 * side + (rows + columns) * (self.copied + self.copied_late)
            if self.copied_late:
                scratch += 4.0 * SIZES.chunk * max(work.itemsize, 4)
        return int(self.result + features + RATES.headroom * (scratch + self.transient * chunk))

    def fits_unblocked(self, bound: int) -> bool:
        """Whether one compiled function can compute the whole kernel."""
        work = self.work
        total = self.total(work.n1, work.n2, max(work.n1, work.n2))
        return total <= _spare(bound) and total - self.result <= RATES.unblocked

    def fit(self, max_bytes: int, *, strict: bool) -> Blocks:
        """The largest blocks within a bound.

        Raises:
            ValueError: not even one sample against one fits, and the bound is `strict`.
        """
        work, bound = self.work, _spare(max_bytes)
        if self.fits_unblocked(max_bytes):
            return Blocks(work.n1, work.n2, max(work.n1, work.n2))
        if self.method == "vector_product":
            most = min(bound, self.result + RATES.unblocked)
            size = largest(max(work.n1, work.n2), lambda b: self.total(b, b, b) <= most)
            blocks = Blocks(min(size, work.n1), min(size, work.n2), size)
        else:
            blocks = self.features_in_blocks(bound)
        if strict and self.total(*blocks) > bound:
            least = self.total(1, 1, 1)
            least += min(RATES.compiler, least // 7 + 1)
            raise ValueError(self._too_little(max_bytes, least))
        return blocks

    def features_in_blocks(self, bound: int) -> Blocks:
        """With all features kept where a symmetric kernel has room for them; else streamed.

        Differentiating gets a quarter of the space.
        """
        work, least = self.work, self.total(1, 1, 1)
        spare = min((bound - least) / 4, RATES.differentiated)
        most = min(work.n1, work.n2)
        chunk = largest(most, lambda q: self.total(1, 1, q) - least <= spare)
        for most in RATES.sides if work.symmetric else ():
            side = _even(work.n1, most)
            blocks = Blocks(side, side, min(side, _even(side, chunk)), kept=True)
            if self.total(*blocks) <= bound:
                return blocks
        width = RATES.sides[0] // 2

        def streamed(rows: int) -> Blocks:
            columns = _even(work.n2, min(rows, width))
            return Blocks(rows, columns, min(chunk, rows, columns))

        rows = largest(work.n1, lambda rows: self.total(*streamed(rows)) <= bound)
        return streamed(_even(work.n1, rows))

    def _too_little(self, bound: int, least: int) -> str:
        """The message for a bound that is too small, with what would fit."""
        work = self.work
        rows = work.samples * work.classes
        width = int(bound - self.transient) // (2 * rows * work.itemsize)
        sketch = ""
        if width >= 1:  # the widest, a power of two, of which two copies and a sample's work fit
            width = 1 << (min(width, rows).bit_length() - 1)
            size = readable(rows * width * work.itemsize)
            sketch = f"sketch it (sketch_jacobian or Sketched with dim={width}: {size}), "
        trace = "" if work.output == "trace" else "ask for output='trace', "
        return (
            f"max_bytes={bound} is too little: output={work.output!r} of N1 = {work.n1:,}, N2 = "
            f"{work.n2:,} samples and C = {work.classes:,} outputs takes {self.result} bytes "
            f"({readable(self.result)}), and about {least} ({readable(least)}) with the work on "
            f"one sample against one. Give at least that, {trace}{sketch}or multiply by a square "
            "kernel without forming it (ntk_operator). Without "
            "max_bytes the memory there is bounds it."
        )


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, or 1."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _spare(bound: int) -> int:
    """A bound without the memory of the compiler."""
    return bound - min(RATES.compiler, bound // 8)


def _even(total: int, most: int) -> int:
    """The size of blocks, at most `most`, that overlap least."""
    return math.ceil(total / math.ceil(total / max(1, min(most, total))))


def readable(size: float) -> str:
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} GiB"


@dataclasses.dataclass(frozen=True)
class KernelPlan:
    """How a kernel will be computed, and why; `print` shows it readably.

    Attributes:
        method: "layerwise", "jacobian" or "vector_product".
        reason: why that method.
        forms: by parameter path, "activation" (no weight gradient is formed), "gradient" (formed
            from patches), "late gradient" (formed again in every product, some columns at a time),
            "direct" (ordinary per-sample differentiation), "with weight" (a bias, part of its
            layer's products).
        rows: samples of x1 whose features stay in memory at a time.
        columns: samples of x2 whose features are computed against them at a time, and dropped.
        chunk: samples differentiated at a time.
        kept: whether the features of all samples stay in memory, so that each is differentiated
            once; else those of the columns are computed again for every block of rows.
        flops: estimated floating-point operations of each method that was considered.
        forward: the same of one sample's forward pass.
        kernel_bytes: size of the result.
        bytes: estimated peak, the result included; on a mesh that of one device, and of its rows.
        max_bytes: the bound that was kept, None for the default working space.
        devices: the number of devices among which the rows are divided.
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

    plot, _repr_html_, __repr__ = RESULT

    def __str__(self) -> str:
        costs = ", ".join(f"{name} {flops:.2e}" for name, flops in self.flops.items())
        once = ", all features kept" if self.kept else ""
        blocks = f"{self.rows} rows x {self.columns} columns, {self.chunk} samples at a time"
        where = f" on each of {self.devices} devices" if self.devices > 1 else ""
        what = "kernel" if self.devices == 1 else "its part of the kernel"
        text = [
            f"kernel by {self.method}: {self.reason}",
            f"operations: {costs}",
            f"blocks: {blocks}{once}",
            f"memory: about {readable(self.bytes)}{where}, {what} {readable(self.kernel_bytes)}",
        ]
        width = max((len(path) for path in self.forms), default=0)
        text += [f"  {path:<{width}}  {form}" for path, form in self.forms.items()]
        return "\n".join(text)


def make_plan(
    work: Workload, method: str, batch_size: int | None, max_bytes: int | None
) -> KernelPlan:
    """The plan that `empirical_ntk` carries out.

    Raises:
        ValueError: `max_bytes` cannot be kept; the message states the least that can.
    """
    bound = work.bytes + RATES.work if max_bytes is None else max_bytes
    costs = method_costs(work)
    method, reason = _choose_method(work, method, costs)
    forms = choose_forms(work, method)
    memory = Memory.of(work, method, forms)
    if batch_size is not None:
        size = check_integer("batch_size", batch_size, at_least=1)
        blocks = Blocks(min(size, work.n1), min(size, work.n2), size)
        needed = memory.total(*blocks)
        if max_bytes is not None and needed > max_bytes:
            raise ValueError(
                f"max_bytes={max_bytes} does not hold batch_size={batch_size}, which needs about "
                f"{needed} bytes; leave batch_size out, and it follows from max_bytes."
            )
    else:
        may_defer = work.alone and not memory.fits_unblocked(bound)
        late = _with_late_gradients(work, method, bound) if may_defer else None
        if late is not None:
            forms, memory, blocks = late
        else:
            blocks = memory.fit(bound, strict=max_bytes is not None)
    return KernelPlan(
        method=method,
        reason=reason,
        forms={work.paths[leaf]: form for leaf, form in forms.items()},
        **blocks._asdict(),
        flops=costs,
        forward=work.forward,
        kernel_bytes=work.bytes,
        bytes=memory.total(*blocks),
        max_bytes=max_bytes,
    )


def _with_late_gradients(
    work: Workload, method: str, bound: int
) -> tuple[dict[int, str], Memory, Blocks] | None:
    """Forms, memory and blocks with deferred gradients, if there are any and they fit."""
    forms = choose_forms(work, method, late=True)
    if "late gradient" not in forms.values():
        return None
    memory = Memory.of(work, method, forms)
    blocks = memory.features_in_blocks(_spare(bound))
    # With few rows they would be formed too often.
    few = not blocks.kept and blocks.rows < min(RATES.few, work.n1)
    return None if few or memory.total(*blocks) > _spare(bound) else (forms, memory, blocks)


def _choose_method(work: Workload, method: str, costs: Mapping[str, float]) -> tuple[str, str]:
    if method != "auto":
        return method, "asked for"
    if set(choose_forms(work, "layerwise").values()) == {"direct"}:
        costs = {name: cost for name, cost in costs.items() if name != "layerwise"}
    best, second = sorted(costs, key=lambda name: costs[name])[:2]
    ratio = costs[second] / max(costs[best], 1.0)
    return best, f"the fewest operations, {ratio:.1f}x fewer than {second}"


def room_on(devices: Iterable[Any]) -> int | None:
    """Bytes that fit on these devices together; None where that is not known of one.

    Args:
        devices: of JAX. Those without memory statistics, such as CPUs, share the host's memory, or
            as much of it as a control group allows.
    """
    stats = [_stats(device).get("bytes_limit") for device in set(devices)]
    host = host_memory().get("MemTotal")
    if None in stats and host is None:
        return None
    of_host = 0 if host is None or None not in stats else int(host * 2**30)
    return of_host + sum(limit for limit in stats if limit is not None)


def devices_of(arrays: Iterable[Any]) -> set[Any]:
    """Where a computation with these arrays runs: on their devices, or where JAX puts new ones."""
    used = [a.devices() for a in arrays if isinstance(a, Array) and is_concrete(a)]
    default: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    default = default if isinstance(default, jax.Device) else jax.local_devices(backend=default)[0]
    return set().union(*used) or {default}


def _stats(device: Any) -> dict[str, int]:
    try:
        return device.memory_stats() or {}
    except (RuntimeError, NotImplementedError):  # of another process, or of a backend without them
        return {}
