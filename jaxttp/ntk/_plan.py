"""Which method, which form for each layer, how many samples at a time: decided before any work.

Operations are counted by `jaxttp.ntk._workload`. The memory model counts live arrays; `_HEADROOM`
covers what XLA keeps beside them.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxttp._checks import check_integer
from jaxttp._result import RESULT
from jaxttp.ntk._workload import Workload, choose_forms, method_costs

_HEADROOM = 1.35
_CHUNK_BYTES = 512 << 20
_ONE_PIECE_BYTES = 1 << 30
_COMPILER_BYTES = 256 << 20
_DEFAULT_WORK_BYTES = 4 << 30
_KEPT_ROWS = 64


@dataclasses.dataclass(frozen=True)
class KernelPlan:
    """How a kernel will be computed, and why; `print` shows it readably.

    Attributes:
        method: "layerwise", "jacobian" or "vector_product".
        reason: why that method.
        forms: by parameter path, "activation" (no weight gradient is formed), "gradient" (formed
            from patches), "direct" (ordinary per-sample differentiation), "with weight" (a bias
            served by its layer's own products).
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
        host_bytes: samples and parameters as they were given, and tiles on their way to a disk.
        tile: samples on a side of a tile of `store_kernel`, of which the blocks are; None for none.
        tiles: how many are computed.
        disk_bytes: that the store will take.
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
    host_bytes: int = 0
    tile: int | None = None
    tiles: int = 0
    disk_bytes: int = 0

    plot, _repr_html_, __repr__ = RESULT

    def __str__(self) -> str:
        costs = ", ".join(f"{name} {flops:.2e}" for name, flops in self.flops.items())
        once = ", all features kept" if self.kept else ""
        blocks = f"{self.rows} rows x {self.columns} columns, {self.chunk} samples at a time"
        each = f" on each of {self.devices} devices" if self.devices > 1 else ""
        what = "kernel" if self.tile is None and self.devices == 1 else "its part of the kernel"
        lines = [
            f"kernel by {self.method}: {self.reason}",
            f"operations: {costs}",
            f"blocks: {blocks}{once}",
            f"memory: about {_readable(self.bytes)}{each}, {what} {_readable(self.kernel_bytes)}; "
            f"{_readable(self.host_bytes)} on the host",
        ]
        if self.tile is not None:
            lines.append(
                f"store: {_readable(self.disk_bytes)}, {self.tiles} tiles of {self.tile} samples "
                "a side to compute"
            )
        width = max((len(path) for path in self.forms), default=0)
        lines += [f"  {path:<{width}}  {form}" for path, form in self.forms.items()]
        return "\n".join(lines)


class TooLittle(ValueError):
    """A bound on memory in which no kernel of these shapes can be computed."""


def _readable(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


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
    memory = Memory.of(work, method, forms, layers)
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
        bound = max_bytes if max_bytes is not None else memory.result + _DEFAULT_WORK_BYTES
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
class Memory:
    """Bytes: of the result, of a sample's features, of differentiating one sample.

    Of the features those in activation form are `copied` when tiles are made of them.
    """

    work: Workload
    method: str
    result: int
    per_sample: int
    copied: int
    transient: int
    entry: int

    @classmethod
    def of(cls, work: Workload, method: str, forms: Mapping[int, str], layers: int) -> "Memory":
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
        per_sample, copied, patches = 0, 0, 0
        for leaf, form in forms.items():
            if form in ("direct", "gradient"):
                per_sample += c * work.leaf_size(leaf)
            if form == "gradient":
                patches = max(patches, sites[leaf].input_size)
            if form == "activation":
                copied += sites[leaf].input_size + c * sites[leaf].cotangent_size
        per_sample += copied
        # All values of the forward pass, a few cotangents, patches of a layer, and the features
        # twice: as they arise and in the block that is copied to its place.
        transient = forward + 4 * c * largest + width * (patches + 7 * per_sample // 4)
        if method == "vector_product":
            per_sample, transient = forward // width, 2 * c * work.size * width
        return cls(
            work, method, work.n1 * work.n2 * entry, width * per_sample, width * copied,
            int(transient), entry,
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

    def fit(self, bound: int, *, strict: bool) -> Blocks:
        """The largest blocks within `bound` bytes."""
        work = self.work
        asked, bound = bound, bound - min(_COMPILER_BYTES, bound // 8)
        one_piece = Blocks(work.n1, work.n2, max(work.n1, work.n2))
        live = self.total(*one_piece) - self.result
        if self.total(*one_piece) <= bound and live <= _ONE_PIECE_BYTES:
            return one_piece
        if self.method == "vector_product":
            wanted = min(bound, self.result + _ONE_PIECE_BYTES)
            size = _largest(max(work.n1, work.n2), lambda b: self.total(b, b, b) <= wanted)
            blocks = Blocks(min(size, work.n1), min(size, work.n2), size)
        else:
            # Differentiating and streaming get at most a quarter of the space.
            least = self.total(1, 1, 1)
            spare = min((bound - least) / 4, _CHUNK_BYTES)
            chunk = _largest(min(work.n1, work.n2), lambda q: self.total(1, q, q) - least <= spare)
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
        raise TooLittle(
            f"max_bytes={asked} is too little: one sample against one sample needs about "
            f"{least} bytes ({_readable(least)}), of which the result takes {self.result} "
            f"({_readable(self.result)}). Give at least that, or ask for output='trace'."
        )
