"""The part of a kernel that a layer with several positions has in activation form.

    sum_{b,s,t} <x_i[b,s], x_j[b,t]> <g_i^c[b,s], g_j^d[b,t]>

It is a loop over groups b, positions s and some positions t. Of a batch with itself the pairs
(s, t) and (t, s) give transposed parts, so that half of the loop does, and its transpose.

With several outputs and many positions it is summed in another order, sample after sample j:

    sum_{s,o} g_i^c[s,o] (sum_t <x_i[s], x_j[t]> g_j^d[t,o])

are C s^2 o + C^2 s o operations for C^2 s^2 o, and rows i of a block that stays in a CPU's caches.
Of a batch with itself a block needs no samples before its own. (3 x 3 convolutions of 150 samples
on two cores: of 256 channels on 4 x 4 pixels with 4 outputs 0.16 s for 0.22, with 9 outputs 0.36
for 0.96; of 16 channels on 8 x 8 pixels with 4 outputs 0.29 s for 1.34.)

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

from jaxttp.ntk._rows import mirrored, rows_product

_TURN, _OWN_TURN = 1 << 21, 1 << 16
"""Numbers that a turn of the loop makes at most, and of a loop over half of the pairs."""
_ROWS, _MANY_ROWS, _BLOCK = 16, 128, 1 << 22
"""Samples of a block of rows where they come sample after sample, more where caches are not what
counts, and the numbers that it makes of another sample at most."""
_MANY_POSITIONS = 16
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


def goes_by_rows(positions: int, classes: int, output: str) -> bool:
    """Whether samples come one after the other, against blocks of rows.

    Args:
        positions: of each sample.
        classes: C.
        output: "full", "trace" or "diagonal".
    """
    return output == "full" and classes > 1 and positions >= _MANY_POSITIONS


def rows_at_once(samples: int, positions: int, fan_out: int, most: int = 0) -> int:
    """Samples of a block of rows, the last of which may be filled up.

    Args:
        samples: of all rows.
        positions: of each.
        fan_out: numbers of a cotangent at each.
        most: no more; those of a CPU for 0.

    Example:
        >>> rows_at_once(150, 16, 256), rows_at_once(10, 16, 256), rows_at_once(150, 1024, 3072)
        (15, 10, 1)
    """
    fitting = max(1, _BLOCK // (positions * max(positions, fan_out)))
    return -(-samples // -(-samples // min(most or _ROWS, fitting)))


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
    if goes_by_rows(positions, classes, output):
        return _by_rows(x1, g1, x2, g2, dtype, windows, is_own=is_own)
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


def _by_rows(
    x1: Array, g1: Array, x2: Array, g2: Array, dtype: Any, windows: np.ndarray | None, *,
    is_own: bool,
) -> Array:  # fmt: skip
    """`sum_over_pairs` of all outputs, sample after sample."""
    (n, classes, groups, positions), m = g1.shape[:4], len(g2)
    most = _ROWS if jax.default_backend() == "cpu" else _MANY_ROWS
    rows = rows_at_once(n, positions, g1.shape[-1], most)
    blocks = -(-n // rows)

    def in_blocks(x: Array) -> Array:  # (groups, blocks, rows, ...)
        whole = jnp.pad(x, [(0, blocks * rows - n)] + [(0, 0)] * (x.ndim - 1))
        return jnp.moveaxis(whole.reshape(blocks, rows, *x.shape[1:]), 2, 0)

    gs = in_blocks(jnp.moveaxis(g1, 2, 1).reshape(n, groups, classes, -1))
    xs, x2, g2 = in_blocks(x1), jnp.moveaxis(x2, 1, 0), jnp.moveaxis(g2, 2, 0)
    find = _alike_in_turn(dtype, windows)

    def block(index: Array, total: Array) -> Array:
        b, i = index // blocks, index % blocks
        x, g = xs[b, i], gs[b, i]

        def column(j: Array, total: Array) -> Array:
            a = find(x, x2[b, j]).reshape(rows * positions, positions)
            parts = []
            for d in range(classes):
                near = jax.lax.dot(a, g2[b, j, d].astype(dtype)).reshape(rows, -1)
                parts.append(jnp.einsum("nck,nk->nc", g, near, preferred_element_type=dtype))
            return total.at[i, :, :, j].add(jnp.stack(parts, -1))

        def wanted(j: Array, total: Array) -> Array:
            return jax.lax.cond(j >= i * rows, column, lambda j, total: total, j, total)

        return jax.lax.fori_loop(0, m, wanted if is_own else column, total)

    nothing = jnp.zeros((blocks, rows, classes, m, classes), dtype)
    found = jax.lax.fori_loop(0, groups * blocks, block, nothing)
    found = found.reshape(-1, classes, m, classes)[:n]
    if not is_own:
        return found
    flat = found.reshape(n * classes, n * classes)
    return mirrored(flat).reshape(found.shape)


def _alike_in_turn(dtype: Any, windows: np.ndarray | None) -> Any:
    """(x of some rows, x of one sample) -> <x_i[s], x_j[t]> (rows, positions, positions)."""
    if windows is None:

        def patches(x: Array, other: Array) -> Array:
            if jnp.issubdtype(x.dtype, jnp.integer):
                return (x[:, :, None] == other[None, None]).astype(dtype)
            one, two = x.reshape(x.shape[0] * x.shape[1], -1), other.reshape(len(other), -1)
            return rows_product(one, two, dtype)

        return patches
    under = windows.astype(np.int32)

    def pixels(x: Array, other: Array) -> Array:
        products = rows_product(x.reshape(-1, x.shape[-1]), other, dtype)
        products = products.reshape(len(x), x.shape[1], -1)
        products = jnp.pad(products, ((0, 0), (0, 1), (0, 1)))  # none: zero
        taps = (products[:, tap][:, :, tap] for tap in under.T)
        return functools.reduce(jnp.add, taps)

    return pixels


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
