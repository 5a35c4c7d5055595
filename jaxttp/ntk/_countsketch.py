"""CountSketch: every coordinate under a random sign into one of `dim` buckets, and their sums.

What a row is made of decides how its coordinates get there:

    rows        blocks of at most `dim` coordinates, each under signs of its own and rolled by a
                random shift: no scatter, and within a block nothing collides
    products    sum_s x[s] g[s]^T formed some columns at a time, and added up as blocks
    convolved   the same without forming it: coordinate (i, j) goes to bucket h(i) + h'(j) under
                the sign s(i) s'(j), so that its sketch is the circular convolution of those of x[s]
                and g[s], a product of their spectra (TensorSketch: Pham and Pagh 2013)
    tokens      rows of a table, each rolled, under signs drawn when its token comes

With h and h' one-to-one pairs (i, j), (i', j) never collide, and all others do with probability
1/(dim - 1) at most, under signs whose products are independent but for few of them: the variance is
that of a CountSketch. Wider x or g share buckets as evenly as can be.

Every sample's inputs and cotangents of all layers come from one forward pass and C backward passes
with many samples at once (see `layerwise`). What is done with them is the cheapest of these: small
layers' gradients are formed and joined, larger ones' formed some columns at a time, those with few
positions (the last stages of a convolutional network) never.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from jaxttp._core.compile import jit
from jaxttp.ntk._plan import Workload
from jaxttp.ntk._program import NetworkProgram
from jaxttp.ntk._sites import Site
from jaxttp.ntk.layerwise import JOIN_BELOW, Features, Layers


class RolledBlocks(NamedTuple):
    """A CountSketch of blocks.

    Attributes:
        signs: of every coordinate (blocks, dim), int8.
        shifts: by which blocks are rolled (blocks,).
    """

    signs: Array
    shifts: Array


class Places(NamedTuple):
    """A CountSketch in which as few coordinates as possible share a bucket.

    Attributes:
        of: the coordinates that go into a bucket (turns, dim), their number for none.
        signs: of what goes there (turns, dim), int8.
    """

    of: Array
    signs: Array


class Convolution(NamedTuple):
    """The sketches of x and of g."""

    inputs: Places
    outputs: Places


@functools.partial(jit, static_argnums=(1, 2))
def draw_blocks(key: Array, blocks: int, dim: int) -> RolledBlocks:
    """Signs and shifts of so many blocks, each by its own number."""

    def draw(index: Array) -> tuple[Array, Array]:
        sign_key, shift_key = jax.random.split(jax.random.fold_in(key, index))
        signs = jax.random.rademacher(sign_key, (1, dim), "int8")[0]
        return signs, jax.random.randint(shift_key, (), 0, dim)

    return RolledBlocks(*jax.vmap(draw)(jnp.arange(blocks)))


def blocks_of(size: int, dim: int) -> int:
    """Blocks of so many coordinates."""
    return -(-size // dim)


@functools.partial(jit, static_argnums=(1, 2, 3))
def draw_convolution(key: Array, fan_in: int, fan_out: int, dim: int) -> Convolution:
    """Places and signs for x and g."""

    def places(key: Array, size: int) -> Places:
        order, sign = jax.random.split(key)
        shape = blocks_of(size, dim), dim
        of = jnp.minimum(jax.random.permutation(order, math.prod(shape)), size)
        signs = jax.random.rademacher(sign, (math.prod(shape),), "int8")
        return Places(of.reshape(shape), signs.reshape(shape))

    one, two = jax.random.split(key)
    return Convolution(places(one, fan_in), places(two, fan_out))


def of_rows(rows: Float[Array, "m d"], blocks: RolledBlocks) -> Float[Array, "m dim"]:
    """Signs for coordinates, a roll for each block of `dim`, and the sum of the blocks."""
    many, size = rows.shape
    count, dim = blocks.signs.shape
    padded = jnp.pad(rows, ((0, 0), (0, count * dim - size)))

    def add(index: Array, total: Array) -> Array:
        block = jax.lax.dynamic_slice_in_dim(padded, index * dim, dim, axis=1)
        return _with_block(total, block, blocks, index)

    return _laid_over(jax.lax.fori_loop(0, count, add, jnp.zeros((many, 2 * dim), rows.dtype)))


def _with_block(total: Array, block: Array, blocks: RolledBlocks, index: Any) -> Array:
    """One more block on two turns of the sketch, which are laid over each other at the end."""
    width, dim = block.shape[-1], blocks.signs.shape[1]
    block = block * blocks.signs[index][None, :width].astype(block.dtype)
    start = dim - blocks.shifts[index]
    there = jax.lax.dynamic_slice_in_dim(total, start, width, axis=1)
    return jax.lax.dynamic_update_slice_in_dim(total, there + block, start, axis=1)


def _laid_over(turns: Array) -> Array:
    dim = turns.shape[1] // 2
    return turns[:, :dim] + turns[:, dim:]


def columns_of(classes: int, fan_out: int, fan_in: int) -> int:
    """Columns of a sample's gradients (C o, k) that are formed at a time: some 2^17 numbers.

    A power of two (34 of them take as long as 64 on a CPU), more than a few in any case.
    """
    fitting = max(1, (1 << 17) // (classes * fan_out))
    return min(fan_in, max(16, min(64, 1 << (fitting.bit_length() - 1))))


def product_blocks(classes: int, fan_in: int, fan_out: int, dim: int) -> int:
    """Blocks of the gradients of a layer, whose columns come some at a time."""
    width = columns_of(classes, fan_out, fan_in)
    return blocks_of(fan_in, width) * blocks_of(width * fan_out, dim)


def of_products(
    x: Float[Array, "n s k"], g: Float[Array, "n c o s"], blocks: RolledBlocks
) -> Float[Array, "n c dim"]:
    """The sketch of sum_s g[o, s] x[s, k], formed some columns at a time (see `_products`)."""
    (n, positions, fan_in), (_, classes, fan_out, _) = x.shape, g.shape
    dim = blocks.signs.shape[1]
    width = columns_of(classes, fan_out, fan_in)
    pieces, each = blocks_of(fan_in, width), blocks_of(width * fan_out, dim)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, pieces * width - fan_in)))
    rows = g.reshape(n, classes * fan_out, positions)

    def add(index: Array, total: Array) -> Array:
        some = jax.lax.dynamic_slice_in_dim(x, index * width, width, axis=2)
        formed = jnp.einsum("nqs,nsk->nqk", rows, some).reshape(n * classes, fan_out * width)
        for block in range(each):
            part = formed[:, block * dim : (block + 1) * dim]
            total = _with_block(total, part, blocks, index * each + block)
        return total

    nothing = jnp.zeros((n * classes, 2 * dim), g.dtype)
    return _laid_over(jax.lax.fori_loop(0, pieces, add, nothing)).reshape(n, classes, dim)


def spectrum_of_products(
    x: Float[Array, "n s k"], g: Float[Array, "n c s o"], drawn: Convolution
) -> Array:
    """The discrete Fourier transform (n, C, dim // 2 + 1) of the sketch of sum_s x[s] g[s]^T."""
    return jnp.einsum("nsf,ncsf->ncf", _spectrum(x, drawn.inputs), _spectrum(g, drawn.outputs))


def _spectrum(rows: Array, places: Places) -> Array:
    padded = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, 1)])  # what goes where nothing does
    total: Any = 0.0
    for of, signs in zip(places.of, places.signs.astype(rows.dtype), strict=True):
        there = jnp.take(padded, of, axis=-1, mode="clip")
        total = total + there * signs.reshape((1,) * (rows.ndim - 1) + (-1,))
    return jnp.fft.rfft(total)


def of_tokens(
    tokens: Integer[Array, "n s"], g: Float[Array, "n c s o"], key: Array, dim: int
) -> Float[Array, "n c dim"]:
    """The sketch of the gradient of a table (V, o), of which each position reads one row."""
    width = g.shape[-1]

    def draw(token: Array) -> tuple[Array, Array]:
        sign_key, shift_key = jax.random.split(jax.random.fold_in(key, token))
        signs = jax.random.rademacher(sign_key, (width,), g.dtype)
        shift = jax.random.randint(shift_key, (), 0, dim)
        return signs, (jnp.arange(width) + shift) % dim

    def of_one(tokens: Array, g: Array) -> Array:
        signs, places = jax.vmap(draw)(tokens)  # (s, o)
        return jnp.zeros((len(g), dim), g.dtype).at[:, places].add(g * signs[None])

    return jax.vmap(of_one)(tokens, g)


@dataclasses.dataclass(frozen=True)
class Prices:
    """Operations that something takes the time of, on two cores of a CPU.

    Attributes:
        write: a number of a gradient that is formed and added up.
        transform: each of dim log2(dim) numbers of a Fourier transform.
        token: a sign that is drawn when it is needed.
        scatter: a number that is put in its place.
    """

    write: float = 20
    transform: float = 45
    token: float = 1000
    scatter: float = 500


PRICES = Prices()
_FOLD = "fold"
Projections = dict[str, Any]


def width_of(size: int, dim: int, wide: int = 1 << 12) -> int:
    """Buckets of a network's sketch before they are folded to `dim`, of which it is a multiple.

    Two coordinates share one of K buckets with probability 1/K, and two of K buckets are folded
    together with (K/dim - 1)/(K - 1): both with 1/dim at most.

    Args:
        size: coordinates of a row of the Jacobian.
        dim: of its sketch.
        wide: at least so many, where there are coordinates for them: with few buckets a turn of a
            loop has little to do.
    """
    return dim * max(1, min(-(-size // dim), -(-wide // dim)))


def form_costs(site: Site, classes: int, dim: int) -> dict[str, float]:
    """Operations of a sample, by how a site's gradients may be sketched."""
    s, k, o = site.positions, site.fan_in, site.fan_out
    if site.kind == "embedding":
        tokens = s * o * (PRICES.token + classes * PRICES.scatter)
        return {"tokens": tokens, "direct": 2.0 * PRICES.write * classes * k * o}
    formed = float(classes * site.size * (2 * s + PRICES.write))
    if site.groups > 1 or site.size < JOIN_BELOW:
        return {"gradient": formed}
    spectra = PRICES.transform * s * (1 + classes) * dim * math.log2(max(2, dim))
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
            total += PRICES.write * classes * work.leaf_size(leaf)
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
            # With the cotangents of the last layer, and with patches.
            activation=tuple(dataclasses.replace(s, is_head=False, windows=None) for s in kept),
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
            columns = columns_of(classes, site.fan_out, site.fan_in)
            parts.append(2 * classes * site.fan_out * columns)
        return kept + max(kept, *parts) + 4 * classes * dim

    def draw(self, key: Array) -> Projections:
        """What all samples share: by leaf (or joined leaves), and how buckets are folded."""
        layers, classes, width = self.layers, self.layers.program.outputs, self.width
        blocks = {n: blocks_of(d, width) for n, d in layers.gradient_sizes().items()}
        found: Projections = {}
        own = jax.random.fold_in(key, 1)
        for site in layers.late:
            count = product_blocks(classes, site.fan_in, site.fan_out, width)
            blocks[str(site.leaf)] = count
        for index, site in enumerate(layers.activation):  # convolved ones first, then tables
            if site.kind == "embedding":
                found[str(site.leaf)] = jax.random.fold_in(key, 3 + site.leaf)
            else:
                one = jax.random.fold_in(own, index)
                drawn = draw_convolution(one, site.fan_in, site.fan_out, width)
                found[str(site.leaf)] = drawn
        if blocks:
            drawn = draw_blocks(jax.random.fold_in(key, 0), sum(blocks.values()), width)
            low = 0
            for name, count in blocks.items():
                part = slice(low, low + count)
                found[name] = RolledBlocks(drawn.signs[part], drawn.shifts[part])
                low += count
        if width > self.dim:
            found[_FOLD] = jax.random.permutation(jax.random.fold_in(key, 2), width)
        return found


def countsketch_rows(found: Features, draws: Projections, dim: int) -> Array:
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
def _add_rows(total: Array, rows: Array, blocks: RolledBlocks) -> Array:
    flat = rows.astype(total.dtype).reshape(-1, rows.shape[-1])
    return total + of_rows(flat, blocks).reshape(total.shape)


@_adding
def _add_products(total: Array, x: Array, g: Array, blocks: RolledBlocks) -> Array:
    return total + of_products(x.astype(total.dtype), g.astype(total.dtype), blocks)


@_adding
def _add_tokens(total: Array, x: Array, g: Array, key: Array) -> Array:
    g = g[:, :, 0].astype(total.dtype)
    return total + of_tokens(x[:, 0], g, key, total.shape[-1])


@_adding
def _add_spectrum(total: Array, x: Array, g: Array, drawn: Convolution) -> Array:
    x, g = (one.astype(total.real.dtype) for one in (x[:, 0], g[:, :, 0]))
    return total + spectrum_of_products(x, g, drawn)


@functools.partial(jit, static_argnames="dim")
def _folded(total: Array, spectrum: Array | None, fold: Array | None, *, dim: int) -> Array:
    if spectrum is not None:
        total = total + jnp.fft.irfft(spectrum, total.shape[-1])
    if fold is not None:
        total = jnp.take(total, fold, axis=-1, mode="clip")
        total = jnp.sum(total.reshape(*total.shape[:2], -1, dim), 2)
    return total
