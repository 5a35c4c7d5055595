"""Pseudo-inverses of a feature matrix, exact or regularised, by the cheapest accurate route.

With features s = U S Vᵀ (N, m) and a wanted change t (N, h), the half-layer's update is
u = V φ(S) Uᵀ t (m, h), where

    exact      φ(s) = 1/s                 truncate   φ(s) = 1/s where s >= max(rtol·s_max, atol)
    damp       φ(s) = 1/(s + rtol·s_max)  tikhonov   φ(s) = s/(s² + (rtol·s_max)²)
    noise      exact, of s plus Gaussian noise

and the change that is really made is s u. Routes: "cholesky" of the N × N Gram with refinement
(exact, noise); "eigh" of the smaller Gram (the other three: truncating singular values at rtol is
truncating eigenvalues at rtol²; in float64, unless float32 resolves what is kept, see
`_routes`); "svd" where a tolerance is finer than a Gram can resolve, and as the oracle of
the tests.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._checks import check_choice, check_finite, check_number, check_used, is_concrete
from jaxttp.gauss_newton._routes import Solve, cholesky_route, measure, spectral_route

MODES = ("exact", "truncate", "damp", "tikhonov", "noise")
DIRECT = ("exact", "noise")
"""Modes without a tolerance: they solve, and filter nothing."""
METHODS = ("auto", "cholesky", "eigh", "svd")

FINEST_RTOL = 1e-6
"""The finest relative tolerance that is trusted below an SVD in float64.

float32 features are off by 6e-8 an entry, so singular values below about 1e-6 of the largest are
rounding; a float64 Gram squares the singular values and blurs those below 1e-7 of the largest.
"""

FULL_RANK_RTOL = FINEST_RTOL
"""Truncation that drops rounding alone: what keeps a step exact wherever it can be."""

RESIDUAL_LIMIT = 1e-3
"""An exact solve with a larger relative residual counts as failed."""


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
    direct = mode in DIRECT
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
    coarse = mode in DIRECT or not is_concrete(rtol) or float(rtol) >= FINEST_RTOL
    return not coarse and jnp.dtype(dtype).itemsize < 8


def check_tolerances(rtol: Any, atol: Any) -> None:
    """`ValueError` for a tolerance that is negative, not finite, or (rtol) not below 1."""
    check_number("rtol", rtol, at_least=0, below=1)
    check_number("atol", atol, at_least=0)


def check_noise(mode: str, noise: Any) -> Any:
    """The noise, 0.1 where none is given; `ValueError` for one that no mode takes."""
    if noise is None:
        return 0.1
    check_number("noise", noise, at_least=0)
    check_used("noise", noise, mode == "noise", "it is that of pseudoinverse='noise'")
    return noise


def check_exact(samples: int, width: int, mode: str) -> None:
    """`ValueError` where there is no right inverse: more samples than features."""
    if mode in DIRECT and samples > width:
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
    noise: ArrayLike | None = None,
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
        noise: for "noise", its standard deviation relative to that of the features; 0.1 when None.

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
    spread = check_noise(pseudoinverse, noise)
    check_exact(features.shape[0], features.shape[1], pseudoinverse)
    if needs_float64(pseudoinverse, rtol, features.dtype):
        raise ValueError(
            f"rtol={rtol!r} is finer than {features.dtype} features resolve; use rtol >= "
            f"{FINEST_RTOL:g}, or compute the features in float64."
        )
    if pseudoinverse == "noise" and key is None:
        raise ValueError("pseudoinverse='noise' needs key, a jax.random.key.")
    return solve(features, change, pseudoinverse, method, rtol, atol, key=key, noise=spread)


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
        return measure(features, change, found.solution, found.rank, found.largest)
    if method == "cholesky":
        return cholesky_route(features, change)
    return spectral_route(features, change, mode, method, rtol, atol)


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
