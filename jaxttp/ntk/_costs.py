"""What a kernel costs by each method, and the cheapest form of each layer: counted from shapes.

The cost model counts floating-point operations; an elementwise pass over a kernel-sized array
counts as `_PASS` operations an entry, because memory sets its pace (measured on a CPU: an entry of
a fused multiply-add over a large array takes as long as about 32 operations of a matrix product).
Products of small matrices, of a sample with a block of rows, count `_SMALL` times: they run at a
lower rate. Counted once, layers would come so that take longer than by their gradients (3 x 3
convolutions of ResNet-18 on 8 x 8 pixels).
"""

import dataclasses
import math

from jaxttp._core.xla_cpu.steps import ProgramStep
from jaxttp.ntk._products import SIZES, goes_by_rows, is_halved, rows_at_once, turns_of
from jaxttp.ntk._program import NetworkProgram
from jaxttp.ntk._sites import Site, by_pixels

_PASS = 32
_SMALL = 1.5
ONE_PIECE_BYTES = 1 << 30
"""Working memory of a kernel that one program may compute in one piece."""


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
    def is_repeated(self) -> bool:
        """Whether last layers alone are trained, so that the kernel is K ⊗ I_C."""
        heads = {leaf for site in self.sites if site.is_head for leaf in (site.leaf, site.bias)}
        return all(leaf in heads for leaf, wanted in enumerate(self.trainable) if wanted)

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
            waits = late and site.groups == 1 and outer_size(work, site) < work.classes * site.size
            forms[site.leaf] = "late gradient" if waits else "gradient"
    return forms


def outer_size(work: Workload, site: Site) -> int:
    """Numbers of a sample from which a site's gradients can be formed."""
    return site.input_size + work.classes * site.cotangent_size


def _activation_cost(work: Workload, site: Site) -> float:
    pairs, pixels = work.n1 * work.n2, by_pixels(site)
    if goes_by_rows(site.positions, work.classes, work.output):
        return _by_rows_cost(work, site)
    if site.positions == 1 and site.groups == 1:
        share = _share_of_product(work, site.fan_out)
    else:
        turns = turns_of(
            site.positions, pairs * work.entries, is_own=work.symmetric, with_pixels=pixels
        )
        share = (turns + 1) / (2 * turns) if work.symmetric else 1.0
    once, similarity = 0.0, 2.0 * site.fan_in
    if site.kind == "embedding":
        similarity = 2.0
    elif pixels and site.windows is not None:
        taps = site.windows.shape[1]
        once, similarity = 2.0 * site.n_pixels**2 * site.fan_in / taps, float(_PASS + taps)
    products = 0 if site.is_head else 2 * work.class_pairs * site.fan_out
    each = similarity + products + _PASS * work.entries
    return pairs * site.groups * (once + share * site.positions**2 * each)


def _by_rows_cost(work: Workload, site: Site) -> float:
    """Of all outputs, sample after sample against blocks of rows."""
    rows = rows_at_once(work.n1, site.positions, site.fan_out)
    share = 0.5 * (1 + rows / work.n1) if work.symmetric else 1.0
    similarity = 2.0 * site.positions**2 * (1 if site.kind == "embedding" else site.fan_in)
    if by_pixels(site) and site.windows is not None:  # of pixels, and their sums over taps
        taps = site.windows.shape[1]
        similarity = 2.0 * site.n_pixels**2 * site.fan_in / taps + site.positions**2 * 2.0 * taps
    c, size = work.classes, site.positions * site.fan_out
    each = similarity + 2.0 * c * size * (site.positions + c)
    return work.n1 * work.n2 * (_SMALL * share * site.groups * each + _PASS * work.entries)


def _gradient_cost(work: Workload, site: Site) -> float:
    forming = 2 * work.samples * work.classes * site.size * site.positions
    if site.kind == "embedding":  # a scatter into a table of zeros
        forming = _PASS * work.samples * work.classes * site.size
    return forming + _product_cost(work, site.size)


def _product_cost(work: Workload, size: int) -> float:
    each = 2 * work.class_pairs * size + _PASS * work.entries
    return work.n1 * work.n2 * _share_of_product(work, size) * each


def _share_of_product(work: Workload, size: int) -> float:
    """How much of a product of gradients of so many numbers is computed."""
    if not work.symmetric or work.output == "diagonal":
        return 1.0
    rows, columns = (1, size * work.classes) if work.output == "trace" else (work.classes, size)
    # A square exists three times, so larger ones are in blocks, of which half are computed.
    in_blocks = 3 * work.n1 * work.n2 * work.entries * work.itemsize > ONE_PIECE_BYTES
    if in_blocks or is_halved(work.n1 * rows, columns):
        return SIZES.half
    return 1.0


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
