"""Both ends of the spectrum of a large dense matrix, without the other eigenvalues.

A Cholesky factorisation is a fifth of the work of all eigenvalues, and runs at full speed where
the reduction to tridiagonal form waits for memory: 0.9 against 31 CPU seconds at 4,000 rows. A
Lanczos process on the inverse then needs a few dozen triangular solves for the smallest
eigenvalues. In NumPy and SciPy, outside jit; memory is twice the matrix.
"""

from typing import Any, NamedTuple

import numpy as np

from jaxttp._core.xla_cpu.threads import limited

TOLERANCE = 1e-10
"""Relative accuracy asked of the iteration; rounding leaves eps * kappa beside it."""

ROWS = 512
"""Rows at a time of an elementwise pass, so that no third matrix is held."""


class DenseEnds(NamedTuple):
    """The largest eigenvalue and the two smallest of a positive definite matrix."""

    largest: float
    smallest: float
    second: float


def is_symmetric(matrix: np.ndarray, precision: float) -> bool:
    """Whether a square matrix equals its transpose to rounding, a block of rows at a time."""
    size = max(np.max(np.abs(matrix[i : i + ROWS])) for i in range(0, len(matrix), ROWS))
    for i in range(0, len(matrix), ROWS):
        difference = matrix[i : i + ROWS, i:] - matrix[i:, i : i + ROWS].T
        if np.max(np.abs(difference)) > 1e3 * precision * size:
            return False
    return True


def dense_ends(matrix: np.ndarray) -> DenseEnds | None:
    """The ends of the spectrum; None if the matrix is not numerically positive definite.

    Args:
        matrix: symmetric (n, n), float64; the lower triangle is factorised.
    """
    import scipy.linalg  # noqa: F401  here, since loading it takes as long as half of jaxttp

    with limited(len(matrix)):
        return _ends(matrix)


def _ends(matrix: np.ndarray) -> DenseEnds | None:
    import scipy.linalg
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    n = len(matrix)
    try:
        factor = scipy.linalg.cholesky(
            np.array(matrix, order="F"), lower=True, overwrite_a=True, check_finite=False
        )
    except np.linalg.LinAlgError:
        return None

    def solve(vector: np.ndarray) -> np.ndarray:
        return scipy.linalg.cho_solve((factor, True), vector, check_finite=False)

    inverse: Any = LinearOperator  # SciPy's annotations miss its own arguments
    options: dict[str, Any] = {
        "which": "LA",
        "v0": np.random.default_rng(0).standard_normal(n),
        "tol": TOLERANCE,
        "return_eigenvectors": False,
    }
    try:
        top = eigsh(matrix, k=1, **options)
        low = eigsh(inverse((n, n), matvec=solve, dtype=np.float64), k=2, **options)
    except ArpackNoConvergence:
        return None
    second, smallest = 1 / np.sort(low)
    return DenseEnds(float(top[0]), float(smallest), float(second))
