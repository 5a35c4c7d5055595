"""The largest eigenvalues with their vectors and their copies: Lanczos' iteration, restarted.

A round fills a basis of `steps` vectors. The next one goes on from the best Ritz vectors, until
the k largest have converged. Copies of a multiple eigenvalue, and any other one in which the first
vector has no share, need a random vector that is orthogonal to those k. If it finds a larger
eigenvalue, that one converges too and another random vector follows. If the largest that it finds
lies below the k-th, the process ends.

Source:
    Wu and Simon 2000 (thick restarts); Parlett, The Symmetric Eigenvalue Problem, chapter 13 (a
    vector meets every eigenspace once).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxttp.ntk._lanczos import Scheme, Steps, length, rest, walk

ROUNDS = 50
"""Rounds before a process is given up, and as many again for each eigenvalue."""


class Operator(NamedTuple):
    """An operator on flat vectors, the key of a round's random ones, and the first one."""

    kernel: Any
    key: Array
    start: Float[Array, " n"]


class Leading(NamedTuple):
    """The k largest eigenvalues after some rounds, decreasing.

    Attributes:
        values: Ritz values.
        vectors: their vectors, orthonormal rows.
        before: those that had converged when the last random vector came; -inf before the first.
        scale: the largest absolute Ritz value, at most ‖A‖.
        converged: whether all residuals are small.
        rounds: how many there were.
        more: whether there is more to do.
        state: what the next round begins with.
    """

    values: Float[Array, " k"]
    vectors: Float[Array, "k n"]
    before: Float[Array, " k"]
    scale: Float[Array, ""]
    converged: Bool[Array, ""]
    rounds: Int[Array, ""]
    more: Bool[Array, ""]
    state: Steps


class Rounds(NamedTuple):
    """The rounds without their products.

    Attributes:
        scheme: the iteration, of at least k + 2 steps, or as many as there are rows.
        k: how many eigenvalues.
        rtol: residuals that count as converged, relative to the largest absolute Ritz value.
    """

    scheme: Scheme
    k: int
    rtol: Float[Array, ""]

    def begin(self, start: Float[Array, " n"]) -> Leading:
        """Before the first round."""
        lowest = jnp.full(self.k, -jnp.inf, start.dtype)
        vectors = jnp.zeros((self.k, start.size), start.dtype)
        no, zero = jnp.zeros((), bool), jnp.zeros((), start.dtype)
        state = self.scheme.begin(start)
        return Leading(lowest, vectors, lowest, zero, no, jnp.zeros((), jnp.int32), ~no, state)

    def after(self, leading: Leading, state: Steps, random: Float[Array, " n"]) -> Leading:
        """What a round found, and what the next one begins with."""
        k, steps, found = self.k, self.scheme.steps, self.scheme.end(state)
        kept = min(k + (steps - k) // 2, steps - 1)
        values, couplings = found.values[::-1], found.couplings[::-1]
        residuals = jnp.where(found.known[::-1], jnp.abs(couplings), jnp.inf)
        best = found.coordinates[:, ::-1][:, : max(k, kept)]
        vectors = jnp.einsum("sk,sn->kn", best, found.basis, precision="highest")
        scale = jnp.max(jnp.abs(found.values))
        small = self.rtol * scale
        converged = jnp.all(residuals[:k] <= small)
        is_new = jnp.any(values[:k] > leading.before + small)
        other = min(k, steps - 1)  # the largest that is none of them
        is_above = values[other] + residuals[other] > leading.before[-1] + small
        done = found.spanned | (converged & ~is_new & ~is_above)
        begins = converged & is_new  # in what is orthogonal to the k, which have converged
        outside = rest(vectors[:k], random)
        state = self.scheme.resume(
            values[:kept],
            vectors[:kept],
            jnp.where(begins, 0, couplings[:kept]),
            jnp.where(begins, min(k, kept), kept).astype(jnp.int32),
            jnp.where(begins, outside / length(outside), state.basis[-1]),
        )
        before = jnp.where(begins, values[:k], leading.before)
        rounds = leading.rounds + 1
        more = ~done & (rounds < ROUNDS * (k + 1))
        return Leading(values[:k], vectors[:k], before, scale, converged, rounds, more, state)


def leading_pairs(
    product: Callable[[Operator, Array], Array],
    operator: Operator,
    rounds: Rounds,
    *,
    walked: bool,
) -> Leading:
    """All rounds.

    Args:
        product: (operator, v) -> A v, not compiled.
        operator: A, the key, and the first vector.
        rounds: what to find.
        walked: one step after the other from outside, see `jaxttp.ntk._lanczos.walked`.
    """

    def one(leading: Leading) -> Leading:
        now = operator._replace(key=jax.random.fold_in(operator.key, leading.rounds))
        if walked:
            state = walk(product, now, rounds.scheme, leading.state, _fresh)
        else:
            of_now = partial(product, now), leading.state, partial(_fresh, now)
            state = rounds.scheme.run(*of_now)
        return _after(rounds, leading, state, now.key)

    leading = _begin(rounds, operator.start)
    if not walked:
        return jax.lax.while_loop(lambda leading: leading.more, one, leading)
    while bool(leading.more):
        leading = one(leading)
    return leading


@eqx.filter_jit
def _begin(rounds: Rounds, start: Array) -> Leading:
    return rounds.begin(start)


@eqx.filter_jit
def _after(rounds: Rounds, leading: Leading, state: Steps, key: Array) -> Leading:
    return rounds.after(leading, state, _random(key, state.basis[0]))


def _fresh(operator: Operator, step: Array, scale: Array) -> Array:
    """A random direction of length ‖A‖, another one at every step."""
    vector = _random(jax.random.fold_in(operator.key, step), operator.start)
    return scale * vector / length(vector)


def _random(key: Array, like: Array) -> Array:
    """Drawn in float32: within somebody's float32 program the bits of a float64 do not compile."""
    return jax.random.normal(key, like.shape, jnp.float32).astype(like.dtype)
