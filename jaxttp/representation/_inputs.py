"""What every measure does first: float64, samples in rows, and refusals that say what to do."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp._core.checks import check_finite_value, is_concrete

ROUNDING = 16 * 2.0**-52
"""Features that differ by less than this share of their size are constant."""


def as_rows(name: str, value: Any) -> Array:
    """Real samples (N, ...) as float64 rows (N, h); call it inside `double`."""
    value = value if hasattr(value, "dtype") else np.asarray(value)
    real = jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
    if not real or value.ndim < 2:
        raise ValueError(
            f"{name} must be real numbers (N, h), a sample a row; got {value.dtype} "
            f"{tuple(value.shape)}."
        )
    if 0 in value.shape:
        raise ValueError(f"{name} must not be empty; got shape {tuple(value.shape)}.")
    value = check_finite_value(name, jnp.asarray(value))
    return value.astype(jnp.float64).reshape(value.shape[0], -1)


def refuse(name: str, value: Array, bad: Array, text: str) -> Array:
    """Return `value`; where `bad` holds it is an error, now if concrete, else at run time."""
    if is_concrete(bad):
        if bool(np.any(np.asarray(bad))):
            raise ValueError(f"{name} {text}")
        return value
    return eqx.error_if(value, jnp.any(bad), f"{name} {text}")


def refuse_constant(name: str, value: Array, spread: Array, size: Array) -> Array:
    """Return `value`; samples that are all the same have no geometry."""
    text = (
        "must differ between samples, but all are the same: nothing can be said of their "
        "directions. Give more samples, or look for dead units."
    )
    return refuse(name, value, spread <= ROUNDING * size, text)
