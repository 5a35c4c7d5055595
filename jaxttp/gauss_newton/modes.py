"""Modes of the pseudo-inverse, as values: what is done with the singular values of the features.

With features s = U S Vᵀ (N, m) and a wanted change t (N, h) a mode gives u = V φ(S) Uᵀ t (m, h):

    Exact      φ(s) = 1/s                 Truncate   φ(s) = 1/s where s >= max(rtol·s_max, atol)
    Damp       φ(s) = 1/(s + rtol·s_max)  Tikhonov   φ(s) = s/(s² + (rtol·s_max)²)
    Noise      exact, of s plus Gaussian noise

A mode checks its numbers when it is made, and passes through `jax.jit`: numbers and keys are
traced, so another tolerance or key compiles nothing; the route (`method`) is static. (Equinox's
`filter_jit` takes Python's numbers as static: give it arrays there.)

A new mode is one class: a subclass of `Filter` with `filter` alone, which is φ, or a subclass of
`Mode` with `apply`, where there is more to do than to filter a spectrum.
"""

import dataclasses
from typing import Any, ClassVar, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.checks import check_choice, check_key, check_number, is_concrete
from jaxttp.gauss_newton._routes import (
    Kept,
    Solve,
    cholesky_route,
    invert_above,
    measure,
    spectral_route,
)

METHODS = ("auto", "cholesky", "eigh", "svd")

FINEST_RTOL = 1e-6
"""The finest relative tolerance that is trusted below an SVD in float64.

float32 features are off by 6e-8 an entry, so singular values below about 1e-6 of the largest are
rounding; a float64 Gram squares the singular values and blurs those below 1e-7 of the largest.
"""

FULL_RANK_RTOL = FINEST_RTOL
"""Truncation that drops rounding alone: what keeps a step exact wherever it can be."""

RTOL, ATOL, NOISE = 0.01, 1e-5, 0.1
"""What the literature truncates at; an absolute tolerance below all that counts; its noise."""


class Mode(eqx.Module):
    """How a half-layer's features are inverted. Subclasses have `apply`, and may have the others.

    Attributes:
        name: the shorthand, a string that says the same where a mode is asked for.
        exact: whether every change that is asked for is made, to rounding. A solve that misses is
            then an error, and the inverse network's own tangent needs no correction.
        method: the route, "cholesky", "eigh" or "svd"; "auto" becomes one of them at once.
        fine: whether float32 is too coarse for the tolerance: all is then computed in float64.
    """

    name: ClassVar[str] = "a mode of one's own"
    exact: ClassVar[bool] = False
    method: str = eqx.field(static=True, default="auto", kw_only=True)
    fine: bool = eqx.field(static=True, default=False, init=False, repr=False)

    def __post_init__(self):
        check_choice("method", self.method, METHODS)

    def __repr__(self) -> str:
        names = [field.name for field in dataclasses.fields(self) if field.repr]
        parts = [f"{name}={getattr(self, name)!r}" for name in names if name != "method"]
        return f"{type(self).__name__}({', '.join([*parts, f'method={self.method!r}'])})"

    def check(self, samples: int, width: int) -> None:
        """`ValueError` where the mode cannot serve N samples and m features; called before work."""

    def apply(self, features: Float[Array, "n m"], change: Float[Array, "n h"]) -> Solve:
        """The update u (m, h) of one half-layer for the wanted change t (N, h), both checked."""
        raise NotImplementedError(f"{type(self).__name__} needs apply(features, change) -> Solve.")

    def each(self, shape: tuple[int, ...]) -> "Mode":
        """This mode for as many half-layers: every number with these leading axes."""
        return jax.tree.map(lambda leaf: jnp.broadcast_to(jnp.asarray(leaf), shape), self)

    def fresh(self, key: Array | None, step: ArrayLike) -> "Mode":
        """This mode for one step of many; what draws, draws anew in every step.

        Args:
            key: a `jax.random.key` for this step alone, or None.
            step: the steps taken so far.
        """
        return self


class _Direct(Mode):
    """Modes without a tolerance: they solve, and filter nothing."""

    def __post_init__(self):
        super().__post_init__()
        self.method = "cholesky" if self.method == "auto" else self.method

    def check(self, samples: int, width: int) -> None:
        """`ValueError` where there is no right inverse: more samples than features."""
        if samples > width:
            raise ValueError(
                f"pseudoinverse={self.name!r} needs at least as many features as samples: N = "
                f"{samples} samples, m = {width} features a half-layer, so no right inverse "
                f"exists. Take mini-batches of at most {width} samples (m >= 2 N is safe), a wider "
                "bottleneck, or pseudoinverse='truncate'."
            )


class Exact(_Direct):
    """The right inverse of the features, φ(s) = 1/s: every wanted change is made. Needs N <= m.

    Args:
        method: "auto" (the Cholesky factor of the N × N Gram, refined), "cholesky", "eigh" or
            "svd".

    Raises:
        ValueError: an unknown method.

    Example:
        >>> Exact()
        Exact(method='cholesky')
    """

    name: ClassVar[str] = "exact"
    exact: ClassVar[bool] = True

    def apply(self, features: Float[Array, "n m"], change: Float[Array, "n h"]) -> Solve:
        """sᵀ (s sᵀ)⁻¹ t; a failed factorisation is a residual that is large or NaN."""
        if self.method == "cholesky":
            return cholesky_route(features, change)
        return spectral_route(features, change, invert_above, self.method)


class Noise(_Direct):
    """The exact inverse of features that Gaussian noise disturbs. Needs N <= m, and a key.

    Args:
        key: a `jax.random.key`. `scale_by_gauss_newton` derives another one of it for every step,
            and takes one for this step as an extra argument of `update`; None where all are given
            so.
        noise: its standard deviation, relative to that of the features.
        method: as of `Exact`.

    Raises:
        ValueError: no key of `jax.random`, a noise that is negative or not finite, an unknown
            method.

    Example:
        >>> import jax
        >>> Noise(jax.random.key(0)).noise
        0.1

    Source:
        XGN Appendix K.
    """

    name: ClassVar[str] = "noise"
    key: Array | None = None
    noise: ArrayLike = NOISE

    def __post_init__(self):
        super().__post_init__()
        check_key(self.key)
        self.noise = _plain(check_number("noise", self.noise, at_least=0))

    def check(self, samples: int, width: int) -> None:
        """`ValueError` for more samples than features, or without a key."""
        super().check(samples, width)
        if self.key is None:
            raise ValueError(
                "pseudoinverse='noise' needs key, a fresh jax.random.key for every step; or give "
                "pseudoinverse=jaxttp.gauss_newton.Noise(key), which draws anew in every step."
            )

    def apply(self, features: Float[Array, "n m"], change: Float[Array, "n h"]) -> Solve:
        """The exact solution for s + noise, and what it makes of s itself."""
        spread = jnp.asarray(self.noise, features.dtype) * jnp.std(features)
        drawn = jax.random.normal(cast(Array, self.key), features.shape, features.dtype)
        found = Exact(method=self.method).apply(features + spread * drawn, change)
        return measure(features, change, found.solution, found.rank, found.largest)

    def each(self, shape: tuple[int, ...]) -> Mode:
        """A key of its own for each."""
        noise = jnp.broadcast_to(jnp.asarray(self.noise), shape)
        return self._with(jax.random.split(cast(Array, self.key), shape), noise)

    def fresh(self, key: Array | None, step: ArrayLike) -> Mode:
        """With the key given, or one that the step makes of its own."""
        if key is not None:
            check_key(key)
            return self._with(key, self.noise)
        return self if self.key is None else self._with(jax.random.fold_in(self.key, step),
                                                        self.noise)  # fmt: skip

    def _with(self, key: Array, noise: ArrayLike) -> Mode:
        return eqx.tree_at(
            lambda mode: (mode.key, mode.noise),
            self,
            (key, noise),
            is_leaf=lambda leaf: leaf is None,
        )


class Filter(Mode):
    """A filter φ on the singular values, relative to the largest. Subclasses have `filter`.

    Args:
        rtol: tolerance relative to the largest singular value, in [0, 1). Below 1e-6 float32 does
            not resolve it: everything is then promoted to float64 and an SVD taken.
        method: "auto" ("eigh" of the smaller Gram; "svd" where the tolerance is finer than a Gram
            resolves), "eigh" or "svd".

    Raises:
        ValueError: a tolerance out of range; a method that is not known or sees no spectrum.

    Example:
        A mode of one's own, which lets all singular values count alike:

        >>> class Whiten(Filter):
        ...     def filter(self, values, tolerance, floor):
        ...         counted = (values >= floor) & (values > 0)
        ...         return counted, jnp.where(counted, jnp.max(values) ** -1, 0.0)
        >>> solve = Whiten().apply(jnp.diag(jnp.array([4.0, 2.0])), jnp.ones((2, 1)))
        >>> solve.solution[:, 0].tolist()
        [0.25, 0.25]
    """

    squares: ClassVar[bool] = False
    """Whether `filter_squares` serves too, in float32."""
    rtol: ArrayLike = RTOL

    def __post_init__(self):
        super().__post_init__()
        check_number("rtol", self.rtol, at_least=0, below=1)
        if self.method == "cholesky":
            raise ValueError(
                f"method='cholesky' does not see the spectrum that pseudoinverse={self.name!r} "
                "filters; use method='eigh', or 'auto'."
            )
        self.rtol = _plain(self.rtol)
        self.fine = is_concrete(self.rtol) and float(cast(Any, self.rtol)) < FINEST_RTOL
        if self.method == "auto":
            self.method = "svd" if self.fine else "eigh"

    def filter(
        self, values: Float[Array, " k"], tolerance: Float[Array, ""], floor: Float[Array, ""]
    ) -> tuple[Array, Array]:
        """Which singular values count towards the rank, and φ of each, in float64.

        Args:
            values: all singular values (k,), in any order.
            tolerance: rtol·s_max.
            floor: below it is the rounding of the route, where a singular vector is arbitrary: 1/s
                and 1/(s + δ) would amplify noise there.

        Returns:
            ``(counted, φ)``, both (k,).
        """
        raise NotImplementedError(f"{type(self).__name__} needs filter(values, tolerance, floor).")

    def filter_squares(self, values: Array, largest: Array, floor: Array | float) -> Kept:
        """Φ(s)/s as a function of s² (any shape), for a Gram in float32; see `squares`."""
        raise NotImplementedError

    def apply(self, features: Float[Array, "n m"], change: Float[Array, "n h"]) -> Solve:
        """V φ(S) Uᵀ t, by the eigenvectors of the smaller Gram or by an SVD."""

        def spectrum(values: Array, floor: Array) -> tuple[Array, Array]:
            tolerance = jnp.asarray(self.rtol, values.dtype) * jnp.max(values)
            return self.filter(values, tolerance, floor)

        squares = self.filter_squares if self.squares else None
        return spectral_route(features, change, spectrum, self.method, squares)


class Truncate(Filter):
    """Small singular values are left out: φ(s) = 1/s where s >= max(rtol·s_max, atol), else 0.

    Args:
        rtol: as of `Filter`; 1e-6 drops rounding alone, and the step is exact where m >= 2 N.
        atol: absolute tolerance; the larger of the two decides.
        method: as of `Filter`.

    Raises:
        ValueError: as `Filter`; an atol that is negative or not finite.

    Example:
        >>> Truncate(0.05)
        Truncate(rtol=0.05, atol=1e-05, method='eigh')

    Source:
        XGN section 5 (1 %).
    """

    name: ClassVar[str] = "truncate"
    squares: ClassVar[bool] = True
    atol: ArrayLike = ATOL

    def __post_init__(self):
        super().__post_init__()
        self.atol = _plain(check_number("atol", self.atol, at_least=0))

    def filter(
        self, values: Float[Array, " k"], tolerance: Float[Array, ""], floor: Float[Array, ""]
    ) -> tuple[Array, Array]:
        """1/s from the larger tolerance on."""
        atol = jnp.asarray(self.atol, values.dtype)
        return invert_above(values, jnp.maximum(floor, jnp.maximum(tolerance, atol)))

    def filter_squares(self, values: Array, largest: Array, floor: Array | float) -> Kept:
        """1/s² from the square of the larger tolerance on."""
        tolerance = jnp.asarray(self.rtol, values.dtype) ** 2 * largest
        smallest = jnp.maximum(tolerance, jnp.asarray(self.atol, values.dtype) ** 2)
        keep = (values >= smallest) & (values > 0)
        ratio = jnp.where(keep, 1 / jnp.where(keep, values, 1), 0)
        return Kept(keep, ratio, jnp.min(jnp.where(keep, values, jnp.max(values))))


class Damp(Filter):
    """The singular values are damped: φ(s) = 1/(s + rtol·s_max).

    Args:
        rtol: the damping, relative to the largest singular value; as of `Filter`.
        method: as of `Filter`.

    Raises:
        ValueError: as `Filter`.

    Example:
        >>> solve = Damp(0.5).apply(jnp.diag(jnp.array([4.0, 2.0])), jnp.ones((2, 1)))
        >>> [round(float(value), 6) for value in solve.solution[:, 0]]
        [0.166667, 0.25]

    Source:
        XGN Appendix K.
    """

    name: ClassVar[str] = "damp"  # its φ does not vanish with s, and would see float32's rounding

    def filter(
        self, values: Float[Array, " k"], tolerance: Float[Array, ""], floor: Float[Array, ""]
    ) -> tuple[Array, Array]:
        """1/(s + δ)."""
        counted = (values >= floor) & (values > 0)
        safe = jnp.where(values > 0, values, 1.0)
        return counted, jnp.where(counted, 1 / (safe + tolerance), 0.0)


class Tikhonov(Filter):
    """Tikhonov's regularisation: φ(s) = s/(s² + (rtol·s_max)²).

    Args:
        rtol: as of `Filter`.
        method: as of `Filter`.

    Raises:
        ValueError: as `Filter`.

    Example:
        >>> solve = Tikhonov(0.5).apply(jnp.diag(jnp.array([4.0, 2.0])), jnp.ones((2, 1)))
        >>> [round(float(value), 6) for value in solve.solution[:, 0]]
        [0.2, 0.25]

    Source:
        XGN Appendix K.
    """

    name: ClassVar[str] = "tikhonov"
    squares: ClassVar[bool] = True

    def filter(
        self, values: Float[Array, " k"], tolerance: Float[Array, ""], floor: Float[Array, ""]
    ) -> tuple[Array, Array]:
        """s/(s² + δ²), which goes to zero with s by itself."""
        safe = jnp.where(values > 0, values, 1.0)
        inverse = jnp.where(values > 0, safe / (safe**2 + tolerance**2), 0.0)
        return (values >= floor) & (values > 0), inverse

    def filter_squares(self, values: Array, largest: Array, floor: Array | float) -> Kept:
        """1/(s² + δ²)."""
        tolerance = jnp.asarray(self.rtol, values.dtype) ** 2 * largest
        ratio = 1 / (jnp.maximum(values, 0) + tolerance)
        least = jnp.maximum(tolerance, jnp.maximum(jnp.min(values), 0))
        return Kept(values > floor, ratio, least)


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's, which are traced alike; JAX's arrays as they are."""
    return value if isinstance(value, jax.Array) else float(value)
