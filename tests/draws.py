"""`jax.random`'s own numbers by one program for all shapes, not by one for each."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

MOST = 4096  # the first of these are the numbers of any smaller shape


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key, size, dtype):
    return jax.random.normal(key, (size,), dtype)


@jax.jit
def _split(key):
    return tuple(jax.random.split(key, 9))


def _key(seed):
    return jax.random.key(seed) if isinstance(seed, int) else seed


def split(seed, count):
    """`jax.random.split` of a key or a seed, into nine at most."""
    return _split(_key(seed))[:count]


def normal(seed, shape, scale=1.0, dtype=float):
    """`scale` times `jax.random.normal`, of a key or a seed."""
    size = math.prod(shape)
    drawn = np.asarray(_normal(_key(seed), max(size, MOST), dtype))[:size].reshape(shape)
    return jnp.asarray(drawn * drawn.dtype.type(scale))
