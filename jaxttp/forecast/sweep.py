"""One kernel, a thousand settings: forecasts for whole grids of hyper-parameters.

All settings of one loss and batch size move together along the first kernel, so that a step of all
of them is one matrix product; algorithms that are not heavy-ball descent are forecast one by one.
One kernel ranks a thousand settings at once, but its times can be three times the real ones, and it
passes over rates at which the kernel soon outgrows them. So those that lead are forecast again, as
`predict_training_time` does, best first, until what leads has been.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxttp._core.checks import check_array, check_known, check_number, check_several
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
from jaxttp.forecast.options import Keywords, announce, check_processes, check_tokens, choose_kernel
from jaxttp.forecast.predict import forecast_along
from jaxttp.forecast.prediction import Prediction
from jaxttp.forecast.problem import Problem
from jaxttp.forecast.stability import rises
from jaxttp.forecast.sweep_result import FEW, FIRST, Sweep, held_to
from jaxttp.forecast.training_setup import Descent, Hyperparameters, check_descent, check_settings
from jaxttp.forecast.uncertainty import speed_warning
from jaxttp.losses import Loss, get_loss
from jaxttp.losses.rule import TRAIN_CURVES, Rule, Target, Values, check_targets, targets_of
from jaxttp.ntk.estimators import KernelEstimator
from jaxttp.ntk.kernels import Kernel, KernelLike

StepSeconds = float | Sequence[float] | np.ndarray | None

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
            "adamw", by training the linearised network: about a training each by cost, which a
            `race` does not take.
        loss: of all settings, a name or a `Loss`; when None their own, as ``grid(loss=)`` names
            it, "cross_entropy" unless told.
        thresholds: the epsilons, fractions in (0, 1) for the rule "relative"; 0.01, 0.1 and 0.4
            when None.
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
        kernel: how kernels are computed, such as ``jaxttp.ntk.Sketched(4096, key)``, in place of
            the keywords that name it.
        max_bytes: bound on the exact kernel's working memory, in bytes.
        step_seconds: seconds of one training step, as `time_step` measures them: one number, or
            one for every setting (S,).

    Returns:
        A `Sweep`. Where no target is given it chooses one for all settings (`shared_goal`, by the
        middle threshold).

    Raises:
        ValueError: no settings, or of several losses; a batch size without a key or above N;
            thresholds out of range; options that would do nothing; whatever
            `predict_training_time` refuses of model and data.

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
    Keywords(relinearize=relinearize).check()
    reading = Rule.of(thresholds, rule, metric, smooth, window)
    targets = targets_of(target_loss, target_error)
    plan = SweepPlan(
        settings,
        count(x),
        reading,
        check_several("targets", targets, "Target"),
        key,
        protocol,
        step_seconds,
    )
    estimator = choose_kernel(sketch_dim, key, None, max_bytes, kernel)
    check_processes(x, estimator)
    problem = Problem.of(apply_fn, params, x, y, loss=plan.loss, trainable=trainable)
    check_tokens(problem, estimator)
    lines = Linearizer(problem, estimator)
    result = forecast_leaders(screen(lines, plan), lines, plan, relinearize=relinearize)
    return with_warnings(result, lines, plan, result.shown())


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
    reading = Rule.of(thresholds, rule, metric, smooth, window)
    samples = len(f0) if f0.ndim else None
    settings = check_settings(settings)
    for one in settings:
        check_descent("settings", one, "jaxttp.sweep does, which has the network.")
    plan = SweepPlan(
        settings,
        samples,
        reading,
        check_several("targets", targets, "Target"),
        key,
        protocol,
        step_seconds,
    )
    theta, f0, targets, exact, _, _ = check_problem(kernel, f0, y, plan.loss)
    return with_shared_goal(_together(theta, f0, targets, exact, plan))


@dataclasses.dataclass(frozen=True)
class SweepPlan:
    """The arguments of a sweep, checked before anything is computed.

    Attributes:
        settings: what is forecast, S of them, of one loss.
        samples: N, where that is known.
        rule: by which times are read.
        targets: losses and errors to get below.
        key: of the batches.
        protocol: how they are drawn; "epochs" when None.
        step_seconds: of every setting (S,), of all of them, or None.
    """

    settings: tuple[Hyperparameters, ...]
    samples: int | None
    rule: Rule
    targets: tuple[Target, ...] = ()
    key: Array | None = None
    protocol: Any = None
    step_seconds: Any = None

    def __post_init__(self) -> None:
        settings = self.settings
        losses = {get_loss(one.loss) for one in settings}
        if len(losses) > 1:
            names = ", ".join(sorted(one.name for one in losses))
            raise ValueError(
                f"settings must share one loss, to be compared; got {names}: sweep the settings of "
                "each by themselves."
            )
        hint = "A sweep is about the training samples; ask predict_training_time, with x_test."
        targets = check_targets(self.targets, known=TRAIN_CURVES, hint=hint)
        self.rule.check(min(one.steps for one in settings))
        sizes = [one.batch_size for one in settings if one.batch_size is not None]
        protocol = check_batches(max(sizes, default=None), self.key, self.protocol, self.samples)
        check_known(key=self.key)
        seconds = self.step_seconds
        if seconds is not None:
            seconds = [seconds] * len(settings) if np.ndim(seconds) == 0 else seconds
            if len(seconds) != len(settings):
                raise ValueError(
                    "step_seconds must be one number, or one a setting, "
                    f"{len(settings)}; got {len(seconds)}."
                )
            for i, one in enumerate(seconds):
                check_number(f"step_seconds[{i}]", one, above=0.0)
            seconds = np.asarray(seconds, np.float64)
        checked = {"targets": targets, "protocol": protocol, "step_seconds": seconds}
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def loss(self) -> str | Loss:
        """Of all settings."""
        return self.settings[0].loss

    def descent(self, one: Hyperparameters) -> Descent:
        """The training of a setting."""
        common: dict[str, Any] = {"steps": one.steps, "batch_size": one.batch_size}
        if one.batch_size is not None:
            common |= {"key": self.key, "protocol": self.protocol}
        if one.schedule == "constant" and one.is_heavy_ball:
            return Descent.of(learning_rate=one.learning_rate, momentum=one.momentum, **common)
        return Descent.of(optimizer=one.optimizer(), **common)


def screen(lines: Linearizer, plan: SweepPlan) -> Sweep:
    """A sweep of a network along its first linearization alone."""
    problem, alone = lines.problem, {}
    for i, one in enumerate(plan.settings):  # what cannot be followed is refused before any is
        if not one.is_heavy_ball:
            descent = plan.descent(one)
            dynamics = Keywords(relinearize=0).choose(descent, problem.weights)
            dynamics.check(descent, problem.weights, problem.loss)
            alone[i] = descent, dynamics
    together = len(alone) < len(plan.settings)
    if together or any(dynamics.kernels for _, dynamics in alone.values()):
        _ = lines.first  # one kernel for all
    forecasts = {}
    for done, (i, (descent, dynamics)) in enumerate(alone.items()):
        lines.report("following other algorithms", done, len(alone))
        forecasts[i] = forecast_along(
            lines.centered(), descent, dynamics, plan.rule, targets=plan.targets,
            asks_limit=dynamics.kernels,  # of what trains the linearised network none is known
        )  # fmt: skip
    kernel = lines.first if together else None
    result = _together(kernel, problem.f0, problem.targets, problem.loss, plan)
    result = result.with_forecasts(forecasts)
    for i, one in forecasts.items():
        result.max_learning_rate[i] = one.max_learning_rate
    return with_shared_goal(dataclasses.replace(result, notes=problem.notes))


def _together(
    kernel: Kernel | None, f0: Array, targets: Array, exact: Loss, plan: SweepPlan
) -> Sweep:
    """All heavy-ball settings on one kernel, those of a batch size together.

    Rows of other settings are left for others to fill; where there are no other rows the kernel is
    None.
    """
    settings, samples = plan.settings, len(f0)
    size, horizon = len(settings), max(one.steps for one in settings)
    loss, error = np.zeros((size, horizon + 1)), np.zeros((size, horizon + 1))
    stable, limits = np.zeros(size, bool), np.zeros(size)
    groups: dict[int | None, list[int]] = defaultdict(list)
    for i, one in enumerate(settings):
        if one.is_heavy_ball:
            groups[one.batch_size].append(i)
    limit = np.inf if kernel is None else float(max_learning_rate(kernel, f0, targets, loss=exact))
    chunk = max(1, _CHUNK_BYTES // (5 * f0.size * f0.dtype.itemsize))
    for batch_size, members in groups.items():
        indices = None
        if batch_size is not None:
            longest = max(settings[i].steps for i in members)
            indices = batch_indices(plan.key, samples, batch_size, longest, protocol=plan.protocol)
        for rows in (members[low : low + chunk] for low in range(0, len(members), chunk)):
            part = [settings[i] for i in rows]
            steps = max(one.steps for one in part)
            rates = np.zeros((steps, len(part)))  # a rate of zero holds the outputs
            for column, one in enumerate(part):
                rates[: one.steps, column] = one.rates()
            momenta = jnp.asarray([one.momentum for one in part], f0.dtype)
            drawn = None if indices is None else indices[:steps]
            curves = heavy_ball_curves(
                kernel, f0, targets, jnp.asarray(rates, f0.dtype), momenta, drawn, exact
            )
            losses, errors, stable[rows] = (np.asarray(curve) for curve in curves)
            loss[rows] = held_to(losses.T, horizon + 1)
            error[rows] = held_to(errors.T, horizon + 1)
        for i in members:
            limits[i] = limit * (1.0 + settings[i].momentum)
            stable[i] &= settings[i].rates().max() < limits[i] and not rises(loss[i])
    return Sweep(
        settings, samples, plan.rule, loss, error, stable, limits,
        plan.targets, step_seconds=plan.step_seconds,
    )  # fmt: skip


def shared_goal(curves: np.ndarray, fraction: float, metric: str = "loss") -> Target | None:
    """A loss, or an error, that settings can be compared by, whatever each of them ends at.

    It is what the best of them ends at and a fraction of the way down to there, rounded up to two
    digits; None where nothing falls.

    Args:
        curves: of settings with the same start (S, T + 1).
        fraction: of the best one's drop, in (0, 1).
        metric: what they are.

    Example:
        >>> shared_goal(np.array([[2.0, 1.0, 0.5], [2.0, 0.3, 0.1]]), 0.1)
        Target(value=0.29, metric='loss', on='train')
    """
    if not len(curves):
        return None
    first, best = float(np.max(curves[:, 0])), float(np.min(curves[:, -1]))
    goal = best + fraction * (first - best)
    if not (np.isfinite(goal) and 0 < goal < first):
        return None
    unit = 10.0 ** (np.floor(np.log10(goal)) - 1)
    rounded = float(f"{np.ceil(goal / unit - 1e-9) * unit:.2g}")
    return Target(rounded, metric) if rounded < first else None


def with_shared_goal(result: Sweep) -> Sweep:
    """The sweep ranked by a goal for all (`shared_goal`), where none was given and one makes sense.

    Not where the rule measures all by the same values already. It is chosen by the ends of what was
    followed along rebuilt kernels, where any of that is stable.
    """
    rule = result.rule
    if (result.targets and not result.shared) or rule.kind != "relative":
        return result
    followed = np.isin(np.arange(len(result.settings)), result.relinearized)
    ends = result.stable & followed if np.any(result.stable & followed) else result.stable
    fraction = rule.thresholds[len(rule.thresholds) // 2]
    goal = shared_goal(rule.curve(result.loss, result.error)[ends], fraction, rule.metric)
    return result if goal is None else dataclasses.replace(result, targets=(goal,), shared=True)


def forecast_leaders(
    screened: Sweep, lines: Linearizer, plan: SweepPlan, *, relinearize: int | str = "auto"
) -> Sweep:
    """The same sweep, with its leading settings forecast again along rebuilt kernels.

    Best first (`_next`), two at least and eight at most; of eight settings or fewer all that are
    stable. Kernels are rebuilt as often as the default budget allows. A goal that the sweep chose
    is chosen again by the ends of those that were followed. Those of algorithms that know no kernel
    stay as they are.

    Args:
        screened: on this first kernel.
        lines: of the problem.
        plan: of the sweep.
        relinearize: as in `predict_training_time`; 0 for nothing.

    Returns:
        A `Sweep` whose `relinearized` names the settings that were followed. Their times, curves,
        verdicts and warnings are those of rebuilt kernels.
    """
    keywords, result = Keywords(relinearize=relinearize), screened
    most = len(screened.settings) if len(screened.settings) <= FEW else MOST
    followed: dict[int, Prediction] = {}
    while len(followed) < most and (i := _next(result)) is not None:
        own, descent = lines.centered(), plan.descent(plan.settings[i])
        dynamics = keywords.choose(descent, own.problem.weights)
        if relinearize == "auto":
            planned = plan_forecast(dynamics, own.problem, descent, lines.estimator)
            dynamics = planned.dynamics
            if lines.progress is None and not followed:
                what = f"forecasting up to {most} leading settings again"
                hint = "relinearize=0 stays with one kernel; jaxttp.race trains them"
                announce(planned, what, hint, forecasts=most, trainings=len(result.settings))
        dynamics = suited(dynamics, own.problem)
        if not isinstance(dynamics, Relinearized | Linear):
            break
        lines.report("rebuilding kernels of the leading settings", len(followed), most)
        followed[i] = forecast_along(own, descent, dynamics, plan.rule, targets=plan.targets)
        result = screened.with_forecasts(followed)
        result = with_shared_goal(dataclasses.replace(result, relinearized=tuple(followed)))
    alone = (*screened.forecasts.values(), *followed.values())
    spent = sum(one.cost.operations / one.cost.training_operations for one in alone)
    return dataclasses.replace(result, trainings=_first_kernel(lines, plan) + spent)


def _first_kernel(lines: Linearizer, plan: SweepPlan) -> float:
    """What the first kernel and its products cost, in trainings of the first setting."""
    one = plan.settings[0]
    products = sum(other.is_heavy_ball for other in plan.settings) * one.steps
    price = Price.of(lines.problem, plan.descent(one), lines.estimator)
    return price.forecast(lines.kernels, lines.passes, products) / price.training


def _next(result: Sweep) -> int | None:
    """The setting to forecast next; None where what leads has been.

    What leads by steps and by cost; the next higher rate of that, also beyond the first kernel's
    limit; then the others in order, those that come nearest to the goal later, and of a few
    settings those that have nothing against them but that limit.
    """
    order, nearest = result.ranking(), result.nearest()
    leaders = [*order[:1], *result.ranking(by_cost=True)[:1]] or nearest[:1]
    waiting = [*leaders, *(_higher(result, i) for i in leaders)]
    if len(result.settings) <= FEW:
        within = np.flatnonzero(~result.stable & ~rises(result.loss)).tolist()
        waiting += [*order, *nearest, *within]
    elif len(result.relinearized) < LEAST:
        waiting += [*order, *nearest]
    return next((i for i in waiting if i is not None and result.method(i) == FIRST), None)


def _higher(result: Sweep, leader: int, *, beyond: float = 3.0) -> int | None:
    """The setting with the next higher rate that is like a leader otherwise.

    Up to `beyond` times the first kernel's limit: networks often survive such rates.
    """
    one = result.settings[leader]
    higher = [
        i for i, other in enumerate(result.settings)
        if one.learning_rate < other.learning_rate <= beyond * result.max_learning_rate[i]
        and dataclasses.replace(other, learning_rate=one.learning_rate) == one
    ]  # fmt: skip
    return min(higher, key=lambda i: result.settings[i].learning_rate, default=None)


def with_warnings(result: Sweep, lines: Linearizer, plan: SweepPlan, rows: Iterable[int]) -> Sweep:
    """The same sweep, with `Sweep.warnings` of some settings: one or two passes each.

    Those that were forecast by themselves have said it already.
    """
    warnings = dict(result.warnings)
    for i in sorted(set(rows) - set(warnings)):
        one = plan.settings[i]
        check = Recursion().check_linearization(lines.centered(), plan.descent(one))
        warnings[i] = speed_warning(check, result.loss[i, : one.steps + 1])
    return dataclasses.replace(result, warnings=warnings)
