"""Maxima over windows with derivatives that are fast on CPUs.

The maximum itself is fast. Its derivative is that of the window's largest entry, of several the
first. XLA scatters to it in a plain loop on one core (`select_and_scatter_add`), 4 to 8 times
slower than an equivalent choice among the window's slices. On other backends nothing changes.
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
"""Entries of a window, at most; wider windows are not rewritten."""


def is_slow(equation: Any) -> bool:
    """Whether an equation is a maximum over windows with a slow derivative, on this backend."""
    if equation.primitive.name != "reduce_window_max" or jax.default_backend() != "cpu":
        return False
    params = equation.params
    dilated = any(n != 1 for n in (*params["base_dilation"], *params["window_dilation"]))
    is_real = jnp.issubdtype(equation.invars[0].aval.dtype, jnp.floating)
    return is_real and not dilated and 1 < math.prod(params["window_dimensions"]) <= MOST


def pool(equation: Any, x: Array) -> Array:
    """A maximum over small windows, with a fast derivative."""
    params, padding = equation.params, tuple(map(tuple, equation.params["padding"]))
    return _largest(x, params["window_dimensions"], params["window_strides"], padding)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _largest(x: Array, window: Any, strides: Any, padding: Any) -> Array:
    least = np.asarray(-np.inf, x.dtype)
    return jax.lax.reduce_window(x, least, jax.lax.max, window, strides, padding)


@_largest.defjvp
def _derivative(window: Any, strides: Any, padding: Any, x: Any, moved: Any) -> tuple[Array, Array]:
    out = _largest(*x, window, strides, padding)
    values = _windows(x[0], -jnp.inf, out.shape, window, strides, padding)
    changes = _windows(moved[0], 0.0, out.shape, window, strides, padding)
    entries = zip(values, changes, strict=True)
    best, slope = next(entries)
    for value, change in entries:
        larger = value > best
        best, slope = jnp.where(larger, value, best), jnp.where(larger, change, slope)
    return out, slope


def _windows(
    x: Array, fill: float, counts: tuple[int, ...], window: Any, strides: Any, padding: Any
) -> Iterator[Array]:
    """The entries of all windows, one position in the window after the other.

    Entries a stride apart are gathered first: the compiler fuses the transposes of contiguous
    slices, but not those of strided ones.
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
    for tap in np.ndindex(*window):
        kept = tuple(i % s for i, s in zip(tap, strides, strict=True))
        first = [i // s for i, s in zip(tap, strides, strict=True)]
        yield apart[kept][tuple(slice(f, f + n) for f, n in zip(first, counts, strict=True))]


def _every(x: Array, axis: int, count: int, stride: int) -> list[Array]:
    """Entries 0, s, 2 s, ... along an axis of s times `count`, then 1, s + 1, ..., and so on."""
    if stride == 1:
        return [x]
    shape = (*x.shape[:axis], count, stride, *x.shape[axis + 1 :])
    parts = jax.lax.split(x.reshape(shape), [1] * stride, axis + 1)
    return [part.reshape((*x.shape[:axis], count, *x.shape[axis + 1 :])) for part in parts]
