"""Loss and error along predicted outputs, compiled once for every forecast of a shape, and read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxttp._core.compile import jit
from jaxttp.dynamics._trajectory import curves
from jaxttp.losses import Loss
from jaxttp.losses.rule import Rule


def loss_and_error(loss: Loss, outputs: Array, targets: Array) -> tuple[Array, Array]:
    """Loss and error along a path (T, N, C); their medians over many paths (P, T, N, C)."""
    if outputs.ndim == 3:
        return curves(outputs, targets, loss)
    return _medians(outputs, targets, loss)


@functools.partial(jit, static_argnums=2)
def _medians(paths: Array, targets: Array, loss: Loss) -> tuple[Array, Array]:
    losses, errors = jax.vmap(lambda path: curves(path, targets, loss))(paths)
    return jnp.median(losses, axis=0), jnp.median(errors, axis=0)


def at_places(
    curve: Float[np.ndarray, "t ..."], places: Float[np.ndarray, " s"]
) -> Float[np.ndarray, "s ..."]:
    """Values at places between the steps of a curve (T + 1, ...); the last one from T on."""
    last = len(curve) - 1
    places = np.minimum(places, last)
    low = np.floor(places).astype(int)
    part = (places - low).reshape(-1, *[1] * (curve.ndim - 1)).astype(curve.dtype)
    return (1 - part) * curve[low] + part * curve[np.minimum(low + 1, last)]


def read_times(
    curves: np.ndarray, stable: np.ndarray, horizons: np.ndarray, reading: Rule
) -> np.ndarray:
    """Steps of every setting to every threshold of a rule (S, E), each within its own horizon.

    Args:
        curves: the loss or the error, whichever is read (S, T + 1).
        stable: the settings that count (S,).
        horizons: steps of every setting (S,).
        reading: the rule.
    """
    times = np.full((len(horizons), len(reading.thresholds)), -1)
    for steps in set(horizons):
        some = np.flatnonzero(stable & (horizons == steps))
        read = jnp.asarray(curves[some, : steps + 1])
        for column, threshold in enumerate(reading.thresholds):
            times[some, column] = jax.vmap(lambda c, e=threshold: reading.time(c, e))(read)
    return times


def held_to(curves: np.ndarray, length: int) -> np.ndarray:
    """Curves (..., t) held at their ends until they have this length."""
    rest = [(0, 0)] * (curves.ndim - 1)
    return np.pad(curves, [*rest, (0, length - curves.shape[-1])], mode="edge")
