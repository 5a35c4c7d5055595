"""Loss and error along predicted outputs, compiled once for every forecast of a shape."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxttp.dynamics._pieces import curves
from jaxttp.losses import Loss


def loss_and_error(loss: Loss, outputs: Array, targets: Array) -> tuple[Array, Array]:
    """Loss and error along a path (T, N, C); their medians over many paths (P, T, N, C)."""
    if outputs.ndim == 3:
        return curves(outputs, targets, loss)
    both = _along_all(outputs, targets, loss)
    return jnp.median(both[0], axis=0), jnp.median(both[1], axis=0)


@functools.partial(jax.jit, static_argnums=2)
def _along_all(paths: Array, targets: Array, loss: Loss) -> tuple[Array, Array]:
    return jax.vmap(lambda path: curves(path, targets, loss))(paths)


def at_places(
    curve: Float[np.ndarray, "t ..."], places: Float[np.ndarray, " s"]
) -> Float[np.ndarray, "s ..."]:
    """Values at places between the steps of a curve (T + 1, ...); the last one from T on."""
    last = len(curve) - 1
    places = np.minimum(places, last)
    low = np.floor(places).astype(int)
    part = (places - low).reshape(-1, *[1] * (curve.ndim - 1)).astype(curve.dtype)
    return (1 - part) * curve[low] + part * curve[np.minimum(low + 1, last)]
