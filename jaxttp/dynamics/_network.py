"""The network at the data, compiled: outputs, and products with its Jacobian; of two vectors."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxttp._core.compile import jit
from jaxttp._core.products import with_forward_mode
from jaxttp._core.traced import Traced, network_of
from jaxttp._core.types import ApplyFn, Params
from jaxttp.adapters.outputs import InTwo
from jaxttp.losses import Loss
from jaxttp.losses.contrasts import Contrasted, contrasts, from_contrasts


@jit
def inner(left: Params, right: Params) -> Array:
    """The product of two vectors in weight space."""
    leaves = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return sum((jnp.vdot(a, b) for a, b in leaves), start=jnp.zeros(()))


@jit
def add_scaled(total: Params, weight: Array, vector: Params) -> Params:
    """Total + weight vector, in weight space."""
    return jax.tree.map(lambda a, b: a + weight.astype(a.dtype) * b, total, vector)


def compile_network(apply_fn: ApplyFn) -> tuple[Callable, Callable, Callable]:
    """Outputs, J^T a and J v, compiled; a network is traced once for every shape.

    Those of a network's contrasts are those of the network: what is compiled for one serves both.

    Args:
        apply_fn: ``(params, x) -> outputs``; a `Network` is traced once in all calls.
    """
    if isinstance(apply_fn, Contrasted):
        outputs, pull, push = compile_network(apply_fn.network)
        return (
            lambda w, x: contrasts(outputs(w, x)),
            lambda w, x, a: pull(w, x, from_contrasts(a)),
            lambda w, x, v: contrasts(push(w, x, v)),
        )
    network, see = network_of(apply_fn), outputs_and_pull(apply_fn)
    return (
        in_two(network),
        lambda w, x, a: see(w, x, a)[1],
        lambda w, x, v: _push(network.precise(w, x), w, x, v),
    )


def outputs_and_pull(apply_fn: ApplyFn) -> Callable:
    """(weights, x, a) -> (outputs, J^T a), by the program of `compile_network`'s J^T a."""
    if isinstance(apply_fn, Contrasted):
        see = outputs_and_pull(apply_fn.network)

        def see_contrasts(w: Params, x: Any, a: Array) -> tuple[Array, Params]:
            outputs, pulled = see(w, x, from_contrasts(a))
            return contrasts(outputs), pulled

        return see_contrasts
    network = network_of(apply_fn)
    return lambda w, x, a: _see(network.precise(w, x), w, x, a)


def in_two(apply_fn: ApplyFn) -> InTwo:
    """The outputs of `compile_network`, which tell whether a network mixes samples."""
    network = network_of(apply_fn)
    return InTwo(lambda w, x: _outputs(network.precise(w, x), w, x))


@jit
def _outputs(network: Traced, w: Params, x: Any) -> Array:
    return network(w, x)


@jit
def _see(network: Traced, w: Params, x: Any, a: Array) -> tuple[Array, Params]:
    outputs, pull = jax.vjp(lambda v: network(v, x), w)
    return outputs, pull(a)[0]


@functools.partial(jit, static_argnames="loss")
def loss_of_weights(network: Traced, w: Params, x: Any, targets: Array, *, loss: Loss) -> Array:
    """The mean loss of samples at some weights, compiled."""
    return loss.value(network(w, x), targets)


@jit
def _push(network: Traced, w: Params, x: Any, v: Params) -> Array:
    run = with_forward_mode(lambda u: network(u, x), w)
    return jax.jvp(run, (w,), (v,))[1]
