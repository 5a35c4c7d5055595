"""Float64 where the numerics need it, whatever the precision of the process; float64 matrices.

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
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.checks import check_array, check_finite, refuse
from jaxttp._core.xla_cpu.threads import decompose


def double() -> contextlib.AbstractContextManager[Any]:
    """Float64 inside the block."""
    return jax.enable_x64(True)


def double_like(arrays: Any) -> contextlib.AbstractContextManager[Any]:
    """Float64 if any of the arrays is in float64, whatever the precision of the process."""
    is_double = any(getattr(a, "dtype", None) == jnp.float64 for a in jax.tree.leaves(arrays))
    return double() if is_double else contextlib.nullcontext()


def precision_of(value: Any) -> float:
    """The rounding unit of an array-like before it was promoted; that of float64 for integers."""
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.floating) else 2.0**-52


def as_double(name: str, value: Any, ndim: int | None = None) -> Array:
    """A finite float64 array of `ndim` axes; call it inside `double`."""
    array = check_array(name, value, ndim=ndim)
    if 0 in array.shape:
        raise ValueError(f"{name} must not be empty; got shape {array.shape}.")
    check_finite(name, value)
    return array.astype(jnp.float64)


def check_symmetric(name: str, matrix: Array, precision: float) -> Array:
    """The symmetric part; a matrix that is not symmetric to rounding is an error."""
    if matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"{name} must be square; got shape {matrix.shape}.")
    size = jnp.max(jnp.abs(matrix))
    skew = jnp.max(jnp.abs(matrix - matrix.T))
    text = f"{name} must be symmetric; pass 0.5 * (m + m.T) if it is so up to rounding"
    matrix = refuse(
        matrix, skew > 1e3 * precision * size, text,
        lambda: f" (its entries differ by up to {float(skew):.2g}).",
    )  # fmt: skip
    return 0.5 * (matrix + matrix.T)


def root(squares: Array) -> Array:
    """Square roots of non-negative numbers; the derivative at 0 is 0.

    That of `jnp.sqrt` is infinite, and NaN once it is multiplied by the zero of a distance to
    itself: ``jax.grad`` of such a norm would be NaN in every entry.

    Args:
        squares: array of any shape, not negative; NaN stays.

    Example:
        >>> import jax
        >>> jax.grad(lambda x: root(jnp.sum((x - x) ** 2)))(2.0).tolist()
        0.0
    """
    is_zero = squares == 0
    return jnp.where(is_zero, 0.0, jnp.sqrt(jnp.where(is_zero, 1.0, squares)))


class Covariance(eqx.Module):
    """Sigma (d, d) with its eigendecomposition; `matrix` None stands for the identity.

    Attributes:
        values: eigenvalues (d,), ascending, zero where they are below the tolerance.
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
    # Eigenvalues below -1e-5 times the largest are no rounding (of float32 data, at worst).
    bad = (values[0] < -1e-5 * jnp.abs(values[-1])) | (values[-1] <= 0)
    values = refuse(
        values, bad, "covariance must be positive semi-definite and not zero",
        lambda: f"; its eigenvalues lie between {float(values[0]):.3g} and "
        f"{float(values[-1]):.3g}. Use X @ X.T / n.",
    )  # fmt: skip
    values = jnp.where(values > d * precision * values[-1], values, 0.0)
    root = jnp.matmul(vectors * jnp.sqrt(values)[None, :], vectors.T, precision="highest")
    return Covariance(values, vectors, root, matrix)


def whitening(covariance: ArrayLike) -> Float[Array, "d d"]:
    """T with T Sigma T^T = I on the range of Sigma; the bounds of T x have kappa(Sigma) = 1.

    Args:
        covariance: Sigma (d, d), symmetric PSD.

    Returns:
        Sigma^(-1/2) (d, d), the pseudo-inverse root: directions without data are mapped to zero.

    Raises:
        ValueError: a covariance that is not a symmetric PSD matrix, or is zero.

    Example:
        >>> import numpy as np
        >>> whitening(np.diag([4.0, 0.0])).tolist()
        [[0.5, 0.0], [0.0, 0.0]]

    Source:
        GNC Section 4 (its experiments whiten) and Section 6.
    """
    with double():
        size = as_double("covariance", covariance, 2).shape[0]
        sigma = check_covariance(covariance, size)
        assert sigma.vectors is not None
        safe = jnp.where(sigma.values > 0, sigma.values, 1.0)
        roots = jnp.where(sigma.values > 0, 1 / jnp.sqrt(safe), 0.0)
        return jnp.matmul(sigma.vectors * roots[None, :], sigma.vectors.T, precision="highest")
