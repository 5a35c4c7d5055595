"""Lanczos' iteration, which ends where its Krylov space does.

    A Q = Q T + beta_k q_{k+1} e_k^T,    Q^T Q = I,    T tridiagonal

A multiple of the identity, a kernel of few weights, whitened data, the rank C - 1 of a Hessian: all
exhaust that space early. What is left of a new vector is then rounding. Normalised, it would no
longer be orthogonal to the others, and its Ritz values could lie anywhere (3 I then has eigenvalues
of -8602 and 8608; zeros give NaN). So every vector is orthogonalised twice before its length is
taken, and the iteration ends at a length that is rounding. This is why it is our own: matfree's
`tridiag_sym` divides by that length whatever it is, and at the backend's default precision.

A process may also go on from Ritz vectors of another one (a thick restart): T then begins with
their values on its diagonal, and their couplings to the next vector beside it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Bool, Float, Int

from jaxttp._core.checks import is_concrete
from jaxttp._core.xla_cpu.threads import decompose


class Ritz(NamedTuple):
    """What `steps` steps know of a symmetric operator; the `made` ones come last.

    Attributes:
        values: Ritz values, increasing, all within the spectrum; those that were never computed
            repeat the smallest, at the front.
        weights: squared first entries of their vectors in the basis, summing to 1; 0 for repeats.
        projected: T with the row of beta_k below it, A Q_k = Q_(k+1) projected; 0 beyond `made`.
        coordinates: column j holds vector j in the basis; 0 for repeats.
        basis: orthonormal rows, 0 for those that were never computed.
        made: how many Ritz values were computed.
        closed: whether the Krylov space of the start is exhausted: the Ritz values are then exactly
            those eigenvalues, each once, whose eigenspaces the start reaches into.
        spanned: whether nothing is left at all, fresh vectors included: multiplicities are right.
    """

    values: Float[Array, " k"]
    weights: Float[Array, " k"]
    projected: Float[Array, "k1 k"]
    coordinates: Float[Array, "k k"]
    basis: Float[Array, "k n"]
    made: Int[Array, ""]
    closed: Bool[Array, ""]
    spanned: Bool[Array, ""]

    @property
    def known(self) -> Bool[Array, " k"]:
        """Which values were computed."""
        steps = self.values.shape[0]
        return jnp.arange(steps, dtype=self.made.dtype) >= steps - self.made

    @property
    def couplings(self) -> Float[Array, " k"]:
        """What of A v lies along the vector that follows the basis; ±‖A v - theta v‖."""
        return jnp.matmul(self.projected[-1], self.coordinates, precision="highest")

    def vectors(self) -> Float[Array, "n k"]:
        """The Ritz vectors, as columns; 0 for repeats."""
        return jnp.einsum("sd,sk->dk", self.basis, self.coordinates, precision="highest")


def lanczos(
    product: Callable[[Array], Array],
    start: Float[Array, " n"],
    steps: int,
    *,
    precision: float | None = None,
    fresh: Callable[[Array, Array], Array] | None = None,
) -> Ritz:
    """Ritz values and vectors of a symmetric operator, with full re-orthogonalisation.

    Args:
        product: v (n,) -> A v (n,).
        start: the first vector, of any length; where it is zero, a constant one.
        steps: products at most, at most n.
        precision: relative rounding of `product`; that of the start's dtype when None.
        fresh: (step, an estimate of ‖A‖ that is not 0) -> a vector to go on with where the Krylov
            space ends, which finds the copies of multiple eigenvalues; of length at most ‖A‖. None
            ends the iteration there.

    Returns:
        A `Ritz`; NaN throughout where a product is not finite.

    Source:
        Golub and Van Loan, section 10.1 (the iteration and its residuals); Parlett, "twice is
        enough" (the orthogonalisation).
    """
    scheme = Scheme(start.size, steps, precision)
    return scheme.end(scheme.run(product, scheme.begin(start), fresh))


def walked(
    product: Callable[[Any, Array], Array],
    operator: Any,
    start: Float[Array, " n"],
    steps: int,
    *,
    precision: float | None = None,
) -> Ritz:
    """The same, one step after the other from outside: for CPUs, and nothing that is traced.

    XLA runs a network that stands in a loop on a single core there, at a third of its pace.

    Args:
        product: (operator, v) -> A v, not compiled.
        operator: what it needs, a pytree.
        start: as in `lanczos`.
        steps: likewise.
        precision: likewise.
    """
    scheme = Scheme(start.size, steps, precision)
    return _end(scheme, walk(product, operator, scheme, _begin(scheme, start)))


def walk(
    product: Callable[[Any, Array], Array],
    operator: Any,
    scheme: "Scheme",
    state: "Steps",
    fresh: Callable[[Any, Array, Array], Array] | None = None,
) -> "Steps":
    """`Scheme.run` from outside; `product` and `fresh` are given the operator first."""
    while int(state.done) < scheme.steps and bool(state.more):
        state = _step(operator, product, fresh, scheme, state)
    return state


def is_walked(operator: Any) -> bool:
    """Whether products differentiate a network, as far as is known, on a CPU and untraced."""
    known = all(is_concrete(leaf) for leaf in jax.tree.leaves(operator))
    is_operator = isinstance(operator, lx.AbstractLinearOperator)
    is_dense = isinstance(operator, lx.MatrixLinearOperator | lx.DiagonalLinearOperator)
    return is_operator and not is_dense and known and jax.default_backend() == "cpu"


class Steps(NamedTuple):
    """Of an iteration: steps done, basis (steps + 1, n), T, and whether there is more to do.

    The first `held` rows of the basis are Ritz vectors of an earlier one, with their `couplings`.
    """

    done: Array
    basis: Array
    diagonal: Array
    beside: Array
    closed: Array
    more: Array
    held: Array
    couplings: Array


class Scheme(NamedTuple):
    """The iteration without its products."""

    size: int
    steps: int
    precision: float | None = None

    def begin(self, start: Array) -> Steps:
        """Before the first step."""
        dtype, n, steps = start.dtype, self.size, self.steps
        size = length(start)
        start = jnp.where(
            size > 0, start / jnp.where(size > 0, size, 1), jnp.asarray(n**-0.5, dtype)
        )
        none, no, zero = jnp.zeros(steps, dtype), jnp.zeros((), bool), jnp.zeros((), jnp.int32)
        basis = jnp.zeros((steps + 1, n), dtype).at[0].set(start)
        return Steps(zero, basis, none, none, no, ~no, zero, none)

    def resume(
        self, values: Array, vectors: Array, couplings: Array, held: Array, following: Array
    ) -> Steps:
        """Before the first step after a restart.

        Args:
            values: Ritz values (r,), r below `steps`.
            vectors: their vectors (r, n).
            couplings: A vectors_j = values_j vectors_j + couplings_j following, (r,).
            held: how many of them to keep.
            following: the vector of length one to go on with, orthogonal to those.
        """
        keep = jnp.arange(len(values), dtype=held.dtype) < held
        none, no = jnp.zeros(self.steps, values.dtype), jnp.zeros((), bool)
        basis = jnp.zeros((self.steps + 1, self.size), values.dtype)
        basis = basis.at[: len(values)].set(jnp.where(keep[:, None], vectors, 0))
        diagonal, couplings = (
            none.at[: len(values)].set(jnp.where(keep, row, 0)) for row in (values, couplings)
        )
        basis = basis.at[held].set(following)
        return Steps(held, basis, diagonal, none, no, ~no, held, couplings)

    def run(
        self,
        product: Callable[[Array], Array],
        state: Steps,
        fresh: Callable[[Array, Array], Array] | None = None,
    ) -> Steps:
        """All steps, in one loop."""
        return jax.lax.while_loop(
            lambda s: (s.done < self.steps) & s.more,
            lambda s: self.step(s, product(s.basis[s.done]), fresh),
            state,
        )

    def step(
        self, state: Steps, image: Array, fresh: Callable[[Array, Array], Array] | None = None
    ) -> Steps:
        """One more vector, out of the operator times the last one."""
        i, basis, diagonal, beside, closed, _, held, couplings = state
        diagonal = diagonal.at[i].set(jnp.vdot(basis[i], image, precision="highest"))
        scale = jnp.maximum(jnp.max(jnp.abs(diagonal)), jnp.max(beside))
        following, size = self._cut(rest(basis, image), scale)
        more = size > 0
        closed = closed | ~more
        if fresh is not None:
            vector, scale = fresh, jnp.where(scale > 0, scale, jnp.ones((), scale.dtype))
            following, left = jax.lax.cond(
                more,
                lambda: (following, size),
                lambda: self._cut(rest(basis, vector(i, scale)), scale),
            )
            more = left > 0
        basis, beside = basis.at[i + 1].set(following), beside.at[i].set(size)
        return Steps(i + 1, basis, diagonal, beside, closed, more, held, couplings)

    def _cut(self, vector: Array, scale: Array) -> tuple[Array, Array]:
        """A vector of length one, and its length: 0 where that is rounding."""
        eps = float(jnp.finfo(vector.dtype).eps) if self.precision is None else self.precision
        size = length(vector)
        small = 10 * eps * self.size**0.5
        size = jnp.where(size > small * scale, size, jnp.zeros((), vector.dtype))
        return jnp.where(size > 0, vector / jnp.where(size > 0, size, 1), 0), size

    def end(self, state: Steps) -> Ritz:
        """What the steps know."""
        count, basis, diagonal, beside, closed, more, held, couplings = state
        steps, dtype = self.steps, diagonal.dtype
        # What was never computed gets an eigenvalue below all others, and so comes first.
        bound = jnp.max(jnp.abs(diagonal)) + 2 * jnp.max(beside) + length(couplings)
        outside = -2 * jnp.where(bound > 0, bound, jnp.ones((), dtype))
        neighbours = jnp.diag(beside[:-1], 1).at[:, held].add(couplings)
        square = jnp.diag(diagonal) + neighbours + neighbours.T
        place = jnp.arange(steps, dtype=count.dtype)
        never = place >= count
        placed = square + jnp.diag(jnp.where(never, outside, 0))
        values, coordinates = decompose(jnp.linalg.eigh, placed)
        known = place >= steps - count
        values = jnp.where(known, values, values[steps - count])
        values = jnp.where(jnp.isfinite(bound), values, jnp.nan)
        coordinates = jnp.where(known[None], coordinates, 0)
        last = jnp.zeros((1, steps), dtype).at[0, -1].set(beside[-1])
        return Ritz(
            values, coordinates[0] ** 2, jnp.concatenate([square, last]), coordinates,
            basis[:-1], count, closed, ~more,
        )  # fmt: skip


def rest(basis: Array, image: Array) -> Array:
    """What of a vector is orthogonal to the basis."""
    for _ in range(2):  # twice is enough
        overlap = jnp.einsum("sd,d->s", basis, image, precision="highest")
        image = image - jnp.einsum("s,sd->d", overlap, basis, precision="highest")
    return image


@eqx.filter_jit
def _begin(scheme: Scheme, start: Array) -> Steps:
    return scheme.begin(start)


@eqx.filter_jit(donate="all-except-first")
def _step(
    operator: Any,
    product: Callable[[Any, Array], Array],
    fresh: Callable[[Any, Array, Array], Array] | None,
    scheme: Scheme,
    state: Steps,
) -> Steps:
    image = product(operator, state.basis[state.done])
    return scheme.step(state, image, fresh and functools.partial(fresh, operator))


@eqx.filter_jit
def _end(scheme: Scheme, state: Steps) -> Ritz:
    return scheme.end(state)


def length(vector: Float[Array, " n"]) -> Float[Array, ""]:
    """The Euclidean norm, of entries whose squares overflow or vanish too."""
    largest = jnp.max(jnp.abs(vector))
    safe = jnp.where(largest > 0, largest, jnp.ones((), vector.dtype))
    return jnp.where(largest > 0, safe * jnp.linalg.norm(vector / safe), largest)
