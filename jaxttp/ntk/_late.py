"""Weight gradients that are formed when they are multiplied, some columns at a time.

    <dW_i^c, dW_j^d>,      dW_i^c = g_i^c x_i,      x_i (s, k), g_i^c (o, s)

With s k + C s o < C k o numbers a sample, x and g are what is worth keeping: a transformer of width
256 on 64 tokens has a quarter of its gradients' size. A piece of all samples' gradients (o, k),
some rows where o > k and else some columns (a product with few columns is slow), is formed,
multiplied, and dropped; it is small enough to stay in a CPU's cache, and for the allocator to give
the same memory again. The loop is Python's: in one program XLA forms all pieces first. The
positions stand last in g, so that a sample's piece is ONE product of matrices as they lie in
memory, (C o, s) (s, k): a product for each output, (o, s) (s, k), runs on one core of a CPU, and
from g (s, o) it takes a quarter longer to thrice as long. Layers of one shape share one program, so
a deep network compiles as one block does.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxttp._core.compile import jit
from jaxttp.ntk._rows import Product

PIECE = 1 << 22
"""Numbers of a piece of the gradients."""
_EVEN = 16  # a wider piece is a multiple of so many numbers, where the layer's length is not one


class Outer(NamedTuple):
    """What a layer's gradients are sums of outer products of.

    Attributes:
        inputs: x (n, s, k).
        cotangents: g (n, C, o, s).
    """

    inputs: Array
    cotangents: Array


def product_of_outer(
    first: Outer, second: Outer | None, product: Product, dtype: Any, piece: int = PIECE
) -> Array:
    """A layer's part of the kernel between two batches, by pieces of its gradients.

    Args:
        first: of n samples.
        second: of m samples; None for the kernel of a batch with itself, of which only the upper
            half counts.
        product: of gradients (n, C, d) and (m, C, d) or None, a function with a hash.
        dtype: in which the kernel is summed.
        piece: numbers of all samples' gradients that are formed at a time, at least a column.

    Returns:
        What `product` returns, summed over the pieces.

    Example:
        >>> pair = Outer(jnp.ones((1, 3, 2)), jnp.ones((1, 1, 4, 3)))
        >>> def product(a, b, dtype):
        ...     return jnp.einsum("ncd,mcd->nm", a, a if b is None else b)
        >>> product_of_outer(pair, None, product, "float32").tolist()  # 8 weights, each 3
        [[72.0]]
    """
    k, (_, classes, o, _) = first.inputs.shape[-1], first.cotangents.shape
    samples = max(len(one.inputs) for one in (first, second) if one is not None)
    length, rest = max(k, o), min(k, o)
    width = _width(length, max(1, piece // (samples * classes * rest)))
    options: dict[str, Any] = {"product": product, "dtype": jnp.dtype(dtype).name}
    total = jnp.zeros(jax.eval_shape(_column(**options), first, second, 0).shape, dtype)
    for low in range(0, length, width):
        size = min(width, length - low)
        total = _go_on(total, first, second, low, width=size, **options)
    return total


def _width(length: int, most: int) -> int:
    """How many of a layer's columns are formed at a time: pieces of one width share a program.

    Example:
        >>> _width(1152, 54), _width(147, 109), _width(147, 500), _width(97, 50)
        (48, 49, 147, 48)
    """
    if most >= length:
        return length
    even = max(most - most % _EVEN, min(most, _EVEN))
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
    found = jnp.einsum("nqs,nsk->nqk", g.reshape(n, -1, positions), x)
    return found.reshape(n, classes, -1)


def _piece(
    first: Outer, second: Outer | None, low: Array, *, width: int, product: Product, dtype: str
) -> Array:
    one = _formed(first, low, width)
    two = None if second is None else _formed(second, low, width)
    return product(one, two, jnp.dtype(dtype))


@functools.lru_cache(maxsize=64)
def _column(product: Product, dtype: str) -> Any:
    """A piece of one column, the same object every time: what it is traced to is kept by it."""
    return functools.partial(_piece, width=1, product=product, dtype=dtype)


_STATIC = ("width", "product", "dtype")


@functools.partial(jit, static_argnames=_STATIC, donate_argnums=0)
def _go_on(
    total: Array, first: Outer, second: Outer | None, low: Array, *, width: int, product: Product,
    dtype: str,
) -> Array:  # fmt: skip
    return total + _piece(first, second, low, width=width, product=product, dtype=dtype)


__all__ = ["PIECE", "Outer", "product_of_outer"]
