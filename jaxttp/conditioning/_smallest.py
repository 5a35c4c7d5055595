"""Both ends of the spectrum of G^_O = sum_l A_l ⊗ C_l when it is too large to be dense.

Three facts make the smallest non-zero eigenvalue cheap:

1. The range is known from the factors. The ranges of S_1, ..., S_L grow with l, the row spaces of
   P_1 R, ..., P_L R shrink, so in bases adapted to both flags the range of G^_O is a set of
   coordinates: row i (an output direction that S_l is the first to reach) times the row space of
   P_l R. Its size, sum_l (e_l - e_{l-1}) f_l, is the rank; on it the matrix is positive definite.
2. For k below the widths every A_l is nearly a multiple of I, so sum_l a_l C_l (one (d, d) matrix,
   or one a row where memory allows) inverted is a preconditioner that hardly misses.
3. LOBPCG needs one product and one preconditioner a step and keeps three blocks of vectors.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp.conditioning.linear import LinearGaussNewton, chain_product, matmul

BLOCK = 4
"""Vectors iterated at once: enough for a crowded end of the spectrum."""

ITERATIONS = 600
TOLERANCE = 1e-6
"""Residual over eigenvalue at which the iteration stops; the eigenvalue errs by its square."""

MEMORY = 2**28
"""Bytes for the inverses of one preconditioner a row, and for dense C_l; else one for a level."""


class Extremes(NamedTuple):
    """What `extreme_eigenvalues` finds."""

    largest: float
    smallest: float
    rank: int
    error: float
    converged: bool


class _Reduced(NamedTuple):
    """The operator in adapted bases: V (k, g) -> mask * sum_l A_l V C_l."""

    lefts: list[Array]  # (k, k), rotated
    enter: Array | None  # (g, d): from adapted coordinates to inputs; None for the identity
    mask: Array  # (k, g)
    groups: list[tuple[int, int, int]]  # rows from, to, and how many columns they own


def extreme_eigenvalues(operator: LinearGaussNewton) -> Extremes:
    """The largest and the smallest non-zero eigenvalue, outside jit."""
    reduced = _adapt(operator)
    rank = int(np.sum(np.asarray(reduced.mask)))
    if rank == 0:
        return Extremes(0.0, 0.0, 0, 0.0, True)
    weights = operator.weights[:-1]
    dense, inverse = _dense_terms(weights, reduced)
    chain = None if dense is not None else (weights, reduced.enter)
    rows = [slice(*group[:2]) for group in reduced.groups]
    k, g = reduced.mask.shape
    noise = jax.random.normal(jax.random.key(0), (2 * BLOCK, k, g), jnp.float64)
    if 3 * BLOCK > rank:
        matrix = _materialise(reduced.lefts, dense, chain, reduced.mask)
        values = np.linalg.eigvalsh(matrix)
        return Extremes(float(values[-1]), float(values[-rank]), rank, 0.0, True)
    sizes = tuple((part.start, part.stop) for part in rows)
    arguments = (reduced.lefts, dense, chain, reduced.mask)
    top, top_residual = _lobpcg(*arguments, None, noise, 0.0, -1.0, sizes)
    largest = -float(top)
    bottom, residual = _lobpcg(*arguments, inverse, noise, largest, 1.0, sizes)
    smallest = float(bottom)
    rounding = 10 * 2.0**-52 * np.sqrt(k * g) * largest
    good = float(residual) <= TOLERANCE * smallest + rounding
    good = good and float(top_residual) <= TOLERANCE * largest + rounding
    error = float(top_residual) / largest + (float(residual) + rounding) / max(smallest, 1e-300)
    return Extremes(largest, smallest, rank, error, bool(good and smallest > 0))


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
            rest = s - basis @ (basis.T @ s)
            basis = np.hstack([basis, np.linalg.svd(rest, full_matrices=False)[0][:, :fresh]])
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
    basis = _align(basis, [np.asarray(a) for a in operator.lefts], groups)
    lefts = [jnp.asarray(basis.T @ np.asarray(a) @ basis) for a in operator.lefts]
    return _Reduced(lefts, None if enter is None else jnp.asarray(enter), jnp.asarray(mask), groups)


def _data_root(operator: LinearGaussNewton) -> np.ndarray | None:
    """(r, d) with root^T root = Sigma, r its rank; None for the identity."""
    sigma = operator.covariance
    if sigma.vectors is None:
        return None
    values = np.asarray(sigma.values)
    keep = values > 0
    return np.sqrt(values[keep])[:, None] * np.asarray(sigma.vectors)[:, keep].T


def _row_spaces(
    weights: list[Array], enter: np.ndarray | None, layers: list[int], size: int
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
        rest = product - (product @ basis) @ basis.T
        fresh = max(rank - basis.shape[1], 0)
        basis = np.hstack([basis, np.linalg.svd(rest, full_matrices=False)[2][:fresh].T])
        ranks.append(basis.shape[1])
    return basis, ranks[::-1]


def _align(basis: np.ndarray, lefts: list[np.ndarray], groups: list) -> np.ndarray:
    """Rotate the output directions of every group to the eigenvectors of the mean of the A_l."""
    mean = sum(a / max(np.trace(a), 1e-300) for a in lefts[:-1]) if len(lefts) > 1 else lefts[0]
    parts = []
    for begin, end, _ in groups:
        part = basis[:, begin:end]
        parts.append(part @ np.linalg.eigh(part.T @ mean @ part)[1])
    rest = np.linalg.qr(basis, mode="complete")[0][:, basis.shape[1] :]
    return np.hstack([*parts, rest])


def _dense_terms(weights: list[Array], reduced: _Reduced) -> tuple[list[Array] | None, list[Array]]:
    """The matrices C_l (g, g) if they pay, and the inverses that precondition each group."""
    k, g = reduced.mask.shape
    through = 2 * sum(weight.size for weight in weights)
    through += 0 if reduced.enter is None else 2 * reduced.enter.size
    keep = len(reduced.lefts) * g * g <= through and len(reduced.lefts) * g * g * 8 <= 2 * MEMORY
    by_row = k * g * g * 8 <= MEMORY
    diagonals = [jnp.diagonal(left) for left in reduced.lefts]
    sums = []
    for begin, end, _ in reduced.groups:
        sums.append(jnp.zeros((end - begin if by_row else 1, g, g), jnp.float64))
    product = None if reduced.enter is None else reduced.enter.T  # (a, g)
    terms = []
    for layer, diagonal in enumerate(diagonals):
        term = jnp.eye(g, dtype=jnp.float64) if product is None else matmul(product.T, product)
        for index, (begin, end, _) in enumerate(reduced.groups):
            part = diagonal[begin:end]
            part = part if by_row else jnp.mean(part, keepdims=True)
            sums[index] = sums[index] + part[:, None, None] * term[None]
        if keep:
            # The identity, or Sigma in its own eigenvectors, needs no product.
            spread = layer == 0 and len(reduced.groups) == 1
            terms.append(jnp.diagonal(term) if spread else term)
        if layer < len(weights):
            product = weights[layer] if product is None else matmul(weights[layer], product)
    inverses = []
    for total, (_, _, width) in zip(sums, reduced.groups, strict=True):
        inverses.append(_invert(total[:, :width, :width]))
    return (terms if keep else None), inverses


@jax.jit
def _invert(matrices: Array) -> Array:
    """Inverses of a stack of positive definite matrices, by Cholesky."""
    size = matrices.shape[-1]
    eye = jnp.eye(size, dtype=matrices.dtype)

    def one(matrix: Array) -> Array:
        jitter = size * 2.0**-52 * jnp.max(jnp.diagonal(matrix))
        factor = jnp.linalg.cholesky(matrix + jitter * eye)
        return jax.scipy.linalg.cho_solve((factor, True), eye)

    return jax.lax.map(one, matrices)


def _product(
    lefts: list[Array], dense: list[Array] | None, chain: tuple | None, mask: Array, v: Array
) -> Array:
    """Mask * sum_l A_l (mask * v) C_l for v (b, k, g)."""
    v = v * mask
    if dense is None:
        assert chain is not None
        weights, enter = chain
        leave = None if enter is None else enter.T
        out = chain_product(weights, lefts, enter, leave, v)
        return out * mask
    total = jnp.zeros_like(v)
    for left, term in zip(lefts, dense, strict=True):
        image = v * term if term.ndim == 1 else matmul(v, term)
        total = total + matmul(left, image)
    return total * mask


def _materialise(lefts: list, dense: list | None, chain: tuple | None, mask: Array) -> np.ndarray:
    k, g = mask.shape
    eye = jnp.eye(k * g, dtype=jnp.float64).reshape(k * g, k, g)
    return np.asarray(_product(lefts, dense, chain, mask, eye)).reshape(k * g, k * g)


@functools.partial(jax.jit, static_argnames=("sign", "rows"))
def _lobpcg(
    lefts: list[Array],
    dense: list[Array] | None,
    chain: tuple | None,
    mask: Array,
    inverses: list[Array] | None,
    noise: Array,
    penalty: float | Array,
    sign: float,
    rows: tuple[tuple[int, int], ...],
) -> tuple[Array, Array]:
    """The smallest eigenvalue of sign * G^_O on the mask, and the norm of its residual.

    What is outside the mask is given the eigenvalue `penalty`, so that rounding which leads there
    is never rewarded.
    """
    _, k, g = noise.shape

    def apply(columns: Array) -> Array:
        v = columns.T.reshape(-1, k, g)
        out = sign * _product(lefts, dense, chain, mask, v) + penalty * (1.0 - mask) * v
        return out.reshape(-1, k * g).T

    def precondition(columns: Array) -> Array:
        if inverses is None:
            return columns
        v = columns.T.reshape(-1, k, g)
        out = jnp.zeros_like(v)
        for (begin, end), inverse in zip(rows, inverses, strict=True):
            width = inverse.shape[-1]
            part = v[:, begin:end, :width]
            if inverse.shape[0] == 1:
                part = matmul(part, inverse[0])
            else:
                part = jnp.einsum("bri,rij->brj", part, inverse, precision="highest")
            out = out.at[:, begin:end, :width].set(part)
        return out.reshape(-1, k * g).T

    start = precondition((noise * mask).reshape(-1, k * g).T)
    return minimise(apply, precondition, start, penalty)


def minimise(
    apply: Callable[[Array], Array],
    precondition: Callable[[Array], Array],
    start: Array,
    scale: float | Array = 0.0,
) -> tuple[Array, Array]:
    """LOBPCG with bases that stay orthonormal: the smallest eigenvalue and its residual's norm.

    Args:
        apply: the symmetric operator on columns (n, b).
        precondition: approximately its inverse, symmetric positive definite.
        start: (n, 2 b) columns to start from.
        scale: the size of the operator, if it dwarfs the eigenvalue, for the rounding to expect.
    """
    b = start.shape[1] // 2
    first, _ = jnp.linalg.qr(start)
    image = apply(first)

    def ritz(basis: Array, images: Array) -> tuple[Array, ...]:
        gram = matmul(basis.T, images)
        values, vectors = jnp.linalg.eigh(0.5 * (gram + gram.T))
        best = vectors[:, :b]
        # The step: what the best vectors take from outside the old block, made orthonormal to them.
        step = best.at[:b].set(0.0)
        for _ in range(2):
            step = step - matmul(best, matmul(best.T, step))
            step, _ = jnp.linalg.qr(step)
        x, p = matmul(basis, best), matmul(basis, step)
        return x, matmul(images, best), p, matmul(images, step), values[:b]

    def residuals(x: Array, ax: Array, values: Array) -> Array:
        return ax - x * values[None, :]

    def unfinished(state: tuple) -> Array:
        x, ax, _, _, values, step = state
        size = jnp.linalg.norm(residuals(x, ax, values)[:, 0])
        rounding = 2.0**-52 * jnp.sqrt(float(x.shape[0])) * scale
        return (step < ITERATIONS) & (size > TOLERANCE * jnp.abs(values[0]) + rounding)

    def advance(state: tuple) -> tuple:
        x, ax, p, ap, values, step = state
        basis, images = jnp.concatenate([x, p], 1), jnp.concatenate([ax, ap], 1)
        w = precondition(residuals(x, ax, values))
        w = w / jnp.maximum(jnp.linalg.norm(w, axis=0, keepdims=True), 1e-300)
        for _ in range(2):
            w = w - matmul(basis, matmul(basis.T, w))
            w, _ = jnp.linalg.qr(w)
        basis = jnp.concatenate([basis, w], 1)
        images = jnp.concatenate([images, apply(w)], 1)
        return (*ritz(basis, images), step + 1)

    state = (*ritz(first, image), jnp.asarray(0))
    x, *_ = jax.lax.while_loop(unfinished, advance, state)
    # Fresh products: the recursion for the images drifts by rounding.
    x, _ = jnp.linalg.qr(x)
    ax = apply(x)
    gram = matmul(x.T, ax)
    values, vectors = jnp.linalg.eigh(0.5 * (gram + gram.T))
    residual = matmul(ax, vectors[:, :1]) - matmul(x, vectors[:, :1]) * values[0]
    return values[0], jnp.linalg.norm(residual)
