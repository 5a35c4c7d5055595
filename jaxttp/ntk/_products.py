"""Products of features, which all kernels are made of.

Products of rows, A B^T, and of A A^T the upper half
----------------------------------------------------
On a CPU, few and very long rows are multiplied slice by slice: the slices of all rows stay in its
caches. Half of a symmetric product is computed by strips of rows against the rows from the strip's
first on. The compiler copies these. Copies of whole rows cost more than they save, copies of slices
do not (600 rows of 37,000 numbers on two cores: a product 0.14 s, half of it by strips of whole
rows 0.15 s, by strips of slices 0.10 s).

Pairs of positions: a layer with several positions in activation form
---------------------------------------------------------------------
sum_{b,s,t} <x_i[b,s], x_j[b,t]> <g_i^c[b,s], g_j^d[b,t]>

It is a loop over groups b and positions s and t. For a batch with itself, the pairs (s, t) and
(t, s) give transposed parts, so half of the loop and its transpose are enough.

With several outputs and many positions it is summed in another order, sample after sample j:

    sum_{s,o} g_i^c[s,o] (sum_t <x_i[s], x_j[t]> g_j^d[t,o])

takes C s^2 o + C^2 s o operations in place of C^2 s^2 o, with rows i of a block that stays in a
CPU's caches. For a batch with itself a block needs no samples before its own. (3 x 3 convolutions
of 150 samples on two cores: of 256 channels on 4 x 4 pixels with 4 outputs 0.16 s in place of 0.22,
with 9 outputs 0.36 in place of 0.96; of 16 channels on 8 x 8 pixels with 4 outputs 0.29 s in place
of 1.34.)

Outer products: weight gradients that are formed when they are multiplied
-------------------------------------------------------------------------
<dW_i^c, dW_j^d>,      dW_i^c = g_i^c x_i,      x_i (s, k), g_i^c (o, s)

With s k + C s o < C k o numbers a sample, x and g are kept in place of the gradients: a transformer
of width 256 on 64 tokens has a quarter of its gradients' size. A chunk of all samples' gradients
(o, k) is formed, multiplied and dropped: some rows where o > k, else some columns (a product with
few columns is slow). A chunk stays in a CPU's cache, and the allocator reuses its memory. The loop
is Python's: in one compiled function XLA forms all chunks first. The positions are the last axis of
g, so that a sample's chunk is ONE product of contiguous matrices, (C o, s) (s, k): a product for
each output, (o, s) (s, k), runs on one core of a CPU, and from g (s, o) it takes 1.25 to 3 times as
long. Layers of one shape share one compiled function, so a deep network compiles as fast as one
block.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp._core.compile import jit


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of parts of products, measured on two cores of a CPU (see the module).

    Attributes:
        strips: number of strips of the upper half of a symmetric product.
        worth_rows: with fewer rows half a product takes as long as the whole.
        worth_size: likewise with shorter rows.
        strip_slice: numbers of a row in a slice of a strip.
        slice: numbers in a slice of all rows.
        few_rows: rows of a product that is cut into slices, at most.
        rows: samples of a block of rows that is multiplied with one sample after the other.
        many_rows: the same on other devices than CPUs.
        block: numbers, at most, of the product of such a block with a sample.
        many_positions: positions from which on samples are multiplied one after the other.
        chunk: numbers in a chunk of deferred gradients.
    """

    strips: int = 4
    worth_rows: int = 256
    worth_size: int = 512
    strip_slice: int = 1 << 10
    slice: int = 1 << 22
    few_rows: int = 512
    rows: int = 16
    many_rows: int = 128
    block: int = 1 << 22
    many_positions: int = 16
    chunk: int = 1 << 22

    @property
    def half(self) -> float:
        """Fraction of the work of a symmetric product that its upper half takes: 5/8."""
        return (self.strips + 1) / (2 * self.strips)


SIZES = Sizes()

Product = Callable[[Array, Array | None, Any], Array]


def is_halved(rows: int, size: int) -> bool:
    """Whether only half of a symmetric product of this size is computed."""
    return rows >= SIZES.worth_rows and size >= SIZES.worth_size


def rows_product(a: Array, b: Array | None, dtype: Any) -> Array:
    """A B^T: twice as fast on a CPU as the same product of arrays with more axes.

    Args:
        a: rows (n, d).
        b: rows (m, d); None for those of `a`. Then only the entries on and above the diagonal are
            meaningful, those below may be anything finite.
        dtype: in which it is summed.
    """
    if b is None and is_halved(*a.shape):
        return _upper_half(a, dtype)
    b = a if b is None else b
    rows, size = max(len(a), len(b)), a.shape[1]
    width = SIZES.slice // max(rows, 1)
    if rows > SIZES.few_rows or size < 2 * width or jax.default_backend() != "cpu":
        return _product(a, b, dtype)

    def add(total: Array, low: Any, width: int) -> Array:
        left, right = (jax.lax.dynamic_slice_in_dim(m, low, width, 1) for m in (a, b))
        return total + _product(left, right, dtype)

    return _by_slices(add, jnp.zeros((len(a), len(b)), dtype), size, width)


def upper_strips(rows: int) -> list[tuple[int, int]]:
    """First and last row of each strip, whose columns are computed from its first row on.

    Example:
        >>> upper_strips(256)
        [(0, 64), (64, 128), (128, 192), (192, 256)]
    """
    edges = [round(index * rows / SIZES.strips) for index in range(SIZES.strips + 1)]
    return list(itertools.pairwise(edges))


def _upper_half(a: Array, dtype: Any) -> Array:
    rows, size = a.shape
    strips = upper_strips(rows)

    def add(totals: list[Array], low: Any, width: int) -> list[Array]:
        part = jax.lax.dynamic_slice_in_dim(a, low, width, 1)
        return [
            total + _product(part[top:bottom], part[top:], dtype)
            for total, (top, bottom) in zip(totals, strips, strict=True)
        ]

    width = SIZES.strip_slice if jax.default_backend() == "cpu" else size
    zeros = [jnp.zeros((bottom - top, rows - top), dtype) for top, bottom in strips]
    whole = jnp.zeros((rows, rows), dtype)
    for part, (top, _) in zip(_by_slices(add, zeros, size, width), strips, strict=True):
        whole = jax.lax.dynamic_update_slice(whole, part, (top, top))
    return whole


def mirrored(kernel: Array) -> Array:
    """The upper half of square matrices (..., n, n) copied onto the lower one."""
    return jnp.triu(kernel) + jnp.triu(kernel, 1).swapaxes(-1, -2)


def _by_slices(add: Callable[..., Any], total: Any, size: int, width: int) -> Any:
    """Add slice after slice, the shorter last one first."""
    count = size // width
    if size % width:
        total = add(total, count * width, size % width)
    if count < 2:
        return add(total, 0, width) if count else total
    return jax.lax.fori_loop(0, count, lambda i, so_far: add(so_far, i * width, width), total)


def _product(a: Array, b: Array, dtype: Any) -> Array:
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def _product_full(a: Array, b: Array | None, dtype: Any) -> Array:
    (n, c, size), m = a.shape, len(a if b is None else b)
    columns = None if b is None else b.reshape(m * c, size)
    return rows_product(a.reshape(n * c, size), columns, dtype).reshape(n, c, m, c)


def _product_trace(a: Array, b: Array | None, dtype: Any) -> Array:
    columns = None if b is None else b.reshape(len(b), -1)
    return rows_product(a.reshape(len(a), -1), columns, dtype)


def _product_diagonal(a: Array, b: Array | None, dtype: Any) -> Array:
    return jnp.einsum("ncd,mcd->cnm", a, a if b is None else b, preferred_element_type=dtype)


PRODUCTS: Mapping[str, Product] = {
    "full": _product_full,
    "trace": _product_trace,
    "diagonal": _product_diagonal,
}
"""By output: rows (n, C, d) and (m, C, d) to (n, C, m, C), (n, m) or (C, n, m).

None for the second as in `rows_product`.
"""


def similarity(x: Array, y: Array | None, dtype: Any) -> Array:
    """<x_i, y_j> of rows; for tokens (integers) whether they are the same.

    With y None those of x with each other, whose upper half is meaningful.
    """
    if jnp.issubdtype(x.dtype, jnp.integer):
        return (x[:, 0, None] == (x if y is None else y)[None, :, 0]).astype(dtype)
    return rows_product(x, y, dtype)


def goes_by_rows(positions: int, classes: int, output: str) -> bool:
    """Whether samples are multiplied one after the other with blocks of rows.

    Args:
        positions: of each sample.
        classes: C.
        output: "full", "trace" or "diagonal".
    """
    return output == "full" and classes > 1 and positions >= SIZES.many_positions


def rows_at_once(samples: int, positions: int, fan_out: int, most: int = 0) -> int:
    """Samples of a block of rows, the last of which may be padded.

    Args:
        samples: of all rows.
        positions: of a sample.
        fan_out: numbers of a cotangent at a position.
        most: the largest number; that of CPUs for 0.

    Example:
        >>> rows_at_once(150, 16, 256), rows_at_once(10, 16, 256), rows_at_once(150, 1024, 3072)
        (15, 10, 1)
    """
    fitting = max(1, SIZES.block // (positions * max(positions, fan_out)))
    return -(-samples // -(-samples // min(most or SIZES.rows, fitting)))


def sum_over_pairs(
    x1: Array,
    g1: Array,
    x2: Array | None,
    g2: Array | None,
    output: str,
    dtype: Any,
    windows: np.ndarray | None = None,
) -> Array:
    """The sum over all groups and pairs of positions.

    Args:
        x1: inputs (n, groups, positions, k), or tokens (n, groups, positions); with `windows`
            pixels (n, 1, p, channels).
        g1: cotangents (n, C, groups, positions, o).
        x2: the same of m other samples; None for the same ones.
        g2: theirs, or None.
        output: "full", "trace" or "diagonal".
        dtype: in which it is summed.
        windows: the pixel under each tap (positions, taps), counted from 1, 0 for none.

    Returns:
        (n, C, m, C), (n, m) or (C, n, m).
    """
    (n, classes, groups, positions), m = g1.shape[:4], len(g1 if g2 is None else g2)
    is_own = g2 is None
    x2, g2 = x1 if x2 is None else x2, g1 if g2 is None else g2
    if goes_by_rows(positions, classes, output):
        return _by_rows(x1, g1, x2, g2, dtype, windows, is_own=is_own)
    if windows is not None:
        x1, x2 = (jnp.pad(x, ((0, 0), (0, 0), (1, 0), (0, 0)))[:, :, windows] for x in (x1, x2))
    # Copies with the positions in front, so that every iteration reads contiguous memory.
    x1, x2 = (x.reshape(*x.shape[:3], -1).transpose(1, 2, 0, 3) for x in (x1, x2))
    multiply = _multiply(g1, g2, output, dtype)
    pairs = np.indices((groups, positions, positions), np.int32).reshape(3, -1).T
    pairs = jnp.asarray(pairs[pairs[:, 2] >= pairs[:, 1]] if is_own else pairs)

    def add(index: Array, total: Array) -> Array:
        b, s, t = pairs[index]
        a = similarity(x1[b, s], x2[b, t], dtype)  # (n, m)
        if is_own:  # (t, s) is added at the end, by the transpose
            a = a * jnp.where(s == t, 0.5, 1.0).astype(a.dtype)
        spread = {"full": a[:, None, None], "diagonal": a[None], "trace": a}[output]
        return total + spread * multiply(b, s, t)

    shape = {"full": (n, classes, classes, m), "diagonal": (classes, n, m), "trace": (n, m)}
    kernel = jax.lax.fori_loop(0, len(pairs), add, jnp.zeros(shape[output], dtype))
    if output != "full":
        return kernel + kernel.swapaxes(-1, -2) if is_own else kernel
    kernel = kernel.swapaxes(2, 3)
    return kernel + kernel.transpose(2, 3, 0, 1) if is_own else kernel


def _products_of_positions(
    x: Array, sample: Array, windows: np.ndarray | None, dtype: Any
) -> Array:
    """<x_i[s], x_j[t]> of some rows with one sample (rows * positions, positions).

    With windows they are sums over taps of products of pixels, which patches share.
    """
    products = similarity(
        x.reshape(len(x) * x.shape[1], -1), sample.reshape(len(sample), -1), dtype
    )
    if windows is None:
        return products
    products = jnp.pad(products.reshape(len(x), -1, len(sample)), ((0, 0), (1, 0), (1, 0)))
    taps = (products[:, tap][:, :, tap] for tap in windows.T)
    return functools.reduce(jnp.add, taps).reshape(-1, len(windows))


def _by_rows(
    x1: Array, g1: Array, x2: Array, g2: Array, dtype: Any, windows: np.ndarray | None, *,
    is_own: bool,
) -> Array:  # fmt: skip
    """`sum_over_pairs` of all outputs, sample after sample."""
    (n, classes, groups, positions), m = g1.shape[:4], len(g2)
    most = SIZES.rows if jax.default_backend() == "cpu" else SIZES.many_rows
    rows = rows_at_once(n, positions, g1.shape[-1], most)
    blocks = -(-n // rows)

    def in_blocks(x: Array) -> Array:  # (groups, blocks, rows, ...)
        whole = jnp.pad(x, [(0, blocks * rows - n)] + [(0, 0)] * (x.ndim - 1))
        return jnp.moveaxis(whole.reshape(blocks, rows, *x.shape[1:]), 2, 0)

    gs = in_blocks(jnp.moveaxis(g1, 2, 1).reshape(n, groups, classes, -1))
    xs, x2, g2 = in_blocks(x1), jnp.moveaxis(x2, 1, 0), jnp.moveaxis(g2, 2, 0)

    def block(index: Array, total: Array) -> Array:
        b, i = index // blocks, index % blocks
        x, g = xs[b, i], gs[b, i]

        def column(j: Array, total: Array) -> Array:
            a = _products_of_positions(x, x2[b, j], windows, dtype)
            parts = []
            for d in range(classes):
                near = jax.lax.dot(a, g2[b, j, d].astype(dtype)).reshape(rows, -1)
                parts.append(jnp.einsum("nck,nk->nc", g, near, preferred_element_type=dtype))
            return total.at[i, :, :, j].add(jnp.stack(parts, -1))

        def upper_column(j: Array, total: Array) -> Array:
            return jax.lax.cond(j >= i * rows, column, lambda j, total: total, j, total)

        return jax.lax.fori_loop(0, m, upper_column if is_own else column, total)

    zeros = jnp.zeros((blocks, rows, classes, m, classes), dtype)
    kernel = jax.lax.fori_loop(0, groups * blocks, block, zeros)
    kernel = kernel.reshape(-1, classes, m, classes)[:n]
    if not is_own:
        return kernel
    return mirrored(kernel.reshape(n * classes, n * classes)).reshape(kernel.shape)


def _multiply(g1: Array, g2: Array, output: str, dtype: Any) -> Any:
    """(b, s, t) -> <g_i^c[b,s], g_j^d[b,t]>, (n, C, C, m), (C, n, m) or (n, m)."""
    first = g1.transpose(2, 3, 0, 1, 4)
    if output != "full":
        second, product = g2.transpose(2, 3, 0, 1, 4), PRODUCTS[output]
        return lambda b, s, t: product(first[b, s], second[b, t], dtype)
    second = g2.transpose(2, 3, 1, 0, 4)  # samples last: similarities are repeated by whole rows
    (_, _, n, classes, size), m = first.shape, len(g2)

    def multiply(b: Array, s: Array, t: Array) -> Array:
        rows, columns = first[b, s].reshape(-1, size), second[b, t].reshape(-1, size)
        return rows_product(rows, columns, dtype).reshape(n, classes, classes, m)

    return multiply


class Outer(NamedTuple):
    """The factors of a layer's gradients, which are sums of outer products.

    Attributes:
        inputs: x (n, s, k).
        cotangents: g (n, C, o, s).
    """

    inputs: Array
    cotangents: Array


def product_of_outer(
    first: Outer, second: Outer | None, product: Product, dtype: Any, chunk: int = SIZES.chunk
) -> Array:
    """A layer's part of the kernel between two batches, by chunks of its gradients.

    Args:
        first: of n samples.
        second: of m samples; None for the kernel of a batch with itself, of which only the upper
            half counts.
        product: of gradients (n, C, d) and (m, C, d) or None, a function with a hash.
        dtype: in which the kernel is summed.
        chunk: numbers of all samples' gradients that are formed at a time, at least a column.

    Returns:
        What `product` returns, summed over the chunks.

    Example:
        >>> pair = Outer(jnp.ones((1, 3, 2)), jnp.ones((1, 1, 4, 3)))
        >>> def product(a, b, dtype):
        ...     return jnp.einsum("ncd,mcd->nm", a, a if b is None else b)
        >>> product_of_outer(pair, None, product, "float32").tolist()  # 8 weights, each 3
        [[72.0]]
    """
    k, (_, classes, o, _) = first.inputs.shape[-1], first.cotangents.shape
    samples = max(len(pair.inputs) for pair in (first, second) if pair is not None)
    length, height = max(k, o), min(k, o)
    width = _width(length, max(1, chunk // (samples * classes * height)))
    options: dict[str, Any] = {"product": product, "dtype": jnp.dtype(dtype).name}
    column = functools.partial(_chunk, width=1, **options)
    total = jnp.zeros(jax.eval_shape(column, first, second, 0).shape, dtype)
    for low in range(0, length, width):
        size = min(width, length - low)
        total = _add_chunk(total, first, second, low, width=size, **options)
    return total


def _width(length: int, most: int) -> int:
    """How many of a layer's columns are formed at a time; equal widths share a compiled function.

    Example:
        >>> _width(1152, 54), _width(147, 109), _width(147, 500), _width(97, 50)
        (48, 49, 147, 48)
    """
    if most >= length:
        return length
    even = max(most - most % 16, min(most, 16))  # multiples of 16 numbers are fast
    whole = [width for width in range(most, most // 3, -1) if length % width == 0]
    return whole[0] if whole and length % even else even


def _formed(pair: Outer, low: Array, width: int) -> Array:
    """Some columns or rows of the gradients (n, C, d), cut from the longer of x and g."""
    x, g = pair
    n, classes, o, positions = g.shape
    if o > x.shape[-1]:
        g = jax.lax.dynamic_slice_in_dim(g, low, width, axis=2)
    else:
        x = jax.lax.dynamic_slice_in_dim(x, low, width, axis=-1)
    gradients = jnp.einsum("nqs,nsk->nqk", g.reshape(n, -1, positions), x)
    return gradients.reshape(n, classes, -1)


def _chunk(
    first: Outer, second: Outer | None, low: Array, *, width: int, product: Product, dtype: str
) -> Array:
    rows = _formed(first, low, width)
    columns = None if second is None else _formed(second, low, width)
    return product(rows, columns, jnp.dtype(dtype))


@functools.partial(jit, static_argnames=("width", "product", "dtype"), donate_argnums=0)
def _add_chunk(total: Array, first: Outer, second: Outer | None, low: Any, **options: Any) -> Array:
    return total + _chunk(first, second, low, **options)
