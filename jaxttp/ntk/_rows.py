"""Products of rows, A B^T, and of A A^T the upper half: what all kernels are made of.

A CPU multiplies few and very long rows a slice of their numbers at a time: the slices of all rows
stay in its caches. So does it compute half of a symmetric product, by strips of rows against those
from there on, of which the compiler makes copies: of whole rows these would cost more than what is
saved, of slices they do not (600 rows of 37,000 numbers on two cores: a product 0.14 s, half of it
by strips of whole rows 0.15 s, by strips of slices 0.10 s). Many rows are halved three times in
place of strips, where multiples of 16 are next to a half: 9/16 of the work of a whole one.
"""

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

STRIPS = 4
"""Strips of the upper half of a symmetric product: 5/8 of the work of a whole one."""
_HALVINGS, _MANY_ROWS, _EVEN = 3, 512, 16  # of so many rows at least, at multiples of so many
_WORTH_ROWS, _WORTH_SIZE = 256, 512  # with fewer rows or numbers half a product takes as long
_STRIP_SLICE = 1 << 10  # numbers of a row that strips are made of
_SLICE, _FEW_ROWS = 1 << 22, 512  # numbers of a slice of rows, and how many rows are cut so

Product = Callable[[Array, Array | None, Any], Array]


def is_halved(rows: int, size: int) -> bool:
    """Whether a symmetric product of so many rows computes half of itself."""
    return rows >= _WORTH_ROWS and size >= _WORTH_SIZE


def rows_product(a: Array, b: Array | None, dtype: Any) -> Array:
    """A B^T: twice as fast on a CPU as the same product of arrays with more axes.

    Args:
        a: rows (n, d).
        b: rows (m, d); None for those of `a`, and then only entries on and above the diagonal
            count, those below may be anything finite.
        dtype: in which it is summed.
    """
    if b is None and is_halved(*a.shape):
        return _upper_half(a, dtype)
    b = a if b is None else b
    rows, size = max(len(a), len(b)), a.shape[1]
    width = _SLICE // max(rows, 1)
    if rows > _FEW_ROWS or size < 2 * width or jax.default_backend() != "cpu":
        return _product(a, b, dtype)

    def add(total: Array, low: Any, width: int) -> Array:
        one, two = (jax.lax.dynamic_slice_in_dim(m, low, width, 1) for m in (a, b))
        return total + _product(one, two, dtype)

    return _by_slices(add, jnp.zeros((len(a), len(b)), dtype), size, width)


@functools.lru_cache(maxsize=256)
def upper_blocks(rows: int) -> tuple[tuple[int, int, int, int], ...]:
    """What is computed of a symmetric product: rows from, to, and columns from, to.

    Example:
        >>> upper_blocks(256)
        ((0, 64, 0, 256), (64, 128, 64, 256), (128, 192, 128, 256), (192, 256, 192, 256))
        >>> sum((b - a) * (d - c) for a, b, c, d in upper_blocks(1024)) / 1024**2
        0.5625
    """
    if rows >= _MANY_ROWS:
        return tuple(_halves(0, rows, _HALVINGS))
    edges = [round(index * rows / STRIPS) for index in range(STRIPS + 1)]
    return tuple((low, high, low, rows) for low, high in itertools.pairwise(edges))


def _halves(low: int, high: int, times: int) -> list[tuple[int, int, int, int]]:
    if times == 0:
        return [(low, high, low, high)]
    middle = low + _EVEN * round((high - low) / (2 * _EVEN))
    rest = _halves(low, middle, times - 1) + _halves(middle, high, times - 1)
    return [(low, middle, middle, high), *rest]


def share_of_half(rows: int) -> float:
    """How much of a symmetric product of so many rows is computed where it is halved."""
    return sum((b - a) * (d - c) for a, b, c, d in upper_blocks(rows)) / rows**2


def _upper_half(a: Array, dtype: Any) -> Array:
    rows, size = a.shape
    blocks = upper_blocks(rows)

    def add(totals: list[Array], low: Any, width: int) -> list[Array]:
        part = jax.lax.dynamic_slice_in_dim(a, low, width, 1)
        return [
            total + _product(part[top:bottom], part[left:right], dtype)
            for total, (top, bottom, left, right) in zip(totals, blocks, strict=True)
        ]

    width = _STRIP_SLICE if jax.default_backend() == "cpu" else size
    nothing = [jnp.zeros((b - a, d - c), dtype) for a, b, c, d in blocks]
    whole = jnp.zeros((rows, rows), dtype)
    found = _by_slices(add, nothing, size, width)
    for part, (top, _, left, _) in zip(found, blocks, strict=True):
        whole = jax.lax.dynamic_update_slice(whole, part, (top, left))
    return whole


def mirrored(kernel: Array) -> Array:
    """The upper half of square matrices (..., n, n) copied onto the lower one."""
    return jnp.triu(kernel) + jnp.triu(kernel, 1).swapaxes(-1, -2)


def _by_slices(add: Callable[..., Any], total: Any, size: int, width: int) -> Any:
    """Add slice after slice, the rest first."""
    turns = size // width
    if size % width:
        total = add(total, turns * width, size % width)
    if turns == 1:
        return add(total, 0, width)
    if turns == 0:
        return total
    return jax.lax.fori_loop(0, turns, lambda i, so_far: add(so_far, i * width, width), total)


def _product(a: Array, b: Array, dtype: Any) -> Array:
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def _product_full(a: Array, b: Array | None, dtype: Any) -> Array:
    (n, c, size), m = a.shape, len(a if b is None else b)
    other = None if b is None else b.reshape(m * c, size)
    return rows_product(a.reshape(n * c, size), other, dtype).reshape(n, c, m, c)


def _product_trace(a: Array, b: Array | None, dtype: Any) -> Array:
    other = None if b is None else b.reshape(len(b), -1)
    return rows_product(a.reshape(len(a), -1), other, dtype)


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
