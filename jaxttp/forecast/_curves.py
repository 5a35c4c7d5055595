"""Loss and error along predicted outputs, compiled once for every forecast of a shape."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxttp.losses import Loss


def loss_and_error(loss: Loss, outputs: Array, targets: Array) -> tuple[Array, Array]:
    """Loss and error along a path (T, N, C); their medians over many paths (P, T, N, C)."""
    if outputs.ndim == 3:
        return _along(outputs, targets, loss)
    both = _along_all(outputs, targets, loss)
    return jnp.median(both[0], axis=0), jnp.median(both[1], axis=0)


@functools.partial(jax.jit, static_argnums=2)
def _along(path: Array, targets: Array, loss: Loss) -> tuple[Array, Array]:
    return jax.vmap(lambda f: (loss.value(f, targets), loss.error(f, targets)))(path)


@functools.partial(jax.jit, static_argnums=2)
def _along_all(paths: Array, targets: Array, loss: Loss) -> tuple[Array, Array]:
    return jax.vmap(lambda path: _along(path, targets, loss))(paths)
