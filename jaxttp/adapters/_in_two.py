"""The outputs for all samples from two batches of one size that have their first sample in common.

So whether outputs mix samples is seen on the way: the first sample has other companions in either
batch, and copies of it fill the second one up. One compiled program computes both.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxttp._core.checks import is_concrete
from jaxttp._core.types import Params, count, take

FEW = 8
"""Samples that tell whether outputs mix them."""
_LEAST = 4 * FEW  # samples of which two batches are made


class Evaluated(NamedTuple):
    """What a network gives.

    Attributes:
        outputs: for all samples (N, C).
        alone: for the first sample in another batch, and in the first place of it, and for copies
            of it in other places (K, C); None where all samples are the same, or of several
            processes.
    """

    outputs: Array
    alone: Array | None


class InTwo(NamedTuple):
    """A compiled network that takes all samples in two batches.

    Attributes:
        program: ``(params, x) -> outputs``, compiled.

    Example:
        >>> network = InTwo(jax.jit(lambda params, x: x @ params))
        >>> x = jnp.arange(40.0)[:, None]
        >>> network(jnp.ones((1, 1)), x).shape, network.evaluate(jnp.ones((1, 1)), x).alone.shape
        ((40, 1), (8, 1))
    """

    program: Callable[[Params, Any], Array]

    def __call__(self, params: Params, x: Any) -> Array:
        """The outputs (N, C) for samples (N, ...)."""
        return self.at(x)(params)

    def at(self, x: Any) -> Callable[[Params], Array]:
        """``params -> outputs`` for samples that are cut once."""
        n = count(x)
        size = _size(x, n)
        if size == n:
            return lambda params: self.program(params, x)
        first, second, _ = _cut(x, size)
        return lambda p: _join(self.program(p, first), self.program(p, second), n)[0]

    def evaluate(self, params: Params, x: Any) -> Evaluated:
        """The same, with what tells whether outputs mix samples."""
        n = count(x)
        if not all(getattr(leaf, "is_fully_addressable", True) for leaf in jax.tree.leaves(x)):
            return Evaluated(self.program(params, x), None)
        size = _size(x, n)
        first, second, are_alike = _cut(x, size)
        one, two = self.program(params, first), self.program(params, second)
        outputs, alone = (one, two) if size == n else _join(one, two, n)
        return Evaluated(outputs, None if bool(are_alike) else alone)


@functools.partial(jax.jit, static_argnums=1)
def _cut(x: Any, size: int) -> tuple[Any, Any, Array]:
    """Two batches, the first sample at both ends of the second, and whether all are alike."""
    n = count(x)

    def second(leaf: Array) -> Array:
        copies = jnp.broadcast_to(leaf[:1], (2 * size - n - 1, *leaf.shape[1:]))
        return jnp.concatenate([leaf[:1], leaf[size:], copies])

    same = [jnp.all(leaf == leaf[:1]) for leaf in jax.tree.leaves(x)]
    return take(x, slice(size)), jax.tree.map(second, x), functools.reduce(jnp.logical_and, same)


@functools.partial(jax.jit, static_argnums=2)
def _join(one: Array, two: Array, n: int) -> tuple[Array, Array]:
    """The outputs for all, and those for the first sample in the second batch."""
    rest = n - len(one)
    return jnp.concatenate([one, two[1 : 1 + rest]]), jnp.concatenate([two[:1], two[1 + rest :]])


def _size(x: Any, n: int) -> int:
    """Samples of a batch: half and some copies; all of few, of traced ones, of several devices'."""
    leaves = jax.tree.leaves(x)
    is_whole = n < _LEAST or not all(map(is_concrete, leaves))
    if is_whole or any(len(getattr(leaf, "devices", set)()) > 1 for leaf in leaves):
        return n
    return -(-(n + FEW) // 2)
