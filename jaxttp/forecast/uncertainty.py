"""How sure is a forecast: bands of draws, errors of rebuilt kernels and sketches, doubts in words.

In this order: bands, errors of times, what a path comes to (`Doubt`); the network as a witness of a
forecast with one kernel, asked how it fares at predicted weights (`ask_network`); warnings.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxttp._core.compile import jit
from jaxttp._core.types import ApplyFn, Params, take
from jaxttp.dynamics._kernels import apply_kernel, block_of
from jaxttp.dynamics._network import outputs_and_pull
from jaxttp.dynamics._trajectory import Trajectory
from jaxttp.dynamics.relinearize import RelinearizedTrajectory
from jaxttp.forecast.problem import loss_and_error
from jaxttp.losses import Loss
from jaxttp.losses.rule import Rule, Target, metric_time, training_time
from jaxttp.ntk.kernels import Kernel


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The numbers behind bands, errors and warnings.

    Chosen on tuning tasks; on others `experiments.bench.trust` measures how often the warnings are
    right, and `experiments/training_time/calibration.py` the bands.

    Attributes:
        spread: how much wider real runs of mini-batches scatter than those of the linearised
            network.
        centre: the share of a re-linearised loss's error estimate that its band allows for; times
            need all.
        part: the share of the samples that the network is asked about.
        least: and so many where there are.
        points: on a way that are looked at.
        towards: on the straight way to the weights where this share of the predicted drop is left,
        asked: the network is asked where this one is: of places on this way and on the path itself,
            one or two, it told right forecasts from wrong ones best, for one of two ways back.
        nothing: a share of the first loss below which losses are alike.
        of_loss: a loss that is r times as large counts as a speed that is r to the power of this.
        off: factors by which the network's speed of learning is another one, and by how much of the
            real times forecasts were off then. In 182 runs the largest error of three times was in
            8 of 10 at most 0.10 of the real one where speed or loss are by less than 1.2 times
            others, 0.18 up to 1.5, 0.32 up to 2, 0.43 up to 5 and 0.59 beyond. Below the least of
            these there is no doubt.
        unsure: a re-linearised time is, where its estimated error exceeds this share of it. The
            estimate is on the safe side: this is the largest share at which four of five times that
            are off by more than 13 % are doubted.
        slack: errors of so many steps are of no account.
        rise: a loss that comes to this multiple of its start is not believed.
        rose: a loss that ends this many times above its least is said to have risen,
        drop: if that is at least this share of its drop.
    """

    spread: float = 1.5
    centre: float = 0.3
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


def recentred(
    paths: Float[Array, "p t"], plain: Float[Array, " t"], centre: Float[Array, " t"]
) -> Float[Array, "p t"]:
    """Loss curves of the linearised network, moved to where the re-linearised one expects them.

    Each becomes centre (L / plain)^1.5: a network whose kernel grows scatters more than one whose
    kernel does not.

    Args:
        paths: losses under many draws of the batches, (P, T + 1).
        plain: the full-batch loss of the linearised network (T + 1,).
        centre: that of the re-linearised one (T + 1,).

    Returns:
        The moved curves (P, T + 1).

    Example:
        >>> import jax.numpy as jnp
        >>> plain, centre = jnp.array([1.0, 0.5]), jnp.array([1.0, 0.25])
        >>> recentred(jnp.array([[1.0, 0.5]]), plain, centre).tolist()
        [[1.0, 0.25]]
    """
    tiny = jnp.finfo(paths.dtype).tiny
    ratio = jnp.maximum(paths, tiny) / jnp.maximum(plain, tiny)[None]
    return centre[None] * ratio**KNOWN.spread


def loss_band(
    paths: Float[Array, "p t"], level: float, uncertainty: Float[Array, " t"] | None = None
) -> Float[Array, "2 t"]:
    """The band that holds a share `level` of the curves at every step, and the centre's error.

    Args:
        paths: loss curves (P, T + 1).
        level: in (0, 1).
        uncertainty: estimated error of a re-linearised centre (T + 1,).

    Returns:
        Lower and upper ends (2, T + 1).

    Example:
        >>> import jax.numpy as jnp
        >>> loss_band(jnp.arange(11.0)[:, None], 0.8).round(6).tolist()
        [[1.0], [9.0]]
    """
    ends = jnp.asarray([(1 - level) / 2, (1 + level) / 2], paths.dtype)
    band = jnp.quantile(paths, ends, axis=0)
    if uncertainty is None:
        return band
    more = KNOWN.centre * uncertainty
    return jnp.stack([jnp.maximum(band[0] - more, 0.0), band[1] + more])


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


def steps_with_error(
    bands: Mapping[float, tuple[int, int]] | None,
    times: Mapping[float, int],
    reads: Mapping[float, Sequence[int]],
    level: float,
    horizon: int,
) -> dict[float, tuple[int, int]]:
    """Bands of training times with room for the error of a sketch, within the horizon.

    Args:
        bands: by threshold; the times themselves when None.
        times: training times.
        reads: what they are without each group of the sketch.
        level: in (0, 1).
        horizon: T.

    Returns:
        The wider bands; one that is not reached stays as it is.

    Example:
        >>> steps_with_error(None, {0.1: 20}, {0.1: [19, 20, 20, 21]}, 0.9, 150)
        {0.1: (17, 23)}
    """
    out = dict(bands) if bands is not None else {e: (t, t) for e, t in times.items()}
    for e, (low, high) in out.items():
        if min(low, high, *reads[e]) >= 0:
            ends = with_error((low, high), times[e], jackknife(reads[e]), level)
            out[e] = (max(0, int(np.floor(ends[0]))), min(horizon, int(np.ceil(ends[1]))))
    return out


def steps_band(
    curves: Array,
    threshold: float,
    *,
    quantiles: tuple[float, ...] = (0.1, 0.5, 0.9),
    read: Callable[..., Any] = metric_time,
    **definition: Any,
) -> tuple[int, ...]:
    """Quantiles of the training time over many curves.

    Args:
        curves: losses or errors (P, T + 1), one curve a path.
        threshold: epsilon, as in `training_time`.
        quantiles: shares of the paths.
        read: (curve, threshold) -> step or -1.
        **definition: metric, rule, window and smooth of `metric_time`.

    Returns:
        One step a quantile, -1 for never: paths that never get there are later than all others.

    Example:
        >>> import jax.numpy as jnp
        >>> curves = jnp.array([[1.0, 0.5, 0.0, 0.0], [1.0, 0.9, 0.5, 0.0]])
        >>> steps_band(curves, 0.6, quantiles=(0.0, 1.0))
        (1, 2)
    """
    times = np.array([int(read(curve, threshold, **definition)) for curve in np.asarray(curves)])
    never = curves.shape[1]
    times = np.where(times < 0, never, times)
    found = np.quantile(times, quantiles, method="nearest")
    return tuple(-1 if t == never else int(t) for t in found)


def steps_uncertainty(
    loss: Any,
    uncertainty: Any,
    threshold: float,
    read: Callable[..., Any] = metric_time,
    **definition: Any,
) -> int:
    """How far a training time moves when the loss curve moves by its uncertainty.

    Args:
        loss: the forecast (T + 1,).
        uncertainty: its estimated error (T + 1,).
        threshold: epsilon, as in `training_time`.
        read: (curve, threshold) -> step or -1.
        **definition: rule, window and smooth of `metric_time`.

    Returns:
        The larger move of both directions in steps, at least 1 (a time is a whole number); the
        horizon where a moved curve does not get there.

    Example:
        >>> import jax.numpy as jnp
        >>> steps_uncertainty(jnp.linspace(1.0, 0.0, 11), jnp.zeros(11), 0.5)
        1
    """
    loss, uncertainty = np.asarray(loss), np.asarray(uncertainty)
    moved = (loss, loss + uncertainty, loss - uncertainty)
    base, *others = (int(read(curve, threshold, **definition)) for curve in moved)
    if base < 0 or min(others) < 0:
        return len(loss) - 1
    return max(1, *(abs(other - base) for other in others))


def displaced(loss: Any, uncertainty: Any, time: int) -> int:
    """How far the loss of a step moves in time; as far, for want of better, other curves do.

    Args:
        loss: the forecast on the training samples (T + 1,).
        uncertainty: its estimated error (T + 1,).
        time: a step; -1 for never.

    Returns:
        Steps, as `steps_uncertainty`; the horizon for never.

    Example:
        >>> import jax.numpy as jnp
        >>> displaced(jnp.linspace(1.0, 0.0, 11), jnp.full(11, 0.15), 4)
        2
    """
    if time < 0:
        return len(loss) - 1
    level = float(loss[time])
    return steps_uncertainty(loss, uncertainty, level, rule="absolute")


LEVEL = 0.9


@dataclasses.dataclass(frozen=True, eq=False)
class Doubt:
    """Training times, and how sure they and the loss are.

    Attributes:
        steps: by threshold; the median over draws where there are some.
        loss_band: where the loss of a share of all runs lies (2, T + 1), or None.
        steps_band: the same for every training time, or None.
        steps_uncertainty: the error of a re-linearised time by its own estimate, or None.
        targets: steps by target.
        targets_band: the same as `steps_band`, for the targets that have one.
        targets_uncertainty: the same as `steps_uncertainty`, for the targets that have one.
    """

    steps: Mapping[float, int]
    loss_band: Float[Array, "2 t"] | None = None
    steps_band: Mapping[float, tuple[int, int]] | None = None
    steps_uncertainty: Mapping[float, int] | None = None
    targets: Mapping[Target, int] = dataclasses.field(default_factory=dict)
    targets_band: Mapping[Target, tuple[int, int]] = dataclasses.field(default_factory=dict)
    targets_uncertainty: Mapping[Target, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        path: Any,
        rule: Rule,
        *,
        stable: bool,
        level: float = LEVEL,
        sketched: tuple[Array, Array] | None = None,
        targets: Iterable[Target] = (),
        doubted_from: int | None = None,
    ) -> "Doubt":
        """Read a path.

        Args:
            path: of any dynamics.
            rule: how times are read.
            stable: whether they count as reached.
            level: the share that bands hold, in (0, 1).
            sketched: losses and errors (G, T + 1) without each part of a sketch, see
                `without_parts`.
            targets: read off the same curves, averaged as the rule's; those of the test samples
                have neither band nor uncertainty.
            doubted_from: see `Prediction`; later times, and those that are not reached, have
                neither band nor uncertainty then.
        """
        band = None
        if path.draws is not None:
            band = loss_band(path.draws.loss, level, path.uncertainty)
        if sketched is not None:
            whole = jnp.stack([path.loss, path.loss]) if band is None else band
            ends = with_error(whole, path.loss, jackknife(sketched[0]), level)
            band = jnp.maximum(jnp.asarray(ends, path.loss.dtype), 0.0)
        own = _read(path, rule, stable=stable, level=level, sketched=sketched)
        own = own.until(doubted_from)
        asked = {}
        for target in targets:
            seen, parts = (path, sketched) if target.on == "train" else (_test(path), None)
            found = _read(seen, target.rule(rule.smooth), stable=stable, level=level,
                          sketched=parts)  # fmt: skip
            found = found.until(doubted_from)
            asked[target] = _Times(*(None if v is None else v.get(target.value) for v in found))
        return cls(
            own.steps, band, own.band, own.uncertainty,
            targets={target: one.steps for target, one in asked.items()},
            targets_band={t: one.band for t, one in asked.items() if one.band is not None},
            targets_uncertainty={
                t: one.uncertainty for t, one in asked.items() if one.uncertainty is not None
            },
        )  # fmt: skip


class _Times(NamedTuple):
    """Times by threshold, where they lie, and their error by the path's own estimate."""

    steps: Any
    band: Any
    uncertainty: Any

    def until(self, step: int | None) -> "_Times":
        """The same, without bands and errors of times after a step, and of none; None for all."""
        if step is None:
            return self
        sure = {threshold for threshold, time in self.steps.items() if 0 <= time <= step}
        band, uncertainty = (
            found and {e: one for e, one in found.items() if e in sure}
            for found in (self.band, self.uncertainty)
        )
        return _Times(self.steps, band, uncertainty)


def _test(path: Any) -> Any:
    """The curves on the test samples in the place of those on the training samples."""
    assert path.test_loss is not None  # checked
    assert path.test_error is not None
    return dataclasses.replace(
        path, loss=path.test_loss, error=path.test_error, uncertainty=None, draws=None
    )


def _read(
    path: Any,
    rule: Rule,
    *,
    stable: bool,
    level: float,
    sketched: tuple[Array, Array] | None,
) -> _Times:
    """What a rule reads off a path, its draws and its rebuilt sketches."""
    horizon = path.loss.shape[0] - 1
    times = rule.read(path.loss, path.error, reached=stable)
    own = bands = None
    if path.uncertainty is not None and rule.metric == "loss":
        own = {
            e: steps_uncertainty(path.loss, path.uncertainty, e, rule.time) for e in rule.thresholds
        }
    elif path.uncertainty is not None:
        own = {e: displaced(path.loss, path.uncertainty, time) for e, time in times.items()}
    if path.draws is not None and stable:
        quantiles = ((1 - level) / 2, 0.5, (1 + level) / 2)
        curves = rule.curve(path.draws.loss, path.draws.error)
        found = {
            e: steps_band(curves, e, quantiles=quantiles, read=rule.time) for e in rule.thresholds
        }
        times = {e: middle for e, (_, middle, _) in found.items()}
        bands = {}
        for e, (low, _, high) in found.items():
            room = 0 if own is None or min(low, high) < 0 else own[e]
            bands[e] = max(min(low, 0), low - room), min(horizon, high + room)
    if sketched is not None and stable:
        curves = rule.curve(*sketched)
        reads = {e: [int(rule.time(curve, e)) for curve in curves] for e in rule.thresholds}
        bands = steps_with_error(bands, times, reads, level, horizon)
    return _Times(times, bands, own)


class Subset(NamedTuple):
    """Some of the samples, and their kernel.

    Attributes:
        kernel: Theta of theirs.
        x: samples (n, ...).
        targets: encoded.
        start: their outputs before training (n, C).
        rows: which they are; None for all.
    """

    kernel: Kernel
    x: Any
    targets: Any
    start: Array
    rows: np.ndarray | None = None

    @property
    def size(self) -> int:
        """How many there are."""
        return self.start.shape[0]

    def some(self) -> "Subset":
        """As many as the network is asked about, drawn by lot, the same ones every time."""
        size = sampled(self.size)
        if size >= self.size:
            return self
        rows = np.sort(np.random.default_rng(0).permutation(self.size)[:size])
        kernel = block_of(self.kernel, rows, rows)
        return Subset(kernel, take(self.x, rows), take(self.targets, rows), self.start[rows], rows)


def sampled(samples: int) -> int:
    """How many of so many samples the network is asked about.

    Example:
        >>> sampled(20), sampled(100), sampled(1000)
        (20, 32, 200)
    """
    return max(min(samples, KNOWN.least), int(KNOWN.part * samples))


@jit
def _moved(params: Params, step: Params, scale: Array) -> Params:
    """C w_0 + the displacement."""
    return jax.tree.map(lambda w, m: scale.astype(w.dtype) * w + m, params, step)


@functools.partial(jit, static_argnums=3)
def _loss_and_square(
    outputs: Array, pulled: Params, targets: Any, loss: Loss
) -> tuple[Array, Array]:
    """The loss of outputs, and the squared norm of all leaves of J^T g."""
    found = sum((jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(pulled)), start=jnp.zeros(()))
    return loss.value(outputs, targets), found


class Waypoint(NamedTuple):
    """A point w_0 + s (w_t - w_0) on the way to the weights w_t = c_t w_0 + J_0^T a_t of a step.

    Attributes:
        dual: s a_t (N, C), so that its weights are scale w_0 + J_0^T dual.
        scale: 1 + s (c_t - 1).
        gradient: of the loss by the outputs f_0 + s (f_t - f_0) that the linearised network has
            there (N, C).
        expected: g^T Theta g, the speed at which the kernel has the loss fall there.
        loss: of those outputs.
    """

    dual: Array
    scale: Array
    gradient: Array
    expected: Array
    loss: Array


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
) -> Waypoint:
    """The first of points on the way to the weights of a step whose loss is low enough.

    Where none is, the end of the way.
    """
    moved = train[step] - start
    ways = jnp.arange(1, KNOWN.points + 1, dtype=moved.dtype) / KNOWN.points
    losses = jax.vmap(lambda s: loss.value(start + s * moved, targets))(ways)
    found = jnp.where(jnp.any(losses <= level), jnp.argmax(losses <= level), KNOWN.points - 1)
    way = ways[found]
    gradient = loss.gradient(start + way * moved, targets)
    expected = jnp.sum(gradient * apply_kernel(kernel, gradient))
    return Waypoint(
        way * dual[step], 1 + way * (scale[step] - 1), gradient, expected, losses[found]
    )


class Witness(NamedTuple):
    """What the network says of a forecast with one kernel.

    Attributes:
        step: on the way to whose weights it was asked; -1 where nobody was.
        speed: how fast its loss falls there over how fast the forecast has it fall.
        loss: its loss over the predicted one; 1 where one of them is negative.
        samples: how many it was asked about.
        share: which of all that is.
    """

    step: int = -1
    speed: float = 1.0
    loss: float = 1.0
    samples: int = 0
    share: float = 1.0

    @property
    def passes(self) -> float:
        """Ways on and back through the network with all samples: to the place, and there."""
        return 2 * self.share if self.step >= 0 else 0.0


NOBODY = Witness()


def passes_asked(samples: int) -> float:
    """The same before anybody is asked, with so many samples.

    Example:
        >>> passes_asked(20), passes_asked(1000)
        (2.0, 0.4)
    """
    return 2 * sampled(samples) / samples


def ask_network(
    network: ApplyFn,
    params: Params,
    whole: Subset,
    loss: Loss,
    follow: Callable[[Subset], Trajectory],
) -> Witness:
    """How fast the network learns, and what its loss is, at weights that one kernel predicts.

    At outputs f with gradient g the loss falls by g^T Theta g, which is |J^T g|^2: with the J of
    weights w on the way from w_0 to w_t = c_t w_0 + J_0^T a_t, over that with J_0, at the outputs
    that the linearised network has there, f_0 + s (f_t - f_0). It costs two products with J^T.
    The weights are those of a training on a part of the samples alone, with the same optimiser and
    full batches: its kernel is a part of the kernel, so that nothing but those products is to be
    paid for.

    Args:
        network: ``(params, x) -> outputs (N, C)``.
        params: w_0, the part that is trained.
        whole: all samples and their kernel.
        loss: exact.
        follow: the training of some samples, of `recursion`, which knows a_t and c_t.

    Returns:
        Speed and loss 1 for a linear network; infinite where the network is not finite. `NOBODY`
        where the loss does not change, the forecast diverges or there is no gradient.
    """
    part = whole.some()
    path = follow(part)
    if _diverges(path) and part is not whole:  # a part may be stiffer than the whole
        part, path = whole, follow(whole)
    if _diverges(path):
        return NOBODY
    curve = np.asarray(loss_and_error(loss, path.train, part.targets)[0])
    step, least = int(training_time(curve, KNOWN.towards)), float(curve.min())
    if step <= 0:
        return NOBODY
    level = least + KNOWN.asked * (float(curve[0]) - least)
    point = _point(
        part.kernel, part.start, part.targets, path.train, path.dual, path.scale,
        np.asarray(step), np.asarray(level, part.start.dtype), loss,
    )  # fmt: skip
    expected = float(point.expected)
    if expected <= 0:
        return NOBODY
    see = outputs_and_pull(network)
    weights = _moved(params, see(params, part.x, point.dual)[1], point.scale)
    outputs, pulled = see(weights, part.x, point.gradient)
    real, found = map(float, _loss_and_square(outputs, pulled, part.targets, loss))
    return Witness(
        step=step,
        speed=found / expected if np.isfinite(found) else np.inf,
        loss=_over(real, float(point.loss), float(curve[0])),
        samples=part.size,
        share=part.size / whole.size,
    )


def _diverges(path: Trajectory) -> bool:
    assert path.diverged_at is not None
    return int(path.diverged_at) >= 0


def _over(real: float, predicted: float, first: float) -> float:
    """A loss over what was predicted, where that means something."""
    if not np.isfinite(real):
        return np.inf
    if min(real, predicted) < 0 or first <= 0:
        return 1.0
    return (real + KNOWN.nothing * first) / (predicted + KNOWN.nothing * first)


def trust_in_speeds(witness: Witness, loss: Float[Array | np.ndarray, " t"]) -> str | None:
    """What `ask_network` and the predicted curve say of a forecast with one kernel.

    Args:
        witness: with 1 where the linearisation holds.
        loss: the predicted curve.

    Returns:
        A sentence, or None where there is no doubt.
    """
    rising = trust_in_loss(loss, "the real network may not survive that; try a lower rate")
    if rising is not None:
        return rising
    if witness.step < 0:
        return None
    change, far = _times(witness.speed), _times(witness.loss) ** KNOWN.of_loss
    if max(change, far) <= min(KNOWN.off)[0]:
        return None
    by_loss = far > change
    told = witness.loss if by_loss else witness.speed
    alone = f" of {witness.samples} samples alone" if witness.share < 1 else ""
    where = f"on the way to the weights predicted for step {witness.step}{alone}"
    if not np.isfinite(told):
        return (
            f"{where} the network is not finite: one linearization does not hold that far; try a "
            "lower rate, or relinearize='auto'"
        )
    off = next(words for least, words in KNOWN.off if max(change, far) >= least)
    times = _times(told)
    much = "over 100" if times > 100 else f"{times:.2g}"
    if by_loss:
        size = "times" if told > 1 else "times below"
        found = f"the network's loss is {much} {size} what this one linearization has it"
    else:
        how = "fast" if told > 1 else "slowly"
        found = f"the network learns {much} times as {how} as this one linearization has it"
    return (
        f"{where} {found}: times can be off by {off} of themselves; relinearize='auto' follows "
        "such changes"
    )


def _times(ratio: float) -> float:
    """How many times larger or smaller."""
    return max(ratio, 1 / ratio) if ratio > 0 else np.inf


def trust_in_loss(loss: Float[Array | np.ndarray, " t"], remedy: str) -> str | None:
    """What a predicted loss curve says of itself: that it rises.

    Args:
        loss: L_0, ..., L_T.
        remedy: what to do where it rises on the way.

    Returns:
        A sentence, or None where it falls.
    """
    curve = np.asarray(loss)
    top, least = float(curve.max() / curve[0]) if curve[0] > 0 else 1.0, int(curve.argmin())
    if top > KNOWN.rise:
        return f"the loss rises on the way, to {top:.2g} times its start: {remedy}"
    if curve[-1] > KNOWN.rose * curve[least] and curve[-1] - curve[least] > KNOWN.drop * (
        curve[0] - curve[least]
    ):
        return (
            f"the loss rises again from step {least} on, which a real training seldom does: more "
            "kernels (relinearize) or a shorter horizon would be surer"
        )
    return None


def trust_in_path(path: RelinearizedTrajectory, rule: Rule) -> str | None:
    """What a re-linearised path says of itself.

    Args:
        path: of `relinearized_recursion`.
        rule: how times are read; those of the loss have an error by the path's own estimate.

    Returns:
        A sentence, or None where there is no doubt.
    """
    if path.held_from >= 0:
        return (
            f"at the edge of stability by step {path.edge_at}: a real training oscillates there; "
            f"this is a mean path with the kernel of step {path.held_from} held"
        )
    rising = trust_in_loss(
        path.loss,
        "at the edge of stability re-linearised networks leave the range from which the real one "
        "often recovers; see relinearize=0",
    )
    if rising is not None:
        return rising
    worst, time, doubt = None, 0, 0
    for threshold in rule.thresholds if rule.metric == "loss" else ():
        step = int(rule.time(path.loss, threshold))
        off = steps_uncertainty(path.loss, path.loss_uncertainty, threshold, rule.time)
        share = off / max(step, 1) if step >= 0 and off > KNOWN.slack else 0.0
        if share > (KNOWN.unsure if worst is None else doubt / max(time, 1)):
            worst, time, doubt = threshold, step, off
    if worst is None:
        return None
    never = doubt >= len(path.loss) - 1
    known = "may as well never come" if never else f"is known to ± {doubt} only"
    line = f"step {time} ({rule.words(worst)}) {known}, by what the last kernels changed"
    if path.edge_at >= 0:
        return (
            f"crosses the edge of stability by step {path.edge_at}: a real training oscillates "
            f"there, and this is the mean path; {line}"
        )
    return f"{line}; a smaller tolerance builds more kernels"
