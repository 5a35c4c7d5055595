"""One kernel, a thousand settings: forecasts for whole grids of hyper-parameters.

All settings of one loss and batch size move together along the first kernel, so that a step of all
of them is one matrix product; algorithms that are not heavy-ball descent are forecast one by one.
One kernel ranks a thousand settings at once, but its times can be three times the real ones, and it
passes over rates at which the kernel soon outgrows them. So those that lead are forecast again, as
`predict_training_time` does, best first, until what leads has been.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxttp._core.checks import check_array, check_known, check_number
from jaxttp._core.types import ApplyFn, Params, count
from jaxttp.adapters.inputs import check_samples
from jaxttp.dynamics._kernels import check_problem
from jaxttp.dynamics.batches import batch_indices, check_batches
from jaxttp.dynamics.recursion import heavy_ball_curves
from jaxttp.dynamics.stability import max_learning_rate
from jaxttp.forecast.cost import Price, plan_forecast, suited
from jaxttp.forecast.methods.base import Linearizer
from jaxttp.forecast.methods.linear import Linear, Recursion
from jaxttp.forecast.methods.relinearized import Relinearized
from jaxttp.forecast.options import (
    Keywords,
    announce,
    check_processes,
    check_tokens,
    choose_kernel,
)
from jaxttp.forecast.predict import forecast_along
from jaxttp.forecast.prediction import Prediction
from jaxttp.forecast.problem import Problem
from jaxttp.forecast.stability import batch_factor, rises
from jaxttp.forecast.swept import FEW, SHOWN, Sweep
from jaxttp.forecast.training_setup import Descent, Hyperparameters, check_descent, check_settings
from jaxttp.forecast.uncertainty import trust_in_speeds
from jaxttp.losses import Loss, get_loss
from jaxttp.losses.rule import TRAIN_CURVES, Rule, Target, Values, check_targets, targets_of
from jaxttp.ntk.estimators import KernelEstimator
from jaxttp.ntk.kernels import Kernel, KernelLike

Progress = Callable[[str, int, int], None]
StepSeconds = float | Mapping[int | None, float] | Sequence[float] | np.ndarray | None

LEAST, MOST = 2, 8
"""So many settings are forecast again, at least and at most."""
_CHUNK_BYTES = 64 << 20


def sweep(  # noqa: PLR0913
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    settings: Sequence[Hyperparameters],
    *,
    loss: str | Loss | None = None,
    thresholds: Sequence[float] | None = None,
    target_loss: Values = None,
    target_error: Values = None,
    rule: str | Rule = "relative",
    metric: str = "loss",
    smooth: int = 1,
    window: int | None = None,
    key: Array | None = None,
    protocol: str | None = None,
    relinearize: int | str = "auto",
    trainable: Any = None,
    sketch_dim: int | None = None,
    kernel: KernelEstimator | None = None,
    max_bytes: int | None = None,
    step_seconds: StepSeconds = None,
) -> Sweep:
    """Forecast every setting from ONE kernel, and those that lead along rebuilt ones.

    No training step is taken.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``, in evaluation mode.
        params: pytree of floating-point arrays, the weights before training.
        x: training samples (N, ...), an array or a pytree of arrays with N rows each.
        y: integer labels (N,) or targets (N, C).
        settings: what to forecast; `grid` makes combinations. Those that are not "sgd" without
            weight decay are followed one by one, and algorithms that know no kernel, such as
            "adamw", by training the linearised network: about a training each by cost
            (`Sweep.simulated`), which a `race` does not take.
        loss: of all settings, a name or a `Loss`; when None their own, as ``grid(loss=)`` names
            them, "cross_entropy" unless told.
        thresholds: the epsilons, shares in (0, 1) for the rule "relative"; 0.01, 0.1 and 0.4 when
            None.
        target_loss: losses on the training samples to get below, one or several, each above 0. The
            first target is what settings are ranked by.
        target_error: the same of errors, each in (0, 1].
        rule: the definition of training time, see `training_time`; or a `Rule`, which takes the
            place of thresholds, metric, smooth and window.
        metric: which curve it is read off, "loss" or "error".
        smooth: steps over which that curve is averaged first, see `smooth_curve`.
        window: steps of the rule "plateau".
        key: a `jax.random.key`, needed with `sketch_dim`, and where a setting has a batch size.
            Settings of the same batch size see the same batches, so that they can be compared.
        protocol: how batches are drawn, where a setting has a batch size: "epochs" when None, see
            `jaxttp.dynamics.batch_indices`.
        relinearize: as in `predict_training_time`, for the settings that lead (two to eight, see
            `Sweep.relinearized`): a single kernel ranks many at once, but its times can be several
            times the real ones. 0 for one kernel alone, which takes seconds for thousands.
        trainable: which parameters train, as in `empirical_ntk`; all of them when None.
        sketch_dim: width of a random projection of the Jacobian that stands for the exact kernel,
            see `sketch_jacobian`.
        kernel: how kernels come about, such as ``jaxttp.ntk.Sketched(4096, key)``, in place of the
            keywords that name it.
        max_bytes: bound on the exact kernel's working memory, in bytes.
        step_seconds: seconds of one training step, as `time_step` measures them: one number, one
            for every batch size that occurs, or one for every setting (S,).

    Returns:
        A `Sweep`. Where no target is given it chooses one for all settings (`shared_goal`, by the
        middle threshold), unless they have several losses.

    Raises:
        ValueError: no settings; a batch size without a key or above N; thresholds out of range;
            options that would do nothing; whatever `predict_training_time` refuses of model and
            data.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxttp.forecast import grid
        >>> x = jax.random.normal(jax.random.key(0), (20, 3))
        >>> y = (x[:, 0] > 0).astype(int)
        >>> settings = grid(learning_rate=(0.1, 1.0), momentum=(0.0, 0.9), steps=50)
        >>> result = sweep(lambda w, x: x @ w, jnp.zeros((3, 2)), x, y, settings, relinearize=0)
        >>> result.steps.shape, result.settings[result.best(0.1)].learning_rate > 0
        ((4, 3), True)

    Source:
        TTP Section 5 forecasts one setting at a time with an ODE; the recursion on the outputs is
        exact for the linearised network (derived, tested against `recursion`).
    """
    settings = check_settings(settings, loss)
    check_known(params=params, x=x, y=y)
    x = check_samples("x", x)
    reading = Rule.of(thresholds, rule, metric, smooth, window)
    Keywords(relinearize=relinearize).check()
    targets = targets_of(target_loss, target_error)
    wanted = Wanted.of(settings, count(x), reading, targets, key, protocol, step_seconds)
    estimator = choose_kernel(sketch_dim, key, None, max_bytes, kernel)
    check_processes(x, estimator)
    losses = list(dict.fromkeys(one.loss for one in wanted.settings))
    problem = Problem.of(apply_fn, params, x, y, loss=losses[0], trainable=trainable)
    check_tokens(problem, estimator)
    y = problem.labels
    for other in losses[1:]:
        problem.with_loss(other, y)  # refuses labels that do not suit it
    lines = Linearizer(problem, estimator)
    swept = forecast_leaders(screen(lines, y, wanted), lines, y, wanted, relinearize=relinearize)
    return with_trust(swept, lines, y, wanted)


def sweep_kernel(
    kernel: KernelLike,
    f0: ArrayLike,
    y: Any,
    settings: Sequence[Hyperparameters],
    *,
    thresholds: Sequence[float] | None = None,
    targets: Iterable[Target] = (),
    rule: str | Rule = "relative",
    metric: str = "loss",
    smooth: int = 1,
    window: int | None = None,
    key: Array | None = None,
    protocol: str | None = None,
    step_seconds: StepSeconds = None,
) -> Sweep:
    """`sweep` for a kernel that exists already; the options are those of `sweep`.

    Args:
        kernel: Theta (N, C, N, C), or (N, N) for K ⊗ I_C; an array, also on a mesh.
        f0: outputs before training (N, C).
        y: integer labels (N,) or targets (N, C).
        settings: what to forecast, heavy-ball descent alone: a kernel does not know the weights,
            which others ask for.
        thresholds: see `sweep`.
        targets: losses and errors on the training samples to get below; the first is what settings
            are ranked by.
        rule: see `sweep`.
        metric: see `sweep`.
        smooth: see `sweep`.
        window: see `sweep`.
        key: see `sweep`.
        protocol: see `sweep`.
        step_seconds: see `sweep`.

    Returns:
        A `Sweep`.

    Raises:
        ValueError: see `sweep`; bad shapes; targets of test samples; other algorithms.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxttp.forecast import grid
        >>> kernel = jnp.eye(4).reshape(2, 2, 2, 2)
        >>> settings = grid(learning_rate=(0.5, 1.0), steps=20)
        >>> sweep_kernel(kernel, jnp.zeros((2, 2)), jnp.array([0, 1]), settings).loss.shape
        (2, 21)
    """
    check_known(kernel=kernel, f0=f0, y=y)
    f0 = check_array("f0", f0)
    n = len(f0) if f0.ndim else None
    reading = Rule.of(thresholds, rule, metric, smooth, window)
    wanted = Wanted.of(settings, n, reading, targets, key, protocol, step_seconds)
    for one in wanted.settings:
        check_descent("settings", one, "jaxttp.sweep does, which has the network.")
    return screen_kernel(kernel, f0, y, wanted)


class Wanted(NamedTuple):
    """What a sweep is asked for, checked before anything is computed.

    Attributes:
        settings: which.
        rule: by which times are read.
        targets: losses and errors to get below.
        key: of the batches.
        protocol: how they are drawn.
        seconds: of a step of every setting (S,), or None.
    """

    settings: tuple[Hyperparameters, ...]
    rule: Rule
    targets: tuple[Target, ...]
    key: Array | None
    protocol: str
    seconds: np.ndarray | None

    @property
    def by_error(self) -> bool:
        """Whether the error of every step is read."""
        return "error" in (self.rule.metric, *(target.metric for target in self.targets))

    @classmethod
    def of(
        cls,
        settings: Sequence[Hyperparameters],
        n: int | None,
        rule: Rule,
        targets: Iterable[Target],
        key: Array | None,
        protocol: str | None,
        step_seconds: StepSeconds,
    ) -> "Wanted":
        """Checked; of N samples, where that is known."""
        settings = check_settings(settings)
        remedy = "A sweep is about the training samples; ask predict_training_time, with x_test."
        targets = check_targets(targets, known=TRAIN_CURVES, remedy=remedy)
        rule.check(min(one.steps for one in settings))
        sizes = [one.batch_size for one in settings if one.batch_size is not None]
        protocol = check_batches(max(sizes, default=None), key, protocol, n)
        check_known(key=key)
        return cls(settings, rule, targets, key, protocol, _step_seconds(step_seconds, settings))

    def descent(self, one: Hyperparameters) -> Descent:
        """The training of a setting."""
        common: dict[str, Any] = {"steps": one.steps, "batch_size": one.batch_size}
        if one.batch_size is not None:
            common |= {"key": self.key, "protocol": self.protocol}
        if one.schedule == "constant" and one.is_heavy_ball:
            return Descent.of(learning_rate=one.learning_rate, momentum=one.momentum, **common)
        return Descent.of(optimizer=one.optimizer(), **common)


def _step_seconds(given: Any, settings: Sequence[Hyperparameters]) -> np.ndarray | None:
    """Seconds of a step of every setting (S,), by batch size, by setting or alike."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        missing = {one.batch_size for one in settings} - set(given)
        if missing:
            raise ValueError(
                f"step_seconds has no entry for batch size {missing.pop()!r}; measure it with "
                "time_step(..., batch_size=...) (None stands for full batches)."
            )
        given = [given[one.batch_size] for one in settings]
    elif np.ndim(given) == 0:
        given = [given] * len(settings)
    if len(given) != len(settings):
        raise ValueError(
            f"step_seconds must be one number a setting, {len(settings)}; got {len(given)}."
        )
    for i, seconds in enumerate(given):
        check_number(f"step_seconds[{i}]", seconds, above=0.0)
    return np.asarray(given, np.float64)


class _Followed(NamedTuple):
    """Curves of all settings, held at their ends, and what their rates are held against."""

    losses: np.ndarray
    errors: np.ndarray
    stable: np.ndarray
    limits: np.ndarray
    in_square: np.ndarray

    @classmethod
    def of(cls, wanted: Wanted) -> "_Followed":
        """Room for them."""
        size, horizon = len(wanted.settings), max(one.steps for one in wanted.settings)
        columns = horizon + 1 if wanted.by_error else 1
        return cls(
            np.zeros((size, horizon + 1)), np.zeros((size, columns)), np.zeros(size, bool),
            np.zeros(size), np.ones(size),
        )  # fmt: skip


def screen(lines: Linearizer, y: Any, wanted: Wanted) -> Sweep:
    """A sweep of a network along its first linearisation alone.

    Args:
        lines: of the problem.
        y: integer labels (N,) or targets (N, C).
        wanted: the options of `sweep`, checked.
    """
    others = [i for i, one in enumerate(wanted.settings) if not one.is_heavy_ball]
    ways = {}
    for i in others:  # what cannot be followed is refused before anything is
        descent = wanted.descent(wanted.settings[i])
        ways[i] = Keywords(relinearize=0).choose(descent, lines.problem.weights)
        loss = get_loss(wanted.settings[i].loss)
        ways[i].check(descent, lines.problem.weights, loss)
    forecasts, trainings = {}, None
    for done, i in enumerate(others):
        lines.report("following other algorithms", done, len(others))
        one, descent = wanted.settings[i], wanted.descent(wanted.settings[i])
        if ways[i].kernels:
            _ = lines.first  # one kernel for all
        beside = _lines_of(lines, one, y)
        forecasts[i] = forecast_along(
            beside, descent, ways[i], wanted.rule, targets=wanted.targets,
            asks_limit=ways[i].kernels,  # of what trains the linearised network none is known
        )  # fmt: skip
        trainings = (trainings or 0.0) + _trainings(forecasts[i])
    found = _Followed.of(wanted)
    if len(others) < len(wanted.settings):
        _follow_together(found, lines.first, lines.problem.f0, y, wanted)
    for i, one in forecasts.items():
        loss, error = (np.asarray(curve, np.float64) for curve in (one.loss, one.error))
        found.losses[i] = held_to(loss, found.losses.shape[1])
        columns = found.errors.shape[1]
        found.errors[i] = held_to(error, columns) if columns > 1 else error[-1]
        found.limits[i] = one.max_learning_rate
        found.stable[i] = one.stable
    return dataclasses.replace(
        _read(found, len(lines.problem.f0), wanted), forecasts=forecasts, trainings=trainings,
        trust={i: one.trust for i, one in forecasts.items()}, notes=lines.problem.notes,
    )  # fmt: skip


def screen_kernel(kernel: KernelLike, f0: ArrayLike, y: Any, wanted: Wanted) -> Sweep:
    """The same of a kernel that exists already, heavy-ball descent alone.

    Args:
        kernel: Theta (N, C, N, C), or (N, N) for K ⊗ I_C.
        f0: outputs before training (N, C).
        y: integer labels (N,) or targets (N, C).
        wanted: the options of `sweep_kernel`, checked.
    """
    found = _Followed.of(wanted)
    _follow_together(found, kernel, f0, y, wanted)
    return _read(found, np.shape(f0)[0], wanted)


def _lines_of(lines: Linearizer, one: Hyperparameters, y: Any) -> Linearizer:
    """Linearisations of the same problem with the loss of a setting, counted by themselves."""
    problem = lines.problem
    if get_loss(one.loss).keyed(problem.f0, problem.targets) != problem.loss:
        problem = problem.with_loss(one.loss, y)
    return lines.contrasted(problem)


def _trainings(found: Prediction) -> float:
    """What a forecast cost, in trainings."""
    return found.cost.operations / found.cost.training_operations


def _read(found: _Followed, n: int, wanted: Wanted) -> Sweep:
    """Curves as a sweep."""
    settings, reading = wanted.settings, wanted.rule
    horizons = np.array([one.steps for one in settings])
    rules = (reading, *(target.rule(reading.smooth) for target in wanted.targets))
    times, *to_targets = (
        read_times(one.curve(found.losses, found.errors), found.stable, horizons, one)
        for one in rules
    )
    swept = Sweep(
        settings, n, reading.thresholds, reading.kind, times,
        found.losses[:, -1], found.errors[:, -1], found.stable, found.limits, found.losses,
        wanted.seconds, reading.metric, found.errors if wanted.by_error else None,
        rate_limit=found.in_square * found.limits, targets=wanted.targets,
        target_steps=np.concatenate([times[:, :0], *to_targets], axis=1), smooth=reading.smooth,
    )  # fmt: skip
    return _with_shared_goal(swept, reading)


def _follow_together(
    out: _Followed, kernel: KernelLike, f0: ArrayLike, y: Any, wanted: Wanted
) -> None:
    """All heavy-ball settings, those of a loss and a batch size together."""
    settings = wanted.settings
    groups: dict[tuple, list[int]] = defaultdict(list)
    for i, one in enumerate(settings):
        if one.is_heavy_ball:
            groups[get_loss(one.loss), one.batch_size].append(i)
    losses = dict.fromkeys(settings[i].loss for members in groups.values() for i in members)
    problems = {loss: check_problem(kernel, f0, y, loss)[:4] for loss in losses}
    for (_, batch_size), members in groups.items():
        theta, start, targets, loss = problem = problems[settings[members[0]].loss]
        indices = None
        if batch_size is not None:
            longest = max(settings[i].steps for i in members)
            indices = batch_indices(
                wanted.key, len(start), batch_size, longest, protocol=wanted.protocol
            )
        size = max(1, _CHUNK_BYTES // (5 * start.size * start.dtype.itemsize))
        for low in range(0, len(members), size):
            part = members[low : low + size]
            some = [settings[i] for i in part]
            found = _run(theta, start, targets, loss, some, indices, wanted.by_error)
            out.losses[part] = held_to(found[0].T, out.losses.shape[1])
            out.errors[part] = held_to(found[1].T, out.errors.shape[1])
            out.stable[part] = found[2]
        _set_limits(out, problem, settings, members, wanted.protocol)
        for i in members:
            below = settings[i].rates().max() < out.in_square[i] * out.limits[i]
            out.stable[i] &= below and not rises(out.losses[i])


def _set_limits(
    out: _Followed,
    problem: tuple,
    settings: Sequence[Hyperparameters],
    members: Sequence[int],
    protocol: str,
) -> None:
    """The limits of settings of one loss and batch size; schedules with batches have two."""
    theta, start, targets, loss = problem
    limit = float(max_learning_rate(theta, start, targets, loss=loss))
    factors: dict[float, float] = {}
    for i in members:
        momentum, batch_size = settings[i].momentum, settings[i].batch_size
        out.limits[i] = limit * (1.0 + momentum)
        if batch_size is None or np.ptp(settings[i].rates()) == 0:
            continue
        if momentum not in factors:
            factors[momentum] = batch_factor(problem, momentum, batch_size, protocol)
        out.in_square[i] = factors[momentum]


def _run(
    kernel: Kernel,
    start: Array,
    targets: Array,
    loss: Loss,
    settings: Sequence[Hyperparameters],
    indices: Array | None,
    all_errors: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Loss curves (T + 1, S), errors (1 or T + 1, S) and who did not diverge (S,)."""
    steps = max(one.steps for one in settings)
    rates = np.zeros((steps, len(settings)))  # a rate of zero holds the outputs
    for i, one in enumerate(settings):
        rates[: one.steps, i] = one.rates()
    momenta = jnp.asarray([one.momentum for one in settings], start.dtype)
    if indices is not None:
        indices = indices[:steps]
    rates = jnp.asarray(rates, start.dtype)
    found = heavy_ball_curves(kernel, start, targets, rates, momenta, indices, loss)
    curves, errors, alive = (np.asarray(part) for part in found)
    return curves.astype(np.float64), errors if all_errors else errors[-1:], alive


def shared_goal(curves: np.ndarray, share: float, metric: str = "loss") -> Target | None:
    """A loss, or an error, that settings can be compared by, whatever each of them ends at.

    It is what the best of them ends at and a share of the way down to there, rounded up to two
    digits; None where nothing falls.

    Args:
        curves: of settings with the same start (S, T + 1).
        share: of the best one's drop, in (0, 1).
        metric: what they are.

    Example:
        >>> shared_goal(np.array([[2.0, 1.0, 0.5], [2.0, 0.3, 0.1]]), 0.1)
        Target(value=0.29, metric='loss', on='train')
    """
    if not len(curves):
        return None
    first, best = float(np.max(curves[:, 0])), float(np.min(curves[:, -1]))
    goal = best + share * (first - best)
    if not (np.isfinite(goal) and 0 < goal < first):
        return None
    unit = 10.0 ** (np.floor(np.log10(goal)) - 1)
    rounded = float(f"{np.ceil(goal / unit - 1e-9) * unit:.2g}")
    return Target(rounded, metric) if rounded < first else None


def _with_shared_goal(swept: Sweep, rule: Rule, curves: np.ndarray | None = None) -> Sweep:
    """The sweep ranked by a goal for all (`shared_goal`), where none was given and one makes sense.

    Not where settings have several losses, whose values say nothing of each other, nor where the
    rule measures all by the same values already.

    Args:
        swept: with targets, if any, of the user's or of this function's choice.
        rule: by which it was read.
        curves: those whose ends count, (S, T + 1); of all stable settings when None.
    """
    losses = {one.loss for one in swept.settings}
    if (swept.targets and not swept.shared) or len(losses) > 1 or rule.kind != "relative":
        return swept
    ends = rule.curve(swept.loss, swept.error)[swept.stable] if curves is None else curves
    goal = shared_goal(ends, rule.thresholds[len(rule.thresholds) // 2], rule.metric)
    if goal is None:
        return swept
    horizons = np.array([one.steps for one in swept.settings])
    curve = rule.curve(swept.loss, swept.error)
    times = read_times(curve, swept.stable, horizons, goal.rule(rule.smooth))
    return dataclasses.replace(swept, targets=(goal,), target_steps=times, shared=True)


def forecast_leaders(
    screened: Sweep,
    lines: Linearizer,
    y: Any,
    wanted: Wanted,
    *,
    relinearize: int | str = "auto",
) -> Sweep:
    """The same sweep, with its leading settings forecast again along rebuilt kernels.

    Best first (`_next`), two at least and eight at most; of eight settings or fewer all that are
    stable. Kernels are rebuilt as often as the default budget allows. A goal that the sweep chose
    is chosen again by the ends of those that were followed. Those of algorithms that know no kernel
    (`Sweep.simulated`) stay as they are.

    Args:
        screened: on this first kernel.
        lines: of the problem.
        y: integer labels (N,) or targets (N, C).
        wanted: the options of `sweep`.
        relinearize: as in `predict_training_time`; 0 for nothing.

    Returns:
        A `Sweep` whose `relinearized` names the settings that were followed. Their times, curves,
        verdicts and trust are those of rebuilt kernels.
    """
    keywords, rule = Keywords(relinearize=relinearize), wanted.rule
    most = len(screened.settings) if len(screened.settings) <= FEW else MOST
    swept, followed = screened, {}
    spent = (screened.trainings or 0.0) + _first_kernel(lines, wanted)
    while len(followed) < most and (waiting := _next(swept)) is not None:
        one = swept.settings[waiting]
        beside, descent = _lines_of(lines, one, y), wanted.descent(one)
        way = keywords.choose(descent, beside.problem.weights)
        if relinearize == "auto":
            plan = plan_forecast(way, beside.problem, descent, lines.estimator)
            way = plan.dynamics
            if lines.progress is None and not followed:
                what = f"forecasting up to {most} leading settings again"
                remedy = "relinearize=0 stays with one kernel; jaxttp.race trains them"
                announce(plan, what, remedy, forecasts=most, trainings=len(swept.settings))
        way = suited(way, beside.problem)
        if not isinstance(way, Relinearized | Linear):
            break
        lines.report("rebuilding kernels of the leading settings", len(followed), most)
        found = forecast_along(beside, descent, way, rule, targets=wanted.targets)
        followed[waiting], spent = found, spent + _trainings(found)
        swept = _replaced(screened, followed, rule)
    return dataclasses.replace(swept, trainings=spent)


def _first_kernel(lines: Linearizer, wanted: Wanted) -> float:
    """What the first kernel and its products cost, in trainings of the first setting."""
    one = wanted.settings[0]
    products = sum(other.is_heavy_ball for other in wanted.settings) * one.steps
    price = Price.of(lines.problem, wanted.descent(one), lines.estimator)
    return price.forecast(lines.kernels, lines.passes, products) / price.training


def _next(swept: Sweep) -> int | None:
    """The setting to forecast next; None where what leads has been.

    What leads by steps and by cost; the next higher rate of that, also beyond the first kernel's
    limit; then the others in order, those that come nearest to the goal later, and of a few
    settings those that have nothing against them but that limit.
    """
    done = {*swept.relinearized, *swept.simulated}
    order, nearest = swept.ranking(), swept.nearest()
    leaders = [*order[:1], *swept.cheapest()[:1]] or nearest[:1]
    first = [*leaders, *(_higher(swept, i) for i in leaders)]
    enough = len(swept.relinearized) >= LEAST and len(swept.settings) > FEW
    rest = [] if enough else [*order, *nearest]
    if len(swept.settings) <= FEW:
        rest += np.flatnonzero(~swept.stable & ~rises(swept.loss)).tolist()
    return next((i for i in (*first, *rest) if i is not None and i not in done), None)


def _higher(swept: Sweep, leader: int, *, beyond: float = 3.0) -> int | None:
    """The setting with the next higher rate that is like a leader otherwise.

    Up to `beyond` times the first kernel's limit: networks often survive such rates.
    """
    one = swept.settings[leader]
    beside = [
        i for i, other in enumerate(swept.settings)
        if one.learning_rate < other.learning_rate <= beyond * swept.limits[i]
        and dataclasses.replace(other, learning_rate=one.learning_rate) == one
    ]  # fmt: skip
    return min(beside, key=lambda i: swept.settings[i].learning_rate, default=None)


def _replaced(screened: Sweep, followed: Mapping[int, Prediction], rule: Rule) -> Sweep:
    """The sweep with the settings that were forecast in the place of the first kernel's."""
    swept = screened
    if swept.shared:
        curves = [
            np.asarray(rule.curve(one.loss, one.error), np.float64)[[0, -1]]
            for one in followed.values()
            if one.stable
        ]
        left = screened.stable.copy()
        left[list(followed)] = False
        rest = rule.curve(screened.loss, screened.error)[left]
        swept = _with_shared_goal(swept, rule, np.stack(curves) if curves else rest)
    names = ["steps", "stable", "final_loss", "final_error", "loss", "target_steps"]
    names += [] if swept.error is None else ["error"]
    kept = {name: getattr(swept, name).copy() for name in names}
    for i, one in followed.items():
        loss, error = (np.asarray(curve, np.float64) for curve in (one.loss, one.error))
        kept["steps"][i], kept["stable"][i] = list(one.steps.values()), one.stable
        kept["final_loss"][i], kept["final_error"][i] = loss[-1], error[-1]
        kept["loss"][i] = held_to(loss, swept.loss.shape[1])
        if swept.error is not None:
            kept["error"][i] = held_to(error, swept.error.shape[1])
        if swept.targets:
            kept["target_steps"][i] = list(one.reach(swept.targets, smooth=rule.smooth).values())
    return dataclasses.replace(
        swept, **kept, forecasts={**screened.forecasts, **followed}, relinearized=tuple(followed),
        trust={**screened.trust, **{i: one.trust for i, one in followed.items()}},
    )  # fmt: skip


def with_trust(
    swept: Sweep, lines: Linearizer, y: Any, wanted: Wanted, *, only: Sequence[int] | None = None
) -> Sweep:
    """The same sweep, with `Sweep.trust` for the settings that it shows first.

    Those are the five cheapest to what the sweep is ranked by (`Sweep.ranked_by`) and the first to
    every other threshold and target, each for a pass through the network or two (`ask_network`).
    Those that were forecast by themselves have said it already.

    Args:
        swept: on this first kernel.
        lines: of the problem.
        y: integer labels (N,) or targets (N, C).
        wanted: the options of `sweep`.
        only: the settings to ask about, where those are known.
    """
    goals = (*swept.targets, *swept.thresholds)
    chosen = {i for goal in goals for i in swept.ranking(goal)[:1]} | {*swept.cheapest()[:SHOWN]}
    chosen, trust = chosen if only is None else set(only), dict(swept.trust)
    for i in sorted(chosen - set(trust)):
        one = swept.settings[i]
        witness = Recursion().witness(_lines_of(lines, one, y), wanted.descent(one))
        trust[i] = trust_in_speeds(witness, swept.loss[i, : one.steps + 1])
    return dataclasses.replace(swept, trust=trust)


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
