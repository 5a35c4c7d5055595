"""Fine-tuning with too many outputs for a kernel: stale gradients, and the cost of their noise.

A language model with next-token loss has N T V outputs. The optimizer runs all of its steps, with
warm-up, momentum, second moments and decay, but reuses the gradient of the trainable weights
between two *refreshes* (of a LoRA adapter: of A and B, so that A B stays exact). K refreshes for T
steps cost K / T of the training and use K / T of its data. The batch noise acts T / K times as
strongly, so that the path lies above the training's.

This excess is measured on the path. Right after a batch was learned, its own loss has fallen
further than that of other sequences, by its *memory*

    gamma_k = [L(w_{k+1}) - L(w_k)] - [L_k(w_{k+1}) - L_k(w_k)],

one forward pass a refresh. For a quadratic loss with noise of a fixed covariance S, steps of z =
eta Delta lambda along an eigenvector of curvature lambda, memory after m refreshes is
gamma_m = z (1 - z)^(m - 1) S / lambda, and the loss that noise costs at refresh k

    1/2 sum_(i < k) z^2 (1 - z)^(2 i) S / lambda = 1/2 (gamma_1 - gamma_2 + ... - gamma_2k),

the alternating sum of the memories, 1/(4 - 2 z) of gamma_1 in the end. In networks it is about the
memory itself; the factor is `Numbers.cost`.

Where the sequences are a sample of a larger corpus, a path that repeats them overfits and the
training does not. The correction (`overfitting`) compares repeated batches with other sequences.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxttp._core.checks import (
    check_finite,
    check_floating,
    check_integer,
    check_key,
    check_known,
    check_number,
    check_optimizer,
)
from jaxttp._core.compile import give_back, jit
from jaxttp._core.results import RESULT, wrapped
from jaxttp._core.traced import Network, Traced, network_of
from jaxttp._core.types import ApplyFn, Params, count, take
from jaxttp.adapters import as_rows, check_per_sample
from jaxttp.adapters.inputs import check_network, check_samples
from jaxttp.adapters.outputs import check_gradients
from jaxttp.dynamics._network import evaluation, loss_of_weights
from jaxttp.dynamics.batches import batch_indices, check_batches
from jaxttp.dynamics.optimizers import Optimizer, inlined, same_program
from jaxttp.dynamics.weight_space import check_stepping
from jaxttp.losses import Loss, encode_targets
from jaxttp.losses.rule import Rule, target_label

POINTS = 11
"""Points of the curve, at which the loss of the watched samples is evaluated."""
FEWEST = 24
"""Refreshes below which no path is followed."""
FORWARD = 1 / 3
"""What a forward pass costs, in gradients."""


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Constants of the path and its correction.

    Those of the correction were chosen on the tuning tasks of experiments/bench/lora_tasks.py.

    Attributes:
        least: least step size, as a fraction of the largest.
        window: refreshes on either side over which weights are smoothed before their evaluation.
        width: standard deviation of the Gaussian mean over refreshes, in refreshes.
        cost: excess loss by noise on the stale path, over the memory of a batch just learned.
        onset: refreshes over which this excess builds up, as 1 - exp(-(k/onset)^2).
        doubt: relative error of that correction.
        lag: fraction of the largest lag at reduced rates that is subtracted, and its error.
        coarse: least `StaleGradientForecast.kept` of a bounded forecast: the minimum of a parabola.
        overfit: the loss that memorizing a sample costs others, over the gain on the sample.
    """

    least: float = 0.02
    window: int = 3
    width: float = 6.0
    cost: float = 1.05
    onset: float = 9.0
    doubt: float = 1 / 2
    lag: float = 1 / 2
    coarse: float = 1 / 2
    overfit: float = 0.35


BY = Numbers()


@dataclasses.dataclass(frozen=True, eq=False)
class StaleGradientForecast:
    """A forecast of a training run from few gradients.

    Attributes:
        loss: of the watched sequences (T + 1,), interpolated between the points.
        uncertainty: estimated error (T + 1,).
        at: the steps of the points (E,).
        stale: the loss along the path of stale gradients there (E,), before the correction.
        memory: of a batch just learned, there (E,).
        refresh_steps: steps at which a gradient was taken (K,).
        gradients: of one sample, that the forecast took; a forward pass counts for a third.
        training_gradients: of one sample, that the training takes.
        diverged: whether the stale path rose above its start, on the watched samples and on the
            training's: its steps are too long, even at a fraction of the rates.
        rate_fraction: the fraction of the training's rates that was followed: 1, or 1/2, 1/4 ...
            where a path at higher rates diverged.
        kept: decrease of a batch's loss while its gradient was reused, over its linear prediction:
            1 for a linear loss, 1/2 at the minimum of a parabola, less beyond.
    """

    loss: Float[np.ndarray, " t"]
    uncertainty: Float[np.ndarray, " t"]
    at: np.ndarray
    stale: np.ndarray
    memory: np.ndarray
    refresh_steps: np.ndarray
    gradients: float
    training_gradients: float
    diverged: bool
    rate_fraction: float = 1.0
    kept: float = 1.0

    plot, _repr_html_, __repr__ = RESULT

    def __str__(self) -> str:
        steps, count = len(self.loss) - 1, len(self.refresh_steps)
        lines = [
            f"StaleGradientForecast of {steps:,} steps from {count:,} gradients, "
            f"{100 * self.fraction:.2g} % of the training's cost",
            f"  loss {self.loss[0]:.4g} to {self.loss[-1]:.4g}"
            + (f" ± {self.uncertainty[-1]:.2g}" if self.is_bounded else ""),
        ]
        never = "never" if self.is_bounded else "not reached, see warnings"
        for threshold, step in self.read((0.1, 0.4)).items():
            target = target_label(threshold, "relative")
            lines.append(f"  {target}: " + (f"step {step}" if step >= 0 else never))
        if self.warnings is not None:
            lines.append(wrapped(f"  warning: {self.warnings}", 4))
        return "\n".join(lines)

    @property
    def fraction(self) -> float:
        """What the forecast costs, as a fraction of the training."""
        return self.gradients / self.training_gradients

    @property
    def is_bounded(self) -> bool:
        """Whether `uncertainty` bounds the error.

        False where the path diverged or gradients were reused for too long: then `warnings` has no
        error estimate, and no range is printed.
        """
        return not self.diverged and self.kept >= BY.coarse

    @property
    def warnings(self) -> str | None:
        """A reliability warning; None where the correction is small."""
        if self.diverged:
            return (
                "stale gradients left the path: this training's steps are too long "
                f"for {len(self.refresh_steps)} gradients, even at {self.rate_fraction:g} of them; "
                "give a larger fraction, or a lower rate"
            )
        decrease = abs(self.loss[0] - self.loss[-1])
        off = float(np.max(self.uncertainty)) / max(decrease, 1e-12)
        if self.rate_fraction < 1:
            return (
                f"these rates are too high for gradients that are {self.stride:.2g} steps old; "
                f"followed at {self.rate_fraction:g} of them, known to ± {100 * off:.2g} % of "
                "the loss decrease; that the training itself is stable at them is not known"
            )
        if self.kept < BY.coarse:
            return (
                f"a gradient used for {self.stride:.2g} steps gave {100 * self.kept:.2g} % of what "
                "it promised: too long for these rates; the loss is likely to fall faster, and "
                "lower; give a larger fraction, or a lower rate"
            )
        if off < 0.05:
            return None
        return f"known to ± {100 * off:.2g} % of the loss decrease, by the noise of few batches"

    @property
    def stride(self) -> float:
        """Steps for which a gradient is used, on average."""
        return float(self.at[-1]) / len(self.refresh_steps)

    def level(self, threshold: float) -> float:
        """The loss at which a fraction of the forecast decrease is left."""
        return float(self.loss[-1] + threshold * (self.loss[0] - self.loss[-1]))

    def between(self, level: float, off: float = 0.0) -> tuple[int, int]:
        """The earliest and the latest step at which a loss is reached, by the uncertainty.

        Args:
            level: the loss to get below.
            off: the error of the level.

        Returns:
            The first steps at which loss - uncertainty < level + off and at which
            loss + uncertainty < level - off; -1 for none, or where the path diverged.
        """
        if self.diverged:
            return -1, -1
        ends = (self.loss + sign * (self.uncertainty + off) < level for sign in (-1, 1))
        earliest, latest = (int(np.argmax(below)) if np.any(below) else -1 for below in ends)
        return earliest, latest

    def read(self, thresholds: float | Sequence[float], *, rule: str = "relative") -> dict:
        """Training times, as `jaxttp.TrainingRun.read` gives those of a real training.

        Args:
            thresholds: the epsilons.
            rule: see `jaxttp.training_time`.

        Returns:
            Steps for every threshold, -1 where the forecast never gets there or diverged.
        """
        reading = Rule.of(thresholds, rule, steps=len(self.loss) - 1)
        return reading.read(jnp.asarray(self.loss), None, reached=not self.diverged)


class StaleState(NamedTuple):
    """Where a path is.

    Attributes:
        step: of the training.
        params: the weights.
        state: of the optimizer.
        loss: of the watched samples here.
    """

    step: int
    params: Params
    state: Any
    loss: float


@dataclasses.dataclass
class Refresh:
    """A step at which a gradient is taken, and the losses around it.

    Attributes:
        step: of the training.
        scale: the fraction of the optimizer's steps that is taken from here on.
        loss: of the watched samples, at weights smoothed over neighbours; None where not evaluated.
        before: of its own batch before this was learned; None at the end of the path.
        fall: change of that batch's loss by the next refresh; None where not evaluated.
        promised: the same to first order, by its gradient.
    """

    step: int
    scale: float
    loss: float | None = None
    before: float | None = None
    fall: float | None = None
    promised: float = 0.0


class Training(NamedTuple):
    """A training run to follow.

    Attributes:
        network: ``(params, x) -> outputs (N, C)``.
        loss: of the training.
        optimizer: see `same_program`.
        batch: samples and targets of a step, and of how many refreshes so far.
        watched: the loss of weights on the watched samples.
    """

    network: Network
    loss: Loss
    optimizer: Optimizer
    batch: Callable[[int, int], tuple[Any, Array]]
    watched: Callable[[Params], float]


def follow_stale(
    training: Training,
    start: StaleState,
    steps: np.ndarray,
    points: np.ndarray,
    *,
    scale: float = 1.0,
    before: Sequence[Refresh] = (),
) -> tuple[list[Refresh], StaleState | None]:
    """Run the optimizer with new gradients only at refreshes, until the path diverges.

    Args:
        training: what is followed.
        start: the state at the first refresh.
        steps: of the refreshes (K + 1,), from the start to the end.
        points: indices of refreshes (E,) at which the watched loss is evaluated.
        scale: the fraction of the optimizer's steps that is taken.
        before: the path up to the start.

    Returns:
        The whole path, and, where it diverged, the state at the last good point, else None.
    """
    refreshes = [Refresh(int(step), scale) for step in steps]
    refreshes[0].loss = start.loss
    path, last, good = [*before, *refreshes], len(refreshes) - 1, start
    states = {0: (start.params, start.state)}
    waiting, own = [point for point in points.tolist() if point > 0], []
    for k in range(last + 1):
        # The window of a point is whole once its last refresh is there.
        while waiting and (k == last or waiting[0] <= k - BY.window):
            point = waiting.pop(0)
            near = np.arange(max(0, point - BY.window), min(k, point + BY.window) + 1)
            weights = _mix([states[i][0] for i in near.tolist()], line_weights(near, point))
            loss = refreshes[point].loss = training.watched(weights)
            if has_left(np.array(own), point, loss, path[0]):
                return path, good
            good = StaleState(refreshes[point].step, *states[point], loss)
        if k == last:
            break
        x, targets = training.batch(refreshes[k].step, len(before) + k)
        params, state = states[k]
        network = training.network.precise(params, x)
        value, stale = _loss_and_gradient(network, params, x, targets, loss=training.loss)
        times = refreshes[k + 1].step - refreshes[k].step
        params, state, promised = inlined(_hold, training.optimizer)(
            training.optimizer, params, state, stale, times, scale
        )
        own.append(float(value))
        states[k + 1], refreshes[k].before = (params, state), own[-1]
        if k % 2 == 0:
            learnt = loss_of_weights(network, params, x, targets, loss=training.loss)
            refreshes[k].fall, refreshes[k].promised = float(learnt) - own[-1], float(promised)
        for i in [i for i in states if i < min(k + 1, waiting[0] - BY.window)]:
            del states[i]
    return path, None


def step_sizes(optimizer: optax.GradientTransformation, params: Params, steps: int) -> np.ndarray:
    """How far every step goes under a constant gradient, up to a factor (T,).

    Args:
        optimizer: any optax transformation of gradients alone.
        params: what it steps; only the structure matters.
        steps: T.

    Returns:
        Sizes in (0, 1]; ones where they cannot be computed.

    Example:
        >>> step_sizes(optax.sgd(optax.linear_schedule(1.0, 0.5, 2)), 0.0, 3).tolist()
        [1.0, 0.75, 0.5]
    """
    weights = jax.tree.map(lambda _: jnp.zeros(()), params)
    push = jax.tree.map(jnp.ones_like, weights)

    def step(state: Any, _: None) -> tuple[Any, Array]:
        updates, state = optimizer.update(push, state, weights)
        sizes = [jnp.abs(leaf) for leaf in jax.tree.leaves(updates)]
        return state, jnp.mean(jnp.stack(sizes))

    try:
        sizes = np.asarray(
            jax.lax.scan(step, optimizer.init(weights), None, length=steps)[1], float
        )
    except (TypeError, ValueError, IndexError, ZeroDivisionError):  # it needs matrices
        return np.ones(steps)
    if not np.all(np.isfinite(sizes)) or np.max(sizes) <= 0:
        return np.ones(steps)
    return np.maximum(sizes / np.max(sizes), BY.least)


def place_refreshes(sizes: np.ndarray, count: int) -> np.ndarray:
    """Steps at which a gradient is taken, and the end: denser by the root of the step's size.

    Args:
        sizes: of every step (T,), see `step_sizes`.
        count: how many gradients.

    Returns:
        Increasing steps from 0 to T, at most count + 1 of them.

    Example:
        >>> place_refreshes(np.array([1.0, 1.0, 1.0, 1.0, 0.25, 0.25, 0.25, 0.25]), 3).tolist()
        [0, 2, 4, 8]
    """
    passed = np.concatenate([[0.0], np.cumsum(np.sqrt(sizes))])
    at = np.interp(np.linspace(0, passed[-1], count + 1), passed, np.arange(len(passed)))
    return np.unique(np.round(at).astype(int))


def place_points(refreshes: int, count: int) -> np.ndarray:
    """Which of the refreshes are points of the curve: the first, the last, more of them early on.

    Example:
        >>> place_points(81, 5).tolist()
        [0, 13, 32, 55, 80]
    """
    return np.unique(np.round(np.linspace(0, 1, count) ** 1.3 * (refreshes - 1)).astype(int))


def line_weights(refreshes: np.ndarray, at: int) -> np.ndarray:
    """The coefficients of weights at these refreshes in the value at `at` of a line fitted to them.

    Neighbours count by the tricube of their distance, as in local regression.

    Args:
        refreshes: numbers of refreshes (n,), `at` among them.
        at: the refresh in question.

    Returns:
        Coefficients (n,) that sum to one.

    Example:
        >>> line_weights(np.array([3, 4, 5]), 4).round(2).tolist()
        [0.29, 0.43, 0.29]
    """
    away = (refreshes - at).astype(float)
    if len(refreshes) == 1:
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
            rows = slice(first, first + batch_size)
            batch = take(x, rows)
            network = traced.precise(weights, batch)
            part = loss_of_weights(network, weights, batch, targets[rows], loss=loss)
            parts += float(part) * min(batch_size, total - first) / total
        return parts

    return look


def has_left(own: np.ndarray, point: int, loss: float, first: Refresh) -> bool:
    """Whether a path is above its start at a point, on the watched samples and on its own batches.

    On the watched samples alone it would be overfitting.

    Args:
        own: every refresh's loss on its own batch, so far (K,).
        point: the number of a refresh.
        loss: of the watched samples there.
        first: the first refresh of the training.

    Example:
        >>> first = Refresh(0, 1.0, loss=2.0, before=2.0)
        >>> has_left(np.array([2.0, 3.0, 5.0, 9.0]), 3, 8.0, first)
        True
    """
    mean = smoothed(np.arange(len(own)), own, np.array([point]))[0]
    if not np.isfinite(mean + loss):
        return True
    assert first.loss is not None and first.before is not None  # noqa: PT018
    return bool(loss > first.loss and mean > first.before)


def smoothed(where: np.ndarray, values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Values by a Gaussian mean over some twelve refreshes.

    Args:
        where: refreshes of the values (P,).
        values: (P,).
        at: refreshes that are asked (E,).

    Returns:
        (E,).

    Example:
        >>> smoothed(np.array([0.0, 50.0]), np.array([1.0, 3.0]), np.array([0.0, 25.0])).round(6)
        array([1., 2.])
    """
    away = (at[:, None] - where[None]) / BY.width
    near = np.exp(-0.5 * np.minimum(away**2, 1400.0))
    return (near @ values) / np.sum(near, axis=1)


@jit
def _mix(weights: list[Params], fractions: Array) -> Params:
    """Sum_k fractions_k weights_k."""

    def mix(*leaves: Array) -> Any:
        return sum(s.astype(leaf.dtype) * leaf for s, leaf in zip(fractions, leaves, strict=True))

    return jax.tree.map(mix, *weights)


@functools.partial(jit, static_argnames="loss")
def _loss_and_gradient(
    network: Traced, params: Params, x: Any, targets: Array, *, loss: Loss
) -> tuple[Array, Params]:
    return jax.value_and_grad(lambda w: loss.value(network(w, x), targets))(params)


@jit
def _hold(
    optimizer: Optimizer, params: Params, state: Any, stale: Params, times: Array, scale: Array
) -> tuple[Params, Any, Array]:
    """Many steps with one gradient, and its product with the change of the weights."""

    def step(_: Array, carry: tuple[Params, Any]) -> tuple[Params, Any]:
        updates, after = optimizer.update(stale, carry[1], carry[0])
        updates = jax.tree.map(lambda u: jnp.asarray(scale, u.dtype) * u, updates)
        return optax.apply_updates(carry[0], updates), after

    moved, state = jax.lax.fori_loop(0, times, step, (params, state))
    change = jax.tree.map(jnp.subtract, moved, params)
    return moved, state, jnp.asarray(optax.tree.vdot(stale, change))


def corrected(
    path: list[Refresh],
    spent: float,
    training: float,
    steps: int,
    *,
    left: bool = False,
    fresh: int | None = None,
) -> StaleGradientForecast:
    """The training's curve: that of the stale path minus the cost of its noise.

    Where a fraction of the rates was followed, the path lags behind the training. The lag is
    between that of the summed steps and 0; half of it is subtracted.

    Args:
        path: all refreshes.
        spent: gradients of one sample that the path took.
        training: gradients of one sample that the training takes.
        steps: T.
        left: whether the path was left at its last point.
        fresh: batches until the first one is repeated; None for the training's batches.

    Returns:
        A `StaleGradientForecast`.
    """
    last, every = len(path) - 1, np.arange(steps + 1)
    refreshes, scale = np.array([k.step for k in path]), np.array([k.scale for k in path[:-1]])
    points = np.array([i for i, refresh in enumerate(path) if refresh.loss is not None])
    measured = np.array([i for i, refresh in enumerate(path) if refresh.fall is not None], int)
    before = np.array([refresh.before for refresh in path if refresh.before is not None])
    fall = np.array([path[i].fall for i in measured], float)
    losses = np.array([path[i].loss for i in points], float)
    others = np.interp(np.arange(last + 1), points, losses)
    gaps = others[measured + 1] - others[measured] - fall
    memory = np.zeros(len(points))
    if len(gaps):
        memory = smoothed(measured + 0.5, gaps, points.astype(float))
    built = 1 - np.exp(-((points / BY.onset) ** 2))
    off = BY.cost * (1 - last / steps) * built * np.maximum(memory, 0.0)
    if fresh is not None:
        off += BY.overfit * overfitting(before, others[:-1], fresh, points)
    diverged = left or not (np.all(np.isfinite(losses)) and np.all(np.isfinite(memory)))
    if diverged:  # nothing is corrected: the path is not the training's
        off = np.zeros_like(off)
    at = refreshes[points]
    shown = _evened(np.where(np.isfinite(losses), losses, losses[0]) - off)
    curve, doubt = _between(at, shown, every), BY.doubt * _between(at, off, every)
    done = np.concatenate([[0.0], np.cumsum(scale * np.diff(refreshes))])
    behind = np.interp(np.interp(every, refreshes, done), every, curve) - curve
    behind = np.minimum.accumulate(np.maximum(behind, 0.0)[::-1])[::-1]  # a loss has no bend there
    lag = BY.lag * behind * (not diverged)
    promised = float(sum(path[i].promised for i in measured))
    kept = float(np.sum(fall)) / promised if promised < 0 and not diverged else 1.0
    return StaleGradientForecast(
        curve - lag, doubt + lag, at, losses, memory, refreshes[:-1], spent, training, diverged,
        float(np.min(scale, initial=1.0)), kept,
    )  # fmt: skip


def overfitting(
    before: np.ndarray, others: np.ndarray, fresh: int, points: np.ndarray
) -> np.ndarray:
    """Overfitting: how much more the loss of repeated batches has fallen than the watched loss.

    For least squares half of this gap is the excess of the watched loss over the optimum of all
    sequences (Mallows' C_p); along a path it is less. Every batch is compared with itself, since
    losses differ more between batches.

    Args:
        before: every batch's loss before it is learned (K,), the same batches over and over.
        others: the watched loss at these refreshes (K,).
        fresh: batches until the first one is repeated.
        points: refreshes of the curve (E,).

    Returns:
        (E,), 0 before a batch is repeated.

    Example:
        >>> before, others = np.array([2.0, 1.0, 1.4, 0.4]), np.array([1.5, 1.5, 1.2, 1.2])
        >>> overfitting(before, others, 2, np.array([0, 3])).round(2).tolist()
        [0.0, 0.3]
    """
    again = np.arange(fresh, len(before))
    if not len(again):
        return np.zeros(len(points))
    first = again % fresh
    further = (others[again] - others[first]) - (before[again] - before[first])
    now = smoothed(again, further, points.astype(float))
    return np.where(points > fresh, np.maximum(now, 0.0), 0.0)


def _between(at: np.ndarray, values: np.ndarray, every: np.ndarray) -> np.ndarray:
    """A curve through points, constant after the last."""
    from scipy.interpolate import PchipInterpolator  # here: a fifth of the time of all imports

    return PchipInterpolator(at, values)(np.minimum(every, at[-1]))


def _evened(loss: np.ndarray) -> np.ndarray:
    """The points of a curve (E,) with a half of themselves and a quarter of either neighbor.

    The first three, where the curve bends, and the last one stay.
    """
    even = loss.copy()
    even[3:-1] = 0.25 * loss[2:-2] + 0.5 * loss[3:-1] + 0.25 * loss[4:]
    return even


def stale_gradient_forecast(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    *,
    x_watched: Any,
    y_watched: Any,
    optimizer: optax.GradientTransformation,
    steps: int,
    batch_size: int,
    key: Array,
    protocol: str | None = None,
    loss: str | Loss = "cross_entropy",
    fraction: float = 0.2,
    total_samples: int | None = None,
) -> StaleGradientForecast:
    """The loss curve of a fine-tuning with many outputs, from a fraction of its gradients.

    The forecast steps the network's weights along its own path. Between two refreshes all steps
    reuse one gradient. It takes at most `fraction` of the gradients; see the module.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``, or logits of tokens (N, T, V).
        params: what trains, such as the adapters of `jaxttp.models.lora`.
        x: training sequences (N, ...).
        y: labels (N,), of tokens (N, T), or targets (N, C).
        x_watched: the sequences whose loss is forecast (M, ...); of no batch, or some of `x`.
        y_watched: their labels.
        optimizer: any optax transformation of gradients alone.
        steps: T.
        batch_size: B, sequences a step.
        key: draws the batches; those of the training at the same key are used at the refreshes.
        protocol: how, see `jaxttp.dynamics.batch_indices`.
        loss: a name or a `Loss`.
        fraction: of the training's gradients that this may take, in (0, 1); counted, not timed.
        total_samples: sequences of the corpus that trains, of which `x` is a sample; None where
            `x` trains. Batches are then no training's, and are drawn so that a path sees every
            sequence of the sample once before it sees one again.

    Returns:
        A `StaleGradientForecast`.

    Raises:
        ValueError: a fraction that affords fewer than 24 refreshes besides the points of the curve;
            steps, batches, labels or an optimizer that do not fit; gradients that are not finite.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> table = jnp.zeros((5, 5))
        >>> x = jnp.arange(240).reshape(60, 4) % 5
        >>> y = (x + 1) % 5
        >>> result = stale_gradient_forecast(
        ...     lambda w, x: w[x], table, x, y, x_watched=x[:4], y_watched=y[:4], steps=200,
        ...     optimizer=optax.adam(0.02), batch_size=6, key=jax.random.key(0))
        >>> result.loss.shape, bool(result.loss[-1] < result.loss[0]), result.fraction <= 0.2
        ((201,), True, True)

    Source:
        Derived; stale gradients are Euler's method of first weak order for the mean path.
    """
    check_integer("steps", steps, at_least=1)
    check_number("fraction", fraction, above=0.0, below=1.0)
    check_key(key, optional=False)
    if total_samples is not None:
        check_integer("total_samples", total_samples, at_least=count(x),
                      hint=f"x, a sample of them, has {count(x)}.")  # fmt: skip
    check_optimizer(optimizer)
    x, x_watched = check_samples("x", x), check_samples("x_watched", x_watched)
    check_network(apply_fn, params)
    check_floating("params", params)
    check_stepping(optimizer, params)
    check_known(fraction=fraction, key=key, y=y, y_watched=y_watched)
    for name, value in {"params": params, "x": x, "x_watched": x_watched}.items():
        check_known(**{name: value})
        check_finite(name, value)
    protocol = check_batches(batch_size, key, protocol, count(x))
    rows, outputs = as_rows(apply_fn, params, x)
    rows, few = network_of(rows), take(x, slice(0, 8))
    evaluate = evaluation(rows)
    f0 = evaluate(params, few)
    check_per_sample(rows, params, few, evaluate=evaluate, outputs=f0)
    check_finite("apply_fn(params, x)", f0)
    targets, loss_train = encode_targets(loss, y, outputs)
    outputs_watched = as_rows(apply_fn, params, x_watched)[1]
    watched, loss_watched = encode_targets(loss, y_watched, outputs_watched)
    indices = np.asarray(batch_indices(key, count(x), batch_size, steps, protocol=protocol))
    fresh = None if total_samples is None else count(x) // batch_size
    per_point = FORWARD * count(x_watched) / batch_size

    def batch(step: int, refresh: int) -> tuple[Any, Array]:
        samples = indices[step] if fresh is None else indices[refresh % fresh]
        return take(x, samples), targets[samples]

    most = affordable(fraction, steps, POINTS * per_point, batch_size)
    look = watcher(rows, loss_watched, x_watched, watched, batch_size)
    training = Training(rows, loss_train, same_program(optimizer, params), batch, look)
    begin = StaleState(0, params, optimizer.init(params), look(params))
    give_back()  # memory of the compilation: hundreds of MB for a large network
    sizes, budget = step_sizes(optimizer, params, steps), fraction * steps
    path, is_left, spent = follow_within(training, begin, sizes, budget, per_point, most)
    losses = [loss for k in path for loss in (k.loss, k.before) if loss is not None]
    check_gradients(rows, params, x, np.array(losses))
    return corrected(
        path, spent * batch_size, float(steps * batch_size), steps, left=is_left, fresh=fresh
    )


def follow_within(
    training: Training,
    start: StaleState,
    sizes: np.ndarray,
    budget: float,
    per_point: float,
    most: int,
) -> tuple[list[Refresh], bool, float]:
    """The path to the horizon; where it diverges, resumed at its last good point at half the rates.

    Args:
        training: what is followed.
        start: before the first step.
        sizes: of every step (T,), see `step_sizes`.
        budget: gradients of a batch that it may take.
        per_point: cost of a point of the curve.
        most: refreshes.

    Returns:
        The path, whether it diverged for good, and the gradients that it took.
    """
    steps, spent, points, scale = len(sizes), per_point, POINTS, 1.0
    path: list[Refresh] = []
    while True:
        before = [refresh for refresh in path if refresh.step < start.step]
        refreshes = start.step + place_refreshes(sizes[start.step :], most)
        at = place_points(len(refreshes), points)
        path, good = follow_stale(training, start, refreshes, at, scale=scale, before=before)
        spent += cost_of(path[len(before) :], per_point)
        if good is None:
            return path, False, spent
        start, scale = good, scale / 2
        done = sum(refresh.loss is not None and refresh.step < good.step for refresh in path)
        points = max(3, POINTS - done)
        left = budget - spent - (points - 1) * per_point
        most = min(affordable_refreshes(left), steps - good.step)
        if most < FEWEST * (steps - good.step) / steps:
            return path, True, spent


def cost_of(refreshes: Sequence[Refresh], per_point: float) -> float:
    """Cost of refreshes in gradients of a batch, without their first point.

    Args:
        refreshes: that were followed.
        per_point: cost of a point of the curve.
    """
    gradients = sum(refresh.before is not None for refresh in refreshes)
    looks = sum(refresh.fall is not None for refresh in refreshes)
    points = sum(refresh.loss is not None for refresh in refreshes)
    return gradients + FORWARD * looks + per_point * (points - 1)


def affordable_refreshes(paid: float) -> int:
    """Refreshes that some gradients afford, each with half a look back at its batch.

    Example:
        >>> affordable_refreshes(98.0)
        84
    """
    refreshes = max(0, int(paid / (1 + FORWARD / 2)))
    # Every second batch is evaluated again, including the first one.
    return refreshes - (refreshes > 0 and refreshes + FORWARD * -(-refreshes // 2) > paid)


def affordable(
    fraction: float, steps: int, evaluations: float, batch_size: int, *, name: str = "fraction"
) -> int:
    """The number of refreshes within a fraction of the training's gradients.

    Args:
        fraction: of the training's gradients.
        steps: T.
        evaluations: cost of the points of the curve, in gradients of a batch.
        batch_size: B, for the message.
        name: of the fraction in messages.

    Returns:
        K.

    Raises:
        ValueError: fewer than `FEWEST`.

    Example:
        >>> affordable(0.2, 600, evaluations=22.0, batch_size=16)
        84
    """
    refreshes = affordable_refreshes(fraction * steps - evaluations)
    if refreshes < FEWEST:
        raise ValueError(
            f"{name}={fraction:g} of {steps} steps affords {refreshes} gradients besides the "
            f"points of the curve (worth {evaluations:.3g} batches of {batch_size}); {FEWEST} are "
            f"needed. Give a larger {name}, fewer watched sequences, or train it."
        )
    return min(refreshes, steps)
