"""A spectrum by products alone: Lanczos' iteration, extreme eigenvalues, and a density.

    A Q = Q T + beta_k q_{k+1} e_k^T,    Q^T Q = I,    T tridiagonal

A multiple of the identity, a kernel of few weights, whitened data, the rank C - 1 of a Hessian: all
exhaust the Krylov space early. The remainder of a new vector is then rounding. Normalized, it would
not be orthogonal to the others, and its Ritz values could lie anywhere (3 I then has eigenvalues of
-8602 and 8608; zeros give NaN). So every vector is orthogonalized twice before its length is taken,
and the iteration ends at a length that is rounding. matfree's `tridiag_sym` divides by that length
in any case, so it is not used here.

Source:
    Golub and Van Loan, section 10.1 (the iteration); Parlett, "twice is enough" (the
    orthogonalization); Ubaru, Chen, Saad 2017 (quadrature).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int

from jaxttp._core.arrays import double_like
from jaxttp._core.checks import check_finite_value, check_integer, check_key, is_concrete
from jaxttp._core.results import RESULT
from jaxttp._core.xla_cpu.threads import decompose
from jaxttp.ntk.kernels import KernelLike
from jaxttp.ntk.spectrum import as_matrix


class Ritz(NamedTuple):
    """Ritz values and vectors of a symmetric operator; the `made` computed ones come last.

    Attributes:
        values: Ritz values, increasing, all within the spectrum; at the front the smallest repeats
            in place of those that were not computed.
        weights: squared first entries of their vectors in the basis, summing to 1; 0 for repeats.
        projected: T with the row of beta_k below it, A Q_k = Q_(k+1) projected; 0 beyond `made`.
        coordinates: column j holds vector j in the basis; 0 for repeats.
        basis: orthonormal rows, 0 for those that were not computed.
        made: how many Ritz values were computed.
        closed: whether the Krylov space of the start is exhausted: the Ritz values are then exactly
            those eigenvalues, each once, to whose eigenspaces the start is not orthogonal.
    """

    values: Float[Array, " k"]
    weights: Float[Array, " k"]
    projected: Float[Array, "k1 k"]
    coordinates: Float[Array, "k k"]
    basis: Float[Array, "k n"]
    made: Int[Array, ""]
    closed: Bool[Array, ""]

    @property
    def known(self) -> Bool[Array, " k"]:
        """Which values were computed."""
        steps = self.values.shape[0]
        return jnp.arange(steps, dtype=self.made.dtype) >= steps - self.made

    def vectors(self) -> Float[Array, "n k"]:
        """The Ritz vectors, as columns; 0 for repeats."""
        return jnp.einsum("sd,sk->dk", self.basis, self.coordinates, precision="highest")


def lanczos(
    product: Callable[[Array], Array],
    start: Float[Array, " n"],
    steps: int,
    *,
    precision: float | None = None,
) -> Ritz:
    """Ritz values and vectors of a symmetric operator, with full re-orthogonalisation.

    Args:
        product: v (n,) -> A v (n,).
        start: the first vector, of any length; where it is zero, a constant one.
        steps: products at most, at most n.
        precision: relative rounding of `product`; that of the start's dtype when None.

    Returns:
        A `Ritz`; NaN throughout where a product is not finite.
    """
    state = jax.lax.while_loop(
        lambda state: (state.done < steps) & ~state.closed,
        lambda state: _after(state, product(state.basis[state.done]), precision),
        _begin(start, steps),
    )
    return _end(state)


def lanczos_of_network(
    product: Callable[[Any, Array], Array],
    operator: Any,
    start: Float[Array, " n"],
    steps: int,
    *,
    precision: float | None = None,
) -> Ritz:
    """The same by a loop in Python, one compiled step at a time: for CPUs and untraced values.

    XLA runs a network inside a loop on a single core there, at a third of its speed.

    Args:
        product: (operator, v) -> A v, not compiled.
        operator: its first argument, a pytree.
        start: as in `lanczos`.
        steps: likewise.
        precision: likewise.
    """
    state = _begin(start, steps)
    while int(state.done) < steps and not bool(state.closed):
        state = _step(operator, product, precision, state)
    return _compiled_end(state)


def runs_a_network(operator: Any) -> bool:
    """Whether products may differentiate a network, on a CPU and untraced."""
    is_untraced = all(map(is_concrete, jax.tree.leaves(operator)))
    is_operator = isinstance(operator, lx.AbstractLinearOperator)
    is_dense = isinstance(operator, lx.MatrixLinearOperator | lx.DiagonalLinearOperator)
    return is_operator and not is_dense and is_untraced and jax.default_backend() == "cpu"


class _State(NamedTuple):
    """Steps done, basis (steps + 1, n), both diagonals of T, whether the space is exhausted."""

    done: Array
    basis: Array
    diagonal: Array
    subdiagonal: Array
    closed: Array


def _begin(start: Array, steps: int) -> _State:
    """Before the first step."""
    dtype, n = start.dtype, start.size
    size = length(start)
    constant = jnp.asarray(n**-0.5, dtype)
    start = jnp.where(size > 0, start / jnp.where(size > 0, size, 1), constant)
    basis = jnp.zeros((steps + 1, n), dtype).at[0].set(start)
    diagonal, subdiagonal = jnp.zeros(steps, dtype), jnp.zeros(steps, dtype)
    return _State(jnp.zeros((), jnp.int32), basis, diagonal, subdiagonal, jnp.zeros((), bool))


def _after(state: _State, image: Array, precision: float | None) -> _State:
    """The state with one more vector, from the operator's product with the last one."""
    i, basis, diagonal, subdiagonal, _ = state
    eps = float(jnp.finfo(image.dtype).eps) if precision is None else precision
    diagonal = diagonal.at[i].set(jnp.vdot(basis[i], image, precision="highest"))
    scale = jnp.maximum(jnp.max(jnp.abs(diagonal)), jnp.max(subdiagonal))
    for _ in range(2):  # twice is enough
        overlap = jnp.einsum("sd,d->s", basis, image, precision="highest")
        image = image - jnp.einsum("s,sd->d", overlap, basis, precision="highest")
    size = length(image)
    is_new = size > 10 * eps * image.size**0.5 * scale
    basis = basis.at[i + 1].set(jnp.where(is_new, image / jnp.where(is_new, size, 1), 0))
    subdiagonal = subdiagonal.at[i].set(jnp.where(is_new, size, jnp.zeros((), size.dtype)))
    return _State(i + 1, basis, diagonal, subdiagonal, ~is_new)


@eqx.filter_jit(donate="all-except-first")
def _step(
    operator: Any, product: Callable[[Any, Array], Array], precision: float | None, state: _State
) -> _State:
    return _after(state, product(operator, state.basis[state.done]), precision)


def _end(state: _State) -> Ritz:
    """The Ritz values and vectors after the last step."""
    count, basis, diagonal, subdiagonal, closed = state
    steps, dtype = len(diagonal), diagonal.dtype
    # Rows that were not computed get an eigenvalue below all others, so that it comes first.
    bound = jnp.max(jnp.abs(diagonal)) + 2 * jnp.max(subdiagonal)
    outside = -2 * jnp.where(bound > 0, bound, jnp.ones((), dtype))
    superdiagonal = jnp.diag(subdiagonal[:-1], 1)
    square = jnp.diag(diagonal) + superdiagonal + superdiagonal.T
    index = jnp.arange(steps, dtype=count.dtype)
    placed = square + jnp.diag(jnp.where(index >= count, outside, 0))
    values, coordinates = decompose(jnp.linalg.eigh, placed)
    is_computed = index >= steps - count
    values = jnp.where(is_computed, values, values[steps - count])
    values = jnp.where(jnp.isfinite(bound), values, jnp.nan)
    coordinates = jnp.where(is_computed[None], coordinates, 0)
    last = jnp.zeros((1, steps), dtype).at[0, -1].set(subdiagonal[-1])
    projected = jnp.concatenate([square, last])
    return Ritz(values, coordinates[0] ** 2, projected, coordinates, basis[:-1], count, closed)


_compiled_end = eqx.filter_jit(_end)


def length(vector: Float[Array, " n"]) -> Float[Array, ""]:
    """The Euclidean norm, of entries whose squares overflow or vanish too."""
    largest = jnp.max(jnp.abs(vector))
    safe = jnp.where(largest > 0, largest, jnp.ones((), vector.dtype))
    return jnp.where(largest > 0, safe * jnp.linalg.norm(vector / safe), largest)


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
        """∫ f dμ and its standard error, from the spread over probes; NaN of a single probe.

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
        with double_like(self.nodes):
            values = jnp.asarray(function(self.nodes), self.weights.dtype)
            parts = jnp.einsum("pd,...pd->...p", self.weights, values, precision="highest")
            spread = jnp.std(parts, axis=-1, ddof=1) * parts.shape[-1] ** 0.5
            return jnp.sum(parts, axis=-1), spread

    @property
    def rounding(self) -> Array:
        """Up to this size eigenvalues are zero to rounding: n eps max |λ|."""
        with double_like(self.nodes):
            return self.size * jnp.finfo(self.nodes.dtype).eps * jnp.max(jnp.abs(self.nodes))

    def zeros(self) -> tuple[Array, Array]:
        """How many eigenvalues are zero to rounding, and the standard error of that number."""
        with double_like(self.nodes):
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
    """A number with its standard error, if the error is finite."""
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
            `ntk_operator`'s; computed in its own precision.
        key: a JAX random key, for the start vector.
        depth: Lanczos steps, cut to the size.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> low, high = extreme_eigenvalues(jnp.diag(jnp.arange(1.0, 5.0)), key=jax.random.key(0))
        >>> round(float(low), 3), round(float(high), 3)
        (1.0, 4.0)
    """
    depth = check_integer("depth", depth, at_least=1)
    values, _ = _ritz_values(_as_operator(kernel, key), key, None, depth)
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

    with θ_j the Ritz values and τ_j the first entries of their eigenvectors. A probe that reaches
    fewer than `depth` eigenspaces is exact; its spare nodes have weight 0 and lie on its smallest
    node. Other nodes converge at both ends of the spectrum first and within it last. Until then,
    zeros between negative and positive eigenvalues appear on either side of 0.

    Args:
        kernel: an array (N, C, N, C) or (N, N), or a lineax operator; computed in its own
            precision.
        key: a JAX random key.
        depth: Lanczos steps a probe, cut to the size. The default smooths the density: peaks and
            gaps in the tails need more, such as 128.
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
    operator = _as_operator(kernel, key)
    nodes, weights = _ritz_values(operator, key, probes, depth)
    with double_like(operator.in_structure()):
        return SpectralDensity(nodes, weights / probes, operator.in_size())


def _as_operator(kernel: Any, key: Any) -> lx.AbstractLinearOperator:
    """An operator as it is, or the operator of a finite matrix; checks the key."""
    check_key(key, optional=False)
    if isinstance(kernel, lx.AbstractLinearOperator):
        return kernel
    with double_like(kernel):
        matrix = check_finite_value("kernel", as_matrix(kernel))
        return lx.MatrixLinearOperator(matrix, lx.symmetric_tag)


def _ritz_values(
    operator: lx.AbstractLinearOperator, key: Array, probes: int | None, depth: int
) -> tuple[Array, Array]:
    """Ritz values and weights (probes, depth), from starts of ±1 or, for None, one normal one."""
    steps = min(depth, operator.in_size())
    vectors = _start_vectors(operator, key, probes)
    with double_like(operator.in_structure()):
        if runs_a_network(operator) and is_concrete(vectors):
            ritz = [lanczos_of_network(_product, operator, start, steps) for start in vectors]
            values = jnp.stack([r.values for r in ritz])
            weights = jnp.stack([r.weights for r in ritz])
        else:
            values, weights = _compiled(operator, vectors, steps)
        if is_concrete(values) and not bool(jnp.all(jnp.isfinite(values))):
            _product(operator, vectors[0])  # raises with the reason, outside of a trace
    return values, weights


@eqx.filter_jit
def _compiled(
    operator: lx.AbstractLinearOperator, vectors: Array, steps: int
) -> tuple[Array, Array]:
    """Ritz values and weights of all starts, in one compiled function."""

    def run(start: Array) -> tuple[Array, Array]:
        return lanczos(lambda vector: _product(operator, vector), start, steps)[:2]

    return jax.lax.map(run, vectors)


def _product(operator: lx.AbstractLinearOperator, vector: Array) -> Array:
    """A v for a flat v, for operators on any pytree."""
    structure = operator.in_structure()
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), structure)
    return ravel_pytree(operator.mv(ravel_pytree(zeros)[1](vector)))[0]


def _start_vectors(operator: lx.AbstractLinearOperator, key: Array, probes: int | None) -> Array:
    """The first vectors (probes, size): ±1, or one normal one for None.

    Drawn in the precision of the process: float64 bits do not compile where x64 mode is off.
    """
    leaves, size = jax.tree.leaves(operator.in_structure()), operator.in_size()
    dtype = jnp.result_type(*leaves)
    if probes is None:
        drawn = jax.random.normal(key, (1, size), dtype)
    else:
        drawn = jax.random.rademacher(key, (probes, size), dtype)
    with double_like(leaves):
        return drawn.astype(jnp.result_type(*leaves))
