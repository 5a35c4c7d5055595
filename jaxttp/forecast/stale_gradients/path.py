"""Where gradients are taken along a training, and the path that holds them in between."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxttp._core.compile import jit
from jaxttp._core.traced import Traced, network_of
from jaxttp._core.types import ApplyFn, Params, count, take
from jaxttp.dynamics._network import loss_of_weights
from jaxttp.dynamics.optimizers import Optimizer, inlined, same_program
from jaxttp.losses import Loss

LOWEST = 0.02
"""Share of the largest step below which a step counts no less."""
WIDTH = 6.0
"""Knots over which losses of batches and memories are averaged, a standard deviation."""


class HeldState(NamedTuple):
    """Where a path is at a knot, and where it began.

    Attributes:
        step: of the training.
        params: the weights.
        state: of the optimiser.
        loss: of the watched samples here.
        first: that before training, and the first batch's own; None where none is known yet.
    """

    step: int
    params: Params
    state: Any
    loss: float
    first: tuple[float, float] | None = None


class HeldPath(NamedTuple):
    """What following the held gradients found.

    Attributes:
        knots: steps at which a gradient was taken, and the last step (K + 1,).
        points: the knots at which the watched loss was evaluated (E,).
        loss: the watched loss there (E,), at weights smoothed over neighbouring knots.
        measured: knots whose batch was looked at again after it was learnt (P,).
        fall: of that batch's own loss, negative where it fell (P,).
        promised: what its gradient at the knot makes of that change of the weights (P,).
        before: every knot's loss on its own batch, before it was learnt (K,).
        scale: the share of the optimiser's steps that was taken from every knot on (K,).
        left: whether it came above its start, on the watched samples and on the training's: its
            steps are too long to be held. What was not looked at then is missing.
        good: the last point at which it had not.
    """

    knots: np.ndarray
    points: np.ndarray
    loss: np.ndarray
    measured: np.ndarray
    fall: np.ndarray
    promised: np.ndarray
    before: np.ndarray
    scale: np.ndarray
    left: bool
    good: HeldState

    def upto_good(self) -> "HeldPath":
        """The part of it before its last good point."""
        knot = int(np.searchsorted(self.knots, self.good.step))
        seen, looked = self.points <= knot, self.measured < knot
        return HeldPath(
            self.knots[: knot + 1], self.points[seen], self.loss[seen], self.measured[looked],
            self.fall[looked], self.promised[looked], self.before[:knot], self.scale[:knot],
            False, self.good,
        )  # fmt: skip

    def then(self, other: "HeldPath") -> "HeldPath":
        """This path, and another that begins where it ends."""
        knot = len(self.knots) - 1
        return HeldPath(
            np.append(self.knots[:-1], other.knots),
            np.append(self.points, knot + other.points[1:]),
            np.append(self.loss, other.loss[1:]),
            np.append(self.measured, knot + other.measured),
            np.append(self.fall, other.fall), np.append(self.promised, other.promised),
            np.append(self.before, other.before), np.append(self.scale, other.scale),
            other.left, other.good,
        )  # fmt: skip


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
    traced = network_of(network)

    def look(weights: Params) -> float:
        total, parts = count(x), 0.0
        for first in range(0, total, batch_size):
            some = slice(first, first + batch_size)
            batch = take(x, some)
            network = traced.precise(weights, batch)
            part = loss_of_weights(network, weights, batch, targets[some], loss=loss)
            parts += float(part) * min(batch_size, total - first) / total
        return parts

    return look


def follow_held(
    programs: tuple,
    start: HeldState,
    scale: float,
    knots: np.ndarray,
    points: np.ndarray,
    batch: Callable[[int], tuple[Any, Array]],
    watched: Callable[[Params], float],
    window: int,
) -> HeldPath:
    """Run the optimiser, with a gradient of its own at every knot alone, until it leaves its path.

    Args:
        programs: of `held_programs`.
        start: where; of the first knot.
        scale: the share of the optimiser's steps that is taken.
        knots: steps (K + 1,), the end among them.
        points: numbers of knots (E,) at which `watched` is asked.
        batch: samples and targets of a step.
        watched: the loss of weights.
        window: knots on either side over which weights are smoothed before they are asked.

    Returns:
        A `HeldPath`.
    """
    gradient, value, hold, mix = programs
    params, state, first = start.params, start.state, start.first
    last, kept, found = len(knots) - 1, {0: params}, {0: start.loss}
    states, good = {0: state}, start
    measured, fall, promised, own, left = [], [], [], [], False
    for k in range(last + 1):
        # A window is whole once its last knot is there.
        for point in _missing(points, found, last if k == last else k - window):
            near = np.arange(max(0, point - window), min(k, point + window) + 1)
            weights = mix([kept[i] for i in near.tolist()], line_weights(near, point))
            found[point] = watched(weights)
            assert first is not None  # a batch was learnt before a window was whole
            left = left or has_left(np.array(own), point, found[point], first)
            if not left:
                step = int(knots[point])
                good = HeldState(step, kept[point], states[point], found[point], first)
        if left or k == last:
            break
        here = batch(int(knots[k]))
        before, held = gradient(params, *here)
        own.append(float(before))
        first = (start.loss, own[0]) if first is None else first
        params, state, promise = hold(params, state, held, int(knots[k + 1] - knots[k]), scale)
        kept[k + 1], states[k + 1] = params, state
        oldest = min(k + 1, _missing(points, found, last)[0] - window)
        for i in [i for i in kept if i < oldest]:
            del kept[i], states[i]
        if k % 2 == 0:
            measured.append(k)
            fall.append(float(value(params, *here)) - float(before))
            promised.append(float(promise))
    seen = np.array(sorted(found))
    loss_at = np.array([found[point] for point in seen])
    return HeldPath(
        np.asarray(knots), seen, loss_at, np.array(measured), np.array(fall), np.array(promised),
        np.array(own), np.full(last, scale), left, good,
    )  # fmt: skip


def _missing(points: np.ndarray, found: Mapping[int, float], upto: int) -> list[int]:
    """Points up to a knot at which nothing is known yet."""
    return [point for point in points.tolist() if point <= upto and point not in found]


def has_left(own: np.ndarray, point: int, loss: float, first: tuple[float, float]) -> bool:
    """Whether a path is above its start at a point, on the watched samples and on its own batches.

    The former alone is a network that learns its samples by heart.

    Args:
        own: every knot's loss on its own batch, as far as it is known (K,).
        point: the number of a knot.
        loss: of the watched samples there.
        first: that before training, and the first batch's own.

    Example:
        >>> has_left(np.array([2.0, 3.0, 5.0, 9.0]), 3, 8.0, first=(2.0, 2.0))
        True
    """
    mean = smoothed(np.arange(len(own)), own, np.array([point]))[0]
    if not np.isfinite(mean + loss):
        return True
    return bool(loss > first[0] and mean > first[1])


def smoothed(where: np.ndarray, values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Values by a Gaussian mean over some twelve knots.

    Args:
        where: knots of the values (P,).
        values: (P,).
        at: knots that are asked (E,).

    Returns:
        (E,).

    Example:
        >>> smoothed(np.array([0.0, 50.0]), np.array([1.0, 3.0]), np.array([0.0, 25.0])).round(6)
        array([1., 2.])
    """
    away = (at[:, None] - where[None]) / WIDTH
    near = np.exp(-0.5 * np.minimum(away**2, 1400.0))
    return (near @ values) / np.sum(near, axis=1)


def held_programs(
    network: ApplyFn, loss: Loss, optimizer: optax.GradientTransformation, params: Params
) -> tuple:
    """Loss and gradient, loss, many steps with one gradient, and sums of weights; compiled."""
    traced, descent = network_of(network), same_program(optimizer, params)

    def gradient(params: Params, x: Any, targets: Array) -> tuple[Array, Params]:
        return _loss_and_gradient(traced.precise(params, x), params, x, targets, loss=loss)

    def value(params: Params, x: Any, targets: Array) -> Array:
        return loss_of_weights(traced.precise(params, x), params, x, targets, loss=loss)

    def mix(weights: list[Params], shares: np.ndarray) -> Params:
        def one(*leaves: Array) -> Array:
            parts = [
                jnp.asarray(s, leaf.dtype) * leaf for s, leaf in zip(shares, leaves, strict=True)
            ]
            return functools.reduce(jnp.add, parts)

        return jax.tree.map(one, *weights)

    return gradient, value, functools.partial(inlined(_hold, descent), descent), mix


@functools.partial(jit, static_argnames="loss")
def _loss_and_gradient(
    network: Traced, params: Params, x: Any, targets: Array, *, loss: Loss
) -> tuple[Array, Params]:
    return jax.value_and_grad(lambda w: loss.value(network(w, x), targets))(params)


@jit
def _hold(
    optimizer: Optimizer, params: Params, state: Any, held: Params, times: Array, scale: Array
) -> tuple[Params, Any, Array]:
    """Many steps with one gradient, and its product with the change of the weights."""

    def one(_: Array, carry: tuple[Params, Any]) -> tuple[Params, Any]:
        updates, after = optimizer.update(held, carry[1], carry[0])
        updates = jax.tree.map(lambda u: jnp.asarray(scale, u.dtype) * u, updates)
        return optax.apply_updates(carry[0], updates), after

    moved, state = jax.lax.fori_loop(0, times, one, (params, state))
    change = jax.tree.map(jnp.subtract, moved, params)
    return moved, state, jnp.asarray(optax.tree.vdot(held, change))
