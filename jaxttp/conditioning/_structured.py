"""Both ends of the spectrum of G^_O = sum_l A_l ⊗ C_l when it is too large to be dense.

Three facts make the smallest non-zero eigenvalue cheap where no layer is narrower than the outputs:

1. With R (r, d) a root of Sigma of full row rank, C_l = R B_l R^T, the matrix shares its non-zero
   eigenvalues, and A_1 and C_1 = R R^T are positive definite. So its rank is k r, all its rows.
2. For k below the widths every A_l is nearly a multiple of I, so sum_l a_l C_l inverted, a_l the
   mean of A_l's diagonal, is a preconditioner that hardly misses.
3. LOBPCG (SciPy's) needs one product and one preconditioner a step and keeps three blocks.

This runs on values, outside jit, and in NumPy: without a compilation a matrix of 2,000 rows takes a
tenth of a second.
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxttp._core.xla_cpu.threads import limited
from jaxttp.conditioning.linear import LinearGaussNewton


@dataclasses.dataclass(frozen=True)
class Effort:
    """What the iteration may take.

    Attributes:
        block: vectors iterated at once: enough for a crowded end of the spectrum.
        iterations: at most, from each start.
        restarts: what counts as a small residual follows from the eigenvalue that was found.
        tolerance: residual over eigenvalue at which it stops; the eigenvalue errs by its square.
    """

    block: int = 4
    iterations: int = 300
    restarts: int = 3
    tolerance: float = 1e-5


EFFORT = Effort()


class Extremes(NamedTuple):
    """What `structured_extremes` finds."""

    largest: float
    smallest: float
    rank: int
    error: float
    converged: bool


def structured_extremes(operator: LinearGaussNewton) -> Extremes | None:
    """The largest and the smallest non-zero eigenvalue; None where S_1 has not rank k."""
    k, d = operator.shape
    outer = np.asarray(operator.outer[0])
    with limited(max(k, d)):
        values = np.linalg.svd(outer, compute_uv=False)
        floor = max(outer.shape) * 2.0**-52 * values[0]
        if len(values) < k or values[k - 1] <= floor:
            return None
        return _solve([np.asarray(left) for left in operator.lefts], _inner_terms(operator))


def _inner_terms(operator: LinearGaussNewton) -> list[np.ndarray]:
    """C_1 ... C_L (r, r)."""
    sigma, d = operator.covariance, operator.shape[1]
    product = np.eye(d)
    if sigma.vectors is not None:
        values = np.asarray(sigma.values)
        keep = values > 0
        product = np.asarray(sigma.vectors)[:, keep] * np.sqrt(values[keep])  # R^T
    terms = [product.T @ product]
    for weight in operator.weights[:-1]:
        product = np.asarray(weight) @ product
        terms.append(product.T @ product)
    return terms


def _solve(lefts: list[np.ndarray], terms: list[np.ndarray]) -> Extremes:
    """Both ends of sum_l A_l ⊗ C_l."""
    k, g = len(lefts[0]), len(terms[0])
    rank = k * g

    def right(v: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        """V (b, k, g) @ matrix as ONE product of matrices."""
        return (v.reshape(-1, g) @ matrix).reshape(-1, k, g)

    def product(columns: np.ndarray) -> np.ndarray:
        v = columns.T.reshape(-1, k, g)
        out = np.zeros_like(v)
        for left, term in zip(lefts, terms, strict=True):
            out += left @ right(v, term)
        return out.reshape(-1, rank).T

    if rank <= 6 * EFFORT.block:
        values = np.linalg.eigvalsh(product(np.eye(rank)))
        return Extremes(float(values[-1]), float(values[0]), rank, 0.0, True)
    mean = sum(np.trace(left) / k * term for left, term in zip(lefts, terms, strict=True))
    ridge = g * 2.0**-52 * np.max(np.diagonal(mean))
    inverse = np.linalg.inv(mean + ridge * np.eye(g))
    inverse = 0.5 * (inverse + inverse.T)

    def precondition(columns: np.ndarray) -> np.ndarray:
        return right(columns.T.reshape(-1, k, g), inverse).reshape(-1, rank).T

    noise = np.random.default_rng(0).standard_normal((rank, EFFORT.block))
    largest, top_residual = _extreme(product, noise, 0.0, largest=True)
    smallest, residual = _extreme(product, precondition(noise), largest, precondition)
    rounding = 10 * 2.0**-52 * np.sqrt(rank) * largest
    is_good = (
        top_residual <= 2 * EFFORT.tolerance * largest
        and residual <= 2 * EFFORT.tolerance * smallest + 2 * rounding
        and smallest > 0
    )
    error = top_residual / largest + residual / max(smallest, 1e-300)
    return Extremes(largest, smallest, rank, error, is_good)


def _extreme(
    product: Callable[[np.ndarray], np.ndarray],
    start: np.ndarray,
    scale: float,
    precondition: Callable[[np.ndarray], np.ndarray] | None = None,
    *,
    largest: bool = False,
) -> tuple[float, float]:
    """The smallest eigenvalue or the largest, and the norm of its residual.

    Args:
        product: the symmetric operator on columns (n, b).
        start: columns (n, b).
        scale: the size of the operator where it dwarfs the eigenvalue: the rounding to expect.
        precondition: approximately its inverse.
        largest: which end.
    """
    from scipy.sparse.linalg import LinearOperator, lobpcg

    n = len(start)
    operator: Any = LinearOperator  # SciPy's annotations miss its own arguments
    wrap = lambda f: operator((n, n), matvec=f, matmat=f, dtype=np.float64)  # noqa: E731
    rounding = 10 * 2.0**-52 * np.sqrt(n) * scale
    vectors, _ = np.linalg.qr(start)
    ends = np.linalg.eigvalsh(vectors.T @ product(vectors))
    value, residual = float(ends[-1] if largest else ends[0]), np.inf
    for _ in range(EFFORT.restarts):  # what counts as small follows from the eigenvalue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of residuals, which are looked at below
            values, vectors = lobpcg(
                wrap(product), vectors, M=None if precondition is None else wrap(precondition),
                largest=largest, tol=EFFORT.tolerance * abs(value) + rounding,
                maxiter=EFFORT.iterations,
            )  # fmt: skip
        index = np.argmax(values) if largest else np.argmin(values)
        vector = vectors[:, [index]] / np.linalg.norm(vectors[:, index])
        image = product(vector)
        value = float(np.sum(vector * image))
        residual = float(np.linalg.norm(image - value * vector))
        if residual <= EFFORT.tolerance * abs(value) + 2 * rounding:
            break
    return value, residual
