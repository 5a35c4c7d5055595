"""A real training of which a few samples' loss is watched, now and then."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jaxtyping import Array

from jaxttp._core.samples import count, take
from jaxttp._core.types import Model
from jaxttp.adapters import as_rows
from jaxttp.dynamics.batches import batch_indices
from jaxttp.forecast.stale_gradients.path import watcher
from jaxttp.losses import encode_targets
from jaxttp.training import TrainingStep

POINTS = 60
"""Looks at what is watched, beside the start."""


class WatchedRun(NamedTuple):
    """What really happened.

    Attributes:
        loss: of what is watched (T + 1,), lines between the points.
        at: the points (P,), steps.
        seconds: of the steps alone: no compilation, no looking.
    """

    loss: np.ndarray
    at: np.ndarray
    seconds: float

    @property
    def finite(self) -> bool:
        """Whether every loss is finite."""
        return bool(np.all(np.isfinite(self.loss)))


def train_watched(
    model: Model, x: Any, y: Any, x_watched: Any, y_watched: Any, *,
    optimizer: optax.GradientTransformation, steps: int, batch_size: int, key: Array,
    progress: Callable[[int, int], None] | None = None,
) -> WatchedRun:  # fmt: skip
    """Train by cross-entropy for real, and look at other samples some sixty times.

    Args:
        model: network and weights.
        x: samples (N, ...).
        y: their labels.
        x_watched: samples that are looked at (M, ...).
        y_watched: their labels.
        optimizer: any optax transformation of gradients alone.
        steps: T.
        batch_size: B.
        key: draws the batches.
        progress: called with (steps done, steps in all).

    Returns:
        A `WatchedRun`.
    """
    params, (rows, outputs) = model.params, as_rows(*model, x)
    targets, loss = encode_targets("cross_entropy", y, outputs)
    seen = as_rows(*model, x_watched)[1]
    watched, loss_watched = encode_targets("cross_entropy", y_watched, seen)
    look = watcher(rows, loss_watched, x_watched, watched, batch_size)
    indices = np.asarray(batch_indices(key, count(x), batch_size, steps))
    at = np.unique(np.round(np.linspace(0, steps, min(POINTS, steps) + 1)).astype(int))
    state, found, seconds = optimizer.init(params), [], 0.0
    step = TrainingStep(rows, loss, optimizer)
    step = step.compile(params, state, take(x, indices[0]), targets[indices[0]])
    for t in range(steps + 1):
        if t in at:
            found.append(look(params))
        if t == steps:
            break
        batch = take(x, indices[t]), targets[indices[t]]
        begun = time.perf_counter()
        params, state, *_ = jax.block_until_ready(step(params, state, *batch))
        seconds += time.perf_counter() - begun
        if progress is not None:
            progress(t + 1, steps)
    return WatchedRun(np.interp(np.arange(steps + 1), at, found), at, seconds)
