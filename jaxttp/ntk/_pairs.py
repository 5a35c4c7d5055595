"""The part of a kernel that a layer with several positions has in activation form.

    sum_{b,s,t} <x_i[b,s], x_j[b,t]> <g_i^c[b,s], g_j^d[b,t]>

It is a loop over groups b, positions s and some positions t. Of a batch with itself the pairs
(s, t) and (t, s) give transposed parts, so that half of the loop does, and its transpose.

A convolution's x are patches, and <patch s, patch t> is the sum over the taps of products of the
pixels under them. Where there are fewer pairs of pixels than of taps under pairs of patches, each
product of two pixels is computed once: patches of 3 x 3 take a ninth of the multiplications.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp.ntk._rows import rows_product

_TURN, _OWN_TURN = 1 << 21, 1 << 16
"""Numbers that a turn of the loop makes at most, and of a loop over half of the pairs."""
_LEAST = 2
"""Positions that a turn may take in any case; with pixels it is one, more are compiled badly."""


def similarity(x: Array, y: Array | None, dtype: Any) -> Array:
    """<x_i, y_j> of rows; for tokens (integers) whether they are the same.

    With y None those of x with each other, of which only the upper half counts.
    """
    if jnp.issubdtype(x.dtype, jnp.integer):
        return (x[:, 0, None] == (x if y is None else y)[None, :, 0]).astype(dtype)
    return rows_product(x, y, dtype)


def turns_of(positions: int, entries: int, *, is_own: bool, with_pixels: bool) -> int:
    """Into how many turns a loop cuts the second position of all pairs.

    Args:
        positions: of each sample.
        entries: of the kernel.
        is_own: whether of a batch with itself: t turns do (t + 1) / 2 of the work of t.
        with_pixels: whether patches are compared pixel by pixel.
    """
    most = max(_LEAST, (_OWN_TURN if is_own else _TURN) // max(1, entries))
    most = 1 if with_pixels else most
    return positions // max(t for t in range(1, positions + 1) if positions % t == 0 and t <= most)


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
        x1: inputs (n, groups, positions, k), or pixels (n, groups, p, channels) with `windows`.
        g1: cotangents (n, C, groups, positions, o).
        x2: the same of m other samples; None for the same ones.
        g2: theirs, or None.
        output: "full", "trace" or "diagonal".
        dtype: in which it is summed.
        windows: which pixel is under each tap (positions, taps); p where there is none.

    Returns:
        (n, C, m, C), (n, m) or (C, n, m).
    """
    (n, classes, groups, positions), m = g1.shape[:4], len(g1 if g2 is None else g2)
    is_own = g2 is None
    x2, g2 = (one if two is None else two for one, two in ((x1, x2), (g1, g2)))
    entries = n * m * {"full": classes**2, "diagonal": classes, "trace": 1}[output]
    turns = turns_of(positions, entries, is_own=is_own, with_pixels=windows is not None)
    turn = positions // turns
    if windows is None:
        find = _alike_patches(x1, x2, turn, dtype)
    else:
        find = _alike_pixels(x1, x2, dtype, windows)
    multiply = _multiply(g1, g2, turn, output, dtype)
    which = np.indices((groups, positions, turns), np.int32).reshape(3, -1).T
    which = which[which[:, 2] >= which[:, 1] // turn] if is_own else which
    places = jnp.asarray(which)

    def add(index: Array, total: Array) -> Array:
        b, s, t = places[index]
        a = find(b, s, t)  # (n, turn, m)
        if is_own:  # (s, t) with t > s stands for (t, s), too, whose part is added at the end
            others = t * turn + jnp.arange(turn)
            weight = jnp.where(others > s, 1.0, jnp.where(others == s, 0.5, 0.0)).astype(a.dtype)
            a = a * weight[None, :, None]
        g = multiply(b, s, t)  # (n, C, turn, C, m), (C, n, turn, m) or (n, turn, m)
        if output == "full":
            return total + jnp.sum(a[:, None, :, None] * g, axis=2)
        return total + jnp.sum((a if output == "trace" else a[None]) * g, axis=-2)

    shape = {"full": (n, classes, classes, m), "diagonal": (classes, n, m), "trace": (n, m)}
    found = jax.lax.fori_loop(0, len(which), add, jnp.zeros(shape[output], dtype))
    if output != "full":
        return found + found.swapaxes(-1, -2) if is_own else found
    found = found.swapaxes(2, 3)
    return found + found.transpose(2, 3, 0, 1) if is_own else found


def _alike_patches(x1: Array, x2: Array, turn: int, dtype: Any) -> Any:
    """(b, s, t) -> <x_i[b,s], x_j[b,t']> (n, turn, m) for the positions t' of turn t."""
    (n, groups, positions), m = x1.shape[:3], len(x2)
    # Copies with the positions in front, so that every turn of the loop reads contiguous memory,
    # and is one product of two matrices.
    x1, x2 = (x.reshape(*x.shape[:3], -1).transpose(1, 2, 0, 3) for x in (x1, x2))
    x2 = x2.reshape(groups, positions // turn, turn * m, -1)
    return lambda b, s, t: similarity(x1[b, s], x2[b, t], dtype).reshape(n, turn, m)


def _alike_pixels(x1: Array, x2: Array, dtype: Any, windows: np.ndarray) -> Any:
    """The same for turns of one position, as the sum over taps of products of pixels."""
    (n, groups, pixels), m = x1.shape[:3], len(x2)
    one, two = (x.transpose(1, 2, 0, 3).reshape(groups, pixels * len(x), -1) for x in (x1, x2))
    products = jnp.stack([rows_product(one[b], two[b], dtype) for b in range(groups)])
    products = products.reshape(groups, pixels, n, pixels, m).transpose(0, 1, 3, 2, 4)
    products = jnp.pad(products, ((0, 0), (0, 1), (0, 1), (0, 0), (0, 0)))  # none: zero
    under = jnp.asarray(windows.astype(np.int32))

    def find(b: Array, s: Array, t: Array) -> Array:
        pairs = zip(under[s], under[t], strict=True)
        return functools.reduce(jnp.add, [products[b, one, two] for one, two in pairs])[:, None]

    return find


def _multiply(g1: Array, g2: Array, turn: int, output: str, dtype: Any) -> Any:
    """(b, s, t) -> <g_i^c[b,s], g_j^d[b,t']> for the positions t' of turn t."""
    (n, classes, groups, positions), m = g1.shape[:4], len(g2)
    turns = positions // turn
    if output == "full":
        g1 = g1.transpose(2, 3, 0, 1, 4).reshape(groups, positions, n * classes, -1)
        g2 = g2.transpose(2, 3, 1, 0, 4).reshape(groups, turns, turn * classes * m, -1)
        shape = (n, classes, turn, classes, m)
    elif output == "trace":
        g1 = g1.transpose(2, 3, 0, 1, 4).reshape(groups, positions, n, -1)
        g2 = g2.transpose(2, 3, 0, 1, 4).reshape(groups, turns, turn * m, -1)
        shape = (n, turn, m)
    else:
        g1 = g1.transpose(2, 3, 1, 0, 4)
        g2 = g2.transpose(2, 1, 3, 0, 4).reshape(groups, classes, turns, turn * m, -1)
        g2 = g2.swapaxes(1, 2)
        shape = (classes, n, turn, m)

    def multiply(b: Array, s: Array, t: Array) -> Array:
        if output == "diagonal":
            product = jnp.einsum("cno,cmo->cnm", g1[b, s], g2[b, t], preferred_element_type=dtype)
        else:
            product = rows_product(g1[b, s], g2[b, t], dtype)
        return product.reshape(shape)

    return multiply
