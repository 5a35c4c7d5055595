"""Pseudo-inverses of a feature matrix, exact or regularised, by the cheapest accurate route.

With features s = U S Vᵀ (N, m) and a wanted change t (N, h), the half-layer's update is
u = V φ(S) Uᵀ t (m, h), where

    exact      φ(s) = 1/s                 truncate   φ(s) = 1/s where s >= max(rtol·s_max, atol)
    damp       φ(s) = 1/(s + rtol·s_max)  tikhonov   φ(s) = s/(s² + (rtol·s_max)²)
    noise      exact, of s plus Gaussian noise

and the change that is really made is s u. Routes: "cholesky" of the N × N Gram with refinement
(exact, noise); "eigh" of the smaller Gram, accumulated in float64 (the other three: truncating
singular values at rtol is truncating eigenvalues at rtol²); "svd" where a tolerance is finer than
a Gram can resolve, and as the oracle of the tests.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._checks import check_choice, check_finite, check_number, is_concrete

MODES = ("exact", "truncate", "damp", "tikhonov", "noise")
METHODS = ("auto", "cholesky", "eigh", "svd")

FINEST_RTOL = 1e-6
"""The finest relative tolerance that is trusted below an SVD in float64.

float32 features are off by 6e-8 an entry, so singular values below about 1e-6 of the largest are
rounding; a float64 Gram squares the singular values and blurs those below 1e-7 of the largest.
"""

RESIDUAL_LIMIT = 1e-3
"""An exact solve with a larger relative residual counts as failed."""


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


def choose_method(mode: str, rtol: Any, method: str = "auto") -> str:
    """The route that "auto" takes, or the one that was asked for if it can do the mode.

    Args:
        mode: "exact", "truncate", "damp", "tikhonov" or "noise".
        rtol: the relative tolerance (a tracer counts as coarse enough for a Gram).
        method: "auto", "cholesky", "eigh" or "svd".

    Returns:
        "cholesky", "eigh" or "svd".

    Raises:
        ValueError: unknown names, or a Cholesky factorisation for a mode that needs a spectrum.

    Example:
        >>> choose_method("truncate", 0.01), choose_method("truncate", 0.0)
        ('eigh', 'svd')
    """
    check_choice("pseudoinverse", mode, MODES)
    check_choice("method", method, METHODS)
    direct = mode in ("exact", "noise")
    if method == "cholesky" and not direct:
        raise ValueError(
            f"method='cholesky' does not see the spectrum that pseudoinverse={mode!r} filters; use "
            "method='eigh', or 'auto'."
        )
    if method != "auto":
        return method
    if direct:
        return "cholesky"
    return "svd" if is_concrete(rtol) and float(rtol) < FINEST_RTOL else "eigh"


def needs_float64(mode: str, rtol: Any, dtype: Any) -> bool:
    """Whether this tolerance is finer than features of this dtype resolve (see `FINEST_RTOL`)."""
    coarse = mode in ("exact", "noise") or not is_concrete(rtol) or float(rtol) >= FINEST_RTOL
    return not coarse and jnp.dtype(dtype).itemsize < 8


def check_tolerances(rtol: Any, atol: Any) -> None:
    """`ValueError` for a tolerance that is negative, not finite, or (rtol) not below 1."""
    check_number("rtol", rtol, at_least=0, below=1)
    check_number("atol", atol, at_least=0)


def check_exact(samples: int, width: int, mode: str) -> None:
    """`ValueError` where there is no right inverse: more samples than features."""
    if mode in ("exact", "noise") and samples > width:
        raise ValueError(
            f"pseudoinverse={mode!r} needs at least as many features as samples: N = {samples} "
            f"samples, m = {width} features a half-layer, so no right inverse exists. Take "
            f"mini-batches of at most {width} samples (m >= 2 N is safe), a wider bottleneck, or "
            "pseudoinverse='truncate'."
        )


def apply_pseudoinverse(
    features: ArrayLike,
    change: ArrayLike,
    *,
    pseudoinverse: str = "truncate",
    rtol: ArrayLike = 0.01,
    atol: ArrayLike = 1e-5,
    method: str = "auto",
    key: Array | None = None,
    noise: ArrayLike = 0.1,
) -> Solve:
    """φ(s) applied to a wanted change: the weights' update of one half-layer, transposed.

        u = V φ(S) Uᵀ t,   s = U S Vᵀ

    Args:
        features: s (N, m).
        change: t (N, h), the wanted change of the half-layer's outputs.
        pseudoinverse: "exact" | "truncate" | "damp" | "tikhonov" | "noise", see the module.
        rtol: tolerance relative to the largest singular value.
        atol: absolute tolerance of the truncation; the larger of the two decides.
        method: "auto" | "cholesky" | "eigh" | "svd"; "auto" is what `choose_method` says.
        key: a `jax.random.key`, needed by "noise".
        noise: standard deviation of the noise, relative to that of the features.

    Returns:
        A `Solve`. In exact mode a failed factorisation is a residual that is large or NaN.

    Raises:
        ValueError: "exact" with N > m; "noise" without a key; shapes that do not match; a tolerance
            out of range, or too fine for float32.

    Example:
        >>> import jax.numpy as jnp
        >>> solve = apply_pseudoinverse(jnp.diag(jnp.array([4.0, 2.0, 0.01])), jnp.ones((3, 1)))
        >>> int(solve.rank), solve.solution[:, 0].tolist()
        (2, [0.25, 0.5, 0.0])

    Source:
        XGN section 5 (truncation) and Appendix K (damping, noise); the Gram route is derived.
    """
    for name, value in (("features", features), ("change", change)):
        check_finite(name, value)
    features = jnp.asarray(features)
    change = jnp.asarray(change)
    if features.ndim != 2 or change.ndim != 2 or features.shape[0] != change.shape[0]:
        raise ValueError(
            f"features (N, m) and change (N, h) must be matrices with the same rows; got "
            f"{features.shape} and {change.shape}."
        )
    check_tolerances(rtol, atol)
    method = choose_method(pseudoinverse, rtol, method)
    check_exact(features.shape[0], features.shape[1], pseudoinverse)
    if needs_float64(pseudoinverse, rtol, features.dtype):
        raise ValueError(
            f"rtol={rtol!r} is finer than {features.dtype} features resolve; use rtol >= "
            f"{FINEST_RTOL:g}, or compute the features in float64."
        )
    if pseudoinverse == "noise" and key is None:
        raise ValueError("pseudoinverse='noise' needs key, a jax.random.key.")
    return solve(features, change, pseudoinverse, method, rtol, atol, key=key, noise=noise)


def solve(
    features: Float[Array, "n m"],
    change: Float[Array, "n h"],
    mode: str,
    method: str,
    rtol: ArrayLike,
    atol: ArrayLike,
    *,
    key: Array | None = None,
    noise: ArrayLike = 0.1,
) -> Solve:
    """`apply_pseudoinverse` without its checks, for use inside a scan."""
    change = change.astype(features.dtype)
    if mode == "noise" and key is not None:
        spread = jnp.asarray(noise, features.dtype) * jnp.std(features)
        disturbed = features + spread * jax.random.normal(key, features.shape, features.dtype)
        found = solve(disturbed, change, "exact", method, rtol, atol)
        return _measure(features, change, found.solution, found.rank, found.largest)
    if method == "cholesky":
        return _cholesky(features, change)
    return _spectral(features, change, mode, method, rtol, atol)


def _norm(x: Array) -> Array:
    return jnp.sqrt(jnp.sum(x * x))


def _relative(part: Array, whole: Array) -> Array:
    """‖part‖/‖whole‖, 0 where the whole is 0; NaN stays NaN."""
    size = _norm(whole)
    return jnp.where(size == 0, jnp.zeros_like(size), _norm(part) / jnp.where(size == 0, 1, size))


def _measure(s: Array, t: Array, solution: Array, rank: Array, largest: Array) -> Solve:
    achieved = s @ solution
    return Solve(solution, achieved, rank, largest, _relative(achieved - t, t))


def _cholesky(s: Array, t: Array) -> Solve:
    """The solution sᵀ (s sᵀ)⁻¹ t, refined up to twice against s itself, not its rounded Gram.

    In float32 the Gram loses what the square of the condition number exceeds 1e7 by. Where the
    refined residual tells of that, the solve is repeated in float64.
    """
    solution, residual = _refined(s, t, s @ s.T)
    if s.dtype.itemsize < 8:

        def repeat() -> tuple[Array, Array]:
            with jax.enable_x64(True):
                wide = s.astype(jnp.float64)
                again, _ = _refined(wide, t.astype(jnp.float64), wide @ wide.T)
                again = again.astype(s.dtype)
            return again, t - s @ again

        good = _relative(residual, t) < 1e-4  # false for NaN
        solution, residual = jax.lax.cond(good, lambda: (solution, residual), repeat)
    rank = jnp.asarray(s.shape[0], jnp.int32)
    return Solve(solution, t - residual, rank, _norm(s), _relative(residual, t))


def _refined(s: Array, t: Array, gram: Array) -> tuple[Array, Array]:
    factor = jnp.linalg.cholesky(gram)
    enough = 100 * float(jnp.finfo(s.dtype).eps) * _norm(t)

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


def _spectral(s: Array, t: Array, mode: str, method: str, rtol: Any, atol: Any) -> Solve:
    """The filter on the spectrum, in float64: that of the smaller Gram, or an SVD."""
    with jax.enable_x64(True):
        wide, wanted = s.astype(jnp.float64), t.astype(jnp.float64)
        tolerances = jnp.asarray(rtol, jnp.float64), jnp.asarray(atol, jnp.float64)
        if method == "svd":
            u, values, vt = jnp.linalg.svd(wide, full_matrices=False)
            keep, inverse = _filter(values, s, mode, *tolerances, gram=False)
            achieved = (values * inverse)[:, None] * (u.T @ wanted)
            solution = vt.T @ (inverse[:, None] * (u.T @ wanted))
            achieved = u @ achieved
        else:
            thin = s.shape[0] > s.shape[1]
            gram = wide.T @ wide if thin else wide @ wide.T
            eigenvalues, u = jnp.linalg.eigh(gram)
            values = jnp.sqrt(jnp.maximum(eigenvalues, 0.0))
            keep, inverse = _filter(values, s, mode, *tolerances, gram=True)
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


def _filter(
    values: Array, s: Array, mode: str, rtol: Array, atol: Array, *, gram: bool
) -> tuple[Array, Array]:
    """Which singular values count towards the rank, and φ of each.

    Below the rounding of the route a singular vector is arbitrary, so 1/s and 1/(s + δ) would
    amplify noise: φ is 0 there. Tikhonov's φ goes to zero with s by itself.
    """
    largest = jnp.max(values)
    rounding = float(jnp.finfo(jnp.float64).eps) * max(s.shape)
    floor = (rounding**0.5 if gram else rounding) * largest
    delta = rtol * largest
    if mode == "truncate":
        floor = jnp.maximum(floor, jnp.maximum(delta, atol))
    counted = (values >= floor) & (values > 0)
    safe = jnp.where(values > 0, values, 1.0)
    if mode == "tikhonov":
        return counted, jnp.where(values > 0, safe / (safe**2 + delta**2), 0.0)
    return counted, jnp.where(counted, 1 / (safe + delta) if mode == "damp" else 1 / safe, 0.0)


def check_residual(value: Array, residual: Array, mode: str) -> Array:
    """`value`; a failed exact solve is an error that says what to change, at run time."""
    if mode != "exact":
        return value
    return eqx.error_if(
        value,
        ~(jnp.max(residual) <= RESIDUAL_LIMIT),
        "pseudoinverse='exact': a half-layer's features are rank-deficient (Cholesky failed or "
        f"left a relative residual above {RESIDUAL_LIMIT:g}). Remove repeated samples, use a wider "
        "bottleneck (m >= 2 N), float64, or pseudoinverse='truncate'.",
    )
