"""The routes to a pseudo-inverse applied to a wanted change: Cholesky, eigenvectors, SVD.

With features s = U S Vᵀ (N, m) and a change t (N, h) they return u = V φ(S) Uᵀ t (m, h). They are
given φ by the modes, see `jaxttp.gauss_newton.modes`: truncating singular values at rtol is
truncating eigenvalues of a Gram at rtol².
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
from jaxtyping import Array

from jaxttp._core.results import RESULT
from jaxttp._core.xla_cpu.threads import after, decompose
from jaxttp.ntk._rows import rows_product
from jaxttp.ntk.layerwise import mirror

ENOUGH = 1000
"""An exact solve is refined until its relative residual is below this many roundings (1e-4 in
float32: a step that is right to 1e-4 contracts the error by as much)."""

RESOLVED = 1000
"""Largest over smallest eigenvalue that a float32 Gram resolves: to 2e-3 at worst, 2e-5 for ReLU
features of random weights, against an SVD in float64."""

LEADING = 1e-5
"""How sharp the leading singular vector must be to be split off."""

_ITERATIONS = 6


class Solve(NamedTuple):
    """A pseudo-inverse applied to a wanted change.

    Attributes:
        solution: u (m, h), the pseudo-inverse times the wanted change.
        achieved: s u (N, h), the change that the features make of it.
        rank: directions kept (a scalar integer): those above the truncation, or, where nothing is
            truncated, those above rounding; N in exact mode.
        largest: the largest singular value, or its bound by the Frobenius norm in exact mode.
        residual: ‖s u − t‖/‖t‖, 0 where t = 0.
    """

    solution: Array
    achieved: Array
    rank: Array
    largest: Array
    residual: Array

    plot, _repr_html_, __repr__ = RESULT


def _norm(x: Array) -> Array:
    return jnp.sqrt(jnp.sum(x * x))


def _relative(part: Array, whole: Array) -> Array:
    """‖part‖/‖whole‖, 0 where the whole is 0; NaN stays NaN."""
    size = _norm(whole)
    return jnp.where(size == 0, jnp.zeros_like(size), _norm(part) / jnp.where(size == 0, 1, size))


def measure(s: Array, t: Array, solution: Array, rank: Array, largest: Array) -> Solve:
    achieved = s @ solution
    return Solve(solution, achieved, rank, largest, _relative(achieved - t, t))


def cholesky_route(s: Array, t: Array) -> Solve:
    """The solution sᵀ (s sᵀ)⁻¹ t, refined up to twice against s itself, not its rounded Gram.

    In float32 the Gram loses what the square of the condition number exceeds 1e7 by. Where the
    refined residual tells of that, the solve is repeated in float64.
    """
    solution, residual = _refined(s, t, _gram(s))
    if s.dtype.itemsize < 8:

        def repeat() -> tuple[Array, Array]:
            with jax.enable_x64(True):
                wide = after(s, residual).astype(jnp.float64)
                again, _ = _refined(wide, t.astype(jnp.float64), _gram(wide))
                again = again.astype(s.dtype)
            return again, t - s @ again

        good = _relative(residual, t) < 1e-4  # false for NaN
        solution, residual = jax.lax.cond(good, lambda: (solution, residual), repeat)
    rank = jnp.asarray(s.shape[0], jnp.int32)
    return Solve(solution, t - residual, rank, _norm(s), _relative(residual, t))


def _gram(s: Array) -> Array:
    """S sᵀ, exactly symmetric."""
    return mirror(rows_product(s, None, s.dtype), "trace")


def _refined(s: Array, t: Array, gram: Array) -> tuple[Array, Array]:
    factor = decompose(jnp.linalg.cholesky, gram, symmetrize_input=False)
    enough = ENOUGH * float(jnp.finfo(s.dtype).eps) * _norm(t)

    def back(r: Array) -> Array:
        return s.T @ jsl.cho_solve((factor, True), r)

    def again(state: tuple) -> tuple:
        count, solution, residual = state
        solution = solution + back(residual)
        return count + 1, solution, t - s @ solution

    def unfinished(state: tuple) -> Array:
        return (state[0] < 2) & (_norm(state[2]) > enough)

    first = back(t)
    start = (jnp.zeros((), jnp.int32), first, t - s @ first)
    _, solution, residual = jax.lax.while_loop(unfinished, again, start)
    return solution, residual


Spectrum: TypeAlias = Callable[[Array, Array], tuple[Array, Array]]
"""``(singular values, floor) -> (counted, φ)``, in float64; see `invert_above`."""


class Kept(NamedTuple):
    """What a filter makes of squared singular values.

    Attributes:
        keep: those that count towards the rank.
        ratio: φ(s)/s.
        least: the smallest square that the filter tells from zero, a scalar: a Gram has to resolve
            it.
    """

    keep: Array
    ratio: Array
    least: Array


Squares: TypeAlias = Callable[[Array, Array, Array | float], Kept]
"""``(squares, the largest, floor) -> Kept``."""


def invert_above(values: Array, floor: Array) -> tuple[Array, Array]:
    """The singular values that are kept, those from the floor on, and 1/s of them, else 0."""
    counted = (values >= floor) & (values > 0)
    return counted, jnp.where(counted, 1 / jnp.where(values > 0, values, 1.0), 0.0)


def spectral_route(
    s: Array, t: Array, spectrum: Spectrum, method: str, squares: Squares | None = None
) -> Solve:
    """The filter on the spectrum: in float64, or in float32 where that resolves it.

    Args:
        s: features (N, m).
        t: the wanted change (N, h).
        spectrum: the filter.
        method: "eigh" or "svd".
        squares: the same filter on squares, where it serves in float32; else None.

    Returns:
        A `Solve`.
    """

    def wide(s: Array) -> Solve:
        return _spectral_wide(s, t, spectrum, method)

    if squares is None or method == "svd" or s.dtype.itemsize != 4:
        return wide(s)
    found, resolved = _spectral_narrow(s, t, squares)
    return jax.lax.cond(resolved, lambda: found, lambda: wide(after(s, found.residual)))


def _spectral_narrow(s: Array, t: Array, squares: Squares) -> tuple[Solve, Array]:
    """The filter by the eigenvectors of a float32 Gram, and whether float32 resolves them.

    A Gram is rounded relative to its largest eigenvalue, and for positive features (ReLU) that one,
    of their mean, stands far above all others. So it is split off first, s = σ q vᵀ + s' with
    qᵀ s' = 0, and only the Gram of s' is diagonalised. The rest is resolved when its eigenvalues
    that count lie within RESOLVED of its largest.
    """
    thin = s.shape[0] > s.shape[1]
    rows = s.T if thin else s
    q, along = _leading(rows)
    deflated = rows - q[:, None] * along[None]
    leading = jnp.sum(along * along)
    eigenvalues, u = decompose(jnp.linalg.eigh, _gram(deflated), symmetrize_input=False)
    largest = jnp.maximum(leading, eigenvalues[-1])
    floor = float(jnp.finfo(s.dtype).eps) * max(s.shape) * eigenvalues[-1]
    keep, ratio, least = squares(eigenvalues, largest, floor)
    kept_leading, leading_ratio, _ = squares(leading, largest, 0.0)
    resolved = (eigenvalues[-1] <= RESOLVED * least) & (eigenvalues[-1] > 0)

    def off(b: Array) -> Array:
        return b - q[:, None] * (q @ b)[None]

    def filtered(b: Array) -> Array:
        """Σ φ(s)/s u uᵀ b; q, a null vector of the rest's Gram, counts once, with its own value."""
        rest = off(u @ (ratio[:, None] * (u.T @ off(b))))
        return rest + q[:, None] * (leading_ratio * (q @ b))[None]

    solution = filtered(s.T @ t) if thin else s.T @ filtered(t)
    achieved = s @ solution
    rank = jnp.sum(keep, dtype=jnp.int32) + (kept_leading & (leading > 0)).astype(jnp.int32)
    residual = _relative(achieved - t, t)
    return Solve(solution, achieved, rank, jnp.sqrt(largest), residual), resolved


def _leading(rows: Array) -> tuple[Array, Array]:
    """The leading left singular vector q and qᵀ s, by power iteration; zero where it is not sharp.

    What is left of it couples to the others by at most LEADING of its eigenvalue, and changes the
    solution by that share.
    """
    tiny = float(jnp.finfo(rows.dtype).tiny)
    q = jnp.sum(rows, axis=1)
    for _ in range(_ITERATIONS):
        q = q / jnp.maximum(_norm(q), tiny)
        q = rows @ (q @ rows)
    q = q / jnp.maximum(_norm(q), tiny)
    along = q @ rows
    size = jnp.sum(along * along)
    sharp = (_norm(rows @ along - size * q) <= LEADING * size) & (size > 0)
    return jnp.where(sharp, q, 0), jnp.where(sharp, along, 0)


def _spectral_wide(s: Array, t: Array, spectrum: Spectrum, method: str) -> Solve:
    """The filter in float64: on the spectrum of the smaller Gram, or by an SVD."""
    with jax.enable_x64(True):
        wide, wanted = s.astype(jnp.float64), t.astype(jnp.float64)
        # The share of the largest singular value below which the route gives rounding.
        rounding = float(jnp.finfo(jnp.float64).eps) * max(s.shape)
        if method == "svd":
            u, values, vt = decompose(jnp.linalg.svd, wide, full_matrices=False)
            keep, inverse = spectrum(values, rounding * jnp.max(values))
            achieved = (values * inverse)[:, None] * (u.T @ wanted)
            solution = vt.T @ (inverse[:, None] * (u.T @ wanted))
            achieved = u @ achieved
        else:
            thin = s.shape[0] > s.shape[1]
            gram = _gram(wide.T if thin else wide)
            eigenvalues, u = decompose(jnp.linalg.eigh, gram, symmetrize_input=False)
            values = jnp.sqrt(jnp.maximum(eigenvalues, 0.0))
            keep, inverse = spectrum(values, rounding**0.5 * jnp.max(values))
            # φ(s)/s: the Gram's eigenvectors need one more factor s to be the other singular side.
            ratio = inverse / jnp.where(values > 0, values, 1.0)
            if thin:
                solution = u @ (ratio[:, None] * (u.T @ (wide.T @ wanted)))
                achieved = wide @ solution
            else:
                along = u.T @ wanted
                solution = wide.T @ (u @ (ratio[:, None] * along))
                achieved = u @ ((values * inverse)[:, None] * along)
        residual = _relative(achieved - wanted, wanted)
        found = [x.astype(s.dtype) for x in (solution, achieved, jnp.max(values), residual)]
        rank = jnp.sum(keep, dtype=jnp.int32)
    return Solve(found[0], found[1], rank, found[2], found[3])
