"""Weight gradients that are formed when they are multiplied, some columns at a time.

    <dW_i^c, dW_j^d>,      dW_i^c = x_i^T g_i^c,      x_i (s, k), g_i^c (s, o)

With s k + C s o < C k o numbers a sample, x and g are what is worth keeping: a transformer of width
256 on 64 tokens has a quarter of its gradients' size. A piece of the columns (k, o) of all samples'
gradients is formed, multiplied, and dropped; it is small enough to stay in a CPU's cache, and for
the allocator to give the same memory again. Layers of one shape share one program, so that a deep
network compiles as one of its blocks does.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

PIECE = 1 << 22
"""Numbers of a piece of the gradients."""

Product = Callable[[Array, Array, Any], Array]


class Outer(NamedTuple):
    """What a layer's gradients are sums of outer products of.

    Attributes:
        inputs: x (n, s, k).
        cotangents: g (n, C, s, o).
    """

    inputs: Array
    cotangents: Array


def product_of_outer(first: Outer, second: Outer, product: Product, dtype: Any) -> Array:
    """A layer's part of the kernel between two batches, by pieces of its gradients.

    Args:
        first: of n samples.
        second: of m samples; `first` itself for the kernel of a batch with itself.
        product: of gradients (n, C, d) and (m, C, d).
        dtype: in which the kernel is summed.

    Returns:
        What `product` returns, summed over the pieces.
    """
    n, classes = first.cotangents.shape[:2]
    k, o = first.inputs.shape[-1], first.cotangents.shape[-1]
    rows = classes * max(n, len(second.inputs))
    long, short = max(k, o), min(k, o)
    pieces = min(long, math.ceil(rows * k * o / PIECE))
    edges = [round(long * index / pieces) for index in range(pieces + 1)]
    total = None
    turned = _turned(first)
    other = turned if second is first else _turned(second)
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        if total is not None:
            # Else the pieces might be formed at once, and lie in memory together.
            total, turned, other = jax.lax.optimization_barrier((total, turned, other))
        one = _formed(turned, low, high, classes, short)
        two = one if second is first else _formed(other, low, high, classes, short)
        part = product(one, two, dtype)
        total = part if total is None else total + part
    assert total is not None
    return total


def _turned(pair: Outer) -> tuple[Array, Array]:
    """The longer of x and g first, both (n C, s, .), so that a piece is a cut of one of them."""
    g = pair.cotangents
    n, classes = g.shape[:2]
    x = jnp.repeat(pair.inputs, classes, axis=0)
    g = g.reshape(n * classes, *g.shape[2:])
    return (x, g) if x.shape[-1] >= g.shape[-1] else (g, x)


def _formed(turned: tuple[Array, Array], low: int, high: int, classes: int, short: int) -> Array:
    """Some columns of the gradients (n, C, d)."""
    long, other = turned
    found = jnp.einsum("msk,mso->mko", long[..., low:high], other)
    return found.reshape(-1, classes, (high - low) * short)


__all__ = ["PIECE", "Outer", "product_of_outer"]
