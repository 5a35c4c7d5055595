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
that of a CountSketch. Wider x or g are cut into pieces with h, h' and signs of their own.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer

_COLUMNS, _FEW, _MANY = 1 << 17, 16, 64
"""Numbers of a sample's gradients that are formed at a time, over all outputs, and in how many
columns: a power of two (34 of them take as long as 64 on a CPU), more than a few in any case."""


class RolledBlocks(NamedTuple):
    """A CountSketch of blocks.

    Attributes:
        signs: of every coordinate (blocks, dim), int8.
        shifts: by which blocks are rolled (blocks,).
    """

    signs: Array
    shifts: Array


class Places(NamedTuple):
    """A CountSketch of few coordinates, of which no two share a bucket; for some pieces.

    Attributes:
        of: the coordinate that goes into a bucket (pieces, dim), the piece's size for none.
        signs: of what goes there (pieces, dim), int8.
    """

    of: Array
    signs: Array


class Convolution(NamedTuple):
    """For pairs of pieces of x and of g the sketches of both."""

    inputs: Places
    outputs: Places


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


def pieces_of(fan_in: int, fan_out: int, dim: int) -> tuple[int, int]:
    """Into how many pieces x and g are cut, that none is wider than the sketch."""
    return blocks_of(fan_in, dim), blocks_of(fan_out, dim)


def piece_sizes(fan_in: int, fan_out: int, dim: int) -> list[tuple[int, int]]:
    """Of all pairs of a piece of x and one of g, how wide they are."""
    cut = pieces_of(fan_in, fan_out, dim)
    sizes = -(-fan_in // cut[0]), -(-fan_out // cut[1])
    return [sizes] * math.prod(cut)


def draw_convolutions(key: Array, sizes: Int[Array, "p 2"], dim: int) -> Convolution:
    """Places and signs of pairs of pieces that are so wide, each by its own number."""

    def places(key: Array, size: Array) -> Places:
        order, sign = jax.random.split(key)
        of = jnp.minimum(jax.random.permutation(order, dim), size)
        return Places(of, jax.random.rademacher(sign, (dim,), "int8"))

    def draw(index: Array, sizes: Array) -> Convolution:
        one, two = jax.random.split(jax.random.fold_in(key, index))
        return Convolution(places(one, sizes[0]), places(two, sizes[1]))

    return jax.vmap(draw)(jnp.arange(len(sizes)), sizes)


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
    """Columns of a sample's gradients (C o, k) that are formed at a time."""
    fitting = max(1, _COLUMNS // (classes * fan_out))
    return min(fan_in, max(_FEW, min(_MANY, 1 << (fitting.bit_length() - 1))))


def product_blocks(classes: int, fan_in: int, fan_out: int, dim: int) -> int:
    """Blocks of the gradients of a layer, whose columns come some at a time."""
    width = columns_of(classes, fan_out, fan_in)
    return blocks_of(fan_in, width) * blocks_of(width * fan_out, dim)


def of_products(
    x: Float[Array, "n s k"], g: Float[Array, "n c o s"], blocks: RolledBlocks
) -> Float[Array, "n c dim"]:
    """The sketch of sum_s g[o, s] x[s, k], formed some columns at a time (see `_late`)."""
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
    dim = drawn.inputs.of.shape[-1]
    cut = pieces_of(x.shape[-1], g.shape[-1], dim)
    inputs, outputs = _pieces(x, cut[0]), _pieces(g, cut[1])
    total = None
    for index in range(cut[0] * cut[1]):
        a = _spectrum(inputs[index // cut[1]], drawn.inputs, index)
        b = _spectrum(outputs[index % cut[1]], drawn.outputs, index)
        found = jnp.einsum("nsf,ncsf->ncf", a, b)
        total = found if total is None else total + found
    assert total is not None
    return total


def _pieces(rows: Array, count: int) -> list[Array]:
    """Equal pieces of the last axis, with zeros at the end."""
    size = -(-rows.shape[-1] // count)
    return [
        jnp.pad(part, [(0, 0)] * (rows.ndim - 1) + [(0, size - part.shape[-1])])
        for part in (rows[..., low : low + size] for low in range(0, count * size, size))
    ]


def _spectrum(rows: Array, places: Places, index: int) -> Array:
    padded = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, 1)])  # what goes where nothing does
    there = jnp.take(padded, places.of[index], axis=-1, mode="clip")
    signs = places.signs[index].astype(rows.dtype)
    return jnp.fft.rfft(there * signs.reshape((1,) * (rows.ndim - 1) + (-1,)))


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
