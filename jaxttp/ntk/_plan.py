"""Which method, which form for each layer, how many samples at a time: decided before any work.

The cost model counts floating-point operations; an elementwise pass over a kernel-sized array
counts as `_PASS` operations an entry, because memory sets its pace (measured on a CPU: an entry of
a fused multiply-add over a large array takes as long as about 32 operations of a matrix product).
The memory model counts live arrays; `_HEADROOM` covers what XLA keeps beside them.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxttp._checks import check_integer
from jaxttp._result import RESULT
from jaxttp.ntk._late import PIECE
from jaxttp.ntk._program import NetworkProgram, ProgramStep
from jaxttp.ntk._sites import Site

_PASS = 32
_HEADROOM = 1.35
_CHUNK_BYTES = 512 << 20
_ONE_PIECE_BYTES = 1 << 30
_COMPILER_BYTES = 256 << 20
_DEFAULT_WORK_BYTES = 4 << 30
_KEPT_ROWS = 64
_LATE_ROWS = 96
STRIPS = 2  # upper-triangle strips of a square block: 3/4 of the work of a full one


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
        bytes: estimated peak, the result included.
        max_bytes: the bound that was kept, None for the default working space.
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

    plot, _repr_html_, __repr__ = RESULT

    def __str__(self) -> str:
        costs = ", ".join(f"{name} {flops:.2e}" for name, flops in self.flops.items())
        once = ", all features kept" if self.kept else ""
        blocks = f"{self.rows} rows x {self.columns} columns, {self.chunk} samples at a time"
        lines = [
            f"kernel by {self.method}: {self.reason}",
            f"operations: {costs}",
            f"blocks: {blocks}{once}",
            f"memory: about {_readable(self.bytes)}, kernel {_readable(self.kernel_bytes)}",
        ]
        width = max((len(path) for path in self.forms), default=0)
        lines += [f"  {path:<{width}}  {form}" for path, form in self.forms.items()]
        return "\n".join(lines)


def _readable(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """What is asked: a program, its sites and the shapes.

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
        alone: whether one device computes all of it, so that gradients may wait for products.
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
    def pairs(self) -> float:
        """Pairs of samples to compute."""
        if self.symmetric:
            return self.n1 * self.n2 * (STRIPS + 1) / (2 * STRIPS)
        return self.n1 * self.n2

    @property
    def samples(self) -> int:
        """Samples to differentiate once."""
        return self.n1 if self.symmetric else self.n1 + self.n2

    @property
    def forward(self) -> float:
        """Estimated operations of one sample's way forward."""
        return sum(_step_flops(step) for step in self.program.steps)

    @property
    def class_pairs(self) -> int:
        """Pairs of classes to compute for a pair of samples."""
        return self.classes**2 if self.output == "full" else self.classes

    @property
    def entries(self) -> int:
        """Entries of the kernel for a pair of samples."""
        return {"full": self.classes**2, "diagonal": self.classes, "trace": 1}[self.output]

    def leaf_size(self, leaf: int) -> int:
        """The number of parameters of a leaf."""
        return math.prod(self.program.avals[self.program.parameters[leaf]].shape)

    @property
    def size(self) -> int:
        """The number of trainable parameters."""
        return sum(self.leaf_size(leaf) for leaf, wanted in enumerate(self.trainable) if wanted)


def choose_forms(work: Workload, method: str, *, late: bool = False) -> dict[int, str]:
    """The cheapest form for each trainable leaf; all direct for the plain Jacobian.

    With `late` gradients wait wherever what they are made of is smaller.
    """
    forms = {leaf: "direct" for leaf, wanted in enumerate(work.trainable) if wanted}
    if method != "layerwise":
        return forms
    for site in work.sites:
        activation, gradient = _activation_cost(work, site), _gradient_cost(work, site)
        if activation <= gradient:
            forms[site.leaf] = "activation"
            if site.bias is not None:
                forms[site.bias] = "with weight"
        elif site.kind != "embedding":
            waits = late and site.groups == 1 and _outer_size(work, site) < work.classes * site.size
            forms[site.leaf] = "late gradient" if waits else "gradient"
    return forms


def _outer_size(work: Workload, site: Site) -> int:
    """Numbers of a sample from which a site's gradients can be formed."""
    return site.input_size + work.classes * site.cotangent_size


def _activation_cost(work: Workload, site: Site) -> float:
    similarity = 2 if site.kind == "embedding" else 2 * site.fan_in
    per_pair = similarity + 2 * work.class_pairs * site.fan_out + _PASS * work.entries
    return work.pairs * site.groups * site.positions**2 * per_pair


def _gradient_cost(work: Workload, site: Site) -> float:
    forming = 2 * work.samples * work.classes * site.size * site.positions
    if site.kind == "embedding":  # a scatter into a table of zeros
        forming = _PASS * work.samples * work.classes * site.size
    return forming + _product_cost(work, site.size)


def _product_cost(work: Workload, size: int) -> float:
    return work.pairs * (2 * work.class_pairs * size + _PASS * work.entries)


def method_costs(work: Workload) -> dict[str, float]:
    """Estimated operations of each method."""
    forward, c = work.forward, work.classes
    sites = {site.leaf: site for site in work.sites}
    layerwise = work.samples * forward * (1 + c)
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
    products += half * work.n1 * work.n2 * work.entries * _PASS
    # A column's weight tangent is read and written once for each block of rows.
    products += work.n2 * c * work.size * _PASS
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
            inner += step.params.get("length", 1) * sum(_step_flops(one) for one in steps)
    return inner + out


def make_plan(
    work: Workload,
    method: str,
    batch_size: int | None,
    max_bytes: int | None,
    layers: int,
) -> KernelPlan:
    """The plan that `empirical_ntk` carries out.

    Raises:
        ValueError: `max_bytes` cannot be kept; the message states the least that can.
    """
    costs = method_costs(work)
    method, reason = _choose_method(work, method, costs)
    forms = choose_forms(work, method)
    memory = _Memory.of(work, method, forms, layers)
    bound = max_bytes if max_bytes is not None else memory.result + _DEFAULT_WORK_BYTES
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
        kernel_bytes=memory.result,
        bytes=memory.total(*blocks),
        max_bytes=max_bytes,
    )


def _late_plan(
    work: Workload, method: str, layers: int, bound: int
) -> "tuple[dict[int, str], _Memory, Blocks] | None":
    """Forms, memory and blocks with gradients that wait, if any do and there is room."""
    forms = choose_forms(work, method, late=True)
    if "late gradient" not in forms.values():
        return None
    memory = _Memory.of(work, method, forms, layers)
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


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, or 1."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _spare(bound: int) -> int:
    """A bound without what the compiler takes."""
    return bound - min(_COMPILER_BYTES, bound // 8)


def _even(total: int, most: int) -> int:
    """The size of blocks of at most `most` that overlap least."""
    return math.ceil(total / math.ceil(total / max(1, min(most, total))))


class Blocks(NamedTuple):
    """How a kernel is cut, see `KernelPlan`."""

    rows: int
    columns: int
    chunk: int
    kept: bool = False


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Bytes: of the result, of a sample's features, of differentiating one sample.

    Of the features those in activation form are `copied` when tiles are made of them, and of those
    whose gradients wait one layer's at a time (`turned`).
    """

    work: Workload
    method: str
    result: int
    per_sample: int
    copied: int
    transient: int
    entry: int
    turned: int = 0

    @classmethod
    def of(cls, work: Workload, method: str, forms: Mapping[int, str], layers: int) -> "_Memory":
        program, c = work.program, work.classes
        width = max(program.avals[program.output].dtype.itemsize, 4)
        entry = work.entries * work.itemsize * layers
        outputs = [
            math.prod(var.aval.shape) * getattr(var.aval.dtype, "itemsize", 4)
            for step in program.steps
            for var in step.equation.outvars
            if hasattr(var.aval, "shape")
        ]
        forward, largest = sum(outputs), max(outputs, default=0)
        sites = {site.leaf: site for site in work.sites}
        per_sample, copied, patches, waiting, turned = 0, 0, 0, 0, 0
        for leaf, form in forms.items():
            if form in ("direct", "gradient"):
                per_sample += c * work.leaf_size(leaf)
            if form == "gradient":
                patches = max(patches, sites[leaf].input_size)
            if form == "activation":
                copied += _outer_size(work, sites[leaf])
            if form == "late gradient":
                waiting += _outer_size(work, sites[leaf])
                turned = max(turned, c * sites[leaf].input_size + c * sites[leaf].cotangent_size)
        per_sample += copied + waiting
        # All values of the forward pass, a few cotangents, patches of a layer, and the features
        # twice: as they arise and in the block that is copied to its place.
        transient = forward + 4 * c * largest + width * (patches + 7 * per_sample // 4)
        if method == "vector_product":
            per_sample, transient = forward // width, 2 * c * work.size * width
        return cls(
            work, method, work.n1 * work.n2 * entry, width * per_sample, width * copied,
            int(transient), entry, width * turned,
        )  # fmt: skip

    def total(self, rows: int, columns: int, chunk: int, kept: bool = False) -> int:
        """Estimated peak for these blocks."""
        work = self.work
        # A square block exists three times: as strips, as the strips joined, and mirrored.
        side = rows * (rows if work.symmetric else columns) * self.entry
        if self.method == "vector_product":
            # Every column takes a tangent of the weights and a forward pass over all rows with it.
            live = 2 * columns * work.classes * rows * self.per_sample + columns * self.transient
            return int(self.result + _HEADROOM * (3 * side + live))
        if self.turned:
            held = work.n1 if kept else rows + columns
            scratch = 5.0 * side + 2.0 * (rows + columns) * (self.copied + self.turned)
            forward = self.transient * chunk
            pieces = 4.0 * PIECE * max(self.work.itemsize, 4)
            features = 1.15 * self.per_sample * held
            return int(self.result + features + _HEADROOM * (scratch + pieces + forward))
        if kept:
            scratch = 5.0 * rows * rows * self.entry + 2.0 * rows * self.copied
            features = 1.15 * self.per_sample * work.n1  # in blocks that are never copied whole
            return int(self.result + features + _HEADROOM * (scratch + self.transient * chunk))
        if chunk >= max(work.n1, work.n2):
            # Strips of the features are copied, those of all layers at once.
            copies = 3.5 if work.symmetric else 2.0
            scratch, features = 3.0 * side, copies * self.per_sample * max(work.n1, work.n2)
        elif work.symmetric and rows == work.n1:
            scratch, features = 3.0 * side, 3.5 * self.per_sample * rows
        else:
            scratch = 2.0 * rows * columns * self.entry
            scratch += 3.0 * rows * rows * self.entry if work.symmetric else 0.0
            features = self.per_sample * (rows + columns)
        forward = self.transient * max(chunk, columns)
        return int(self.result + _HEADROOM * (scratch + features + forward))

    def in_one_piece(self, bound: int) -> bool:
        """Whether one program can compute it all."""
        work = self.work
        total = self.total(work.n1, work.n2, max(work.n1, work.n2))
        return total <= _spare(bound) and total - self.result <= _ONE_PIECE_BYTES

    def _chunk(self, bound: int) -> int:
        """Samples differentiated at a time: with a quarter of the space."""
        least = self.total(1, 1, 1)
        spare = min((bound - least) / 4, _CHUNK_BYTES)
        most = min(self.work.n1, self.work.n2)
        return _largest(most, lambda q: self.total(1, q, q) - least <= spare)

    def fit_late(self, bound: int) -> "Blocks | None":
        """The blocks with gradients that wait, None where they would be formed too often."""
        work, bound = self.work, _spare(bound)
        chunk = self._chunk(bound)
        side = _even(work.n1, _LATE_ROWS)
        if work.symmetric and self.total(side, side, min(chunk, side), kept=True) <= bound:
            return Blocks(side, side, min(side, _even(side, chunk)), kept=True)
        rows = _largest(work.n1, lambda r: self.total(r, min(r, work.n2), chunk) <= bound)
        rows = _even(work.n1, rows)
        columns = _even(work.n2, min(rows, _LATE_ROWS))
        few = min(rows, columns) < min(_LATE_ROWS // 8, work.n1, work.n2)
        blocks = Blocks(rows, columns, min(chunk, rows, columns))
        return None if few or self.total(*blocks) > bound else blocks

    def fit(self, bound: int, *, strict: bool) -> Blocks:
        """The largest blocks within `bound` bytes."""
        work = self.work
        if self.in_one_piece(bound):
            return Blocks(work.n1, work.n2, max(work.n1, work.n2))
        asked, bound = bound, _spare(bound)
        if self.method == "vector_product":
            wanted = min(bound, self.result + _ONE_PIECE_BYTES)
            size = _largest(max(work.n1, work.n2), lambda b: self.total(b, b, b) <= wanted)
            blocks = Blocks(min(size, work.n1), min(size, work.n2), size)
        else:
            # Differentiating and streaming get at most a quarter of the space.
            chunk = self._chunk(bound)
            rows = _largest(work.n1, lambda r: self.total(r, min(chunk, r), min(chunk, r)) <= bound)
            rows = _even(work.n1, rows)
            if work.symmetric and rows < work.n1:
                side = _even(work.n1, _KEPT_ROWS)
                blocks = Blocks(side, side, min(side, _even(side, chunk)), kept=True)
                if self.total(*blocks) <= bound:
                    return blocks
            chunk = min(rows, _even(rows, chunk))
            blocks = Blocks(rows, min(chunk, work.n2), chunk)
        if self.total(*blocks) <= bound or not strict:
            return blocks
        least = self.total(1, 1, 1)
        least += min(_COMPILER_BYTES, least // 7 + 1)
        raise ValueError(
            f"max_bytes={asked} is too little: one sample against one sample needs about "
            f"{least} bytes ({_readable(least)}), of which the result takes {self.result} "
            f"({_readable(self.result)}). Give at least that, or ask for output='trace'."
        )
