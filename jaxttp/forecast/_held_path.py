"""Where gradients are taken along a training, and the path that holds them in between."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxttp._convolutions import quick
from jaxttp._jit import jit
from jaxttp._samples import count, take
from jaxttp._types import ApplyFn, Params
from jaxttp.losses import Loss

LOWEST = 0.02
"""Share of the largest step below which a step counts no less."""


class HeldPath(NamedTuple):
    """What following the held gradients found.

    Attributes:
        points: the knots at which the watched loss was evaluated (E,).
        loss: the watched loss there (E,), at weights smoothed over neighbouring knots.
        measured: knots whose batch was looked at again after it was learnt (P,).
        fall: of that batch's own loss, negative where it fell (P,).
        before: every knot's loss on its own batch, before it was learnt (K,).
    """

    points: np.ndarray
    loss: np.ndarray
    measured: np.ndarray
    fall: np.ndarray
    before: np.ndarray


def step_sizes(optimizer: optax.GradientTransformation, params: Params, steps: int) -> np.ndarray:
    """How far every step goes under a constant gradient, up to a factor (T,).

    Args:
        optimizer: any optax transformation of gradients alone.
        params: what it steps; only the structure matters.
        steps: T.

    Returns:
        Sizes in (0, 1], at least a fiftieth of the largest; ones where they cannot be told.

    Example:
        >>> step_sizes(optax.sgd(optax.linear_schedule(1.0, 0.5, 2)), 0.0, 3).tolist()
        [1.0, 0.75, 0.5]
    """
    weights = jax.tree.map(lambda _: jnp.zeros(()), params)
    push = jax.tree.map(jnp.ones_like, weights)

    def one(state: Any, _: None) -> tuple[Any, Array]:
        updates, state = optimizer.update(push, state, weights)
        sizes = [jnp.abs(leaf) for leaf in jax.tree.leaves(updates)]
        return state, jnp.mean(jnp.stack(sizes))

    try:
        found = jax.lax.scan(one, optimizer.init(weights), None, length=steps)[1]
        sizes = np.asarray(found, float)
    except (TypeError, ValueError, IndexError, ZeroDivisionError):  # it asks for matrices
        return np.ones(steps)
    if not np.all(np.isfinite(sizes)) or np.max(sizes) <= 0:
        return np.ones(steps)
    return np.maximum(sizes / np.max(sizes), LOWEST)


def place_knots(sizes: np.ndarray, count: int) -> np.ndarray:
    """Steps at which a gradient is taken, and the end: denser by the root of the step's size.

    Args:
        sizes: of every step (T,), see `step_sizes`.
        count: how many gradients.

    Returns:
        Increasing steps from 0 to T, at most count + 1 of them.

    Example:
        >>> place_knots(np.array([1.0, 1.0, 1.0, 1.0, 0.25, 0.25, 0.25, 0.25]), 3).tolist()
        [0, 2, 4, 8]
    """
    passed = np.concatenate([[0.0], np.cumsum(np.sqrt(sizes))])
    at = np.interp(np.linspace(0, passed[-1], count + 1), passed, np.arange(len(passed)))
    return np.unique(np.round(at).astype(int))


def place_points(knots: int, count: int) -> np.ndarray:
    """Which of the knots are points of the curve: the first, the last, more of them early on.

    Example:
        >>> place_points(81, 5).tolist()
        [0, 13, 32, 55, 80]
    """
    return np.unique(np.round(np.linspace(0, 1, count) ** 1.3 * (knots - 1)).astype(int))


def line_weights(knots: np.ndarray, at: int) -> np.ndarray:
    """The coefficients of weights at these knots in the value at `at` of a line fitted to them.

    Neighbours count by the tricube of their distance, as in local regression.

    Args:
        knots: numbers of knots (n,), `at` among them.
        at: the knot in question.

    Returns:
        Coefficients (n,) that sum to one.

    Example:
        >>> line_weights(np.array([3, 4, 5]), 4).round(2).tolist()
        [0.29, 0.43, 0.29]
    """
    away = (knots - at).astype(float)
    if len(knots) == 1:
        return np.ones(1)
    near = (1 - (np.abs(away) / (np.max(np.abs(away)) + 1)) ** 3) ** 3
    design = np.stack([np.ones_like(away), away], axis=1) * np.sqrt(near)[:, None]
    return np.linalg.pinv(design)[0] * np.sqrt(near)


def watcher(
    network: ApplyFn, loss: Loss, x: Any, targets: Array, batch_size: int
) -> Callable[[Params], float]:
    """What the loss of some samples is at given weights, a batch of them at a time.

    Args:
        network: ``(params, x) -> outputs (N, C)``.
        loss: its mean over samples that count alike.
        x: samples (M, ...).
        targets: as the loss wants them (M, ...).
        batch_size: samples at a time; the last may be fewer.

    Returns:
        A function of the weights.

    Example:
        >>> from jaxttp.losses import get_loss
        >>> ones = jnp.ones((3, 1))
        >>> look = watcher(lambda w, x: w * x, get_loss("squared_error"), ones, 2 * ones, 2)
        >>> look(jnp.zeros(()))
        2.0
    """
    evaluate = jit(lambda weights, a, b: loss.value(network(weights, a), b))

    def look(weights: Params) -> float:
        total, parts = count(x), 0.0
        for first in range(0, total, batch_size):
            some = slice(first, first + batch_size)
            part = evaluate(weights, take(x, some), targets[some])
            parts += float(part) * min(batch_size, total - first) / total
        return parts

    return look


def follow_held(
    network: ApplyFn,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    params: Params,
    knots: np.ndarray,
    points: np.ndarray,
    batch: Callable[[int], tuple[Any, Array]],
    watched: Callable[[Params], float],
    window: int,
) -> HeldPath:
    """Run the optimiser for all steps, with a gradient of its own at every knot alone.

    Args:
        network: ``(params, x) -> outputs (N, C)``.
        loss: its mean over a batch is minimised.
        optimizer: any optax transformation of gradients alone.
        params: the weights before training.
        knots: steps (K + 1,), the end among them.
        points: numbers of knots (E,) at which `watched` is asked.
        batch: samples and targets of a knot.
        watched: the loss of weights.
        window: knots on either side over which weights are smoothed before they are asked.

    Returns:
        A `HeldPath`.
    """
    gradient, value, hold, mix = _programs(network, loss, optimizer)
    last, state, kept, found = len(knots) - 1, optimizer.init(params), {0: params}, {}
    measured, fall, own = [], [], []
    for k in range(last + 1):
        for point in points.tolist():
            # A window is whole once its last knot is there; the start has none.
            if point not in found and (k == last or k >= point + window or point == 0):
                low = max(0, point - window) if point else 0
                high = min(k, point + window) if point else 0
                near = np.arange(low, high + 1)
                weights = mix([kept[i] for i in near.tolist()], line_weights(near, point))
                found[point] = watched(weights)
        if k == last:
            break
        here = batch(k)
        before, held = gradient(params, *here)
        own.append(float(before))
        params, state = hold(params, state, held, int(knots[k + 1] - knots[k]))
        kept[k + 1] = params
        waiting = [point for point in points.tolist() if point not in found]
        kept = {i: w for i, w in kept.items() if i > k or i >= min(waiting) - window}
        if k % 2 == 0:
            measured.append(k)
            fall.append(float(value(params, *here)) - float(before))
    loss_at = np.array([found[point] for point in points])
    return HeldPath(points, loss_at, np.array(measured), np.array(fall), np.array(own))


def _programs(network: ApplyFn, loss: Loss, optimizer: optax.GradientTransformation) -> tuple:
    """Loss and gradient, loss, many steps with one gradient, and sums of weights; compiled."""
    quickly = quick(network)

    def value(params: Params, x: Any, targets: Array) -> Array:
        return loss.value(quickly(params, x), targets)

    @jit
    def hold(params: Params, state: Any, held: Params, times: Array) -> tuple[Params, Any]:
        def one(_: Array, carry: tuple[Params, Any]) -> tuple[Params, Any]:
            updates, after = optimizer.update(held, carry[1], carry[0])
            return optax.apply_updates(carry[0], updates), after

        return jax.lax.fori_loop(0, times, one, (params, state))

    def mix(weights: list[Params], shares: np.ndarray) -> Params:
        def one(*leaves: Array) -> Array:
            parts = [
                jnp.asarray(s, leaf.dtype) * leaf for s, leaf in zip(shares, leaves, strict=True)
            ]
            return functools.reduce(jnp.add, parts)

        return jax.tree.map(one, *weights)

    return jit(jax.value_and_grad(value)), jit(value), hold, mix
