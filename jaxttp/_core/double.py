"""Float64 where the numerics need it, whatever the user's process computes in.

The smallest eigenvalue of a Gram matrix is lost in float32 (2.4x wrong at a condition number of
1e8). `double` switches float64 on for the lines inside it only; it works under jit, vmap and jvp
and leaves the user's process as it was. Results stay float64, too; NumPy reads them as such.
"""

import contextlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp._core.checks import check_finite, is_concrete


def double() -> contextlib.AbstractContextManager[Any]:
    """Float64 inside the block."""
    return jax.enable_x64(True)


def precision_of(value: Any) -> float:
    """The rounding unit of an array-like before it was promoted; that of float64 for integers."""
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.floating) else 2.0**-52


def as_double(name: str, value: Any, ndim: int | None = None) -> Array:
    """A finite float64 array of `ndim` axes; call it inside `double`."""
    if not hasattr(value, "dtype"):
        value = np.asarray(value)
    if not (jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)):
        raise ValueError(f"{name} must hold real numbers; got {value.dtype}.")
    if ndim is not None and value.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} axes; got shape {tuple(value.shape)}.")
    if 0 in value.shape:
        raise ValueError(f"{name} must not be empty; got shape {tuple(value.shape)}.")
    check_finite(name, value)
    return jnp.asarray(value).astype(jnp.float64)


def check_symmetric(name: str, matrix: Array, precision: float) -> Array:
    """The symmetric part; a matrix that is not symmetric to rounding is an error."""
    if matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"{name} must be square; got shape {matrix.shape}.")
    size = jnp.max(jnp.abs(matrix))
    skew = jnp.max(jnp.abs(matrix - matrix.T))
    bad = skew > 1e3 * precision * size
    text = f"{name} must be symmetric; pass 0.5 * (m + m.T) if it is so up to rounding"
    if is_concrete(bad):
        if bool(np.asarray(bad)):
            raise ValueError(f"{text} (its entries differ by up to {float(skew):.2g}).")
    else:
        matrix = eqx.error_if(matrix, bad, text)
    return 0.5 * (matrix + matrix.T)
