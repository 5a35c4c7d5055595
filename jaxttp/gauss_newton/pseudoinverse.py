"""Pseudo-inverses of a feature matrix, exact or regularised, by the cheapest accurate route.

With features s = U S Vᵀ (N, m) and a wanted change t (N, h), the half-layer's update is
u = V φ(S) Uᵀ t (m, h), with the φ of a mode (`jaxttp.gauss_newton.modes`), and the change that is
really made is s u. Routes: "cholesky" of the N × N Gram with refinement (exact, noise); "eigh" of
the smaller Gram (the others; in float64, unless float32 resolves what is kept, see `_routes`);
"svd" where a tolerance is finer than a Gram can resolve, and as the oracle of the tests.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxttp._core.checks import check_array, check_finite
from jaxttp._core.compile import full_precision
from jaxttp.gauss_newton._routes import Solve
from jaxttp.gauss_newton.modes import ATOL, FINEST_RTOL, RTOL, Mode
from jaxttp.gauss_newton.shorthands import PseudoInverse, to_mode

RESIDUAL_LIMIT = 1e-3
"""An exact solve with a larger relative residual counts as failed."""


@full_precision
def apply_pseudoinverse(
    features: ArrayLike,
    change: ArrayLike,
    *,
    pseudoinverse: PseudoInverse = "truncate",
    rtol: ArrayLike = RTOL,
    atol: ArrayLike = ATOL,
    method: str = "auto",
    key: Array | None = None,
    noise: ArrayLike | None = None,
) -> Solve:
    """φ(s) applied to a wanted change: the weights' update of one half-layer, transposed.

        u = V φ(S) Uᵀ t,   s = U S Vᵀ

    Args:
        features: s (N, m).
        change: t (N, h), the wanted change of the half-layer's outputs.
        pseudoinverse: a mode, `Exact()`, `Truncate(rtol, atol)`, `Damp(rtol)`, `Tikhonov(rtol)` or
            `Noise(key)`, see `jaxttp.gauss_newton.modes`; or its shorthand, "exact", "truncate",
            "damp", "tikhonov" or "noise", with the options below.
        rtol: of a shorthand: tolerance relative to the largest singular value.
        atol: likewise: absolute tolerance of the truncation; the larger of the two decides.
        method: likewise: "auto" | "cholesky" | "eigh" | "svd"; "auto" is what `choose_method` says.
        key: a `jax.random.key`, needed by "noise".
        noise: for "noise", its standard deviation relative to that of the features; 0.1 when None.

    Returns:
        A `Solve`. In exact mode a failed factorisation is a residual that is large or NaN.

    Raises:
        ValueError: "exact" with N > m; "noise" without a key; shapes that do not match; a tolerance
            out of range, or too fine for float32; options beside a mode that holds its own.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxttp.gauss_newton import Truncate
        >>> features = jnp.diag(jnp.array([4.0, 2.0, 0.01]))
        >>> solve = apply_pseudoinverse(features, jnp.ones((3, 1)), pseudoinverse=Truncate(0.01))
        >>> int(solve.rank), solve.solution[:, 0].tolist()
        (2, [0.25, 0.5, 0.0])

    Source:
        XGN section 5 (truncation) and Appendix K (damping, noise); the Gram route is derived.
    """
    for name, value in (("features", features), ("change", change)):
        check_finite(name, value)
    features = check_array("features", features, floating=True)
    change = check_array("change", change, floating=True)
    if features.ndim != 2 or change.ndim != 2 or features.shape[0] != change.shape[0]:
        raise ValueError(
            f"features (N, m) and change (N, h) must be matrices with the same rows; got "
            f"{features.shape} and {change.shape}."
        )
    mode = to_mode(pseudoinverse, rtol=rtol, atol=atol, method=method, noise=noise, key=key)
    mode.check(*features.shape)
    if is_too_fine(mode, features.dtype):
        raise ValueError(
            f"pseudoinverse={mode!r} is finer than {features.dtype} features resolve; use rtol >= "
            f"{FINEST_RTOL:g}, or compute the features in float64."
        )
    return _apply(mode, features, change)


@jax.jit
def _apply(mode: Mode, features: Array, change: Array) -> Solve:
    return mode.apply(features, change.astype(features.dtype))


def is_too_fine(mode: Mode, dtype: jnp.dtype) -> bool:
    """Whether the mode's tolerance is finer than features of this dtype resolve: `FINEST_RTOL`."""
    return mode.fine and jnp.dtype(dtype).itemsize < 8


def check_residual(value: Array, residual: Array, mode: Mode) -> Array:
    """`value`; a failed exact solve is an error that says what to change, at run time."""
    if not mode.exact:
        return value
    return eqx.error_if(
        value,
        ~(jnp.max(residual) <= RESIDUAL_LIMIT),
        "pseudoinverse='exact': a half-layer's features are rank-deficient (Cholesky failed or "
        f"left a relative residual above {RESIDUAL_LIMIT:g}). Remove repeated samples, use a wider "
        "bottleneck (m >= 2 N), float64, or pseudoinverse='truncate'.",
    )
