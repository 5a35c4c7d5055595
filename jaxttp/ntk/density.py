"""A spectrum by products alone, by Lanczos: its ends, its largest eigenpairs and its density."""

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array

from jaxttp._core.checks import (
    check_finite_value,
    check_integer,
    check_key,
    check_number,
    is_concrete,
)
from jaxttp._core.double import double
from jaxttp._core.results import RESULT
from jaxttp.ntk._lanczos import Scheme, is_walked, lanczos, length, walked
from jaxttp.ntk._leading import Leading, Operator, Rounds, leading_pairs
from jaxttp.ntk.kernels import KernelLike
from jaxttp.ntk.spectrum import as_matrix


class SpectralDensity(NamedTuple):
    """A spectrum as weighted points: ∫ f dμ = (1/n) Σ_k f(λ_k) ≈ Σ weights · f(nodes).

    Attributes:
        nodes: (probes, depth) Ritz values.
        weights: (probes, depth), summing to 1 over everything.
        size: n, the number of eigenvalues that the unit mass stands for.
    """

    nodes: Array
    weights: Array
    size: int

    plot, _repr_html_, __repr__ = RESULT

    def integral(self, function: Callable[[Array], Any]) -> tuple[Array, Array]:
        """∫ f dμ and its standard error, from how the probes differ: nan of a single one.

        Args:
            function: f, of an array of eigenvalues (probes, depth) to (..., probes, depth).

        Returns:
            Two arrays (...); n times as much for tr f(A).

        Example:
            >>> import jax, jax.numpy as jnp
            >>> kernel = jnp.array([[2.0, 1.0], [1.0, 2.0]])
            >>> density = spectral_density(kernel, key=jax.random.key(0))
            >>> trace, error = (2 * float(part) for part in density.integral(lambda x: x))
            >>> abs(trace - 4.0) < 3 * error
            True
        """
        with _precision(self.nodes):
            values = jnp.asarray(function(self.nodes), self.weights.dtype)
            parts = jnp.einsum("pd,...pd->...p", self.weights, values, precision="highest")
            spread = jnp.std(parts, axis=-1, ddof=1) * parts.shape[-1] ** 0.5
            return jnp.sum(parts, axis=-1), spread

    def smoothed(self, grid: Array, width: Any) -> Array:
        """The density at `grid` (G,), each node a Gaussian of that standard deviation."""
        with _precision(self.nodes):
            width = jnp.asarray(width, grid.dtype)

            def bumps(nodes: Array) -> Array:
                z = (grid[:, None, None] - nodes[None]) / width
                return jnp.exp(-0.5 * z**2) / (width * (2 * jnp.pi) ** 0.5)

            return self.integral(bumps)[0]

    @property
    def rounding(self) -> Array:
        """Up to this size eigenvalues are zero to rounding: n eps max |λ|."""
        with _precision(self.nodes):
            return self.size * jnp.finfo(self.nodes.dtype).eps * jnp.max(jnp.abs(self.nodes))

    def zeros(self) -> tuple[Array, Array]:
        """How many eigenvalues are zero to rounding, and the standard error of that number."""
        with _precision(self.nodes):
            part, error = self.integral(lambda nodes: jnp.abs(nodes) <= self.rounding)
            return self.size * part, self.size * error

    def __str__(self) -> str:
        nodes, probes = np.asarray(self.nodes), len(self.nodes)
        mean, zeros = (with_error(*pair) for pair in (self.integral(lambda x: x), self.zeros()))
        return (
            f"{self.size} eigenvalues from {nodes.min():.3g} to {nodes.max():.3g}, mean {mean}; "
            f"{zeros} are zero to rounding ({probes} probe{'s' if probes > 1 else ''})"
        )


def with_error(value: Any, error: Any) -> str:
    """A number and what it is known to; alone where that is not known, nan."""
    value, error = float(value), float(error)
    return f"{value:.3g} ± {error:.1g}" if math.isfinite(error) else f"{value:.3g}"


def extreme_eigenvalues(
    kernel: KernelLike | lx.AbstractLinearOperator, *, key: Array, depth: int = 64
) -> tuple[Array, Array]:
    """(smallest, largest) Ritz value of `depth` Lanczos steps with full reorthogonalisation.

    Ritz values lie inside the spectrum: the largest is a lower bound and converges fast, the
    smallest is an upper bound and is right only when `depth` reaches the number of distinct
    eigenvalues (both are then exact to rounding, and fewer steps are made) or λmin is isolated.

    Args:
        kernel: an array (N, C, N, C) or (N, N), or a lineax operator such as
            `ntk_operator`'s.
        key: a JAX random key, for the start vector.
        depth: Lanczos steps, cut to the size.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> low, high = extreme_eigenvalues(jnp.diag(jnp.arange(1.0, 5.0)), key=jax.random.key(0))
        >>> round(float(low), 3), round(float(high), 3)
        (1.0, 4.0)
    """
    depth = check_integer("depth", depth, at_least=1)
    kernel = _ready(kernel, key)
    starts = _starts(kernel, key, None)
    with _precision(kernel):
        values, _ = _quadrature(kernel, starts, depth)
        return values[0, 0], values[0, -1]


def top_eigenpairs(
    kernel: KernelLike | lx.AbstractLinearOperator,
    k: int,
    *,
    key: Array,
    rtol: Any = None,
    depth: int | None = None,
) -> tuple[Array, Any]:
    """The k largest eigenvalues and their vectors, λ_1 ≥ ... ≥ λ_k with their multiplicities.

        A v_j = λ_j v_j,        v_i · v_j = δ_ij

    Largest in value, not in size: those of a Hessian are its sharpest directions, and the top of
    ``-operator`` are its most negative ones. From products alone, by Lanczos iteration with full
    reorthogonalisation that is restarted. A random start has a share in each eigenspace, and finds
    one vector of it; so further random vectors, orthogonal to what was found, follow until one
    finds nothing larger than λ_k. That takes 100 to 400 products for k up to 20 (1.3 to 2 times
    those of SciPy's `eigsh`, which does not look for what it missed), and the memory of 2 `depth`
    vectors.

    Args:
        kernel: a symmetric array (N, C, N, C) or (N, N), or a symmetric lineax
            operator such as `ntk_operator`'s or `jaxttp.conditioning.curvature_operator`'s.
        k: how many, at most the size.
        key: a JAX random key, for the random vectors.
        rtol: bound on ‖A v_j − λ_j v_j‖ relative to the largest |λ|, beside rounding; it bounds the
            error of λ_j, too. None for the rounding unit to the power 2/3 (4e-11 in float64).
        depth: vectors of the Krylov space, at least k + 2; None for 2 k + 48. Cut to the size, at
            which the result is exact to rounding.

    Returns:
        (values (k,), vectors), decreasing, in the operator's dtype: vectors (k, N, C) for a kernel
        (N, C, N, C), (k, N) for (N, N), and the structure of the operator's input with k rows for
        an operator. The entry of largest size is positive, the first of several within 0.1 %. Of
        equal eigenvalues the vectors are any basis of their space.

    Raises:
        ValueError: k, rtol or depth out of range; a kernel that is not finite; residuals that are
            not below the bound (at run time in traced code), as of an operator that is not
            symmetric.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> kernel = jnp.diag(jnp.array([1.0, 3.0, -4.0, 2.0]))
        >>> values, vectors = top_eigenpairs(kernel, 2, key=jax.random.key(0))
        >>> [round(float(value), 3) for value in values], vectors.shape
        ([3.0, 2.0], (2, 4))

    Source:
        `jaxttp.ntk._leading`.
    """
    matrix = _ready(kernel, key)
    start = _starts(matrix, key, None)[0]
    with _precision(matrix):
        _, size, dtype, unravel = _flat(matrix)
        eps = float(jnp.finfo(dtype).eps)
        k = check_integer("k", k, at_least=1, at_most=size)
        if depth is not None:
            depth = check_integer("depth", depth, at_least=min(k + 2, size))
        if rtol is not None:
            check_number("rtol", rtol, at_least=0.0, below=1.0)
        rtol = jnp.asarray(eps ** (2 / 3) if rtol is None else rtol, dtype)
        # What each of k vectors is off by adds to a later one's residual.
        each = jnp.maximum(rtol / (2 * (k + 1) ** 0.5), 10 * eps)
        scheme = Scheme(size, min(2 * k + 48 if depth is None else depth, size))
        found, images = _pairs(matrix, key, start, Rounds(scheme, k, each))
        bound = rtol + 10 * eps * size**0.5  # the length that ends a Krylov space
        values, vectors = _checked_pairs(found, images, bound)
        if isinstance(matrix, lx.AbstractLinearOperator):
            return values, jax.vmap(unravel)(vectors)
        shape = np.shape(cast(Any, kernel))
        return values, vectors.reshape(k, *shape[: len(shape) // 2])


def _pairs(kernel: Any, key: Array, start: Array, rounds: Rounds) -> tuple[Leading, Array]:
    """The largest eigenpairs, and the products with their vectors (k, size)."""
    if not (is_walked(kernel) and is_concrete(start)):
        return _compiled_pairs(kernel, key, start, rounds)
    operator = Operator(kernel, key, start)
    found = leading_pairs(_product_of, operator, rounds, walked=True)
    return found, jnp.stack([_compiled_product(kernel, vector) for vector in found.vectors])


@eqx.filter_jit
def _compiled_pairs(kernel: Any, key: Array, start: Array, rounds: Rounds) -> tuple[Leading, Array]:
    """All of it in one program."""
    found = leading_pairs(_product_of, Operator(kernel, key, start), rounds, walked=False)
    return found, jax.lax.map(lambda vector: _product(kernel, vector), found.vectors)


def _product_of(operator: Operator, vector: Array) -> Array:
    return _product(operator.kernel, vector)


def _checked_pairs(found: Leading, images: Array, bound: Array) -> tuple[Array, Array]:
    """Values and vectors of fixed sign, whose residuals are small relative to the largest value."""
    values, vectors, scale = found.values, found.vectors, found.scale
    residuals = jax.vmap(length)(images - values[:, None] * vectors)
    worst = jnp.max(residuals) / jnp.where(scale > 0, scale, 1)
    bad = ~(found.converged & (worst <= bound))
    text = (
        "kernel: eigenpairs did not converge; give a larger depth or rtol, and check that the "
        "kernel is symmetric and its products finite"
    )
    if not is_concrete(bad):
        values = eqx.error_if(values, bad, text)
    elif bool(bad):
        raise ValueError(f"{text} (residuals up to {float(worst):.2g} of the largest eigenvalue).")
    sizes = jnp.abs(vectors)
    # The first of those that are the largest but for rounding: several often are, by symmetry.
    first = jnp.argmax(sizes >= 0.999 * jnp.max(sizes, axis=1, keepdims=True), axis=1)
    return values, vectors * jnp.sign(jnp.take_along_axis(vectors, first[:, None], axis=1))


def spectral_density(
    kernel: KernelLike | lx.AbstractLinearOperator,
    *,
    key: Array,
    depth: int = 32,
    probes: int = 8,
) -> SpectralDensity:
    """The density of eigenvalues by stochastic Lanczos quadrature.

        (1/n) Σ_k f(λ_k) ≈ mean over probes of Σ_j τ_j² f(θ_j)

    with θ_j the Ritz values and τ_j the first entries of their eigenvectors. A probe that meets
    fewer than `depth` distinct eigenvalues is exact; the nodes that it does not need have weight 0
    and lie on its smallest. Other nodes are accurate at both ends first and within last: zeros
    between negative and positive eigenvalues lie on either side of 0 until then.

    Args:
        kernel: an array (N, C, N, C) or (N, N), or a lineax operator.
        key: a JAX random key.
        depth: Lanczos steps a probe, cut to the size.
        probes: random ±1 start vectors.

    Source:
        Ubaru, Chen, Saad 2017, Algorithm 1.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> kernel = jnp.diag(jnp.array([1.0, 2.0, 3.0]))
        >>> density = spectral_density(kernel, key=jax.random.key(0), depth=3)
        >>> round(3 * float(jnp.sum(density.weights * density.nodes)), 3)  # the trace
        6.0
    """
    depth = check_integer("depth", depth, at_least=1)
    probes = check_integer("probes", probes, at_least=1)
    kernel = _ready(kernel, key)
    starts = _starts(kernel, key, probes)
    with _precision(kernel):
        nodes, weights = _quadrature(kernel, starts, depth)
        return SpectralDensity(nodes, weights / probes, starts.shape[1])


def _ready(kernel: Any, key: Any) -> Any:
    """A finite matrix, or an operator as it is; no key is refused."""
    check_key(key, optional=False)
    if isinstance(kernel, lx.AbstractLinearOperator):
        return kernel
    return check_finite_value("kernel", as_matrix(kernel))


def _precision(values: Any) -> contextlib.AbstractContextManager[Any]:
    """Float64 for what is in float64, whatever the process computes in."""
    is_operator = isinstance(values, lx.AbstractLinearOperator)
    leaves = jax.tree.leaves(values.in_structure()) if is_operator else [values]
    is_double = any(leaf.dtype == jnp.float64 for leaf in leaves)
    return double() if is_double else contextlib.nullcontext()


def _quadrature(
    kernel: KernelLike | lx.AbstractLinearOperator, starts: Array, depth: int
) -> tuple[Array, Array]:
    """Ritz values and weights (probes, depth)."""
    if not (is_walked(kernel) and is_concrete(starts)):
        values, weights = _compiled(kernel, starts, depth)
    else:
        steps = min(depth, starts.shape[1])
        found = [walked(_product, kernel, start, steps) for start in starts]
        values, weights = (
            jnp.stack(each) for each in zip(*((f.values, f.weights) for f in found), strict=True)
        )
    if is_concrete(values) and not bool(jnp.all(jnp.isfinite(values))):
        _product(kernel, starts[0])  # an operator raises with the reason, outside of a trace
    return values, weights


def _product(kernel: KernelLike | lx.AbstractLinearOperator, vector: Array) -> Array:
    return _flat(kernel)[0](vector)


_compiled_product = eqx.filter_jit(_product)


def _starts(
    kernel: KernelLike | lx.AbstractLinearOperator, key: Array, probes: int | None
) -> Array:
    """The first vectors (probes, size) in the kernel's dtype: ±1, or one normal one for None.

    Drawn in the precision of the process: in a float32 program the bits of a float64 do not
    compile.
    """
    with _precision(kernel):
        _, size, dtype, _ = _flat(kernel)
    drawn = _drawn(key, probes, size, jax.dtypes.canonicalize_dtype(dtype))
    with _precision(kernel):
        return drawn.astype(dtype)


@eqx.filter_jit
def _drawn(key: Array, probes: int | None, size: int, dtype: Any) -> Array:
    if probes is None:
        return jax.random.normal(key, (1, size), dtype)
    return jax.random.rademacher(key, (probes, size), dtype)


@eqx.filter_jit
def _compiled(
    kernel: KernelLike | lx.AbstractLinearOperator, starts: Array, depth: int
) -> tuple[Array, Array]:
    """All of it in one program."""
    product, size, *_ = _flat(kernel)

    def of(start: Array) -> tuple[Array, Array]:
        found = lanczos(product, start, min(depth, size))
        return found.values, found.weights

    return jax.lax.map(of, starts)


def _flat(
    kernel: KernelLike | lx.AbstractLinearOperator,
) -> tuple[Callable[[Array], Array], int, Any, Callable[[Array], Any]]:
    """The product with flat vectors, their size and dtype, and the way to the kernel's own."""
    if isinstance(kernel, lx.AbstractLinearOperator):
        zeros = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), kernel.in_structure())
        flat, unravel = ravel_pytree(zeros)
        return lambda v: ravel_pytree(kernel.mv(unravel(v)))[0], flat.size, flat.dtype, unravel
    matrix = as_matrix(kernel)
    product = lambda v: jnp.matmul(matrix, v, precision="highest")  # noqa: E731
    return product, matrix.shape[0], matrix.dtype, lambda v: v
