"""One kernel, a thousand settings: forecasts for whole grids of hyperparameters.

All settings of one loss and batch size share the first kernel: a step of all of them is one matrix
product. Algorithms other than heavy-ball descent are forecast one by one. Times on one kernel can
be three times the real ones, and rates near its limit are misjudged as the kernel grows. The
leading settings are therefore forecast again, as `predict_training_time` does, best first, until
all leaders have been.
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
from jaxttp._core.progress import shown
from jaxttp._core.types import ApplyFn, Params, Progress, count
from jaxttp.adapters.inputs import check_samples
from jaxttp.dynamics._kernels import check_problem
from jaxttp.dynamics.batches import batch_indices, check_batches
from jaxttp.dynamics.recursion import heavy_ball_curves
from jaxttp.dynamics.stability import max_learning_rate
from jaxttp.forecast.cost import Price, is_rebuilt, plan_forecast, suited
from jaxttp.forecast.methods.base import Linearizer
from jaxttp.forecast.methods.linear import Recursion
from jaxttp.forecast.options import Keywords, check_processes, check_tokens, choose_kernel
from jaxttp.forecast.predict import forecast_along
from jaxttp.forecast.prediction import Prediction
from jaxttp.forecast.problem import Problem
from jaxttp.forecast.seconds import announce, estimate_seconds
from jaxttp.forecast.stability import rises
from jaxttp.forecast.sweep_result import FEW, Sweep, held_to
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
    progress: Progress | bool | None = None,
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
            "adamw", by training the linearized network: about a training each by cost, which a
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
        progress: as in `predict_training_time`.

    Returns:
        A `Sweep`. Where no target is given it chooses one for all settings (`shared_target`, by the
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
        exact for the linearized network (derived, tested against `recursion`).
    """
    settings = check_settings(settings, loss)
    check_known(params=params, x=x, y=y)
    x = check_samples("x", x)
    Keywords(relinearize=relinearize).check()
    reading = Rule.of(thresholds, rule, metric, smooth, window)
    targets = targets_of(target_loss, target_error)
    plan = SweepPlan(settings, count(x), reading, targets, key, protocol, step_seconds)
    estimator = choose_kernel(sketch_dim, key, None, max_bytes, kernel)
    check_processes(x, estimator)
    problem = Problem.of(apply_fn, params, x, y, loss=plan.loss, trainable=trainable)
    check_tokens(problem, estimator)
    linearizer = Linearizer(problem, estimator, shown(progress))
    result = forecast_leaders(screen(linearizer, plan), linearizer, plan, relinearize=relinearize)
    return with_warnings(result, linearizer, plan, result.shown())


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
    for setting in settings:
        check_descent("settings", setting, "jaxttp.sweep does, which has the network.")
    targets = check_several("targets", targets, "Target")
    plan = SweepPlan(settings, samples, reading, targets, key, protocol, step_seconds)
    theta, f0, encoded, exact, _, _ = check_problem(kernel, f0, y, plan.loss)
    return with_shared_target(_together(theta, f0, encoded, exact, plan))


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
        losses = {get_loss(setting.loss) for setting in settings}
        if len(losses) > 1:
            names = ", ".join(sorted(loss.name for loss in losses))
            raise ValueError(
                f"settings must share one loss, to be compared; got {names}: sweep the settings of "
                "each by themselves."
            )
        hint = "A sweep is about the training samples; ask predict_training_time, with x_test."
        targets = check_targets(self.targets, known=TRAIN_CURVES, hint=hint)
        self.rule.check(min(setting.steps for setting in settings))
        sizes = [setting.batch_size for setting in settings if setting.batch_size is not None]
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
            for i, value in enumerate(seconds):
                check_number(f"step_seconds[{i}]", value, above=0.0)
            seconds = np.asarray(seconds, np.float64)
        object.__setattr__(self, "targets", targets)
        object.__setattr__(self, "protocol", protocol)
        object.__setattr__(self, "step_seconds", seconds)

    @property
    def loss(self) -> str | Loss:
        """Of all settings."""
        return self.settings[0].loss

    def descent(self, setting: Hyperparameters) -> Descent:
        """The training of a setting."""
        options: dict[str, Any] = {"steps": setting.steps, "batch_size": setting.batch_size}
        if setting.batch_size is not None:
            options |= {"key": self.key, "protocol": self.protocol}
        if setting.schedule == "constant" and setting.is_heavy_ball:
            rate, momentum = setting.learning_rate, setting.momentum
            return Descent.of(learning_rate=rate, momentum=momentum, **options)
        return Descent.of(optimizer=setting.optimizer(), **options)


def screen(linearizer: Linearizer, plan: SweepPlan) -> Sweep:
    """A sweep of a network along its first linearization alone."""
    problem, single = linearizer.problem, {}
    for i, setting in enumerate(plan.settings):  # all are checked before one is forecast
        if not setting.is_heavy_ball:
            descent = plan.descent(setting)
            dynamics = Keywords(relinearize=0).choose(descent, problem.weights)
            dynamics.check(descent, problem.weights, problem.loss)
            single[i] = descent, dynamics
    together = len(single) < len(plan.settings)
    if together or any(dynamics.kernels for _, dynamics in single.values()):
        _ = linearizer.first  # one kernel for all
    forecasts = {}
    for done, (i, (descent, dynamics)) in enumerate(single.items()):
        linearizer.report("following other algorithms", done, len(single))
        forecasts[i] = forecast_along(
            linearizer.centered(), descent, dynamics, plan.rule, targets=plan.targets,
            with_limit=dynamics.kernels,
        )  # fmt: skip
    kernel = linearizer.first if together else None
    result = _together(kernel, problem.f0, problem.targets, problem.loss, plan)
    result = result.with_forecasts(forecasts)
    for i, forecast in forecasts.items():
        result.max_learning_rate[i] = forecast.max_learning_rate
    return with_shared_target(dataclasses.replace(result, notes=problem.notes))


def _together(
    kernel: Kernel | None, f0: Array, targets: Array, exact: Loss, plan: SweepPlan
) -> Sweep:
    """All heavy-ball settings on one kernel, those of a batch size together.

    Rows of other settings are 0; the kernel is None where all are other ones.
    """
    settings, samples = plan.settings, len(f0)
    size, horizon = len(settings), max(setting.steps for setting in settings)
    loss, error = np.zeros((2, size, horizon + 1))
    stable, limits = np.zeros(size, bool), np.zeros(size)
    groups: dict[int | None, list[int]] = defaultdict(list)
    for i, setting in enumerate(settings):
        if setting.is_heavy_ball:
            groups[setting.batch_size].append(i)
    limit = np.inf if kernel is None else float(max_learning_rate(kernel, f0, targets, loss=exact))
    chunk = max(1, _CHUNK_BYTES // (5 * f0.size * f0.dtype.itemsize))
    for batch_size, members in groups.items():
        indices = None
        if batch_size is not None:
            longest = max(settings[i].steps for i in members)
            indices = batch_indices(plan.key, samples, batch_size, longest, protocol=plan.protocol)
        for rows in (members[low : low + chunk] for low in range(0, len(members), chunk)):
            part = [settings[i] for i in rows]
            steps = max(setting.steps for setting in part)
            rates = np.zeros((steps, len(part)))  # a rate of zero keeps the outputs
            for column, setting in enumerate(part):
                rates[: setting.steps, column] = setting.rates()
            momenta = jnp.asarray([setting.momentum for setting in part], f0.dtype)
            batches = None if indices is None else indices[:steps]
            curves = heavy_ball_curves(
                kernel, f0, targets, jnp.asarray(rates, f0.dtype), momenta, batches, exact
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


def shared_target(curves: np.ndarray, fraction: float, metric: str = "loss") -> Target | None:
    """A loss, or an error, that all settings are compared by.

    It lies a fraction of the best setting's decrease above its end, rounded up to two digits; None
    where no curve falls.

    Args:
        curves: of settings with the same start (S, T + 1).
        fraction: of the best one's drop, in (0, 1).
        metric: what they are.

    Example:
        >>> shared_target(np.array([[2.0, 1.0, 0.5], [2.0, 0.3, 0.1]]), 0.1)
        Target(value=0.29, metric='loss', on='train')
    """
    if not len(curves):
        return None
    first, best = float(np.max(curves[:, 0])), float(np.min(curves[:, -1]))
    target = best + fraction * (first - best)
    if not (np.isfinite(target) and 0 < target < first):
        return None
    unit = 10.0 ** (np.floor(np.log10(target)) - 1)
    rounded = float(f"{np.ceil(target / unit - 1e-9) * unit:.2g}")
    return Target(rounded, metric) if rounded < first else None


def with_shared_target(result: Sweep) -> Sweep:
    """The sweep ranked by a `shared_target`, where no target was given and the rule is "relative".

    The target depends on the ends of stable forecasts along rebuilt kernels, where there are any.
    """
    rule = result.rule
    if (result.targets and not result.shared) or rule.kind != "relative":
        return result
    followed = np.isin(np.arange(len(result.settings)), result.relinearized)
    ends = result.stable & followed if np.any(result.stable & followed) else result.stable
    fraction = rule.thresholds[len(rule.thresholds) // 2]
    target = shared_target(rule.curve(result.loss, result.error)[ends], fraction, rule.metric)
    return result if target is None else dataclasses.replace(result, targets=(target,), shared=True)


def forecast_leaders(
    screened: Sweep, linearizer: Linearizer, plan: SweepPlan, *, relinearize: int | str = "auto"
) -> Sweep:
    """The sweep with its leading settings forecast again along rebuilt kernels.

    Best first (`_next`), two to eight; of eight settings or fewer all stable ones. The default
    budget bounds the rebuilt kernels. A `shared_target` is chosen again after each forecast.
    Settings that kernels cannot follow keep their forecast in weight space.

    Args:
        screened: on the first kernel.
        linearizer: of the problem.
        plan: of the sweep.
        relinearize: as in `predict_training_time`; 0 for nothing.

    Returns:
        A `Sweep` whose `relinearized` names the settings that were forecast again.
    """
    result = screened
    most = len(screened.settings) if len(screened.settings) <= FEW else MOST
    most *= relinearize != 0
    followed: dict[int, Prediction] = {}
    kept: set[int] = set()
    while len(followed) < most and (i := _next(result, kept)) is not None:
        own, descent = linearizer.centered(), plan.descent(plan.settings[i])
        dynamics = Keywords().choose(descent, own.problem.weights)
        if not is_rebuilt(dynamics):
            kept.add(i)
            continue
        if relinearize != "auto":
            dynamics = Keywords(relinearize=relinearize).choose(descent, own.problem.weights)
        if relinearize == "auto" or dynamics.is_scaled:
            kernel = None if dynamics.is_scaled else linearizer.estimator
            planned = plan_forecast(dynamics, own.problem, descent, kernel)
            dynamics = planned.dynamics
            if dynamics.is_scaled:  # kernels of its own
                own = Linearizer(own.problem, planned.kernel)
            if not followed:
                seconds = estimate_seconds(
                    planned, own.problem, descent.steps, forecasts=most,
                    trainings=len(result.settings),
                )  # fmt: skip
                hint = "relinearize=0 stays with one kernel; jaxttp.race trains settings"
                announce(seconds, linearizer.progress, hint)
        dynamics = suited(dynamics, own.problem)
        linearizer.report("rebuilding kernels of the leading settings", len(followed), most)
        followed[i] = forecast_along(own, descent, dynamics, plan.rule, targets=plan.targets)
        result = screened.with_forecasts(followed)
        result = with_shared_target(dataclasses.replace(result, relinearized=tuple(followed)))
    costs = [forecast.cost for forecast in (*screened.forecasts.values(), *followed.values())]
    spent = sum(cost.operations / cost.training_operations for cost in costs)
    # The first kernel and its products, in training runs of the first setting.
    first = plan.settings[0]
    products = sum(setting.is_heavy_ball for setting in plan.settings) * first.steps
    price = Price.of(linearizer.problem, plan.descent(first), linearizer.estimator)
    spent += price.forecast(linearizer.kernels, linearizer.passes, products) / price.training
    return dataclasses.replace(result, trainings=spent)


def _next(result: Sweep, kept: set[int]) -> int | None:
    """The setting to forecast next, but for `kept`; None where all leading ones have been.

    First the leaders by steps and by cost; then the next higher rate of each, also beyond the first
    kernel's limit; then the ranking, then the settings that end nearest to the target. Of few
    settings also those whose only defect is that limit.
    """
    order, nearest = result.ranking(), result.nearest()
    leaders = [*order[:1], *result.ranking(by_cost=True)[:1]] or nearest[:1]
    waiting = [*leaders, *(_higher(result, i) for i in leaders)]
    if len(result.settings) <= FEW:
        within = np.flatnonzero(~result.stable & ~rises(result.loss)).tolist()
        waiting += [*order, *nearest, *within]
    elif len(result.relinearized) < LEAST:
        waiting += [*order, *nearest]
    done = kept | set(result.relinearized)
    return next((i for i in waiting if i is not None and i not in done), None)


def _higher(result: Sweep, leader: int) -> int | None:
    """The setting with the next higher rate and the leader's other hyperparameters.

    Up to 3 times the first kernel's limit: networks often survive such rates.
    """
    setting = result.settings[leader]
    higher = [
        i for i, other in enumerate(result.settings)
        if setting.learning_rate < other.learning_rate <= 3.0 * result.max_learning_rate[i]
        and dataclasses.replace(other, learning_rate=setting.learning_rate) == setting
    ]  # fmt: skip
    return min(higher, key=lambda i: result.settings[i].learning_rate, default=None)


def with_warnings(
    result: Sweep, linearizer: Linearizer, plan: SweepPlan, rows: Iterable[int]
) -> Sweep:
    """The sweep with `Sweep.warnings` of more settings: one or two passes each."""
    warnings = dict(result.warnings)
    for i in sorted(set(rows) - set(warnings)):
        setting = plan.settings[i]
        check = Recursion().check_linearization(linearizer.centered(), plan.descent(setting))
        warnings[i] = speed_warning(check, result.loss[i, : setting.steps + 1])
    return dataclasses.replace(result, warnings=warnings)
