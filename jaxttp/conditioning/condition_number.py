"""The pseudo-condition number: the largest over the smallest non-zero eigenvalue.

It depends on the tolerance for zero. So the result holds the rank, the tolerance, the gap behind
the last eigenvalue that counts, and the condition numbers at neighboring ranks.
"""

import dataclasses
import functools
import math
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Float, Int

from jaxttp._core.arrays import as_double, check_symmetric, double, precision_of
from jaxttp._core.checks import check_integer, check_number, is_concrete
from jaxttp._core.results import RESULT, describe
from jaxttp._core.xla_cpu.threads import decompose, limited
from jaxttp.conditioning._structured import structured_extremes
from jaxttp.conditioning.bounds import ratio
from jaxttp.conditioning.linear import LinearGaussNewton
from jaxttp.ntk.kernels import Factored
from jaxttp.ntk.lanczos import Ritz, lanczos, lanczos_of_network, runs_a_network
from jaxttp.ntk.sharded import gathered


@dataclasses.dataclass(frozen=True)
class Effort:
    """The choice of the method and its limits; sizes are rows, timed on two cores.

    Attributes:
        dense: operators up to this size are made dense, and all their eigenvalues computed.
        large: of matrices beyond this only both ends of the spectrum are computed, in 10 % of the
            time.
        steps: products with an operator of unknown structure, at most.
        tolerance: relative accuracy of the ends of a large matrix; rounding adds eps * kappa.
    """

    dense: int = 1024
    large: int = 3000
    steps: int = 256
    tolerance: float = 1e-10


EFFORT = Effort()


class ConditionNumber(eqx.Module):
    """A pseudo-condition number with its rank, tolerance and error.

    Attributes:
        value: largest / smallest; nan for a zero matrix, +inf if the argument `rank` is too high.
        largest: the largest absolute eigenvalue.
        smallest: the smallest absolute eigenvalue that counts as non-zero.
        rank: how many count; None for an operator known by products alone, which do not resolve
            multiplicities, unless the rank was passed.
        tolerance: below this an eigenvalue is zero.
        gap: smallest over the next eigenvalue; +inf at full rank; nan where not all are known.
        rank_below: the condition number at rank - 1; nan at rank 1 or less, or where it is not
            known.
        rank_above: the condition number at rank + 1; +inf if that eigenvalue is zero, nan at full
            rank or where it is not known.
        error: relative error of `value` by the residuals of an iteration; 0 for "dense", nan where
            it is not known.
        eigenvalues: absolute eigenvalues, descending; None from an iteration that did not find all.
        kind: "dense" (all eigenvalues), "iterative" (converged eigenvalues at both ends, by a
            known structure, by shift and invert, or by a Lanczos process that found every
            eigenvalue) or "lower bound" (an iteration without convergence: the condition number is
            at least `value`).
    """

    value: Float[Array, "..."]
    largest: Float[Array, "..."]
    smallest: Float[Array, "..."]
    rank: Int[Array, "..."] | None
    tolerance: Float[Array, "..."]
    gap: Float[Array, "..."]
    rank_below: Float[Array, "..."]
    rank_above: Float[Array, "..."]
    error: Float[Array, "..."]
    eigenvalues: Float[Array, "... n"] | None
    kind: str = eqx.field(static=True)

    plot, _repr_html_, __repr__ = RESULT

    @property
    def is_lower_bound(self) -> bool:
        """Whether the condition number may be larger than `value`."""
        return self.kind == "lower bound"

    def __str__(self) -> str:
        sign = "at least " if self.is_lower_bound else ""
        if not is_concrete(self.value) or jnp.ndim(self.value) > 0:
            return describe(self)
        text = (
            f"condition number {sign}{float(self.value):.4g} ({self.kind}): absolute eigenvalues "
            f"{float(self.largest):.4g} to {float(self.smallest):.4g}"
        )
        if self.rank is None:
            return f"{text}, rank not known"
        rank = int(self.rank)
        pairs = ((rank - 1, float(self.rank_below)), (rank + 1, float(self.rank_above)))
        neighbors = ", ".join(f"at {r}: {value:.4g}" for r, value in pairs if not math.isnan(value))
        return f"{text}, rank {rank}" + (f" ({neighbors})" if neighbors else "")


def condition_number(
    matrix_or_operator: Any, *, rank: Any = None, rtol: float | None = None, spectrum: bool = False
) -> ConditionNumber:
    """The pseudo-condition number of a symmetric matrix or operator.

    Eigenvalues below n * eps * lambda_max count as zero, eps that of the input's dtype. Pass the
    rank where it is known (`generic_rank`), which is safer. Eigenvalues enter by absolute value, so
    indefinite matrices such as the functional Hessian work, too.

    A large matrix of full rank (beyond 3000 rows) is factorized, and a Lanczos process on its
    inverse finds the smallest eigenvalues ("iterative"); `spectrum=True` computes all of them.

    A `LinearGaussNewton` of any size is solved through its structure: its rank is that of the
    factors, and a preconditioned iteration (LOBPCG) finds both ends. Any other operator beyond 1024
    rows gets a Lanczos process of 256 steps. Where it finds all distinct eigenvalues (a multiple of
    the identity, a low rank) its result is exact ("iterative"), else a "lower bound"; its `rank` is
    then None, or the one that was passed. It may miss a single eigenvalue below
    10 n eps lambda_max, and no bound exceeds 1 / sqrt(eps).

    Args:
        matrix_or_operator: (n, n), a kernel (N, C, N, C), or a symmetric `lineax` operator.
        rank: the number of non-zero eigenvalues, if known; may be traced.
        rtol: eigenvalues below rtol * lambda_max count as zero, in place of n * eps.
        spectrum: compute all eigenvalues of a matrix, however large; they are in `eigenvalues`.

    Returns:
        A `ConditionNumber`, in float64 for any input.

    Raises:
        ValueError: not square, not symmetric, not finite, a rank outside 1..n, rtol outside (0, 1).

    Example:
        >>> import numpy as np
        >>> result = condition_number(np.diag([8.0, 2.0, 0.0]))
        >>> float(result.value), int(result.rank), float(result.rank_below)
        (4.0, 2, 1.0)

    Source:
        GNC Appendix C. A float32 Gram matrix is 2.4x wrong at 1e8: build it in float64, as
        `gauss_newton_linear` and `curvature_matrix` do.
    """
    if rtol is not None:
        check_number("rtol", rtol, above=0.0, below=1.0)
    if rank is not None and is_concrete(rank):
        whole = np.asarray(rank)[()] if isinstance(rank, Array | np.ndarray) else rank
        rank = check_integer("rank", whole, at_least=1)
    if isinstance(matrix_or_operator, lx.AbstractLinearOperator):
        return _of_operator(matrix_or_operator, rank, rtol)
    if isinstance(matrix_or_operator, Array | Factored):
        matrix_or_operator = gathered(matrix_or_operator)
    precision = precision_of(matrix_or_operator)
    with double():
        matrix = as_double("matrix_or_operator", matrix_or_operator)
        if matrix.ndim == 4:
            matrix = matrix.reshape(matrix.shape[0] * matrix.shape[1], -1)
        if matrix.ndim != 2:
            raise ValueError(
                "matrix_or_operator must be a matrix (n, n), a kernel (N, C, N, C) or a lineax "
                f"operator; got shape {matrix.shape}."
            )
        matrix = check_symmetric("matrix_or_operator", matrix, precision)
        if (
            not spectrum
            and matrix.shape[0] > EFFORT.large
            and is_concrete(matrix)
            and (rank is None or (is_concrete(rank) and rank == matrix.shape[0]))
        ):
            result = _of_ends(matrix, rtol, precision, trusted=rank is not None)
            if result is not None:
                return result
        return _of_spectrum(decompose(jnp.linalg.eigvalsh, matrix), rank, rtol, precision)


def _of_ends(
    matrix: Array, rtol: float | None, precision: float, *, trusted: bool
) -> ConditionNumber | None:
    """From both ends of a matrix of full rank, by shift and invert; None for another rank.

    A factorization is 10 % of the work of all eigenvalues, and runs at full speed where the
    reduction to tridiagonal form waits for memory. In SciPy, outside jit.

    Where the full rank was passed (`trusted`) no tolerance reduces it.
    """
    import scipy.linalg  # here, since loading it takes as long as half of jaxttp
    from scipy.sparse.linalg import ArpackError, eigsh

    values, n = np.asarray(matrix), matrix.shape[0]
    v0 = np.random.default_rng(0).standard_normal(n)
    options: dict[str, Any] = {"v0": v0, "tol": EFFORT.tolerance, "return_eigenvectors": False}
    try:
        with limited(n), warnings.catch_warnings():
            warnings.simplefilter("error", scipy.linalg.LinAlgWarning)  # an exact zero
            largest = np.max(np.abs(eigsh(values, k=1, which="LM", **options)))
            ends = np.sort(np.abs(eigsh(values, k=2, sigma=0.0, which="LM", **options)))
    except (scipy.linalg.LinAlgWarning, np.linalg.LinAlgError, ArpackError, RuntimeError):
        return None
    tolerance = (n * precision if rtol is None else rtol) * largest
    if not np.all(np.isfinite(ends)) or (ends[0] <= tolerance and not trusted):
        return None
    largest, smallest, second = (jnp.asarray(value) for value in (largest, *ends))
    result = _partial(largest, smallest, n, EFFORT.tolerance, "iterative", tolerance)
    rank_below = ratio(largest, second)
    return dataclasses.replace(result, gap=jnp.asarray(math.inf), rank_below=rank_below)


def _of_spectrum(
    eigenvalues: Array, rank: Any, rtol: float | None, precision: float
) -> ConditionNumber:
    """From all eigenvalues, under any transformation."""
    n = eigenvalues.shape[0]
    values = jnp.sort(jnp.abs(eigenvalues))[::-1]
    largest = values[0]
    tolerance = (n * precision if rtol is None else rtol) * largest
    if rank is not None and is_concrete(rank):
        check_integer("rank", rank, at_least=1, at_most=n)
    counted = jnp.sum(values > tolerance) if rank is None else jnp.asarray(rank)
    counted = jnp.where(largest > 0, counted, 0).astype(jnp.int64)

    padded = jnp.concatenate([values, jnp.zeros(2, values.dtype)])

    def at(position: Array) -> Array:
        return padded[jnp.clip(position, 0, n)]

    smallest = jnp.where(counted > 0, at(counted - 1), 0.0)
    beyond = at(counted)
    gap = jnp.where(beyond > 0, smallest / jnp.where(beyond > 0, beyond, 1.0), jnp.inf)
    return ConditionNumber(
        value=ratio(largest, smallest),
        largest=largest,
        smallest=smallest,
        rank=counted,
        tolerance=tolerance,
        gap=jnp.where(counted < n, gap, jnp.inf),
        rank_below=jnp.where(counted > 1, ratio(largest, at(counted - 2)), jnp.nan),
        rank_above=jnp.where(counted < n, ratio(largest, beyond), jnp.nan),
        error=jnp.zeros_like(largest),
        eigenvalues=values,
        kind="dense",
    )


def _of_operator(operator: Any, rank: Any, rtol: float | None) -> ConditionNumber:
    n = operator.in_size()
    if operator.out_size() != n or not lx.is_symmetric(operator):
        raise ValueError(
            "matrix_or_operator must be square and symmetric; tag it with lineax.symmetric_tag."
        )
    with double():
        if rank is not None and is_concrete(rank):
            check_integer("rank", rank, at_least=1, at_most=n)
        if n > EFFORT.dense:
            is_known = all(map(is_concrete, jax.tree.leaves((operator, rank))))
            if isinstance(operator, LinearGaussNewton) and is_known and rtol is None:
                return _of_structure(operator, rank)
            return _of_products(operator, n, rank, rtol)
        matrix = jnp.asarray(operator.as_matrix())
        precision = float(jnp.finfo(matrix.dtype).eps)
        matrix = matrix.astype(jnp.float64)
        _check_products(operator, matrix)
        values = decompose(jnp.linalg.eigvalsh, 0.5 * (matrix + matrix.T))
        return _of_spectrum(values, rank, rtol, precision)


def _of_structure(operator: LinearGaussNewton, rank: Any) -> ConditionNumber:
    extremes = structured_extremes(operator)
    if rank not in (None, extremes.rank):
        raise ValueError(
            f"rank={rank} contradicts the factors, whose rank is {extremes.rank}; leave it None, "
            "or pass the dense matrix to look at the spectrum."
        )
    kind = "iterative" if extremes.converged else "lower bound"
    ends = jnp.asarray(extremes.largest), jnp.asarray(extremes.smallest)
    return _partial(*ends, extremes.rank, extremes.error, kind)


def _partial(
    largest: Array, smallest: Array, rank: Any, error: Any, kind: str, tolerance: Any = math.nan
) -> ConditionNumber:
    unknown = jnp.full_like(largest, math.nan)
    return ConditionNumber(
        value=ratio(largest, smallest),
        largest=largest,
        smallest=smallest,
        rank=None if rank is None else jnp.asarray(rank, jnp.int64),
        tolerance=jnp.full_like(largest, tolerance),
        gap=unknown,
        rank_below=unknown,
        rank_above=unknown,
        error=jnp.asarray(error, jnp.float64),
        eigenvalues=None,
        kind=kind,
    )


def _check_products(operator: Any, result: Array) -> None:
    """Refuse an operator whose products are not finite, by the `result` of some products."""
    if is_concrete(result) and not np.all(np.isfinite(result)):
        ones = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), operator.in_structure())
        operator.mv(ones)  # outside of a trace it may raise an error with the reason
        raise ValueError("matrix_or_operator: its products hold NaN or infinite values.")


def _of_products(operator: Any, n: int, rank: Any, rtol: float | None) -> ConditionNumber:
    """From products alone; exact where they reach every eigenvalue, else a lower bound."""
    structure = operator.in_structure()
    if not isinstance(structure, jax.ShapeDtypeStruct) or structure.shape != (n,):
        raise ValueError(
            "matrix_or_operator must act on flat vectors (n,) beyond "
            f"{EFFORT.dense} rows; its input is {structure}."
        )
    precision = float(jnp.finfo(structure.dtype).eps)
    steps = min(EFFORT.steps, n)
    start = jax.random.normal(jax.random.key(0), (n,), jnp.float64)
    if runs_a_network(operator) and is_concrete(start):
        start = _product(operator, start)
        ritz = lanczos_of_network(_product, operator, start, steps, precision=precision)
        ends = _ends_of(ritz, n, precision, rtol)
    else:
        ends = _ends_by_products(operator, start, steps, precision, rtol)
    largest, smallest, counted, closed = ends
    tolerance = (n * precision if rtol is None else rtol) * largest
    error = jnp.where(closed, 10 * precision * n**0.5 * largest / smallest, math.nan)
    if not is_concrete(largest) or not is_concrete(rank):
        # No error can be raised while tracing: a rank that products contradict gives NaN.
        result = _partial(largest, smallest, rank, error, "lower bound", tolerance)
        is_contradicted = False if rank is None else counted > rank
        return dataclasses.replace(result, value=jnp.where(is_contradicted, math.nan, result.value))
    _check_products(operator, largest)
    if rank is not None and int(counted) > rank:
        raise ValueError(
            f"rank={rank} contradicts the operator, of which at least {int(counted)} eigenvalues "
            f"exceed {n * precision if rtol is None else rtol:.2g} of the largest; set rtol, "
            "below which they count as zero, or pass the dense matrix to look at the spectrum."
        )
    kind = "iterative" if bool(closed) else "lower bound"
    return _partial(largest, smallest, rank, error, kind, tolerance)


@eqx.filter_jit
def _ends_by_products(
    operator: Any, start: Array, steps: int, precision: float, rtol: float | None
) -> tuple[Array, Array, Array, Array]:
    product = functools.partial(_product, operator)
    ritz = lanczos(product, product(start), steps, precision=precision)
    return _ends_of(ritz, start.size, precision, rtol)


def _product(operator: Any, vector: Array) -> Array:
    return operator.mv(vector.astype(operator.in_structure().dtype)).astype(jnp.float64)


@eqx.filter_jit
def _ends_of(
    ritz: Ritz, n: int, precision: float, rtol: float | None
) -> tuple[Array, Array, Array, Array]:
    """The largest eigenvalue, a bound on the smallest that counts, their number, and convergence.

    For w = A v of the Krylov space |A w|/|w| is at least the smallest absolute eigenvalue that is
    not zero, since w lies in the range. Ritz values may be nearer to zero: rounding leads out of
    the range, and they lie between positive and negative eigenvalues. With A Q y = Q T y the bound
    is the smallest singular value of T U, U the left singular vectors of T. Those with singular
    values below sqrt(eps) of the largest are left out, since rounding affects them.
    """
    values = jnp.where(ritz.known, jnp.abs(ritz.values), 0.0)
    largest = jnp.max(values)
    tolerance = (n * precision if rtol is None else rtol) * largest
    images, sizes, _ = decompose(jnp.linalg.svd, ritz.projected[:-1, :-1], full_matrices=False)
    kept = sizes > jnp.sqrt(precision) * largest
    bounds = decompose(jnp.linalg.svd, ritz.projected @ (images * kept[None]), compute_uv=False)
    bound = bounds[jnp.maximum(jnp.sum(kept) - 1, 0)]
    exact = jnp.min(jnp.where(values > tolerance, values, jnp.inf))
    smallest = jnp.where(ritz.closed, exact, bound)
    counted = jnp.sum(values > tolerance)
    return largest, jnp.where(largest > 0, smallest, 0.0), counted, ritz.closed
