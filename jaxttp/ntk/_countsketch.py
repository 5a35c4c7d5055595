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


class Buckets(NamedTuple):
    """A CountSketch in which as few coordinates as possible share a bucket.

    Attributes:
        coordinates: those in each bucket (rounds, dim); their total number stands for none.
        signs: of these coordinates (rounds, dim), int8.
    """

    coordinates: Array
    signs: Array


class Convolution(NamedTuple):
    """The sketches of x and of g."""

    inputs: Buckets
    outputs: Buckets


@functools.partial(jit, static_argnums=(1, 2))
def draw_blocks(key: Array, blocks: int, dim: int) -> RolledBlocks:
    """Signs and shifts of this many blocks, each by its own index."""

    def draw(index: Array) -> tuple[Array, Array]:
        sign_key, shift_key = jax.random.split(jax.random.fold_in(key, index))
        signs = jax.random.rademacher(sign_key, (1, dim), "int8")[0]
        return signs, jax.random.randint(shift_key, (), 0, dim)

    return RolledBlocks(*jax.vmap(draw)(jnp.arange(blocks)))


def blocks_of(size: int, dim: int) -> int:
    """How many blocks of width `dim` hold this many coordinates."""
    return -(-size // dim)


@functools.partial(jit, static_argnums=(1, 2, 3))
def draw_convolution(key: Array, fan_in: int, fan_out: int, dim: int) -> Convolution:
    """Buckets and signs for x and g."""

    def draw(key: Array, size: int) -> Buckets:
        order_key, sign_key = jax.random.split(key)
        shape = blocks_of(size, dim), dim
        order = jax.random.permutation(order_key, math.prod(shape))
        signs = jax.random.rademacher(sign_key, (math.prod(shape),), "int8")
        return Buckets(jnp.minimum(order, size).reshape(shape), signs.reshape(shape))

    input_key, output_key = jax.random.split(key)
    return Convolution(draw(input_key, fan_in), draw(output_key, fan_out))


def of_rows(rows: Float[Array, "m d"], blocks: RolledBlocks) -> Float[Array, "m dim"]:
    """Signs for coordinates, a roll for each block of `dim`, and the sum of the blocks."""
    many, size = rows.shape
    count, dim = blocks.signs.shape
    padded = jnp.pad(rows, ((0, 0), (0, count * dim - size)))

    def add(index: Array, total: Array) -> Array:
        block = jax.lax.dynamic_slice_in_dim(padded, index * dim, dim, axis=1)
        return _with_block(total, block, blocks, index)

    zeros = jnp.zeros((many, 2 * dim), rows.dtype)
    return _sum_of_halves(jax.lax.fori_loop(0, count, add, zeros))


def _with_block(total: Array, block: Array, blocks: RolledBlocks, index: Any) -> Array:
    """Add a block to a sketch of twice its width, whose halves are added at the end."""
    width, dim = block.shape[-1], blocks.signs.shape[1]
    block = block * blocks.signs[index][None, :width].astype(block.dtype)
    start = dim - blocks.shifts[index]
    before = jax.lax.dynamic_slice_in_dim(total, start, width, axis=1)
    return jax.lax.dynamic_update_slice_in_dim(total, before + block, start, axis=1)


def _sum_of_halves(total: Array) -> Array:
    dim = total.shape[1] // 2
    return total[:, :dim] + total[:, dim:]


def columns_of(classes: int, fan_out: int, fan_in: int) -> int:
    """Columns of a sample's gradients (C o, k) that are formed at a time: some 2^17 numbers.

    At least 16, and a power of two: 34 columns take as long as 64 on a CPU.
    """
    fitting = max(1, (1 << 17) // (classes * fan_out))
    return min(fan_in, max(16, min(64, 1 << (fitting.bit_length() - 1))))


def product_blocks(classes: int, fan_in: int, fan_out: int, dim: int) -> int:
    """Blocks of the gradients of a layer, whose columns come some at a time."""
    width = columns_of(classes, fan_out, fan_in)
    return blocks_of(fan_in, width) * blocks_of(width * fan_out, dim)


def of_products(
    x: Float[Array, "n s k"],
    g: Float[Array, "n c o s"],
    blocks: RolledBlocks,
    factor: Float[Array, "k o"] | None = None,
) -> Float[Array, "n c dim"]:
    """The sketch of sum_s g[o, s] x[s, k], formed some columns at a time (see `_products`).

    Args:
        x: inputs.
        g: cotangents.
        blocks: of the sketch.
        factor: of the entries; None for 1.
    """
    (n, positions, fan_in), (_, classes, fan_out, _) = x.shape, g.shape
    dim = blocks.signs.shape[1]
    width = columns_of(classes, fan_out, fan_in)
    chunks, chunk_blocks = blocks_of(fan_in, width), blocks_of(width * fan_out, dim)
    missing = chunks * width - fan_in
    x = jnp.pad(x, ((0, 0), (0, 0), (0, missing)))
    if factor is not None:
        factor = jnp.pad(factor.astype(g.dtype), ((0, missing), (0, 0))).T
    rows = g.reshape(n, classes * fan_out, positions)

    def add(index: Array, total: Array) -> Array:
        some = jax.lax.dynamic_slice_in_dim(x, index * width, width, axis=2)
        formed = jnp.einsum("nqs,nsk->nqk", rows, some).reshape(n * classes, fan_out, width)
        if factor is not None:
            part = jax.lax.dynamic_slice_in_dim(factor, index * width, width, axis=1)
            formed = formed * part[None]
        formed = formed.reshape(n * classes, fan_out * width)
        for block in range(chunk_blocks):
            part = formed[:, block * dim : (block + 1) * dim]
            total = _with_block(total, part, blocks, index * chunk_blocks + block)
        return total

    zeros = jnp.zeros((n * classes, 2 * dim), g.dtype)
    return _sum_of_halves(jax.lax.fori_loop(0, chunks, add, zeros)).reshape(n, classes, dim)


def spectrum_of_products(
    x: Float[Array, "n s k"], g: Float[Array, "n c s o"], drawn: Convolution
) -> Array:
    """The discrete Fourier transform (n, C, dim // 2 + 1) of the sketch of sum_s x[s] g[s]^T."""
    return jnp.einsum("nsf,ncsf->ncf", _spectrum(x, drawn.inputs), _spectrum(g, drawn.outputs))


def _spectrum(rows: Array, buckets: Buckets) -> Array:
    padded = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, 1)])  # a zero for empty buckets
    total: Any = 0.0
    for coordinates, signs in zip(*buckets, strict=True):
        entries = jnp.take(padded, coordinates, axis=-1, mode="clip")
        total = total + entries * signs.astype(rows.dtype).reshape((1,) * (rows.ndim - 1) + (-1,))
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

    def sample_sketch(tokens: Array, g: Array) -> Array:
        signs, buckets = jax.vmap(draw)(tokens)  # (s, o)
        return jnp.zeros((len(g), dim), g.dtype).at[:, buckets].add(g * signs[None])

    return jax.vmap(sample_sketch)(tokens, g)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Floating-point operations that take as long as one of these, on two cores of a CPU.

    Attributes:
        write: a number of a gradient that is formed and added up.
        transform: each of dim log2(dim) numbers of a Fourier transform.
        token: a sign that is drawn when it is needed.
        scatter: a number that is scattered.
    """

    write: float = 20
    transform: float = 45
    token: float = 1000
    scatter: float = 500


COSTS = Costs()
_FOLD, FACTORS = "fold", "factors"
Projections = dict[str, Any]


def width_of(size: int, dim: int, wide: int = 1 << 12) -> int:
    """Buckets of a network's sketch before they are folded to `dim`, of which it is a multiple.

    Two coordinates share one of K buckets with probability 1/K. Two of K buckets are folded
    together with probability (K/dim - 1)/(K - 1). Together this is 1/dim at most.

    Args:
        size: coordinates of a row of the Jacobian.
        dim: of its sketch.
        wide: buckets at least, where there are as many coordinates: with few buckets an iteration
            of a loop has little to do.
    """
    return dim * max(1, min(-(-size // dim), -(-wide // dim)))


def form_costs(site: Site, classes: int, dim: int, *, is_scaled: bool = False) -> dict[str, float]:
    """Operations of a sample, by how a site's gradients may be sketched.

    Entries that are scaled have to be formed.
    """
    s, k, o = site.positions, site.fan_in, site.fan_out
    if site.kind == "embedding":
        tokens = s * o * (COSTS.token + classes * COSTS.scatter)
        return {"tokens": tokens, "direct": 2.0 * COSTS.write * classes * k * o}
    formed = float(classes * site.size * (2 * s + COSTS.write))
    if site.groups > 1 or site.size < JOIN_BELOW:
        return {"gradient": formed}
    spectra = COSTS.transform * s * (1 + classes) * dim * math.log2(max(2, dim))
    return {"products": formed} if is_scaled else {"products": formed, "convolved": spectra}


def sketch_cost(work: Workload, dim: int, *, is_scaled: bool = False) -> float:
    """Estimated operations of a sample's rows of a sketch."""
    classes, sites = work.classes, {site.leaf: site for site in work.sites}
    dim = width_of(work.size, dim)
    total = work.forward * (1 + classes)
    for leaf in work.trained:
        if leaf in sites:
            total += min(form_costs(sites[leaf], classes, dim, is_scaled=is_scaled).values())
        else:
            total += COSTS.write * classes * work.leaf_size(leaf)
    return total


@dataclasses.dataclass(frozen=True, eq=False)
class SketchLayers:
    """The form of each trainable leaf of a network in a sketch.

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
        cls,
        network: NetworkProgram,
        sites: Sequence[Site],
        trainable: Sequence[bool],
        dim: int,
        *,
        is_scaled: bool = False,
    ) -> "SketchLayers":
        """The cheapest form of every leaf."""
        shapes = [network.avals[slot].shape for slot in network.parameters]
        size = sum(math.prod(s) for s, trained in zip(shapes, trainable, strict=True) if trained)
        width = width_of(size, dim)
        by_form: dict[str, list[Site]] = {}
        direct = {leaf for leaf, trained in enumerate(trainable) if trained}
        for site in sites:
            costs = form_costs(site, network.outputs, width, is_scaled=is_scaled)
            form = min(costs, key=lambda form: costs[form])
            by_form.setdefault(form, []).append(site)
            if form != "direct":
                direct.discard(site.leaf)
        kept = by_form.get("convolved", []) + by_form.get("tokens", [])
        layers = Layers(
            network,
            # With the cotangents of the last layer, and with patches.
            activation=tuple(dataclasses.replace(s, is_head=False, windows=None) for s in kept),
            gradient=tuple(by_form.get("gradient", [])),
            direct=tuple(sorted(direct)),
            late=tuple(by_form.get("products", [])),
        )
        return cls(layers, dim, width)

    @property
    def working_size(self) -> int:
        """Numbers held at a time for a sample: features, their inputs and their sketches."""
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
        """The draws that all samples share, by leaf (or joined leaves), and the fold of buckets."""
        layers, classes, width = self.layers, self.layers.program.outputs, self.width
        blocks = {n: blocks_of(d, width) for n, d in layers.gradient_sizes().items()}
        draws: Projections = {}
        convolutions = jax.random.fold_in(key, 1)
        for site in layers.late:
            blocks[str(site.leaf)] = product_blocks(classes, site.fan_in, site.fan_out, width)
        for index, site in enumerate(layers.activation):  # convolved ones first, then tables
            if site.kind == "embedding":
                draws[str(site.leaf)] = jax.random.fold_in(key, 3 + site.leaf)
            else:
                site_key = jax.random.fold_in(convolutions, index)
                drawn = draw_convolution(site_key, site.fan_in, site.fan_out, width)
                draws[str(site.leaf)] = drawn
        if blocks:
            drawn = draw_blocks(jax.random.fold_in(key, 0), sum(blocks.values()), width)
            low = 0
            for name, count in blocks.items():
                part = slice(low, low + count)
                draws[name] = RolledBlocks(drawn.signs[part], drawn.shifts[part])
                low += count
        if width > self.dim:
            draws[_FOLD] = jax.random.permutation(jax.random.fold_in(key, 2), width)
        return draws


def countsketch_rows(features: Features, draws: Projections, dim: int) -> Array:
    """The sketch (n, C, dim) of features, layer after layer."""
    late = [outer.cotangents for outer in features.late.values()]
    of_outputs = [*features.gradients.values(), *features.cotangents.values(), *late]
    dtype, shape = jnp.result_type(*of_outputs), of_outputs[0].shape[:2]
    wide, fold = jnp.promote_types(dtype, "float32"), draws.get(_FOLD)
    width = dim if fold is None else len(fold)
    total = jnp.zeros((*shape, width), wide)
    spectrum = jnp.zeros((*shape, width // 2 + 1), jnp.result_type(wide, "complex64"))
    for name, value in features.gradients.items():
        total = _add_rows(total, value, draws[name])
    factors = draws.get(FACTORS, {})
    for leaf, outer in features.late.items():
        factor = factors[leaf][0] if leaf in factors else None
        total = _add_products(total, *outer, draws[str(leaf)], factor)
    for leaf, x in features.inputs.items():
        drawn, g = draws[str(leaf)], features.cotangents[leaf]
        if jnp.issubdtype(x.dtype, jnp.integer):
            total = _add_tokens(total, x, g, drawn, factors.get(leaf))
        else:
            spectrum = _add_spectrum(spectrum, x, g, drawn)
    return _folded(total, spectrum if features.inputs else None, fold, dim=dim).astype(dtype)


_adding = functools.partial(jit, has_loops=True)


@_adding
def _add_rows(total: Array, rows: Array, blocks: RolledBlocks) -> Array:
    flat = rows.astype(total.dtype).reshape(-1, rows.shape[-1])
    return total + of_rows(flat, blocks).reshape(total.shape)


@_adding
def _add_products(
    total: Array, x: Array, g: Array, blocks: RolledBlocks, factor: Array | None
) -> Array:
    return total + of_products(x.astype(total.dtype), g.astype(total.dtype), blocks, factor)


@_adding
def _add_tokens(total: Array, x: Array, g: Array, key: Array, factor: Array | None) -> Array:
    g = g[:, :, 0].astype(total.dtype)
    if factor is not None:
        g = g * jnp.take(factor[0], x[:, 0], axis=0, mode="clip").astype(g.dtype)[:, None]
    return total + of_tokens(x[:, 0], g, key, total.shape[-1])


@_adding
def _add_spectrum(total: Array, x: Array, g: Array, drawn: Convolution) -> Array:
    dtype = total.real.dtype
    return total + spectrum_of_products(x[:, 0].astype(dtype), g[:, :, 0].astype(dtype), drawn)


@functools.partial(jit, static_argnames="dim")
def _folded(total: Array, spectrum: Array | None, fold: Array | None, *, dim: int) -> Array:
    if spectrum is not None:
        total = total + jnp.fft.irfft(spectrum, total.shape[-1])
    if fold is not None:
        total = jnp.take(total, fold, axis=-1, mode="clip")
        total = jnp.sum(total.reshape(*total.shape[:2], -1, dim), 2)
    return total
