"""Maxima over windows, whose derivatives XLA's compiler for CPUs takes one number after the other.

The maximum itself is quick. Its derivative is that of the entry of the window that is the largest,
of several the first; XLA scatters to it in a plain loop on one core (`select_and_scatter_add`),
four to eight times slower than a choice among the window's slices, which is the same. On other
backends nothing changes.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

MOST = 16
"""Entries of a window of which each is a slice of its own; wider ones stay as they are."""


def is_slow(equation: Any) -> bool:
    """Whether an equation is a maximum over windows with a slow derivative, on this backend."""
    if equation.primitive.name != "reduce_window_max" or jax.default_backend() != "cpu":
        return False
    given = equation.params
    dilated = any(n != 1 for n in (*given["base_dilation"], *given["window_dilation"]))
    is_real = jnp.issubdtype(equation.invars[0].aval.dtype, jnp.floating)
    return is_real and not dilated and 1 < math.prod(given["window_dimensions"]) <= MOST


def pool(equation: Any, x: Array) -> Array:
    """A maximum over small windows, with a quick derivative."""
    given = equation.params
    return _largest(
        x, given["window_dimensions"], given["window_strides"], tuple(map(tuple, given["padding"]))
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _largest(x: Array, window: Any, strides: Any, padding: Any) -> Array:
    least = np.asarray(-np.inf, x.dtype)
    return jax.lax.reduce_window(x, least, jax.lax.max, window, strides, padding)


@_largest.defjvp
def _derivative(window: Any, strides: Any, padding: Any, x: Any, moved: Any) -> tuple[Array, Array]:
    out = _largest(*x, window, strides, padding)
    cuts = (
        _windows(one, fill, out.shape, window, strides, padding)
        for one, fill in ((x[0], -jnp.inf), (moved[0], 0.0))
    )
    entries = zip(*cuts, strict=True)
    best, slope = next(entries)
    for value, change in entries:
        larger = value > best
        best, slope = jnp.where(larger, value, best), jnp.where(larger, change, slope)
    return out, slope


def _windows(
    x: Array, fill: float, counts: tuple[int, ...], window: Any, strides: Any, padding: Any
) -> Iterator[Array]:
    """One entry of all windows after the other, in order.

    Entries a stride apart are brought together first: slices of neighbours are transposed to sums
    that the compiler fuses, which those of every second entry are not.
    """
    blocks = [n + (k - 1) // s for n, k, s in zip(counts, window, strides, strict=True)]
    margins = [
        (low, max(0, b * s - n - low), 0)
        for (low, _), b, s, n in zip(padding, blocks, strides, x.shape, strict=True)
    ]
    padded = jax.lax.pad(x, jnp.asarray(fill, x.dtype), margins)
    padded = padded[tuple(slice(b * s) for b, s in zip(blocks, strides, strict=True))]
    apart = {(): padded}
    for axis, (b, s) in enumerate(zip(blocks, strides, strict=True)):
        apart = {
            (*key, i): part
            for key, whole in apart.items()
            for i, part in enumerate(_every(whole, axis, b, s))
        }
    for place in np.ndindex(*window):
        kept = tuple(i % s for i, s in zip(place, strides, strict=True))
        first = [i // s for i, s in zip(place, strides, strict=True)]
        yield apart[kept][tuple(slice(f, f + n) for f, n in zip(first, counts, strict=True))]


def _every(x: Array, axis: int, count: int, stride: int) -> list[Array]:
    """Entries 0, s, 2 s, ... along an axis of s times `count`, then 1, s + 1, ..., and so on."""
    if stride == 1:
        return [x]
    shape = (*x.shape[:axis], count, stride, *x.shape[axis + 1 :])
    parts = jax.lax.split(x.reshape(shape), [1] * stride, axis + 1)
    return [part.reshape((*x.shape[:axis], count, *x.shape[axis + 1 :])) for part in parts]
