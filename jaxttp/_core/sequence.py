"""One decomposition after the other, where several batches of them stand in one program.

jaxlib 0.10.0 to 0.11.0 cut a *batch* of matrices (of anything that LAPACK computes, as `jax.vmap`
makes it) into a task for each thread of XLA's pool, and the operation that hands the tasks out
waits for them on a thread of the same pool. XLA runs independent operations of a program at the
same time: with as many such operations as cores all threads wait, and none is left for the tasks.
The process then uses no CPU and never ends (two batches of 20 SVDs of 60 x 30 on two cores, within
seconds). BLAS has no part in it: it happens with one BLAS thread as with two. Later versions
compute a batch on one thread.

A result that depends on the one before cannot start too early. What is not batched needs no order,
and gets none: independent decompositions then share the cores.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from jaxttp._core.checks import is_concrete


def after(value: Array, *done: Array) -> Array:
    """Return `value`, unchanged; under `jax.vmap` available once all of `done` has been computed.

    Args:
        value: any floating-point array.
        done: real arrays. Give all results so far: one that is not batched has waited for nothing.

    Example:
        >>> import jax.numpy as jnp
        >>> after(jnp.ones(2), jnp.zeros(3)).tolist()
        [1.0, 1.0]
    """
    if is_concrete(value) or not done:
        return value
    with jax.enable_x64(True):  # as the arrays may be of float64, whatever holds outside
        ones = [array.reshape(-1)[0].astype(value.dtype) for array in done]
        return _after.bind(value, functools.reduce(jnp.add, ones))


def _batched(arguments: tuple, axes: tuple) -> tuple[Any, Any]:
    (value, done), (axis, other) = arguments, axes
    with jax.enable_x64(True):
        if other is not None:
            done = done[0]
        if axis is None:  # one matrix for all: no batch yet
            return _after.bind(value, done), None
        # Not an optimization_barrier, which XLA removes before it schedules; 0 * x stays, as x may
        # be negative for all that XLA knows.
        return value + 0 * jnp.where(jnp.isfinite(done), done, 0), axis


_after = Primitive("after")
_after.def_impl(lambda value, done: value)
_after.def_abstract_eval(lambda value, done: value)
ad.primitive_jvps[_after] = lambda primals, tangents: (_after.bind(*primals), tangents[0])
batching.primitive_batchers[_after] = _batched
mlir.register_lowering(_after, mlir.lower_fun(lambda value, done: value, multiple_results=False))
