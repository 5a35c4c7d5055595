"""The CountSketch of a network's Jacobian, layer by layer: most gradients are never kept.

Every sample's inputs and cotangents of all layers come from one way forward and C back with many
samples at once (see `layerwise`). What is done with them is the cheapest of what `_countsketch`
offers: small layers' gradients are formed and joined, larger ones' formed some columns at a time,
those with few positions (the last stages of a convolutional network) never.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp._core.compile import jit
from jaxttp.ntk import _countsketch as sketches
from jaxttp.ntk._costs import Workload
from jaxttp.ntk._program import NetworkProgram
from jaxttp.ntk._sites import Site, find_sites
from jaxttp.ntk.layerwise import JOIN_BELOW, Features, Layers

_WRITE = 20
"""A number of a gradient that is formed and added up takes the time of so many operations."""
_TRANSFORM = 45
"""And dim log2(dim) numbers of a transform of so many each."""
_TOKEN, _SCATTER = 1000, 500
"""And a sign that is drawn when it is needed, and a number that is put in its place."""
_MOST_PIECES = 8
_FOLD = "fold"
_WIDE = 1 << 12
"""Buckets that a sketch has at first: with few of them a turn of a loop has little to do."""

Projections = dict[str, Any]


def width_of(size: int, dim: int) -> int:
    """Buckets of a network's sketch before they are folded to `dim`, of which it is a multiple.

    Two coordinates share one of K buckets with probability 1/K, and two of K buckets are folded
    together with (K/dim - 1)/(K - 1): both with 1/dim at most.

    Args:
        size: coordinates of a row of the Jacobian.
        dim: of its sketch.
    """
    return dim * max(1, min(-(-size // dim), -(-_WIDE // dim)))


def form_costs(site: Site, classes: int, dim: int) -> dict[str, float]:
    """Operations of a sample, by how a site's gradients may be sketched."""
    s, k, o = site.positions, site.fan_in, site.fan_out
    if site.kind == "embedding":
        tokens = s * o * (_TOKEN + classes * _SCATTER)
        return {"tokens": tokens, "direct": 2.0 * _WRITE * classes * k * o}
    formed = float(classes * site.size * (2 * s + _WRITE))
    if site.groups > 1 or site.size < JOIN_BELOW:
        return {"gradient": formed}
    pieces = math.prod(sketches.pieces_of(k, o, dim))
    if pieces > _MOST_PIECES:
        return {"products": formed}
    spectra = _TRANSFORM * s * (1 + classes) * pieces * dim * math.log2(max(2, dim))
    return {"products": formed, "convolved": spectra}


def sketch_cost(work: Workload, dim: int) -> float:
    """Estimated operations of a sample's rows of a sketch."""
    classes, sites = work.classes, {site.leaf: site for site in work.sites}
    dim = width_of(work.size, dim)
    total = work.forward * (1 + classes)
    for leaf, wanted in enumerate(work.trainable):
        if leaf in sites and wanted:
            total += min(form_costs(sites[leaf], classes, dim).values())
        elif wanted:
            total += _WRITE * classes * work.leaf_size(leaf)
    return total


@dataclasses.dataclass(frozen=True, eq=False)
class SketchLayers:
    """How each trainable leaf of a program enters a sketch.

    Attributes:
        layers: gives inputs, cotangents and gradients.
        dim: width of the sketch.
        width: buckets before they are folded.
    """

    layers: Layers
    dim: int
    width: int

    @classmethod
    def of(
        cls, program: NetworkProgram, sites: Sequence[Site], trainable: Sequence[bool], dim: int
    ) -> "SketchLayers":
        """The cheapest form of every leaf."""
        shapes = [program.avals[slot].shape for slot in program.parameters]
        size = sum(math.prod(s) for s, wanted in zip(shapes, trainable, strict=True) if wanted)
        width = width_of(size, dim)
        chosen: dict[str, list[Site]] = {}
        for site in sites:
            costs = form_costs(site, program.outputs, width)
            chosen.setdefault(min(costs, key=lambda form: costs[form]), []).append(site)
        apart = {site.leaf for form, some in chosen.items() if form != "direct" for site in some}
        direct = [i for i, wanted in enumerate(trainable) if wanted and i not in apart]
        kept = chosen.get("convolved", []) + chosen.get("tokens", [])
        layers = Layers(
            program,
            # With patches in place of pixels, and the cotangents of the last layer.
            activation=tuple(
                dataclasses.replace(site, windows=None, is_head=False) for site in kept
            ),
            gradient=tuple(chosen.get("gradient", [])),
            direct=tuple(direct),
            late=tuple(chosen.get("products", [])),
        )
        return cls(layers, dim, width)

    @property
    def numbers(self) -> int:
        """That are there at a time for a sample: its features, what they are of or become."""
        layers, classes, dim = self.layers, self.layers.program.outputs, self.width
        kept = classes * sum(layers.gradient_sizes().values())
        parts = [max((classes * n for n in layers.gradient_sizes().values()), default=0)]
        for site in layers.activation + layers.gradient + layers.late:
            kept += site.input_size + classes * site.cotangent_size
        for site in layers.activation:
            if site.kind != "embedding":
                parts.append(2 * dim * (1 + classes) * site.positions)
        for site in layers.late:
            columns = sketches.columns_of(classes, site.fan_out, site.fan_in)
            parts.append(2 * classes * site.fan_out * columns)
        return kept + max(kept, *parts) + 4 * classes * dim

    def draw(self, key: Array) -> Projections:
        """What all samples share: by leaf (or joined leaves), and how buckets are folded."""
        layers, classes, width = self.layers, self.layers.program.outputs, self.width
        blocks = {n: sketches.blocks_of(d, width) for n, d in layers.gradient_sizes().items()}
        pairs: dict[str, list[tuple[int, int]]] = {}
        found: Projections = {}
        for site in layers.late:
            count = sketches.product_blocks(classes, site.fan_in, site.fan_out, width)
            blocks[str(site.leaf)] = count
        for site in layers.activation:
            if site.kind == "embedding":
                found[str(site.leaf)] = jax.random.fold_in(key, 3 + site.leaf)
            else:
                pairs[str(site.leaf)] = sketches.piece_sizes(site.fan_in, site.fan_out, width)
        if blocks:
            own = jax.random.fold_in(key, 0)
            found |= _shared_out(blocks, _draw_blocks(own, sum(blocks.values()), width))
        if pairs:
            own, sizes = jax.random.fold_in(key, 1), np.concatenate(list(pairs.values()))
            drawn = _draw_convolutions(own, sizes, width)
            found |= _shared_out({name: len(some) for name, some in pairs.items()}, drawn)
        if width > self.dim:
            found[_FOLD] = jax.random.permutation(jax.random.fold_in(key, 2), width)
        return found


_draw_blocks = jit(sketches.draw_blocks, static_argnums=(1, 2))
_draw_convolutions = jit(sketches.draw_convolutions, static_argnums=2)


def _shared_out(counts: Mapping[str, int], drawn: Any) -> dict[str, Any]:
    """What was drawn for all leaves at once, by leaf."""
    ends = np.cumsum(list(counts.values()))
    return {
        name: jax.tree.map(lambda a, low=end - count, high=end: a[low:high], drawn)
        for (name, count), end in zip(counts.items(), ends.tolist(), strict=True)
    }


@dataclasses.dataclass(frozen=True)
class LayeredSketcher:
    """(leaves, x (B, ...), draws) -> rows (B, C, dim).

    The network is one program and every shape of a layer another, so that a deep network compiles
    as one block does.

    Attributes:
        program: the network.
        mask: which leaves are differentiated by.
        dim: width of the sketch.
    """

    program: NetworkProgram
    mask: tuple[bool, ...]
    dim: int

    def __call__(self, leaves: list[Array], x: Any, draws: Projections) -> Array:
        """The rows of some samples."""
        features = _features(self.program, self.mask, self.dim, leaves, x)
        return _rows(features, draws, self.dim)


@functools.partial(jit, static_argnums=(0, 1, 2))
def _features(
    program: NetworkProgram, mask: tuple[bool, ...], dim: int, leaves: list[Array], x: Any
) -> Features:
    layers = SketchLayers.of(program, find_sites(program, mask), mask, dim).layers
    return layers.features(leaves, jax.tree.leaves(x))


def _rows(found: Features, draws: Projections, dim: int) -> Array:
    """The sketch (n, C, dim) of features, layer after layer."""
    late = {leaf: outer.cotangents for leaf, outer in found.late.items()}
    of_outputs = [*found.gradients.values(), *found.cotangents.values(), *late.values()]
    dtype, shape = jnp.result_type(*of_outputs), of_outputs[0].shape[:2]
    wide, fold = jnp.promote_types(dtype, "float32"), draws.get(_FOLD)
    width = dim if fold is None else len(fold)
    total = jnp.zeros((*shape, width), wide)
    spectrum = jnp.zeros((*shape, width // 2 + 1), jnp.result_type(wide, "complex64"))
    for name, value in found.gradients.items():
        total = _add_rows(total, value, draws[name])
    for leaf, outer in found.late.items():
        total = _add_products(total, *outer, draws[str(leaf)])
    for leaf, x in found.inputs.items():
        drawn, g = draws[str(leaf)], found.cotangents[leaf]
        if jnp.issubdtype(x.dtype, jnp.integer):
            total = _add_tokens(total, x, g, drawn)
        else:
            spectrum = _add_spectrum(spectrum, x, g, drawn)
    return _folded(total, spectrum if found.inputs else None, fold, dim=dim).astype(dtype)


_adding = functools.partial(jit, has_loops=True)


@_adding
def _add_rows(total: Array, rows: Array, blocks: sketches.RolledBlocks) -> Array:
    flat = rows.astype(total.dtype).reshape(-1, rows.shape[-1])
    return total + sketches.of_rows(flat, blocks).reshape(total.shape)


@_adding
def _add_products(total: Array, x: Array, g: Array, blocks: sketches.RolledBlocks) -> Array:
    return total + sketches.of_products(x.astype(total.dtype), g.astype(total.dtype), blocks)


@_adding
def _add_tokens(total: Array, x: Array, g: Array, key: Array) -> Array:
    g = g[:, :, 0].astype(total.dtype)
    return total + sketches.of_tokens(x[:, 0], g, key, total.shape[-1])


@_adding
def _add_spectrum(total: Array, x: Array, g: Array, drawn: sketches.Convolution) -> Array:
    x, g = (one.astype(total.real.dtype) for one in (x[:, 0], g[:, :, 0]))
    return total + sketches.spectrum_of_products(x, g, drawn)


@functools.partial(jit, static_argnames="dim")
def _folded(total: Array, spectrum: Array | None, fold: Array | None, *, dim: int) -> Array:
    if spectrum is not None:
        total = total + jnp.fft.irfft(spectrum, total.shape[-1])
    if fold is not None:
        total = jnp.take(total, fold, axis=-1, mode="clip")
        total = jnp.sum(total.reshape(*total.shape[:2], -1, dim), 2)
    return total
