"""Both ends of the spectrum of an operator from its products alone, under any transformation.

A Lanczos process meets every eigenvalue with a share in its first vector once. Where it ends by
itself that is all of them but copies, which a second process counts; where it does not, a harmonic
Ritz value bounds the smallest eigenvalue that is not zero.
"""

import functools
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxttp._core.checks import is_concrete
from jaxttp._core.xla_cpu.threads import after, decompose
from jaxttp.ntk._lanczos import Ritz, is_walked, lanczos, walked

LANCZOS_STEPS = 256
"""Products spent on an operator about which nothing is known."""

CUTS = 16
"""Levels at which directions are left out of a lower bound."""

POWER = 100
"""Steps of power iterations on matrices of LANCZOS_STEPS rows."""


class KrylovEnds(NamedTuple):
    """What a Lanczos process finds.

    Attributes:
        largest: the largest absolute eigenvalue.
        smallest: at least the smallest that counts; that one where the process is complete.
        values: absolute eigenvalues, with their copies where `spanned`.
        counted: how many eigenvalues count, at least.
        error: rounding of the smallest; nan where it is a bound.
        complete: whether all distinct eigenvalues were met.
        spanned: whether `values` are all that are not zero, and no other is below 10 n eps of the
            largest.
    """

    largest: Array
    smallest: Array
    values: Array
    counted: Array
    error: Array
    complete: Array
    spanned: Array


def ends_by_products(operator: Any, n: int, precision: float, rtol: float | None) -> KrylovEnds:
    """A Lanczos process, and where it has met every eigenvalue one that counts their copies.

    The second stays in the range, and goes on with new vectors of it until nothing is left.
    """
    steps, start = min(LANCZOS_STEPS, n), _draw(n, -1)
    if is_walked(operator) and is_concrete(start):
        found = walked(_product, operator, start, steps, precision=precision)
        return _ends(operator, found, n, precision, rtol)
    return _traced(operator, n, precision, rtol)


@eqx.filter_jit
def _traced(operator: Any, n: int, precision: float, rtol: float | None) -> KrylovEnds:
    product, steps = functools.partial(_product, operator), min(LANCZOS_STEPS, n)
    found = lanczos(product, _draw(n, -1), steps, precision=precision)
    return _ends(operator, found, n, precision, rtol)


def _product(operator: Any, vector: Array) -> Array:
    return operator.mv(vector.astype(operator.in_structure().dtype)).astype(jnp.float64)


@functools.partial(jax.jit, static_argnums=0)
def _draw(n: int, index: Any) -> Array:
    """The start of a process (-1, and -2 for copies), or what it goes on with."""
    keys = jax.random.split(jax.random.key(0), min(LANCZOS_STEPS, n) + 2)
    vector = jax.random.normal(keys[index], (n,), jnp.float64)
    return vector / jnp.linalg.norm(vector)


@eqx.filter_jit
def _ends(operator: Any, found: Ritz, n: int, precision: float, rtol: float | None) -> KrylovEnds:
    """Both ends, of what a process found."""
    product, draw = functools.partial(_product, operator), functools.partial(_draw, n)

    def copies() -> tuple[Array, Array]:
        again = lanczos(
            product, product(draw(-2)), min(LANCZOS_STEPS, n),
            precision=precision, fresh=lambda index, _: product(draw(index)),
        )  # fmt: skip
        return jnp.where(again.known, jnp.abs(again.values), 0.0), again.spanned

    values = jnp.where(found.known, jnp.abs(found.values), 0.0)
    largest = jnp.max(values)
    share = n * precision if rtol is None else rtol
    tolerance = share * largest
    least = jnp.min(jnp.where(values > tolerance, values, jnp.inf))
    bound = _nearest_zero(
        after(found.projected, values), tolerance, 10 * precision * n**0.5 * largest
    )
    smallest = jnp.where(found.closed, least, bound)
    repeated, spanned = jax.lax.cond(found.closed, copies, lambda: (values, jnp.zeros((), bool)))
    fewest = jnp.min(jnp.where(repeated > tolerance, repeated, jnp.inf))
    # Of single eigenvalues this close to zero the length that ends a process may hide some.
    wide = max(share, 10 * n * precision) * largest
    agree = (fewest > 0.5 * least) & (fewest < 2 * least) & (least > wide)
    return KrylovEnds(
        largest=largest,
        smallest=jnp.where(largest > 0, smallest, 0.0),
        values=repeated,
        counted=jnp.sum(repeated > tolerance),
        error=jnp.where(found.closed, 10 * precision * n**0.5 * largest / smallest, math.nan),
        complete=found.closed,
        spanned=spanned & (agree | (largest == 0)),
    )


def _nearest_zero(projected: Array, tolerance: Array, rounding: Array) -> Array:
    """A harmonic Ritz value: at least the smallest absolute eigenvalue that is not zero.

    With A Q = Q_+ T_+ and T_+ = W S V^T, the orthonormal Z = Q_+ W lie in the range of A, where
    Z^T A^+ Z = W^T [V; 0] S^-1 has no eigenvalue above 1 / min |lambda|. A Ritz value may be nearer
    to zero than all eigenvalues that count, between positive and negative ones or by its share of a
    null vector; this one cannot be. Rounding disturbs that matrix by as much over the square of the
    smallest s; so the bound is the best over several that are left out, less that.
    """
    k = projected.shape[1]
    w, s, vt = decompose(jnp.linalg.svd, projected, full_matrices=False)
    share = jnp.linspace(0.0, 1.0, CUTS)
    keep = (s[None] >= (tolerance ** (1 - share) * s[0] ** share)[:, None]).astype(s.dtype)
    inverse = jnp.einsum("ij,ki->jk", w[:k], vt, precision="highest")
    inverse = inverse / jnp.where(s >= tolerance, s, jnp.inf)[None]
    inverse = 0.5 * (inverse + inverse.T)

    def power(_: Any, vectors: Array) -> Array:  # its length is a bound from below at every step
        vectors = vectors / jnp.maximum(jnp.linalg.norm(vectors, axis=1, keepdims=True), 1e-300)
        return keep * jnp.matmul(vectors, inverse, precision="highest")

    largest = jnp.linalg.norm(jax.lax.fori_loop(0, POWER, power, keep), axis=1)
    least = jnp.min(jnp.where(keep > 0, s[None], jnp.inf), axis=1)
    bounds = largest * (1 - rounding / least) ** 2 - rounding / least**2
    return 1.0 / jnp.maximum(jnp.max(bounds), 1.0 / s[0])
