"""How many samples at a time fit into memory, and how a kernel is cut into blocks accordingly.

The memory model counts live arrays; `_HEADROOM` covers what XLA keeps beside them.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxttp.ntk._costs import ONE_PIECE_BYTES, Workload, outer_size
from jaxttp.ntk._late import PIECE
from jaxttp.ntk._pairs import goes_by_rows
from jaxttp.ntk._sites import by_pixels

_HEADROOM = 1.35
_CHUNK_BYTES = 512 << 20
_COMPILER_BYTES = 256 << 20
KEPT_ROWS = 64
_LATE_ROWS = 192


class TooLittle(ValueError):
    """A bound on memory in which no kernel of these shapes can be computed."""


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
        part = 0 if work.outputs is None else work.n1 * work.n2 * entry
        return cls(
            work, method, work.bytes(layers) + part, width * per_sample, width * copied,
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
            pieces = 4.0 * PIECE * max(self.work.itemsize, 4)
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
            scratch += 3.0 * rows * rows * (self.entry + self.pixels) if work.symmetric else 0.0
            features = self.per_sample * (rows + columns)
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

    def fit_late(self, bound: int) -> "Blocks | None":
        """The blocks with gradients that wait, None where they would be formed too often."""
        work, bound = self.work, _spare(bound)
        chunk = self._chunk(bound)
        for most in (_LATE_ROWS, _LATE_ROWS // 2):
            side = _even(work.n1, most)
            if work.symmetric and self.total(side, side, min(chunk, side), kept=True) <= bound:
                return Blocks(side, side, min(side, _even(side, chunk)), kept=True)
        rows = largest(work.n1, lambda r: self.total(r, min(r, work.n2), chunk) <= bound)
        rows = _even(work.n1, rows)
        columns = _even(work.n2, min(rows, _LATE_ROWS // 2))
        few = min(rows, columns) < min(_LATE_ROWS // 16, work.n1, work.n2)
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
                side = _even(work.n1, KEPT_ROWS)
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
            f"{least} bytes ({readable(least)}), of which the result takes {self.result} "
            f"({readable(self.result)}). Give at least that, ask for output='trace', "
            f"{self._sketch_that_fits(asked)}or multiply by a square kernel without "
            "forming it (ntk_operator)."
        )

    def _sketch_that_fits(self, bound: int) -> str:
        """The widest sketch, a power of two, of which two copies and one sample's work fit."""
        rows = self.work.samples * self.work.classes
        width = (bound - self.transient) // (2 * rows * self.work.itemsize)
        if width < 1:
            return ""
        width = 1 << (min(width, rows).bit_length() - 1)
        size = readable(rows * width * self.work.itemsize)
        return f"sketch it (sketch_jacobian or Sketched with dim={width}: {size}), "


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
