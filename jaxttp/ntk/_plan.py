"""Which method, which form for each layer, how many samples at a time: decided before any work.

The memory model counts live arrays; `_HEADROOM` covers what XLA keeps beside them.
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
from jaxttp.ntk._costs import ONE_PIECE_BYTES, Workload, choose_forms, method_costs, outer_size
from jaxttp.ntk._products import SIZES, goes_by_rows
from jaxttp.ntk._sites import by_pixels

_HEADROOM = 1.35  # of peaks measured on CPUs and GPUs over those counted
_CHUNK_BYTES = 512 << 20
_COMPILER_BYTES = 256 << 20


class Blocks(NamedTuple):
    """How a kernel is cut, see `KernelPlan`."""

    rows: int
    columns: int
    chunk: int
    kept: bool = False


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes: of the result, of a sample's features, of differentiating one sample.

    Of the features those in activation form are `copied` when tiles are made of them, and of those
    whose gradients wait one layer's at a time (`turned`). Products of the `pixels` of a convolution
    count for each pair of samples, unless they come sample after sample.
    """

    work: Workload
    method: str
    result: int
    per_sample: int
    copied: int
    transient: int
    entry: int
    turned: int = 0
    pixels: int = 0

    @classmethod
    def of(cls, work: Workload, method: str, forms: Mapping[int, str]) -> "Memory":
        program, c = work.program, work.classes
        width = max(program.avals[program.output].dtype.itemsize, 4)
        entry = work.entries * work.itemsize
        outputs = [
            math.prod(var.aval.shape) * getattr(var.aval.dtype, "itemsize", 4)
            for step in program.steps
            for var in step.equation.outvars
            if hasattr(var.aval, "shape")
        ]
        forward, largest = sum(outputs), max(outputs, default=0)
        sites = {site.leaf: site for site in work.sites}
        per_sample, copied, patches, waiting, turned, pixels = 0, 0, 0, 0, 0, 0
        for leaf, form in forms.items():
            if form in ("direct", "gradient"):
                per_sample += c * work.leaf_size(leaf)
            if form == "gradient":
                patches = max(patches, sites[leaf].input_size)
            if form == "activation":
                site = sites[leaf]
                copied += site.compared_size + c * site.cotangent_size * (not site.is_head)
                if by_pixels(site) and not goes_by_rows(site.positions, c, work.output):
                    pixels = max(pixels, site.groups * (site.n_pixels + 1) ** 2)
            if form == "late gradient":
                waiting += outer_size(work, sites[leaf])
                turned = max(turned, c * sites[leaf].input_size + c * sites[leaf].cotangent_size)
        per_sample += copied + waiting
        # All values of the forward pass, a few cotangents, patches of a layer, and the features
        # twice: as they arise and in the block that is copied to its place.
        backward = 0 if method == "layerwise" and work.is_repeated else 4 * c * largest
        transient = forward + backward + width * (patches + 7 * per_sample // 4)
        if method == "vector_product":
            per_sample, transient = forward // width, 2 * c * work.size * width
        return cls(
            work, method, work.bytes, width * per_sample, width * copied,
            int(transient), entry, width * turned, max(work.itemsize, 4) * pixels,
        )  # fmt: skip

    def total(self, rows: int, columns: int, chunk: int, kept: bool = False) -> int:
        """Estimated peak for these blocks."""
        work = self.work
        # A square block exists three times: as strips, as the strips joined, and mirrored.
        pairs = rows * (rows if work.symmetric else columns)
        side = pairs * (self.entry + self.pixels)
        if self.method == "vector_product":
            # Every column takes a tangent of the weights and a forward pass over all rows with it.
            live = 2 * columns * work.classes * rows * self.per_sample + columns * self.transient
            return int(self.result + _HEADROOM * (3 * side + live))
        if self.turned:
            held = work.n1 if kept else rows + columns
            scratch = 5.0 * side + 2.0 * (rows + columns) * (self.copied + self.turned)
            forward = self.transient * chunk
            pieces = 4.0 * SIZES.piece * max(self.work.itemsize, 4)
            features = 1.15 * self.per_sample * held
            return int(self.result + features + _HEADROOM * (scratch + pieces + forward))
        if kept:
            square = rows * rows * (5.0 * self.entry + 3.0 * self.pixels)
            scratch = square + 2.0 * rows * self.copied
            features = 1.15 * self.per_sample * work.n1  # in blocks that are never copied whole
            return int(self.result + features + _HEADROOM * (scratch + self.transient * chunk))
        if chunk >= max(work.n1, work.n2):
            # Strips of the features are copied, those of all layers at once.
            copies = 3.5 if work.symmetric else 2.0
            scratch, features = 3.0 * side, copies * self.per_sample * max(work.n1, work.n2)
        elif work.symmetric and rows == work.n1:
            scratch, features = 3.0 * side, 3.5 * self.per_sample * rows
        else:
            scratch = rows * columns * (2.0 * self.entry + 3.0 * self.pixels)
            features = self.per_sample * (rows + columns)
            if work.symmetric:
                scratch += 3.0 * rows * rows * (self.entry + self.pixels)
                features += self.copied * rows
        forward = self.transient * max(chunk, columns)
        return int(self.result + _HEADROOM * (scratch + features + forward))

    def in_one_piece(self, bound: int) -> bool:
        """Whether one program can compute it all."""
        work = self.work
        total = self.total(work.n1, work.n2, max(work.n1, work.n2))
        return total <= _spare(bound) and total - self.result <= ONE_PIECE_BYTES

    def _chunk(self, bound: int) -> int:
        """Samples differentiated at a time: with a quarter of the space."""
        least = self.total(1, 1, 1)
        spare = min((bound - least) / 4, _CHUNK_BYTES)
        most = min(self.work.n1, self.work.n2)
        return largest(most, lambda q: self.total(1, q, q) - least <= spare)

    def fit_late(self, bound: int, ideal: int = 192) -> "Blocks | None":
        """The blocks with gradients that wait, None where they would be formed too often.

        Args:
            bound: bytes.
            ideal: rows of a block, at best: with more of them pieces leave a CPU's cache.
        """
        work, bound = self.work, _spare(bound)
        chunk = self._chunk(bound)
        for most in (ideal, ideal // 2):
            side = _even(work.n1, most)
            if work.symmetric and self.total(side, side, min(chunk, side), kept=True) <= bound:
                return Blocks(side, side, min(side, _even(side, chunk)), kept=True)
        rows = largest(work.n1, lambda r: self.total(r, min(r, work.n2), chunk) <= bound)
        rows = _even(work.n1, rows)
        columns = _even(work.n2, min(rows, ideal // 2))
        few = min(rows, columns) < min(ideal // 16, work.n1, work.n2)
        blocks = Blocks(rows, columns, min(chunk, rows, columns))
        return None if few or self.total(*blocks) > bound else blocks

    def fit(self, bound: int, *, strict: bool) -> Blocks:
        """The largest blocks within `bound` bytes."""
        work = self.work
        if self.in_one_piece(bound):
            return Blocks(work.n1, work.n2, max(work.n1, work.n2))
        asked, bound = bound, _spare(bound)
        if self.method == "vector_product":
            wanted = min(bound, self.result + ONE_PIECE_BYTES)
            size = largest(max(work.n1, work.n2), lambda b: self.total(b, b, b) <= wanted)
            blocks = Blocks(min(size, work.n1), min(size, work.n2), size)
        else:
            # Differentiating and streaming get at most a quarter of the space.
            chunk = self._chunk(bound)
            rows = largest(work.n1, lambda r: self.total(r, min(chunk, r), min(chunk, r)) <= bound)
            rows = _even(work.n1, rows)
            if work.symmetric and rows < work.n1:
                side = _even(work.n1, 64)
                blocks = Blocks(side, side, min(side, _even(side, chunk)), kept=True)
                if self.total(*blocks) <= bound:
                    return blocks
            chunk = min(rows, _even(rows, chunk))
            blocks = Blocks(rows, min(chunk, work.n2), chunk)
        if self.total(*blocks) <= bound or not strict:
            return blocks
        least = self.total(1, 1, 1)
        least += min(_COMPILER_BYTES, least // 7 + 1)
        raise ValueError(self._too_little(asked, least))

    def _too_little(self, bound: int, least: int) -> str:
        """What does not fit, and what does."""
        work = self.work
        rows = work.samples * work.classes
        width = int(bound - self.transient) // (2 * rows * work.itemsize)
        sketch = ""
        if width >= 1:  # the widest, a power of two, of which two copies and a sample's work fit
            width = 1 << (min(width, rows).bit_length() - 1)
            size = readable(rows * width * work.itemsize)
            sketch = f"sketch it (sketch_jacobian or Sketched with dim={width}: {size}), "
        other = "" if work.output == "trace" else "ask for output='trace', "
        return (
            f"max_bytes={bound} is too little: output={work.output!r} of N1 = {work.n1:,}, N2 = "
            f"{work.n2:,} samples and C = {work.classes:,} outputs takes {self.result} bytes "
            f"({readable(self.result)}), and about {least} ({readable(least)}) with the work on "
            f"one sample against one. Give at least that, {other}{sketch}or multiply by a square "
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
    """A bound without what the compiler takes."""
    return bound - min(_COMPILER_BYTES, bound // 8)


def _even(total: int, most: int) -> int:
    """The size of blocks of at most `most` that overlap least."""
    return math.ceil(total / math.ceil(total / max(1, min(most, total))))


def readable(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


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
    host_bytes: int = 0

    plot, _repr_html_, __repr__ = RESULT

    def __str__(self) -> str:
        costs = ", ".join(f"{name} {flops:.2e}" for name, flops in self.flops.items())
        once = ", all features kept" if self.kept else ""
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
    work: Workload, method: str, batch_size: int | None, max_bytes: int | None
) -> KernelPlan:
    """The plan that `empirical_ntk` carries out.

    Raises:
        ValueError: `max_bytes` cannot be kept; the message states the least that can.
    """
    bound = work.bytes + DEFAULT_WORK_BYTES if max_bytes is None else max_bytes
    costs = method_costs(work)
    method, reason = _choose_method(work, method, costs)
    forms = choose_forms(work, method)
    memory = Memory.of(work, method, forms)
    later = None
    if batch_size is None and work.alone and not memory.in_one_piece(bound):
        later = _late_plan(work, method, bound)
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
        kernel_bytes=work.bytes,
        bytes=memory.total(*blocks),
        max_bytes=max_bytes,
    )


def _late_plan(
    work: Workload, method: str, bound: int
) -> "tuple[dict[int, str], Memory, Blocks] | None":
    """Forms, memory and blocks with gradients that wait, if any do and there is room."""
    forms = choose_forms(work, method, late=True)
    if "late gradient" not in forms.values():
        return None
    memory = Memory.of(work, method, forms)
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


def room_on(devices: Iterable[Any]) -> int | None:
    """Bytes that fit on these devices together; None where one of them does not say.

    Args:
        devices: of JAX. Those that count no memory of their own, as CPUs, have the host's, or of
            that as much as a control group allows.
    """
    stats = [_stats(device).get("bytes_limit") for device in set(devices)]
    host = host_memory().get("MemTotal")
    if None in stats and host is None:
        return None
    of_host = 0 if host is None or None not in stats else int(host * 2**30)
    return of_host + sum(limit for limit in stats if limit is not None)


def devices_of(arrays: Iterable[Any]) -> set[Any]:
    """Where a computation with these arrays runs: on their devices, or where JAX puts new ones."""
    there = [a.devices() for a in arrays if isinstance(a, Array) and is_concrete(a)]
    default: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    default = default if isinstance(default, jax.Device) else jax.local_devices(backend=default)[0]
    return set().union(*there) or {default}


def _stats(device: Any) -> dict[str, int]:
    try:
        return device.memory_stats() or {}
    except (RuntimeError, NotImplementedError):  # of another process, or of a backend without them
        return {}
