"""The network at the data, compiled: outputs, and products with its Jacobian; of two vectors."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxttp._contrasts import Contrasted, contrasts, from_contrasts
from jaxttp._jit import compile_ahead, jit
from jaxttp._quick import quick
from jaxttp._types import ApplyFn, Params
from jaxttp.adapters._in_two import InTwo

T = TypeVar("T")


def kept(make: Callable[..., T], apply_fn: ApplyFn, *others: Any) -> T:
    """`make(apply_fn, *others)` of a cached `make`, or made anew for a network without a hash.

    A callable without a hash is, for example, a module that holds arrays.

    Args:
        make: a function under `functools.lru_cache`, of hashable arguments.
        apply_fn: the network.
        others: further arguments of `make`.

    Example:
        >>> @functools.lru_cache(maxsize=8)
        ... def make(apply_fn):
        ...     return jax.jit(apply_fn)
        >>> kept(make, abs) is kept(make, abs)
        True
    """
    try:
        hash(apply_fn)
    except TypeError:
        return make.__wrapped__(apply_fn, *others)  # type: ignore
    return make(apply_fn, *others)


def inner(left: Params, right: Params) -> Array:
    """The product of two vectors in weight space."""
    leaves = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return sum((jnp.vdot(a, b) for a, b in leaves), start=jnp.zeros(()))


def compile_network(apply_fn: ApplyFn) -> tuple[Callable, Callable, Callable]:
    """Outputs, J^T a and J v; the compiled functions are kept for a few networks.

    Those of a network's contrasts are those of the network: what is compiled for one serves both.
    """
    if isinstance(apply_fn, Contrasted):
        outputs, pull, push = compile_network(apply_fn.network)
        return (
            lambda w, x: contrasts(outputs(w, x)),
            lambda w, x, a: pull(w, x, from_contrasts(a)),
            lambda w, x, v: contrasts(push(w, x, v)),
        )
    outputs, see, push = kept(_compile_network, apply_fn)
    return outputs, lambda w, x, a: see(w, x, a)[1], push


def outputs_and_pull(apply_fn: ApplyFn) -> Callable:
    """(weights, x, a) -> (outputs, J^T a), by the program of `compile_network`'s J^T a."""
    if isinstance(apply_fn, Contrasted):
        see = outputs_and_pull(apply_fn.network)

        def see_contrasts(w: Params, x: Any, a: Array) -> tuple[Array, Params]:
            outputs, pulled = see(w, x, from_contrasts(a))
            return contrasts(outputs), pulled

        return see_contrasts
    return kept(_compile_network, apply_fn)[1]


def see_ahead(
    apply_fn: ApplyFn, weights: Params, x: Any, outputs: Array, size: int | None = None
) -> None:
    """Compile J^T a in the background.

    Args:
        apply_fn: the network.
        weights: its weights.
        x: samples (N, ...).
        outputs: for them (N, C).
        size: samples at once; all of them when None.
    """
    size = len(outputs) if size is None else size
    columns = outputs.shape[1]
    if isinstance(apply_fn, Contrasted):
        apply_fn, columns = apply_fn.network, columns + 1

    def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.ShapeDtypeStruct((size, *leaf.shape[1:]), dtype)

    like = jax.ShapeDtypeStruct((size, columns), outputs.dtype)
    see = kept(_compile_network, apply_fn)[1]
    compile_ahead(see, weights, jax.tree.map(shape_of, x), like)


def in_two(apply_fn: ApplyFn) -> InTwo:
    """The outputs of `compile_network`, which tell whether a network mixes samples."""
    return kept(_compile_network, apply_fn)[0]


@functools.lru_cache(maxsize=8)
def _compile_network(apply_fn: ApplyFn) -> tuple[InTwo, Callable, Callable]:
    network = quick(apply_fn)

    def see(w: Params, x: Any, a: Array) -> tuple[Array, Params]:
        outputs, pull = jax.vjp(lambda v: network(v, x), w)
        return outputs, pull(a)[0]

    return (
        InTwo(jit(network)),
        jit(see),
        jit(lambda w, x, v: jax.jvp(lambda u: network(u, x), (w,), (v,))[1]),
    )
