"""Both ends of the spectrum of G^_O = sum_l A_l ⊗ C_l when it is too large to be dense.

Three facts make the smallest non-zero eigenvalue cheap:

1. The range is known from the factors. The ranges of S_1, ..., S_L grow with l, the row spaces of
   P_1 R, ..., P_L R shrink, so in bases adapted to both flags the range of G^_O is a set of
   coordinates: row i (an output direction that S_l is the first to reach) times the row space of
   P_l R. Its size, sum_l (e_l - e_{l-1}) f_l, is the rank; on it the matrix is positive definite.
2. For k below the widths every A_l is nearly a multiple of I, so sum_l a_l C_l inverted, a_l their
   mean on a level of the flag, is a good preconditioner.
3. LOBPCG (SciPy's) needs one product and one preconditioner a step and keeps three blocks.

The shapes depend on the ranks, so this runs on values, outside jit, and in NumPy: without a
compilation a matrix of 2,000 rows takes a tenth of a second.
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
    """Limits of the iteration.

    Attributes:
        block: vectors iterated at once: enough for a crowded end of the spectrum.
        iterations: in each run, at most.
        restarts: runs, at most; each takes its tolerance from the eigenvalue of the one before.
        tolerance: residual over eigenvalue at which it stops; the eigenvalue errs by its square.
        memory: bytes for dense C_l; with more of them products go through the layers.
    """

    block: int = 4
    iterations: int = 300
    restarts: int = 3
    tolerance: float = 1e-5
    memory: int = 2**29


EFFORT = Effort()


class Extremes(NamedTuple):
    """The result of `structured_extremes`."""

    largest: float
    smallest: float
    rank: int
    error: float
    converged: bool


class _Reduced(NamedTuple):
    """The operator in adapted bases: V (k, g) -> mask * sum_l A_l V C_l."""

    hidden: list[np.ndarray]  # W_1 ... W_{L-1}
    lefts: list[np.ndarray]  # (k, k), rotated
    enter: np.ndarray | None  # (g, d): from adapted coordinates to inputs; None for the identity
    mask: np.ndarray  # (k, g)
    groups: list[tuple[int, int, int]]  # rows from, to, and how many columns they own


def structured_extremes(operator: LinearGaussNewton) -> Extremes:
    """The largest and the smallest non-zero eigenvalue, outside jit."""
    k, d = operator.shape
    with limited(max(k, d)):
        reduced = _adapt(operator)
        return _solve(reduced, *_terms_and_inverses(reduced))


def _solve(
    reduced: _Reduced, terms: list[np.ndarray] | None, inverses: list[np.ndarray]
) -> Extremes:
    """Both ends in adapted bases."""
    mask = reduced.mask
    rank = int(np.sum(mask))
    if rank == 0:
        return Extremes(0.0, 0.0, 0, 0.0, True)
    k, g = mask.shape

    def product(columns: np.ndarray) -> np.ndarray:
        v = columns.T.reshape(-1, k, g) * mask
        if terms is None:
            out = _chain(reduced, v)
        else:
            pairs = zip(reduced.lefts, terms, strict=True)
            out = sum((left @ _right(v, term) for left, term in pairs), start=np.zeros_like(v))
        return (out * mask).reshape(-1, k * g).T

    def precondition(columns: np.ndarray) -> np.ndarray:
        v = columns.T.reshape(-1, k, g)
        out = np.zeros_like(v)
        for (begin, end, width), inverse in zip(reduced.groups, inverses, strict=True):
            out[:, begin:end, :width] = _right(v[:, begin:end, :width], inverse)
        return out.reshape(-1, k * g).T

    if rank <= 6 * EFFORT.block:
        rows = np.flatnonzero(mask.reshape(-1))
        values = np.linalg.eigvalsh(product(np.eye(k * g))[np.ix_(rows, rows)])
        return Extremes(float(values[-1]), float(values[0]), rank, 0.0, True)
    noise = np.random.default_rng(0).standard_normal((k * g, EFFORT.block)) * mask.reshape(-1, 1)
    largest, top_residual = _extreme(product, noise, 0.0, largest=True)
    # Outside the mask the eigenvalue is set to the largest, so that rounding there has no effect.
    outside = largest * (1.0 - mask).reshape(-1, 1)
    raised = lambda v: product(v) + outside * v  # noqa: E731
    smallest, residual = _extreme(raised, precondition(noise), largest, precondition)
    rounding = 10 * 2.0**-52 * np.sqrt(k * g) * largest
    error = top_residual / largest + residual / max(smallest, 1e-300)
    is_good = (
        top_residual <= 2 * EFFORT.tolerance * largest
        and residual <= 2 * EFFORT.tolerance * smallest + 2 * rounding
        and error < 1  # beyond that rounding is larger than the eigenvalue
    )
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
        scale: the size of the operator where it is much larger than the eigenvalue; for rounding.
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
    for _ in range(EFFORT.restarts):  # the tolerance follows from the eigenvalue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of residuals, which are checked below
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


def _rank(values: np.ndarray, shape: tuple[int, ...]) -> int:
    return int(np.sum(values > max(shape) * 2.0**-52 * values[0])) if values.size else 0


def _adapt(operator: LinearGaussNewton) -> _Reduced:
    """Bases of both sides in which the range is a set of coordinates."""
    k, d = operator.shape
    outer = [np.asarray(s) for s in operator.outer]
    basis = np.zeros((k, 0))
    levels: list[tuple[int, int]] = []  # (layer, new output directions)
    for layer, s in enumerate(outer):
        fresh = _rank(np.linalg.svd(s, compute_uv=False), s.shape) - basis.shape[1]
        if fresh > 0:
            residual = s - basis @ (basis.T @ s)
            basis = np.hstack([basis, np.linalg.svd(residual, full_matrices=False)[0][:, :fresh]])
            levels.append((layer, fresh))
    basis, _ = np.linalg.qr(basis)

    enter = _data_root(operator)
    size = d if enter is None else enter.shape[0]
    columns, right = [size], None
    if len(levels) > 1 or levels[0][0] > 0:
        right, columns = _row_spaces(operator.weights, enter, [level for level, _ in levels], size)
        enter = right.T if enter is None else right.T @ enter

    groups, start = [], 0
    for (_, count), width in zip(levels, columns, strict=True):
        groups.append((start, start + count, width))
        start += count
    mask = np.zeros((k, columns[0] if right is None else right.shape[1]))
    for begin, end, width in groups:
        mask[begin:end, :width] = 1.0
    complement = np.linalg.qr(basis, mode="complete")[0][:, basis.shape[1] :]
    basis = np.hstack([basis, complement])
    lefts = [basis.T @ np.asarray(a) @ basis for a in operator.lefts]
    hidden = [np.asarray(weight) for weight in operator.weights[:-1]]
    return _Reduced(hidden, lefts, enter, mask, groups)


def _data_root(operator: LinearGaussNewton) -> np.ndarray | None:
    """(r, d) with root^T root = Sigma, r its rank; None for the identity."""
    sigma = operator.covariance
    if sigma.vectors is None:
        return None
    values = np.asarray(sigma.values)
    keep = values > 0
    return np.sqrt(values[keep])[:, None] * np.asarray(sigma.vectors)[:, keep].T


def _row_spaces(
    weights: list, enter: np.ndarray | None, layers: list[int], size: int
) -> tuple[np.ndarray, list[int]]:
    """An orthonormal basis (size, g) adapted to the row spaces of P_l R, and their ranks."""
    products = [np.eye(size) if enter is None else enter.T]  # (a, size)
    for weight in weights[:-1]:
        products.append(np.asarray(weight) @ products[-1])
    ranks, basis = [], np.zeros((size, 0))
    for layer in reversed(layers):
        if layer == 0:
            basis = np.linalg.qr(basis, mode="complete")[0] if basis.size else np.eye(size)
            ranks.append(size)
            continue
        product = products[layer]
        rank = _rank(np.linalg.svd(product, compute_uv=False), product.shape)
        residual = product - (product @ basis) @ basis.T
        fresh = max(rank - basis.shape[1], 0)
        basis = np.hstack([basis, np.linalg.svd(residual, full_matrices=False)[2][:fresh].T])
        ranks.append(basis.shape[1])
    return basis, ranks[::-1]


def _chain(reduced: _Reduced, v: np.ndarray) -> np.ndarray:
    """sum_l A_l (v enter) B_l enter^T for v (b, k, g), through the layers."""
    states = [v if reduced.enter is None else _right(v, reduced.enter)]
    for weight in reduced.hidden:
        states.append(_right(states[-1], weight.T))
    total = reduced.lefts[-1] @ states[-1]
    for index in range(len(reduced.hidden) - 1, -1, -1):
        total = reduced.lefts[index] @ states[index] + _right(total, reduced.hidden[index])
    return total if reduced.enter is None else _right(total, reduced.enter.T)


def _right(v: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """V @ matrix as ONE product of matrices."""
    return (v.reshape(-1, v.shape[-1]) @ matrix).reshape(*v.shape[:-1], -1)


def _terms_and_inverses(reduced: _Reduced) -> tuple[list[np.ndarray] | None, list[np.ndarray]]:
    """The matrices C_l (g, g) if cheaper, and the inverses that precondition each group."""
    g = reduced.mask.shape[1]
    through = 2 * sum(weight.size for weight in reduced.hidden)
    through += 0 if reduced.enter is None else 2 * reduced.enter.size
    size = len(reduced.lefts) * g * g
    keep = size <= 1.5 * through and size * 8 <= EFFORT.memory
    sums = [np.zeros((g, g)) for _ in reduced.groups]
    product = None if reduced.enter is None else reduced.enter.T  # (a, g)
    terms = []
    for layer, left in enumerate(reduced.lefts):
        term = np.eye(g) if product is None else product.T @ product
        for total, (begin, end, _) in zip(sums, reduced.groups, strict=True):
            total += np.mean(np.diagonal(left)[begin:end]) * term
        if keep:
            terms.append(term)
        if layer < len(reduced.hidden):
            weight = reduced.hidden[layer]
            product = weight if product is None else weight @ product
    inverses = []
    for total, (_, _, width) in zip(sums, reduced.groups, strict=True):
        corner = total[:width, :width]
        ridge = width * 2.0**-52 * np.max(np.diagonal(corner), initial=0.0)
        inverse = np.linalg.inv(corner + ridge * np.eye(width))
        inverses.append(0.5 * (inverse + inverse.T))
    return (terms if keep else None), inverses
