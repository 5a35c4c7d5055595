"""Uncertainty of a forecast: the ± of losses and times, bands that hold most runs, warnings.

Three sources of error add up:

- *the integrator*: the correction by rebuilt kernels is the error of the loss; the error of a time
  is its shift when the curve is shifted by that error (`time_error`);
- *draws* of mini-batches, whose quantiles are bands (`loss_band`);
- *a sketch*: curves without one part of it at a time, by the jackknife (`with_error`).

A forecast on one kernel has no error estimate. There the network is evaluated at predicted weights
(`check_linearization`), and a warning compares outputs and gradients with the linearized ones. All
constants are in `Calibration`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxttp._core.compile import jit
from jaxttp._core.types import Params
from jaxttp.dynamics._kernels import apply_kernel
from jaxttp.dynamics._network import outputs_and_pull
from jaxttp.dynamics._trajectory import Trajectory
from jaxttp.dynamics.relinearize import RelinearizedTrajectory
from jaxttp.forecast.methods.base import Linearizer, recur
from jaxttp.forecast.problem import loss_and_error
from jaxttp.forecast.training_setup import Descent
from jaxttp.losses import Loss
from jaxttp.losses.rule import Rule, Target, training_time
from jaxttp.ntk.kernels import Kernel


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Constants of bands, errors and warnings.

    Chosen on tuning tasks; on others `experiments.bench.trust` measures how often the warnings are
    right, and `experiments/training_time/calibration.py` the bands.

    Attributes:
        level: default fraction of runs that bands hold.
        spread: exponent by which real mini-batch runs scatter more than those of the linearized
            network.
        center: fraction of a relinearized loss's error in its band; bands of times use all of it.
        part: fraction of the samples at which the network is evaluated.
        least: least number of these samples.
        points: on a straight line in weight space, the candidates for the evaluation.
        towards: fraction of the predicted decrease that is left at the end of this line.
        asked: the evaluation is at the first point where this fraction is left. Of points on the
            line and on the path it separated right forecasts from wrong ones best.
        nothing: floor of losses in ratios, as a fraction of the first loss.
        of_loss: exponent that makes a ratio of losses comparable with one of speeds.
        off: ratios of speed or loss between network and linearization, and the relative error of
            times above them. In 182 runs the largest error of three times was, in 8 of 10 cases, at
            most 0.10 for ratios below 1.2, 0.18 up to 1.5, 0.32 up to 2, 0.43 up to 5 and 0.59
            beyond. Below the least ratio there is no warning.
        unsure: relative error of a relinearized time above which there is a warning: the largest
            value at which four of five times with errors above 13 % have one.
        slack: errors of at most this many steps have no warning.
        rise: a loss above this multiple of its start has a warning.
        rose: so has a loss that ends above this multiple of its least,
        drop: if the difference is at least this fraction of its decrease.
    """

    level: float = 0.9
    spread: float = 1.5
    center: float = 0.3
    part: float = 0.2
    least: int = 32
    points: int = 64
    towards: float = 0.1
    asked: float = 0.2
    nothing: float = 1e-6
    of_loss: float = 1.5
    off: tuple[tuple[float, str], ...] = ((5.0, "two thirds"), (2.0, "half"), (1.5, "a third"))
    unsure: float = 0.18
    slack: int = 2
    rise: float = 2.0
    rose: float = 2.0
    drop: float = 0.05


KNOWN = Calibration()


class Times(NamedTuple):
    """Training times, with bands and errors, by threshold or target.

    Attributes:
        steps: the median over draws where there are some; -1 for never.
        bands: where most runs lie; None without draws and sketch.
        errors: the ± by the integrator's own estimate; None where it has none.
    """

    steps: dict[Any, int]
    bands: dict[Any, tuple[int, int]] | None = None
    errors: dict[Any, int] | None = None


def read_times(
    path: Any,
    rule: Rule,
    *,
    stable: bool,
    level: float = KNOWN.level,
    sketched: tuple[Array, Array] | None = None,
    doubted_from: int | None = None,
) -> Times:
    """Training times of a path, with bands from its draws and its sketch.

    Args:
        path: of any dynamics.
        rule: how times are read.
        stable: whether they count as reached.
        level: the fraction of runs that bands hold, in (0, 1).
        sketched: losses and errors (G, T + 1) without each part of a sketch.
        doubted_from: the step from which on a warning states no size: later times, and those that
            are not reached, have neither band nor error then. None for never.
    """
    horizon = path.loss.shape[0] - 1
    steps = rule.read(path.loss, path.error, reached=stable)
    bands = errors = None
    if path.uncertainty is not None:
        errors = {
            e: time_error(path.loss, path.uncertainty, functools.partial(rule.time, threshold=e))
            if rule.metric == "loss"
            else displaced(path.loss, path.uncertainty, time)
            for e, time in steps.items()
        }
    if path.draws is not None and stable:
        curves, bands = rule.curve(path.draws.loss, path.draws.error), {}
        for e in rule.thresholds:
            times = np.array([int(rule.time(curve, e)) for curve in np.asarray(curves)])
            low, steps[e], high = _quantiles(times, level, horizon)
            # A band lies around the center, whose own error widens it.
            room = errors[e] if errors is not None and min(low, high) >= 0 else 0
            bands[e] = max(min(low, 0), low - room), min(horizon, high + room)
    if sketched is not None and stable:
        curves = rule.curve(*sketched)
        bands = {e: (t, t) for e, t in steps.items()} if bands is None else bands
        for e, (low, high) in bands.items():
            parts = [int(rule.time(curve, e)) for curve in curves]
            if min(low, high, *parts) >= 0:  # one that is not reached stays as it is
                ends = with_error((low, high), steps[e], jackknife(parts), level)
                bands[e] = max(0, int(np.floor(ends[0]))), min(horizon, int(np.ceil(ends[1])))
    for e, time in steps.items():
        if doubted_from is not None and not 0 <= time <= doubted_from:
            (bands or {}).pop(e, None)
            (errors or {}).pop(e, None)
    return Times(steps, bands, errors)


def read_targets(
    path: Any,
    targets: Iterable[Target],
    smooth: int,
    *,
    sketched: tuple[Array, Array] | None = None,
    **options: Any,
) -> Times:
    """The same by target, off curves averaged over `smooth` steps; see `read_times`.

    Those of the test samples have neither band nor error, which are estimated on the training
    samples.
    """
    steps: dict[Target, int] = {}
    bands: dict[Target, tuple[int, int]] = {}
    errors: dict[Target, int] = {}
    for target in targets:
        curves, parts = path, sketched
        if target.on == "test":
            test = {"loss": path.test_loss, "error": path.test_error}
            curves, parts = dataclasses.replace(path, uncertainty=None, draws=None, **test), None
        times = read_times(curves, target.rule(smooth), sketched=parts, **options)
        steps[target] = times.steps[target.value]
        if times.bands:
            bands[target] = times.bands[target.value]
        if times.errors:
            errors[target] = times.errors[target.value]
    return Times(steps, bands, errors)


def _quantiles(times: np.ndarray, level: float, horizon: int) -> list[int]:
    """The ends of a band of times and their median; paths that never arrive (-1) are the latest."""
    times = np.where(times < 0, horizon + 1, times)
    ends = np.quantile(times, ((1 - level) / 2, 0.5, (1 + level) / 2), method="nearest")
    return [-1 if time > horizon else int(time) for time in ends]


def time_error(loss: Any, error: Any, read: Callable[[Any], Any]) -> int:
    """How far a training time moves when the loss curve moves by its error.

    Args:
        loss: the forecast (T + 1,).
        error: the estimated error (T + 1,).
        read: curve -> step or -1.

    Returns:
        The larger move of both directions in steps, at least 1 (a time is a whole number); the
        horizon where a moved curve does not get there.

    Example:
        >>> line = np.linspace(1.0, 0.0, 11)
        >>> time_error(line, np.full(11, 0.15), lambda curve: training_time(curve, 0.5))
        1
    """
    loss, error = np.asarray(loss), np.asarray(error)
    time, *moved = (int(read(curve)) for curve in (loss, loss + error, loss - error))
    if time < 0 or min(moved) < 0:
        return len(loss) - 1
    return max(1, *(abs(end - time) for end in moved))


def displaced(loss: Any, error: Any, time: int) -> int:
    """How far the loss of a step moves in time, which estimates the same for other curves.

    Args:
        loss: the forecast on the training samples (T + 1,).
        error: its estimated error (T + 1,).
        time: a step; -1 for never.

    Returns:
        Steps, as `time_error`; the horizon for never.

    Example:
        >>> displaced(np.linspace(1.0, 0.0, 11), np.full(11, 0.15), 4)
        2
    """
    if time < 0:
        return len(loss) - 1
    level = float(loss[time])
    return time_error(loss, error, lambda curve: training_time(curve, level, rule="absolute"))


def loss_band(
    path: Any, level: float, sketched: tuple[Array, Array] | None = None
) -> Float[Array, "2 t"] | None:
    """Where the loss of most runs lies at every step; None without draws and sketch.

    Args:
        path: of any dynamics; around a relinearized center the band leaves room for its error.
        level: the fraction of runs, in (0, 1).
        sketched: losses and errors (G, T + 1) without each part of a sketch.

    Returns:
        Lower and upper ends (2, T + 1).
    """
    band = None
    if path.draws is not None:
        ends = jnp.asarray([(1 - level) / 2, (1 + level) / 2], path.draws.loss.dtype)
        band = jnp.quantile(path.draws.loss, ends, axis=0)
        if path.uncertainty is not None:
            room = KNOWN.center * path.uncertainty
            band = jnp.stack([jnp.maximum(band[0] - room, 0.0), band[1] + room])
    if sketched is not None:
        whole = np.stack([path.loss, path.loss]) if band is None else band
        ends = with_error(whole, path.loss, jackknife(sketched[0]), level)
        band = jnp.asarray(np.maximum(ends, 0.0), path.loss.dtype)
    return band


def recentered(
    paths: Float[Array, "p t"], plain: Float[Array, " t"], center: Float[Array, " t"]
) -> Float[Array, "p t"]:
    """Loss curves of the linearized network, moved to where the relinearized one expects them.

    Each becomes center (L / plain)^1.5: a network whose kernel grows scatters more than one whose
    kernel does not.

    Args:
        paths: losses under many draws of the batches, (P, T + 1).
        plain: the full-batch loss of the linearized network (T + 1,).
        center: that of the relinearized one (T + 1,).

    Returns:
        The moved curves (P, T + 1).

    Example:
        >>> plain, center = jnp.array([1.0, 0.5]), jnp.array([1.0, 0.25])
        >>> recentered(jnp.array([[1.0, 0.5]]), plain, center).tolist()
        [[1.0, 0.25]]
    """
    tiny = jnp.finfo(paths.dtype).tiny
    ratio = jnp.maximum(paths, tiny) / jnp.maximum(plain, tiny)[None]
    return center[None] * ratio**KNOWN.spread


def jackknife(values: Any) -> np.ndarray:
    """Standard deviation of what all groups give, from what it is without each (G, ...)."""
    values = np.asarray(values, np.float64)
    groups = len(values)
    squares = np.sum((values - values.mean(axis=0)) ** 2, axis=0)
    return np.asarray(np.sqrt((groups - 1) / groups * squares))


def with_error(band: Any, middle: Any, deviation: Any, level: float) -> np.ndarray:
    """A band with room for an independent normal error of its middle.

    Args:
        band: lower and upper end (2, ...).
        middle: what lies between them (...).
        deviation: standard deviation of the error (...).
        level: in (0, 1).

    Returns:
        The ends (2, ...), half-widths added in squares.

    Example:
        >>> with_error([6.0, 14.0], 10.0, 3.0 / 1.2815515655446004, 0.8).round(9).tolist()
        [5.0, 15.0]
    """
    reach = NormalDist().inv_cdf((1 + level) / 2) * np.asarray(deviation, np.float64)
    low, high = np.asarray(band, np.float64)
    middle = np.asarray(middle, np.float64)
    below, above = np.maximum(middle - low, 0.0), np.maximum(high - middle, 0.0)
    return np.stack([middle - np.hypot(below, reach), middle + np.hypot(above, reach)])


def sampled(samples: int) -> int:
    """The number of samples at which the network is evaluated.

    Example:
        >>> sampled(20), sampled(100), sampled(1000)
        (20, 32, 200)
    """
    return max(min(samples, KNOWN.least), int(KNOWN.part * samples))


def passes_asked(samples: int) -> float:
    """Backward passes over all samples that `check_linearization` takes.

    Example:
        >>> passes_asked(20), passes_asked(1000)
        (2.0, 0.4)
    """
    return 2 * sampled(samples) / samples


class LinearizationCheck(NamedTuple):
    """How the network differs from its linearization at predicted weights.

    Attributes:
        step: on the line to whose weights it was evaluated; -1 where it was not.
        speed: how fast its loss falls there over how fast the forecast has it fall.
        loss: its loss over the predicted one; 1 where one of them is negative.
        samples: how many were evaluated.
        fraction: which of all that is.
    """

    step: int = -1
    speed: float = 1.0
    loss: float = 1.0
    samples: int = 0
    fraction: float = 1.0

    @property
    def passes(self) -> float:
        """Backward passes over all samples: for the weights, and at them."""
        return 2 * self.fraction if self.step >= 0 else 0.0


NO_CHECK = LinearizationCheck()


def check_linearization(linearizer: Linearizer, descent: Descent) -> LinearizationCheck:
    """How fast the network learns, and what its loss is, at weights that one kernel predicts.

    At outputs f with gradient g the loss falls by g^T Theta g, which is |J^T g|^2: with the J of
    weights w on the line from w_0 to w_t = c_t w_0 + J_0^T a_t, over that with J_0, at the outputs
    that the linearized network has there, f_0 + s (f_t - f_0). It costs two products with J^T.
    The weights are those of a training on a part of the samples alone, with the same optimizer and
    full batches: its kernel is a part of the kernel, so that nothing but those products is to be
    computed.

    Args:
        linearizer: with its kernel before training.
        descent: the training, by a linear optimizer.

    Returns:
        Speed and loss 1 for a linear network; infinite where the network is not finite. `NO_CHECK`
        where the loss does not change, the forecast diverges or there is no gradient.
    """
    whole = linearizer.problem.f0.shape[0]
    size, part = sampled(whole), linearizer
    if size < whole:  # drawn at random, the same ones every time
        part = linearizer.take(np.sort(np.random.default_rng(0).permutation(whole)[:size]))
    path = recur(part, descent.full)
    if diverges(path) and part is not linearizer:  # a part may be stiffer than the whole
        part, path = linearizer, recur(linearizer, descent.full)
    if diverges(path):
        return NO_CHECK
    problem = part.problem
    loss, size = problem.loss, problem.f0.shape[0]
    curve = np.asarray(loss_and_error(loss, path.train, problem.targets)[0])
    step, least = int(training_time(curve, KNOWN.towards)), float(curve.min())
    if step <= 0:
        return NO_CHECK
    level = least + KNOWN.asked * (float(curve[0]) - least)
    dual, scale, gradient, expected, predicted = _point(
        part.first, problem.f0, problem.targets, path.train, path.dual, path.scale,
        np.asarray(step), np.asarray(level, problem.f0.dtype), loss,
    )  # fmt: skip
    expected, predicted = float(expected), float(predicted)
    if expected <= 0:
        return NO_CHECK
    see = outputs_and_pull(problem.network)
    weights = _moved(problem.weights, see(problem.weights, problem.x, dual)[1], scale)
    outputs, pulled = see(weights, problem.x, gradient)
    real, square = map(float, _loss_and_square(outputs, pulled, problem.targets, loss))
    floor, ratio = KNOWN.nothing * float(curve[0]), 1.0
    if not np.isfinite(real):
        ratio = np.inf
    elif min(real, predicted) >= 0 and floor > 0:  # no ratio of a user's negative loss
        ratio = (real + floor) / (predicted + floor)
    speed = square / expected if np.isfinite(square) else np.inf
    return LinearizationCheck(step, speed, ratio, size, size / whole)


def diverges(path: Trajectory) -> bool:
    """Whether a path by steps, which can diverge, does."""
    assert path.diverged_at is not None
    return int(path.diverged_at) >= 0


@functools.partial(jit, static_argnums=8)
def _point(
    kernel: Kernel,
    start: Array,
    targets: Any,
    train: Array,
    dual: Array,
    scale: Array,
    step: Array,
    level: Array,
    loss: Loss,
) -> tuple[Array, Array, Array, Array, Array]:
    """The first point w_0 + s (w_t - w_0) on the line to w_t whose loss is low enough, or its end.

    Returns:
        dual: s a_t (N, C), so that its weights are scale w_0 + J_0^T dual.
        scale: 1 + s (c_t - 1).
        gradient: of the loss by the outputs f_0 + s (f_t - f_0) that the linearized network has
            there (N, C).
        expected: g^T Theta g, the speed at which the kernel has the loss fall there.
        loss: of those outputs.
    """
    moved = train[step] - start
    fractions = jnp.arange(1, KNOWN.points + 1, dtype=moved.dtype) / KNOWN.points
    losses = jax.vmap(lambda s: loss.value(start + s * moved, targets))(fractions)
    first = jnp.where(jnp.any(losses <= level), jnp.argmax(losses <= level), KNOWN.points - 1)
    s = fractions[first]
    gradient = loss.gradient(start + s * moved, targets)
    expected = jnp.sum(gradient * apply_kernel(kernel, gradient))
    return s * dual[step], 1 + s * (scale[step] - 1), gradient, expected, losses[first]


@jit
def _moved(params: Params, step: Params, scale: Array) -> Params:
    """C w_0 + the displacement."""
    return jax.tree.map(lambda w, m: scale.astype(w.dtype) * w + m, params, step)


@functools.partial(jit, static_argnums=3)
def _loss_and_square(
    outputs: Array, pulled: Params, targets: Any, loss: Loss
) -> tuple[Array, Array]:
    """The loss of outputs, and the squared norm of all leaves of J^T g."""
    square = sum((jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(pulled)), start=jnp.zeros(()))
    return loss.value(outputs, targets), square


def speed_warning(check: LinearizationCheck, loss: Float[Array | np.ndarray, " t"]) -> str | None:
    """The warning of a forecast with one kernel, by `check_linearization` and its loss curve.

    Args:
        check: with 1 where the linearization holds.
        loss: the predicted curve.

    Returns:
        A sentence, or None where there is no warning.
    """
    rising = loss_warning(loss, "the real network may not survive that; try a lower rate")
    if rising is not None or check.step < 0:
        return rising
    change, far = _times(check.speed), _times(check.loss) ** KNOWN.of_loss
    off = [error for least, error in KNOWN.off if max(change, far) >= least]
    if not off:
        return None
    alone = f" of {check.samples} samples alone" if check.fraction < 1 else ""
    where = f"on the way to the weights predicted for step {check.step}{alone}"
    ratio = check.loss if far > change else check.speed
    if not np.isfinite(ratio):
        return (
            f"{where} the network is not finite: one linearization does not hold that far; try a "
            "lower rate, or relinearize='auto'"
        )
    much = "over 100" if _times(ratio) > 100 else f"{_times(ratio):.2g}"
    if far > change:
        size = "times" if ratio > 1 else "times below"
        differs = f"the network's loss is {much} {size} what this one linearization has it"
    else:
        how = "fast" if ratio > 1 else "slowly"
        differs = f"the network learns {much} times as {how} as this one linearization has it"
    return (
        f"{where} {differs}: times can be off by {off[0]} of themselves; relinearize='auto' "
        "follows such changes"
    )


def _times(ratio: float) -> float:
    """How many times larger or smaller."""
    return max(ratio, 1 / ratio) if ratio > 0 else np.inf


def loss_warning(loss: Float[Array | np.ndarray, " t"], hint: str) -> str | None:
    """A warning where a predicted loss curve rises.

    Args:
        loss: L_0, ..., L_T.
        hint: what to do where it rises on the way.

    Returns:
        A sentence, or None where it falls.
    """
    curve = np.asarray(loss)
    top, least = float(curve.max() / curve[0]) if curve[0] > 0 else 1.0, int(curve.argmin())
    if top > KNOWN.rise:
        return f"the loss rises on the way, to {top:.2g} times its start: {hint}"
    if curve[-1] > KNOWN.rose * curve[least] and curve[-1] - curve[least] > KNOWN.drop * (
        curve[0] - curve[least]
    ):
        return (
            f"the loss rises again from step {least} on, which a real training seldom does: more "
            "kernels (relinearize) or a shorter horizon would be surer"
        )
    return None


def path_warning(path: RelinearizedTrajectory, rule: Rule) -> str | None:
    """The warning of a relinearized path.

    Args:
        path: of `relinearized_recursion`.
        rule: how times are read; those of the loss have an error by the path's own estimate.

    Returns:
        A sentence, or None where there is no warning.
    """
    if path.frozen_from >= 0 > path.edge_at:
        return (
            f"with later kernels the loss rises, which a real training seldom does: from step "
            f"{path.frozen_from} on the kernel of that step is kept; a smaller tolerance builds "
            "more kernels"
        )
    if path.frozen_from >= 0:
        return (
            f"at the edge of stability by step {path.edge_at}: a real training oscillates there; "
            f"this is a mean path with the kernel of step {path.frozen_from} frozen"
        )
    rising = loss_warning(
        path.loss,
        "at the edge of stability relinearized networks leave the range from which the real one "
        "often recovers; see relinearize=0",
    )
    if rising is not None:
        return rising
    unsure = []
    for threshold in rule.thresholds if rule.metric == "loss" else ():
        read = functools.partial(rule.time, threshold=threshold)
        step, off = int(read(path.loss)), time_error(path.loss, path.loss_uncertainty, read)
        relative = off / max(step, 1)
        if step >= 0 and off > KNOWN.slack and relative > KNOWN.unsure:
            unsure.append((relative, step, off, threshold))
    if not unsure:
        return None
    _, step, off, threshold = max(unsure)
    never = off >= len(path.loss) - 1
    accuracy = "may as well never come" if never else f"is known to ± {off} only"
    line = f"step {step} ({rule.words(threshold)}) {accuracy}, by what the last kernels changed"
    if path.edge_at >= 0:
        return (
            f"crosses the edge of stability by step {path.edge_at}: a real training oscillates "
            f"there, and this is the mean path; {line}"
        )
    return f"{line}; a smaller tolerance builds more kernels"
