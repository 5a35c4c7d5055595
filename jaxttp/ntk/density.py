"""A spectrum by products alone: the extreme eigenvalues and the density, by Lanczos."""

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array

from jaxttp._checks import check_finite_value, check_integer, check_key, is_concrete
from jaxttp._result import RESULT
from jaxttp.ntk._lanczos import is_walked, lanczos, walked
from jaxttp.ntk.factored import KernelLike
from jaxttp.ntk.row_sharded import RowSharded, recognised
from jaxttp.ntk.spectrum import as_matrix


class SpectralDensity(NamedTuple):
    """A spectrum as weighted points: ∫ f dμ ≈ Σ weights · f(nodes).

    Attributes:
        nodes: (probes, depth) Ritz values.
        weights: (probes, depth), summing to 1 over everything.
        size: the number of eigenvalues that the unit mass stands for.
    """

    nodes: Array
    weights: Array
    size: int

    plot, _repr_html_, __repr__ = RESULT

    def smoothed(self, grid: Array, width: Any) -> Array:
        """The density at `grid` (G,), each node a Gaussian of that standard deviation."""
        width = jnp.asarray(width, grid.dtype)
        z = (grid[:, None] - self.nodes.reshape(1, -1)) / width
        bumps = jnp.exp(-0.5 * z**2) / (width * jnp.sqrt(2 * jnp.asarray(jnp.pi, grid.dtype)))
        return bumps @ self.weights.reshape(-1)


def extreme_eigenvalues(
    kernel: KernelLike | lx.AbstractLinearOperator, *, key: Array, depth: int = 64
) -> tuple[Array, Array]:
    """(smallest, largest) Ritz value of `depth` Lanczos steps with full reorthogonalisation.

    Ritz values lie inside the spectrum: the largest is a lower bound and converges fast, the
    smallest is an upper bound and is right only when `depth` reaches the number of distinct
    eigenvalues (both are then exact to rounding, and fewer steps are made) or λmin is isolated.

    Args:
        kernel: an array (N, C, N, C) or (N, N), a `RowSharded`, or a lineax operator such as
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
    values, _ = _quadrature(kernel, key, depth, None)
    return values[0, 0], values[0, -1]


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
    and lie on its smallest.

    Args:
        kernel: an array (N, C, N, C) or (N, N), a `RowSharded`, or a lineax operator.
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
    _, size, dtype = _matvec(kernel)
    nodes, weights = _quadrature(kernel, key, depth, probes)
    return SpectralDensity(nodes, weights / jnp.asarray(probes, dtype), size)


def _ready(kernel: Any, key: Any) -> Any:
    """A finite matrix, or an operator as it is, and a kernel on many devices; no key is refused."""
    check_key(key, optional=False)
    kernel = recognised(kernel)
    if isinstance(kernel, lx.AbstractLinearOperator | RowSharded):
        return kernel
    return check_finite_value("kernel", as_matrix(kernel))


def _quadrature(
    kernel: KernelLike | lx.AbstractLinearOperator,
    key: Array,
    depth: int,
    probes: int | None,
) -> tuple[Array, Array]:
    """Ritz values and weights (probes, depth), of ±1 probes, or of one normal one for None."""
    if not is_walked(kernel):
        return _compiled(kernel, key, depth, probes)
    starts = _starts(kernel, key, probes)
    if not is_concrete(starts):
        return _compiled(kernel, key, depth, probes)
    steps = min(depth, starts.shape[1])
    found = [walked(_product, kernel, start, steps) for start in starts]
    return jnp.stack([one.values for one in found]), jnp.stack([one.weights for one in found])


def _product(operator: lx.AbstractLinearOperator, vector: Array) -> Array:
    return _matvec(operator)[0](vector)


@eqx.filter_jit
def _starts(
    kernel: KernelLike | lx.AbstractLinearOperator, key: Array, probes: int | None
) -> Array:
    """The first vectors, (probes, size)."""
    _, size, dtype = _matvec(kernel)
    if probes is None:
        return jax.random.normal(key, (1, size), dtype)
    return jax.random.rademacher(key, (probes, size), dtype)


@eqx.filter_jit
def _compiled(
    kernel: KernelLike | lx.AbstractLinearOperator,
    key: Array,
    depth: int,
    probes: int | None,
) -> tuple[Array, Array]:
    """All of it in one program."""
    matvec, size, _ = _matvec(kernel)

    def of(start: Array) -> tuple[Array, Array]:
        found = lanczos(matvec, start, min(depth, size))
        return found.values, found.weights

    return jax.lax.map(of, _starts(kernel, key, probes))


def _matvec(kernel: KernelLike | lx.AbstractLinearOperator) -> tuple[Any, int, Any]:
    if isinstance(kernel, lx.AbstractLinearOperator):
        structure = kernel.in_structure()
        shape, size = structure.shape, 1
        for length in shape:
            size *= length
        return lambda v: kernel.mv(v.reshape(shape)).reshape(-1), size, structure.dtype
    if isinstance(kernel, RowSharded):
        shape = kernel.shape[: kernel.ndim // 2]
        each = shape if len(shape) == 2 else (*shape, 1)
        return (
            lambda v: kernel.apply(v.reshape(each)).reshape(-1), math.prod(shape), kernel.dtype
        )  # fmt: skip
    matrix = as_matrix(kernel)
    return lambda v: jnp.matmul(matrix, v, precision="highest"), matrix.shape[0], matrix.dtype
