"""Sites: the steps of a network at which the layerwise method separates parameters from data.

A parameter is a *site* parameter when it reaches the data at exactly one step, through a chain
that only rearranges or rescales it (reshape, transpose, cast, ...), and when that step has a rule:

    dense      dot_general(data, W)                out[b, s, o] = sum_k x[b, s, k] W[b, k, o]
    conv       conv_general_dilated(data, W)       the same, x being patches and b the groups
    embedding  gather(W, tokens)                   the same, x being one-hot tokens

Then its gradient is dW[b, k, o] = sum_s x[b, s, k] g[b, s, o] with g the cotangent of the step's
output. Every other parameter (bias, scale, tied weight, weight inside a scan, softmax of a weight,
...) is *direct*: differentiated per sample by `jax.vjp`, which is right for anything.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp._core.xla_cpu.steps import ProgramStep, patches
from jaxttp.ntk._program import NetworkProgram

_CONSTANT, _PARAMETER, _DATA = range(3)  # results of two kinds are of the larger kind
_ADDING = ("add", "add_any")
_REARRANGING = ("reshape", "squeeze", "expand_dims", "transpose", "rev", "copy", "broadcast_in_dim")


class _WeightView(NamedTuple):
    """A slot that holds `scale` times the entries of a leaf, each once, in some order."""

    leaf: int
    scale: float


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """A step whose parameter gradient is a sum over positions of outer products.

    Attributes:
        kind: "dense", "conv" or "embedding".
        leaf: index of the parameter leaf.
        bias: index of the leaf that is added to the output of a one-position dense site: its
            cotangent is the site's own. None if there is none.
        step: index of the step.
        operand: position of the data among the step's inputs, and
        weight: that of the weight.
        groups: b, the number of independent groups.
        positions: s, the number of tokens or pixels that share the weight.
        fan_in: k, entries of x at a position; for an embedding the size of the table.
        fan_out: o, entries of g at a position.
        scale: the factor between the leaf and what the step uses.
        inputs: data operand -> x (groups, positions, fan_in); tokens (groups, positions).
        cotangents: cotangent of the step's output -> g (groups, positions, fan_out).
        layout: weight -> (groups, fan_in, fan_out).
        pixels: of a convolution with windows, data operand -> its pixels (groups, p, channels).
        windows: of a convolution whose patches share few pixels: the pixel under each tap
            (positions, taps), counted from 1, 0 for none. None for other sites.
        is_head: whether the network's outputs are those of this dense step, each once, up to added
            terms: the cotangents of the step's output are unit vectors then.
    """

    kind: str
    leaf: int
    bias: int | None
    step: int
    operand: int
    weight: int
    groups: int
    positions: int
    fan_in: int
    fan_out: int
    scale: float
    inputs: Callable[[Array], Array]
    cotangents: Callable[[Array, Array], Array]
    layout: Callable[[Array], Array]
    pixels: Callable[[Array], Array] | None = None
    windows: np.ndarray | None = None
    is_head: bool = False

    @property
    def size(self) -> int:
        """The number of parameters of the leaf."""
        return self.groups * self.fan_in * self.fan_out

    @property
    def input_size(self) -> int:
        """Entries of x per sample."""
        per_position = 1 if self.kind == "embedding" else self.fan_in
        return self.groups * self.positions * per_position

    @property
    def compared_size(self) -> int:
        """Entries kept of x per sample for products with the x of other samples."""
        if self.windows is None:
            return self.input_size
        return self.windows.max() * self.fan_in // self.windows.shape[1]

    @property
    def cotangent_size(self) -> int:
        """Entries of g per sample and class."""
        return self.groups * self.positions * self.fan_out


def find_sites(network: NetworkProgram, trainable: Sequence[bool]) -> tuple[Site, ...]:
    """The sites of a network, in the order of its steps."""
    kinds, leaves, views = _classify(network, trainable)
    uses: dict[int, list[tuple[int, int]]] = {}
    for index, step in enumerate(network.steps):
        if not any(slot is not None and kinds[slot] == _DATA for slot in step.inputs):
            continue
        for position, slot in enumerate(step.inputs):
            for leaf in leaves.get(slot, ()) if slot is not None else ():
                uses.setdefault(leaf, []).append((index, position))
    for leaf in leaves.get(network.output, ()):
        uses.setdefault(leaf, []).append((-1, 0))

    sites = []
    for leaf, steps in uses.items():
        index, position = steps[0]
        if len(steps) != 1 or index < 0:
            continue
        step = network.steps[index]
        view = views.get(step.inputs[position])  # type: ignore[arg-type]
        rule = _RULES.get(step.name)
        if view is None or rule is None:
            continue
        data = [slot is not None and kinds[slot] == _DATA for slot in step.inputs]
        site = rule(step, index, position, data, leaf, view.scale)
        size = math.prod(network.avals[network.parameters[leaf]].shape)
        if site is not None and site.size == size:
            sites.append(site)
    sites.sort(key=lambda site: site.step)
    return tuple(
        dataclasses.replace(_with_bias(network, site, uses, views), is_head=_is_head(network, site))
        for site in sites
    )


def _classify(
    network: NetworkProgram, trainable: Sequence[bool]
) -> tuple[dict[int, int], dict[int, frozenset[int]], dict[int, _WeightView]]:
    """For each slot: constant, parameter or data; the leaves behind it; whether it is a view."""
    kinds: dict[int, int] = dict.fromkeys((*network.constants, *network.literals), _CONSTANT)
    leaves: dict[int, frozenset[int]] = {}
    views: dict[int, _WeightView] = {}
    kinds.update(dict.fromkeys(network.inputs, _DATA))
    for leaf, slot in enumerate(network.parameters):
        kinds[slot] = _PARAMETER if trainable[leaf] else _CONSTANT
        if trainable[leaf]:
            leaves[slot] = frozenset({leaf})
            views[slot] = _WeightView(leaf, 1.0)
    for step in network.steps:
        slots = [slot for slot in step.inputs if slot is not None]
        kind = max((kinds[slot] for slot in slots), default=_CONSTANT)
        outputs = [slot for slot in step.outputs if slot is not None]
        kinds.update(dict.fromkeys(outputs, kind))
        if kind != _PARAMETER:
            continue
        behind = frozenset().union(*(leaves.get(slot, frozenset()) for slot in slots))
        leaves.update(dict.fromkeys(outputs, behind))
        view = _view_through(network, step, views)
        if view is not None:
            views[outputs[0]] = view
    return kinds, leaves, views


def _view_through(
    network: NetworkProgram, step: ProgramStep, views: dict[int, _WeightView]
) -> _WeightView | None:
    """The view after a step that only rearranges, casts or rescales the view before it."""
    slots = [slot for slot in step.inputs if slot is not None]
    if len(slots) != 1 or slots[0] not in views or len(step.outputs) != 1:
        return None
    view = views[slots[0]]
    before, after = network.avals[slots[0]], step.equation.outvars[0].aval
    if step.name in _REARRANGING:
        return view if math.prod(before.shape) == math.prod(after.shape) else None
    if step.name == "convert_element_type":
        return view if jnp.issubdtype(after.dtype, jnp.floating) else None
    if step.name == "neg":
        return _WeightView(view.leaf, -view.scale)
    if step.name in ("mul", "div"):
        position = 0 if step.inputs[0] is None else 1
        factor = step.literal(position)
        if factor is None or jnp.ndim(factor) != 0 or (step.name == "div" and position == 0):
            return None
        factor = float(factor)
        return _WeightView(view.leaf, view.scale * (factor if step.name == "mul" else 1.0 / factor))
    return None


def _dense_site(
    step: ProgramStep, index: int, position: int, data: Sequence[bool], leaf: int, scale: float
) -> Site | None:
    operand = 1 - position
    if not data[operand]:
        return None
    contracting, batch = step.params["dimension_numbers"]
    shape, weight = step.shape(operand), step.shape(position)
    inner, groups = tuple(contracting[operand]), tuple(batch[operand])
    free = tuple(axis for axis in range(len(shape)) if axis not in inner + groups)
    weight_inner, weight_groups = tuple(contracting[position]), tuple(batch[position])
    outer = tuple(axis for axis in range(len(weight)) if axis not in weight_inner + weight_groups)
    n_groups = math.prod(shape[axis] for axis in groups)
    positions = math.prod(shape[axis] for axis in free)
    fan_in = math.prod(shape[axis] for axis in inner)
    fan_out = math.prod(weight[axis] for axis in outer)

    def inputs(value: Array) -> Array:
        return value.transpose(groups + free + inner).reshape(n_groups, positions, fan_in)

    def cotangents(g: Array, _: Array) -> Array:
        if operand == 0:
            return g.reshape(n_groups, positions, fan_out)
        return g.reshape(n_groups, fan_out, positions).swapaxes(1, 2)

    def layout(value: Array) -> Array:
        axes = weight_groups + weight_inner + outer
        return value.transpose(axes).reshape(n_groups, fan_in, fan_out)

    return Site(
        "dense", leaf, None, index, operand, position, n_groups, positions, fan_in, fan_out, scale,
        inputs, cotangents, layout,
    )  # fmt: skip


def _conv_site(
    step: ProgramStep, index: int, position: int, data: Sequence[bool], leaf: int, scale: float
) -> Site | None:
    if position != 1 or not data[0] or step.params["batch_group_count"] != 1:
        return None
    params, groups = step.params, step.params["feature_group_count"]
    left, right, result = params["dimension_numbers"]
    shape, kernel = step.shape(0), step.shape(1)
    out = tuple(step.equation.outvars[0].aval.shape)
    batch, channels = shape[left[0]], shape[left[1]]
    counts = tuple(out[axis] for axis in result[2:])
    window = tuple(kernel[axis] for axis in right[2:])
    to_last = (left[0], *left[2:], left[1])
    out_to_last = (result[0], *result[2:], result[1])
    positions = batch * math.prod(counts)
    taps = math.prod(window)
    fan_in = taps * (channels // groups)
    fan_out = out[result[1]] // groups

    def inputs(value: Array) -> Array:
        by_tap = patches(value.transpose(to_last), window, counts, params)
        by_tap = [part.reshape(positions, groups, channels // groups) for part in by_tap]
        return jnp.concatenate(by_tap, axis=-1).swapaxes(0, 1)

    def cotangents(g: Array, _: Array) -> Array:
        g = g.transpose(out_to_last).reshape(positions, groups, fan_out)
        return g.swapaxes(0, 1)

    def layout(value: Array) -> Array:
        value = value.transpose(right[0], *right[2:], right[1])
        return value.reshape(groups, fan_out, fan_in).swapaxes(1, 2)

    def pixels(value: Array) -> Array:
        return value.transpose(to_last).reshape(1, -1, channels)

    size, windows = tuple(shape[axis] for axis in left[2:]), None
    few = taps > 1 and 2 * math.prod(size) ** 2 < positions**2 * taps
    if few and batch == groups == 1 and min(map(min, params["padding"])) >= 0:
        windows = _windows(size, window, params)
    return Site(
        "conv", leaf, None, index, 0, 1, groups, positions, fan_in, fan_out, scale,
        inputs, cotangents, layout, pixels, windows,
    )  # fmt: skip


def _windows(
    size: tuple[int, ...], window: tuple[int, ...], params: Mapping[str, Any]
) -> np.ndarray:
    """The pixel, counted from 1, under each tap at each position (positions, taps); 0 for none."""
    input_dilation, dilation = params["lhs_dilation"], params["rhs_dilation"]
    low, high = np.transpose(params["padding"])
    end = low + (np.array(size) - 1) * input_dilation + 1
    image = np.zeros(end + high, np.int32)
    indices = 1 + np.arange(math.prod(size)).reshape(size)
    image[tuple(map(slice, low, end, input_dilation))] = indices
    extent = (np.array(window) - 1) * dilation + 1
    views = np.lib.stride_tricks.sliding_window_view(image, extent)
    views = views[tuple(slice(None, None, step) for step in (*params["window_strides"], *dilation))]
    return views.reshape(-1, math.prod(window))


def _embedding_site(
    step: ProgramStep, index: int, position: int, data: Sequence[bool], leaf: int, scale: float
) -> Site | None:
    """A table (V, d...) indexed along its first axis; other gathers have no rule.

    A token outside the table has the gradient that reverse differentiation gives it: that of the
    nearest row where the mode is "clip", none otherwise (nor where the mode promises that there is
    no such token, although the network's outputs are then those of the nearest row).
    """
    axes, sizes = step.params["dimension_numbers"], tuple(step.params["slice_sizes"])
    table: Any = step.shape(0)
    tokens = step.shape(1)
    out_rank = len(step.equation.outvars[0].aval.shape)
    offsets = tuple(range(out_rank - len(table) + 1, out_rank))
    plain = (
        position == 0
        and data[1]
        and len(table) >= 2
        and tuple(axes.collapsed_slice_dims) == tuple(axes.start_index_map) == (0,)
        and not axes.operand_batching_dims
        and tuple(axes.offset_dims) == offsets
        and sizes == (1, *table[1:])
        and tuple(tokens[-1:]) == (1,)
    )
    if not plain:
        return None
    rows, width, positions = table[0], math.prod(table[1:]), math.prod(tokens)
    clip = step.params["mode"] == jax.lax.GatherScatterMode.CLIP

    def inputs(value: Array) -> Array:
        value = value.reshape(1, positions)
        return jnp.clip(value, 0, rows - 1) if clip else value

    def cotangents(g: Array, value: Array) -> Array:
        g = g.reshape(1, positions, width)
        value = value.reshape(1, positions, 1)
        return g if clip else jnp.where((value >= 0) & (value < rows), g, 0)

    return Site(
        "embedding", leaf, None, index, 1, 0, 1, positions, rows, width, scale,
        inputs, cotangents, lambda value: value.reshape(1, rows, width),
    )  # fmt: skip


_RULES: dict[str, Callable[..., Site | None]] = {
    "dot_general": _dense_site,
    "conv_general_dilated": _conv_site,
    "gather": _embedding_site,
}


def _with_bias(
    network: NetworkProgram,
    site: Site,
    uses: dict[int, list[tuple[int, int]]],
    views: dict[int, _WeightView],
) -> Site:
    """Add the bias of a dense site, where the output has no other reader than the sum with it.

    With one position the bias has the cotangent of the site's output, so (x xT + 1) * (g gT) is the
    kernel of both.
    """
    if site.kind != "dense" or site.positions != 1 or site.groups != 1 or site.scale != 1.0:
        return site
    output: Any = network.steps[site.step].outputs[0]
    size = math.prod(network.avals[output].shape)
    while True:
        adder = _only_reader(network, output)
        if adder is None or output == network.output:
            return site
        is_rearranged = math.prod(adder.equation.outvars[0].aval.shape) == size
        if adder.name not in _REARRANGING or not is_rearranged:
            break
        output = adder.outputs[0]
    if adder.name not in _ADDING or adder.inputs.count(output) != 1:
        return site
    added: Any = adder.inputs[1 - adder.inputs.index(output)]
    view = views.get(added)
    if view is None or view.scale != 1.0 or len(uses[view.leaf]) != 1:
        return site
    same_shape = network.avals[added].shape == network.avals[output].shape
    return dataclasses.replace(site, bias=view.leaf) if same_shape else site


def _only_reader(network: NetworkProgram, slot: int) -> ProgramStep | None:
    """The step that reads a slot; None where there is none or several."""
    readers = [step for step in network.steps if slot in step.inputs]
    return readers[0] if len(readers) == 1 else None


def _is_head(network: NetworkProgram, site: Site) -> bool:
    """Whether the cotangents of a dense site with one position are unit vectors."""
    if site.kind != "dense" or site.positions != 1 or site.groups != 1:
        return False
    slot: Any = network.steps[site.step].outputs[0]
    while slot != network.output:
        reader = _only_reader(network, slot)
        if reader is None or not _passes_on(reader, slot):
            return False
        slot = reader.outputs[0]
    return True


def _passes_on(step: ProgramStep, slot: int) -> bool:
    """Whether a step returns the entries of a slot, or some of them, each once and unchanged."""
    if step.inputs.count(slot) != 1:
        return False
    if step.name in ("slice", "dynamic_slice"):
        return step.inputs[0] == slot
    after = step.equation.outvars[0].aval
    same_size = math.prod(after.shape) == math.prod(step.shape(step.inputs.index(slot)))
    is_real = jnp.issubdtype(after.dtype, jnp.floating)
    return same_size and is_real and step.name in (*_REARRANGING, *_ADDING, "convert_element_type")
