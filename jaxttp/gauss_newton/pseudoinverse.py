"""Pseudo-inverses of a feature matrix, exact or regularized, by the cheapest accurate method.

With features s = U S Vᵀ (N, m) and a target change t (N, h), the half-layer's update is
u = V φ(S) Uᵀ t (m, h), and the achieved change is s u. The kinds are

    exact      φ(s) = 1/s                 truncate   φ(s) = 1/s where s >= max(rtol·s_max, atol)
    damp       φ(s) = 1/(s + rtol·s_max)  tikhonov   φ(s) = s/(s² + (rtol·s_max)²)
    noise      exact, of s plus Gaussian noise of 10 % of the standard deviation of s

Methods: "cholesky" of the N × N Gram with refinement (exact, noise); "eigh" of the smaller Gram
(the others; in float64, unless float32 resolves the kept part); "svd" where a tolerance is finer
than a Gram can resolve, and as the oracle of the tests.
"""

from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxttp._core.checks import check_choice, check_key, check_number, is_concrete
from jaxttp._core.xla_cpu.threads import after, decompose
from jaxttp.ntk._products import rows_product
from jaxttp.ntk.layerwise import mirror

FILTERS = ("truncate", "damp", "tikhonov")
"""The kinds that filter the spectrum, with a tolerance."""
KINDS = ("exact", *FILTERS, "noise")

FINEST_RTOL = 1e-6
"""The finest relative tolerance without an SVD in float64.

float32 features have errors of 6e-8 an entry, so singular values below about 1e-6 of the largest
are rounding; a float64 Gram squares the singular values and loses those below 1e-7 of the largest.
Truncation at this tolerance drops rounding alone: a step is exact wherever possible.
"""

RESIDUAL_LIMIT = 1e-3
"""An exact solve with a larger relative residual counts as failed."""


class Solve(NamedTuple):
    """A pseudo-inverse applied to a target change.

    Attributes:
        solution: u (m, h), the pseudo-inverse times the target change.
        achieved: s u (N, h), the achieved change.
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


class PseudoInverse(eqx.Module):
    """The pseudo-inverse of a half-layer's features; made and checked by `as_pseudoinverse`.

    A pytree: numbers and the key are traced, so that another tolerance compiles nothing.

    Attributes:
        kind: one of `KINDS`.
        method: "cholesky", "eigh" or "svd".
        fine: whether the tolerance needs float64 throughout.
        rtol: tolerance relative to the largest singular value, of the filters.
        atol: absolute tolerance of "truncate"; the larger of the two decides.
        key: of "noise".
    """

    kind: str = eqx.field(static=True)
    method: str = eqx.field(static=True)
    fine: bool = eqx.field(static=True)
    rtol: ArrayLike
    atol: ArrayLike
    key: Array | None

    @property
    def exact(self) -> bool:
        """Whether every change is achieved to rounding; a solve with a larger error then raises."""
        return self.kind == "exact"

    def check(self, samples: int, width: int) -> None:
        """`ValueError` where N samples with m features have no such inverse."""
        if self.kind in FILTERS:
            return
        if samples > width:
            raise ValueError(
                f"pseudoinverse={self.kind!r} needs at least as many features as samples: N = "
                f"{samples} samples, m = {width} features a half-layer, so no right inverse "
                f"exists. Take mini-batches of at most {width} samples (m >= 2 N is safe), a wider "
                "bottleneck, or pseudoinverse='truncate'."
            )
        if self.kind == "noise" and self.key is None:
            raise ValueError("pseudoinverse='noise' needs key, a jax.random.key.")

    def apply(self, s: Array, t: Array) -> Solve:
        """The update u (m, h) of one half-layer for the target change t (N, h), both checked."""
        if self.kind == "noise":
            spread = 0.1 * jnp.std(s)  # XGN Appendix K
            noise = jax.random.normal(cast(Array, self.key), s.shape, s.dtype)
            solve = self._solve(s + spread * noise, t)
            achieved = s @ solve.solution
            return solve._replace(achieved=achieved, residual=relative(achieved - t, t))
        return self._solve(s, t)

    def _solve(self, s: Array, t: Array) -> Solve:
        if self.method == "cholesky":
            return _by_cholesky(s, t)
        narrow = self.kind in ("truncate", "tikhonov") and self.method == "eigh"
        if not narrow or s.dtype.itemsize != 4:
            return self._spectral_wide(s, t)
        solve, resolved = self._spectral_narrow(s, t)
        wide = lambda: self._spectral_wide(after(s, solve.residual), t)  # noqa: E731
        return jax.lax.cond(resolved, lambda: solve, wide)

    def for_layers(self, shape: tuple[int, ...]) -> "PseudoInverse":
        """One for each of several half-layers: numbers and keys with these leading axes."""
        key = None if self.key is None else jax.random.split(self.key, shape)
        rtol, atol = (jnp.broadcast_to(jnp.asarray(v), shape) for v in (self.rtol, self.atol))
        return PseudoInverse(self.kind, self.method, self.fine, rtol, atol, key)

    def at_step(self, step: ArrayLike) -> "PseudoInverse":
        """For one of many steps, each with its own noise."""
        key = None if self.key is None else jax.random.fold_in(self.key, step)
        return PseudoInverse(self.kind, self.method, self.fine, self.rtol, self.atol, key)

    def _filter(self, values: Array, floor: Array) -> tuple[Array, Array]:
        """Which singular values count towards the rank, and φ of each, in float64.

        Below the floor singular values are rounding, and their vectors arbitrary: 1/s and 1/(s + δ)
        would amplify noise there. Tikhonov's φ goes to zero with s.
        """
        tolerance = jnp.asarray(self.rtol, values.dtype) * jnp.max(values)
        safe = jnp.where(values > 0, values, 1.0)
        if self.kind == "truncate":
            atol = jnp.asarray(self.atol, values.dtype)
            floor = jnp.maximum(floor, jnp.maximum(tolerance, atol))
        counted = (values >= floor) & (values > 0)
        if self.kind == "tikhonov":
            return counted, jnp.where(values > 0, safe / (safe**2 + tolerance**2), 0.0)
        inverse = 1 / (safe + tolerance) if self.kind == "damp" else 1 / safe
        return counted, jnp.where(counted, inverse, 0.0)

    def _filter_squares(self, squares: Array, largest: Array, floor: Array | float) -> tuple:
        """Which squares (any shape) count towards the rank, φ(s)/s, and the least square.

        For a Gram in float32.

        The least is the smallest square that is not zero for the filter: a Gram must resolve it.
        Damping's φ does not vanish with s, and would amplify float32's rounding.
        """
        tolerance = jnp.asarray(self.rtol, squares.dtype) ** 2 * largest
        if self.kind == "truncate":
            smallest = jnp.maximum(tolerance, jnp.asarray(self.atol, squares.dtype) ** 2)
            keep = (squares >= smallest) & (squares > 0)
            ratio = jnp.where(keep, 1 / jnp.where(keep, squares, 1), 0)
            return keep, ratio, jnp.min(jnp.where(keep, squares, jnp.max(squares)))
        ratio = 1 / (jnp.maximum(squares, 0) + tolerance)
        least = jnp.maximum(tolerance, jnp.maximum(jnp.min(squares), 0))
        return squares > floor, ratio, least

    def _spectral_narrow(self, s: Array, t: Array) -> tuple[Solve, Array]:
        """The filter by the eigenvectors of a float32 Gram, and whether float32 resolves them.

        A Gram is rounded relative to its largest eigenvalue, and for positive features (ReLU) this
        one, of their mean, is far larger than all others. So it is split off first, s = σ q vᵀ + s'
        with qᵀ s' = 0, and only the Gram of s' is diagonalized. s' is resolved when its eigenvalues
        that count lie within a factor of 1000 of its largest (error 2e-3 at worst, 2e-5 for ReLU
        features of random weights, compared with an SVD in float64).
        """
        thin = s.shape[0] > s.shape[1]
        rows = s.T if thin else s
        q, along = _leading(rows)
        deflated = rows - q[:, None] * along[None]
        leading = jnp.sum(along * along)
        eigenvalues, u = decompose(jnp.linalg.eigh, _gram(deflated), symmetrize_input=False)
        largest = jnp.maximum(leading, eigenvalues[-1])
        floor = float(jnp.finfo(s.dtype).eps) * max(s.shape) * eigenvalues[-1]
        keep, ratio, least = self._filter_squares(eigenvalues, largest, floor)
        kept_leading, leading_ratio, _ = self._filter_squares(leading, largest, 0.0)
        resolved = (eigenvalues[-1] <= 1000 * least) & (eigenvalues[-1] > 0)

        def project(b: Array) -> Array:
            return b - q[:, None] * (q @ b)[None]

        def filtered(b: Array) -> Array:
            """Σ φ(s)/s u uᵀ b; q, in the null space of s', counts once, by its own value."""
            image = project(u @ (ratio[:, None] * (u.T @ project(b))))
            return image + q[:, None] * (leading_ratio * (q @ b))[None]

        solution = filtered(s.T @ t) if thin else s.T @ filtered(t)
        achieved = s @ solution
        rank = jnp.sum(keep, dtype=jnp.int32) + (kept_leading & (leading > 0)).astype(jnp.int32)
        residual = relative(achieved - t, t)
        return Solve(solution, achieved, rank, jnp.sqrt(largest), residual), resolved

    def _spectral_wide(self, s: Array, t: Array) -> Solve:
        """The filter in float64: on the spectrum of the smaller Gram, or by an SVD."""
        with jax.enable_x64(True):
            wide, target = s.astype(jnp.float64), t.astype(jnp.float64)
            # Singular values below this fraction of the largest are rounding.
            rounding = float(jnp.finfo(jnp.float64).eps) * max(s.shape)
            if self.method == "svd":
                u, values, vt = decompose(jnp.linalg.svd, wide, full_matrices=False)
                keep, inverse = self._filter(values, rounding * jnp.max(values))
                components = u.T @ target
                solution = vt.T @ (inverse[:, None] * components)
                achieved = u @ ((values * inverse)[:, None] * components)
            else:
                thin = s.shape[0] > s.shape[1]
                gram = _gram(wide.T if thin else wide)
                eigenvalues, u = decompose(jnp.linalg.eigh, gram, symmetrize_input=False)
                values = jnp.sqrt(jnp.maximum(eigenvalues, 0.0))
                keep, inverse = self._filter(values, rounding**0.5 * jnp.max(values))
                # φ(s)/s, as the Gram's eigenvectors are of one side only: s maps to the other.
                ratio = inverse / jnp.where(values > 0, values, 1.0)
                if thin:
                    solution = u @ (ratio[:, None] * (u.T @ (wide.T @ target)))
                    achieved = wide @ solution
                else:
                    components = u.T @ target
                    solution = wide.T @ (u @ (ratio[:, None] * components))
                    achieved = u @ ((values * inverse)[:, None] * components)
            rank, residual = jnp.sum(keep, dtype=jnp.int32), relative(achieved - target, target)
            floats = solution, achieved, jnp.max(values), residual
            solution, achieved, largest, residual = (x.astype(s.dtype) for x in floats)
        return Solve(solution, achieved, rank, largest, residual)


def as_pseudoinverse(
    kind: str,
    *,
    rtol: ArrayLike = 0.01,
    atol: ArrayLike = 1e-5,
    method: str = "auto",
    key: Array | None = None,
) -> PseudoInverse:
    """The pseudo-inverse of this name, its options checked.

    Args:
        kind: one of `KINDS`.
        rtol: of the filters; other kinds ignore it, like `atol` and `key`.
        atol: of "truncate".
        method: "auto" for "cholesky" (exact, noise), "eigh", or, where the tolerance is
            finer than a Gram resolves, "svd".
        key: of "noise".

    Returns:
        A `PseudoInverse`.

    Raises:
        ValueError: an unknown name, options out of range.

    Example:
        >>> as_pseudoinverse("truncate", rtol=1e-8).method
        'svd'
    """
    check_choice("pseudoinverse", kind, KINDS)
    check_number("rtol", rtol, at_least=0, below=1)
    check_number("atol", atol, at_least=0)
    check_key(key)
    filters = kind in FILTERS
    fine = filters and is_concrete(rtol) and _plain(rtol) < FINEST_RTOL
    if method == "auto":
        method = "cholesky" if not filters else "svd" if fine else "eigh"
    key = key if kind == "noise" else None
    return PseudoInverse(kind, method, bool(fine), _plain(rtol), _plain(atol), key)


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python floats; JAX arrays as they are."""
    return value if isinstance(value, jax.Array) else float(value)


def check_residual(value: Array, residual: Array, inverse: PseudoInverse) -> Array:
    """`value`; a failed exact solve is an error at run time."""
    if not inverse.exact:
        return value
    return eqx.error_if(
        value,
        ~(jnp.max(residual) <= RESIDUAL_LIMIT),
        "pseudoinverse='exact': a half-layer's features are rank-deficient (Cholesky failed or "
        f"left a relative residual above {RESIDUAL_LIMIT:g}). Remove repeated samples, use a wider "
        "bottleneck (m >= 2 N), float64, or pseudoinverse='truncate'.",
    )


# --- methods --------------------------------------------------------------------------------------


def _norm(x: Array) -> Array:
    return jnp.sqrt(jnp.sum(x * x))


def relative(part: Array, whole: Array) -> Array:
    """‖part‖/‖whole‖, 0 where the whole is 0; NaN stays NaN."""
    size = _norm(whole)
    return jnp.where(size == 0, jnp.zeros_like(size), _norm(part) / jnp.where(size == 0, 1, size))


def _by_cholesky(s: Array, t: Array) -> Solve:
    """The solution sᵀ (s sᵀ)⁻¹ t, refined up to twice against s itself, not its rounded Gram.

    In float32 the Gram is inaccurate where the square of the condition number exceeds 1e7. Where
    the refined residual is then too large, the solve is repeated in float64.
    """
    solution, residual = _refined(s, t)
    if s.dtype.itemsize < 8:

        def repeat() -> tuple[Array, Array]:
            with jax.enable_x64(True):
                wide = after(s, residual).astype(jnp.float64)
                solution = _refined(wide, t.astype(jnp.float64))[0].astype(s.dtype)
            return solution, t - s @ solution

        good = relative(residual, t) < 1e-4  # false for NaN
        solution, residual = jax.lax.cond(good, lambda: (solution, residual), repeat)
    rank = jnp.asarray(s.shape[0], jnp.int32)
    return Solve(solution, t - residual, rank, _norm(s), relative(residual, t))


def _gram(s: Array) -> Array:
    """S sᵀ, exactly symmetric."""
    return mirror(rows_product(s, None, s.dtype), "trace")


def _refined(s: Array, t: Array) -> tuple[Array, Array]:
    factor = decompose(jnp.linalg.cholesky, _gram(s), symmetrize_input=False)
    # Until the relative residual is below 1000 roundings, 1e-4 in float32: a step with this error
    # contracts the error of the outputs by as much.
    tolerance = 1000 * float(jnp.finfo(s.dtype).eps) * _norm(t)

    def solve(r: Array) -> Array:
        return s.T @ jsl.cho_solve((factor, True), r)

    def refine(state: tuple) -> tuple:
        count, solution, residual = state
        solution = solution + solve(residual)
        return count + 1, solution, t - s @ solution

    def is_unfinished(state: tuple) -> Array:
        return (state[0] < 2) & (_norm(state[2]) > tolerance)

    solution = solve(t)
    first = (jnp.zeros((), jnp.int32), solution, t - s @ solution)
    return jax.lax.while_loop(is_unfinished, refine, first)[1:]


def _leading(rows: Array) -> tuple[Array, Array]:
    """The leading left singular vector q and qᵀ s, by power iteration; zero without convergence.

    The remainder couples to the other vectors by at most 1e-5 of its eigenvalue, and changes the
    solution by that fraction.
    """
    tiny = float(jnp.finfo(rows.dtype).tiny)
    q = jnp.sum(rows, axis=1)
    for _ in range(6):
        q = q / jnp.maximum(_norm(q), tiny)
        q = rows @ (q @ rows)
    q = q / jnp.maximum(_norm(q), tiny)
    along = q @ rows
    size = jnp.sum(along * along)
    is_sharp = (_norm(rows @ along - size * q) <= 1e-5 * size) & (size > 0)
    return jnp.where(is_sharp, q, 0), jnp.where(is_sharp, along, 0)
