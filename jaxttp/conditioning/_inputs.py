"""What every function here does first: shapes that chain, float64, a covariance and its root.

All of this package computes in float64, whatever comes in: the smallest eigenvalue of a Gram matrix
is lost in float32 (2.4x wrong at a condition number of 1e8). `double` switches it on for the lines
inside it only; it works under jit, vmap and jvp and leaves the user's process as it was. Results
stay float64, too; NumPy reads them as such.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp._checks import check_finite, check_number, is_concrete
from jaxttp._threads import decompose

NEGATIVE = 1e-5
"""Eigenvalues below -NEGATIVE times the largest are no rounding (of float32 data, at worst)."""


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


def check_weights(weights: Any) -> list[Array]:
    """W_1 (a_1, d), ..., W_L (k, a_{L-1}) in float64, or `ValueError` where they do not chain."""
    if not isinstance(weights, Sequence) or len(weights) == 0:
        raise ValueError(
            "weights must be a list of at least one matrix, [W_1 (a1, d), ..., W_L (k, a)]; "
            f"got {type(weights).__name__}."
        )
    chain = [as_double(f"weights[{i}]", weight, 2) for i, weight in enumerate(weights)]
    for i in range(1, len(chain)):
        if chain[i].shape[1] != chain[i - 1].shape[0]:
            raise ValueError(
                f"weights[{i}] has shape {chain[i].shape} but weights[{i - 1}] gives "
                f"{chain[i - 1].shape[0]} features; the columns of each must be the rows of the "
                "one before it (the first layer comes first)."
            )
    return chain


def check_scales(scales: Any, weights: list[Array]) -> list[Array] | None:
    """Fixed factors (a_l,) behind every layer but the last, or None."""
    if scales is None:
        return None
    if not isinstance(scales, Sequence) or len(scales) != len(weights) - 1:
        raise ValueError(
            f"scales must be a list of {len(weights) - 1} vectors, one for every hidden layer."
        )
    out = [as_double(f"scales[{i}]", scale, 1) for i, scale in enumerate(scales)]
    for i, (scale, weight) in enumerate(zip(out, weights, strict=False)):
        if scale.shape[0] != weight.shape[0]:
            raise ValueError(
                f"scales[{i}] has {scale.shape[0]} entries, hidden layer {i} has {weight.shape[0]}."
            )
    return out


def check_skip(skip: Any) -> Any:
    """A finite skip weight."""
    return check_number("skip", skip)


def add_skip(weights: list[Array], skip: Any) -> list[Array]:
    """W_l + skip I, with a rectangular identity."""
    if is_concrete(skip) and float(skip) == 0.0:
        return weights
    skip = jnp.asarray(skip).astype(jnp.float64)
    return [w + skip * jnp.eye(*w.shape, dtype=w.dtype) for w in weights]


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


class Covariance(eqx.Module):
    """Sigma (d, d) with its eigendecomposition; `matrix` None stands for the identity.

    Attributes:
        values: eigenvalues (d,), ascending, what is below the tolerance set to zero.
        vectors: eigenvectors (d, d) in columns, or None.
        root: Sigma^(1/2) (d, d), or None.
    """

    values: Array
    vectors: Array | None
    root: Array | None
    matrix: Array | None

    def condition(self) -> Array:
        """The largest eigenvalue over the smallest positive one."""
        return self.largest() / self.smallest()

    def largest(self) -> Array:
        """The largest eigenvalue."""
        return self.values[-1]

    def smallest(self) -> Array:
        """The smallest positive eigenvalue."""
        return jnp.min(jnp.where(self.values > 0, self.values, jnp.inf))


def check_covariance(covariance: Any, d: int) -> Covariance:
    """Sigma with its root, or `ValueError` if it does not fit, is zero or not PSD."""
    if covariance is None:
        return Covariance(jnp.ones(d, jnp.float64), None, None, None)
    precision = precision_of(covariance)
    matrix = as_double("covariance", covariance, 2)
    if matrix.shape != (d, d):
        raise ValueError(
            f"covariance has shape {matrix.shape}, but the network reads {d} inputs; give the "
            f"({d}, {d}) second moments of the inputs."
        )
    matrix = check_symmetric("covariance", matrix, precision)
    values, vectors = decompose(jnp.linalg.eigh, matrix)
    bad = (values[0] < -NEGATIVE * jnp.abs(values[-1])) | (values[-1] <= 0)
    text = "covariance must be positive semi-definite and not zero"
    if is_concrete(bad):
        if bool(np.asarray(bad)):
            raise ValueError(
                f"{text}; its eigenvalues lie between {float(values[0]):.3g} and "
                f"{float(values[-1]):.3g}. Use X @ X.T / n."
            )
    else:
        values = eqx.error_if(values, bad, text)
    values = jnp.where(values > d * precision * values[-1], values, 0.0)
    root = jnp.matmul(vectors * jnp.sqrt(values)[None, :], vectors.T, precision="highest")
    return Covariance(values, vectors, root, matrix)
