"""The CountSketch of a network's Jacobian, layer by layer: most gradients are never kept.

Every sample's inputs and cotangents of all layers come from one way forward and C back with many
samples at once (see `layerwise`). What is done with them is the cheapest of what `_countsketch`
offers: small layers' gradients are formed and joined, larger ones' formed some columns at a time,
those with few positions (the last stages of a convolutional network) never.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxttp._jit import jit
from jaxttp._types import ApplyFn
from jaxttp.ntk import _countsketch as sketches
from jaxttp.ntk._compiled import structure
from jaxttp.ntk._costs import Workload
from jaxttp.ntk._program import NetworkProgram, trace
from jaxttp.ntk._sites import Site, find_sites
from jaxttp.ntk.layerwise import JOIN_BELOW, JOINED, Layers

_WRITE = 20
"""A number of a gradient that is formed and added up takes the time of so many operations."""
_TRANSFORM = 45
"""And dim log2(dim) numbers of a transform of so many each."""
_TOKEN, _SCATTER = 1000, 500
"""And a sign that is drawn when it is needed, and a number that is put in its place."""
_MOST_PIECES = 8

Draws = dict[str, Any]
Wanted = tuple[tuple[str, tuple[int, ...]], ...]
"""By leaf, a number of blocks, the sizes of a convolution, or none for a key alone."""


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
    """

    layers: Layers
    dim: int

    @classmethod
    def of(
        cls, program: NetworkProgram, sites: Sequence[Site], trainable: Sequence[bool], dim: int
    ) -> "SketchLayers":
        """The cheapest form of every leaf."""
        chosen: dict[str, list[Site]] = {}
        for site in sites:
            costs = form_costs(site, program.outputs, dim)
            chosen.setdefault(min(costs, key=lambda form: costs[form]), []).append(site)
        apart = {site.leaf for form, some in chosen.items() if form != "direct" for site in some}
        direct = [i for i, wanted in enumerate(trainable) if wanted and i not in apart]
        kept = chosen.get("convolved", []) + chosen.get("tokens", [])
        layers = Layers(
            program,
            activation=tuple(dataclasses.replace(site, windows=None) for site in kept),  # patches
            gradient=tuple(chosen.get("gradient", [])),
            direct=tuple(direct),
            late=tuple(chosen.get("products", [])),
        )
        return cls(layers, dim)

    @property
    def numbers(self) -> int:
        """That a sample's features are, and the largest of what is made of them at a time."""
        layers, classes, dim = self.layers, self.layers.program.outputs, self.dim
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
        return kept + max(parts) + 4 * classes * dim

    @property
    def random(self) -> Wanted:
        """What `draw` is to draw."""
        dim, classes = self.dim, self.layers.program.outputs
        sizes: dict[str, tuple[int, ...]] = {
            name: (sketches.blocks_of(size, dim),)
            for name, size in self.layers.gradient_sizes().items()
        }
        for site in self.layers.late:
            count = sketches.product_blocks(classes, site.fan_in, site.fan_out, dim)
            sizes[str(site.leaf)] = (count,)
        for site in self.layers.activation:
            is_table = site.kind == "embedding"
            sizes[str(site.leaf)] = () if is_table else (site.fan_in, site.fan_out)
        return tuple(sizes.items())

    def rows(self, leaves: Sequence[Array], samples: Sequence[Array], draws: Draws) -> Array:
        """The sketch (n, C, dim) of some samples."""
        found = self.layers.features(leaves, samples)
        shape = len(samples[0]), self.layers.program.outputs, self.dim
        dtype = jnp.result_type(*jax.tree.leaves(found._replace(inputs={})))
        wide = jnp.promote_types(dtype, "float32")
        total = jnp.zeros(shape, wide)
        for name, value in found.gradients.items():
            rows = value.astype(wide).reshape(shape[0] * shape[1], -1)
            total = total + sketches.of_rows(rows, draws[name]).reshape(shape)
        for leaf, outer in found.late.items():
            x, g = (one.astype(wide) for one in outer)
            total = total + sketches.of_products(x, g, draws[str(leaf)])
        spectra = []
        for site in self.layers.activation:
            x, drawn = found.inputs[site.leaf][:, 0], draws[str(site.leaf)]
            g = found.cotangents[site.leaf][:, :, 0].astype(wide)
            if site.kind == "embedding":
                total = total + sketches.of_tokens(x, g, drawn, self.dim)
            else:
                spectra.append(sketches.spectrum_of_products(x.astype(wide), g, drawn))
        if spectra:
            total = total + jnp.fft.irfft(functools.reduce(jnp.add, spectra), self.dim)
        return total.astype(dtype)


@functools.partial(jit, static_argnames=("wanted", "dim"))
def draw(key: Array, wanted: Wanted, dim: int) -> Draws:
    """By leaf (or joined leaves), what all samples share: of its number and size."""

    def of(name: str, sizes: tuple[int, ...]) -> Any:
        own = jax.random.fold_in(key, (1 << 31) - 1 if name == JOINED else int(name))
        if len(sizes) == 2:
            return sketches.draw_convolution(own, sizes[0], sizes[1], dim)
        return sketches.draw_blocks(own, sizes[0], dim) if sizes else own

    return {name: of(name, sizes) for name, sizes in wanted}


@functools.lru_cache(maxsize=64)
def layered_sketcher(
    apply_fn: ApplyFn, treedef: Any, mask: tuple[bool, ...], dim: int
) -> Callable[..., Array]:
    """(leaves, x (B, ...), draws, key) -> rows (B, C, dim), compiled."""

    @jit
    def sketch(leaves: list[Array], x: Any, draws: Draws, key: Array) -> Array:
        del key
        shape = functools.partial(
            jax.tree.map, lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype)
        )
        params = structure(jax.tree.unflatten(treedef, leaves))
        program = trace(apply_fn, params, shape(x))
        layers = SketchLayers.of(program, find_sites(program, mask), mask, dim)
        return layers.rows(leaves, jax.tree.leaves(x), draws)

    return sketch
