"""Real training beside condition numbers: measured along the way, or after pruning at the start."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxttp import conditioning
from jaxttp._core.results import RESULT
from jaxttp._core.types import ApplyFn, Params
from jaxttp.conditioning import ConditionNumber, Record, Tracker
from jaxttp.pipeline.conditioning import network_condition
from jaxttp.training import TrainingRun, train


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """A real training with what was measured along it.

    Attributes:
        run: losses and final weights.
        records: step, loss and measures at the steps that were due.
    """

    run: TrainingRun
    records: tuple[Record, ...]

    plot, _repr_html_, __repr__ = RESULT


def tracked_run(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    *,
    loss: str,
    optimizer: optax.GradientTransformation,
    steps: int,
    measures: dict[str, Callable[[Params], Any]] | None = None,
    every: int = 1,
    batch_size: int | None = None,
    key: Array | None = None,
) -> TrackedRun:
    """Train for real and measure condition numbers, bounds or anything else along the way.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``.
        params: the weights to start from.
        x: samples (N, ...).
        y: labels (N,) or targets (N, C).
        loss: a name.
        optimizer: any optax transformation.
        steps: number of steps.
        measures: name -> function of the weights; None for "kappa", the condition number of the
            Gauss-Newton matrix on all of `x`.
        every: measure at the steps that are multiples of this.
        batch_size: samples a step; all of them when None.
        key: a `jax.random.key`, needed with `batch_size`.

    Returns:
        A `TrackedRun`.

    Raises:
        ValueError: as `jaxttp.train` and `Tracker`.

    Example:
        >>> import numpy as np
        >>> found = tracked_run(lambda w, x: x @ w, np.zeros((2, 1)), np.eye(2), np.ones((2, 1)),
        ...                     loss="squared_error", optimizer=optax.sgd(0.5), steps=4, every=2)
        >>> [(record.step, float(record.values["kappa"])) for record in found.records]
        [(0, 1.0), (2, 1.0), (4, 1.0)]

    Source:
        GNC Figures 10 and 18.
    """
    if measures is None:
        measures = {"kappa": lambda weights: network_condition(apply_fn, weights, x).value}
    tracker = Tracker(measures, every=every)
    run = train(
        apply_fn, params, x, y, loss=loss, optimizer=optimizer, steps=steps,
        batch_size=batch_size, key=key, callback=tracker,
    )  # fmt: skip
    return TrackedRun(run, tuple(tracker.records))


@dataclasses.dataclass(frozen=True)
class PrunedRun:
    """A network pruned at initialisation: how well conditioned it is, and how it trains.

    Attributes:
        rate: share of every layer that was removed.
        condition: of the Gauss-Newton matrix in the weights that are left.
        run: its training, the pruned weights staying at zero.
    """

    rate: float
    condition: ConditionNumber
    run: TrainingRun

    plot, _repr_html_, __repr__ = RESULT


def pruning_runs(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    rates: Sequence[float],
    *,
    loss: str,
    optimizer: optax.GradientTransformation,
    steps: int,
    batch_size: int | None = None,
    key: Array | None = None,
) -> tuple[PrunedRun, ...]:
    """Prune by magnitude at initialisation, take the condition number, train; for several rates.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``.
        params: the weights to start from.
        x: samples (N, ...).
        y: labels (N,) or targets (N, C).
        rates: shares in [0, 1) of every layer to remove.
        loss: a name.
        optimizer: any optax transformation.
        steps: number of steps.
        batch_size: samples a step; all of them when None.
        key: a `jax.random.key`, needed with `batch_size`.

    Returns:
        One `PrunedRun` for each rate.

    Raises:
        ValueError: a rate outside [0, 1), and what `jaxttp.train` refuses.

    Example:
        >>> import numpy as np
        >>> x, w = np.eye(2), np.array([[1.0], [2.0]])
        >>> runs = pruning_runs(lambda w, x: x @ w, w, x, np.zeros((2, 1)), (0.0, 0.5),
        ...                     loss="squared_error", optimizer=optax.sgd(0.5), steps=3)
        >>> [int(found.condition.rank) for found in runs], runs[1].run.params.tolist()[0]
        ([2, 1], [0.0])

    Source:
        GNC Figures 1 and 13-17.
    """
    out = []
    for rate in rates:
        masks = conditioning.magnitude_masks(params, rate)
        start = conditioning.apply_masks(params, masks)

        def pruned(weights: Params, x: Any, masks: Params = masks) -> Any:
            return apply_fn(conditioning.apply_masks(weights, masks), x)

        found = network_condition(pruned, start, x)
        run = train(
            pruned, jax.tree.map(jnp.asarray, start), x, y, loss=loss,
            optimizer=conditioning.keep_pruned(optimizer, masks), steps=steps,
            batch_size=batch_size, key=key,
        )  # fmt: skip
        out.append(PrunedRun(float(rate), found, run))
    return tuple(out)
