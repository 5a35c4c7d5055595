"""One kernel, a thousand settings: forecasts for whole grids of hyper-parameters.

All settings of one loss and batch size move together (`jaxttp.dynamics._heavy_ball`), so a step of
all of them is one matrix product.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxttp._checks import check_array, check_choice, check_known, check_number
from jaxttp._samples import count
from jaxttp._types import ApplyFn, Params
from jaxttp.adapters.inputs import check_samples
from jaxttp.dynamics._heavy_ball import heavy_ball
from jaxttp.dynamics._kernels import check_problem, flatten_kernel
from jaxttp.dynamics.batches import batch_indices, check_batches
from jaxttp.dynamics.stability import max_learning_rate
from jaxttp.forecast._curves import held_to, read_times
from jaxttp.forecast._options import Keywords, check_processes, check_tokens, choose_kernel
from jaxttp.forecast._shared import with_shared_goal
from jaxttp.forecast._stability import batch_factor, rises
from jaxttp.forecast.hyperparameters import Hyperparameters, check_settings
from jaxttp.forecast.leaders import follow_leaders, with_trust
from jaxttp.forecast.paths.base import Linearizer
from jaxttp.forecast.problem import Problem
from jaxttp.forecast.swept import Sweep
from jaxttp.losses import Loss, get_loss
from jaxttp.ntk.estimators import KernelEstimator
from jaxttp.ntk.factored import Kernel, KernelLike
from jaxttp.ntk.row_sharded import on_many_devices
from jaxttp.ntk.streamed import Streamed
from jaxttp.rule import TRAIN_CURVES, Rule, Target, Values, check_targets, targets_of

_CHUNK_BYTES = 64 << 20
RANKINGS = ("shared", "own")
"""What settings are measured by, where no target is given."""


def sweep(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    settings: Sequence[Hyperparameters],
    *,
    thresholds: Sequence[float] | None = None,
    target_loss: Values = None,
    target_error: Values = None,
    rule: str | Rule = "relative",
    metric: str = "loss",
    smooth: int = 1,
    window: int | None = None,
    key: Array | None = None,
    protocol: str | None = None,
    rank_by: str = "shared",
    relinearize: int | str = "auto",
    trainable: Any = None,
    sketch_dim: int | None = None,
    kernel: KernelEstimator | None = None,
    max_bytes: int | None = None,
    step_seconds: float | Mapping[int | None, float] | None = None,
) -> Sweep:
    """Forecast every setting from ONE kernel, and those that lead along rebuilt ones.

    No training step is taken.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``, in evaluation mode.
        params: pytree of floating-point arrays, the weights before training.
        x: training samples (N, ...), an array or a pytree of arrays with N rows each.
        y: integer labels (N,) or targets (N, C).
        settings: what to forecast; `grid` makes combinations.
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
        rank_by: where no target is given, "shared" for one that the sweep chooses for all settings
            (see `shared_goal`; the share is the middle threshold), or "own" for every setting's own
            drop, by which a slow one can seem early. Settings of several losses have their own.
        relinearize: as in `predict_training_time`, for the settings that lead (two to eight, see
            `Sweep.relinearized`): a single kernel ranks many at once, but its times can be several
            times the real ones. 0 for one kernel alone, which takes seconds for thousands.
        trainable: which parameters train, as in `empirical_ntk`; all of them when None.
        sketch_dim: width of a random projection of the Jacobian that stands for the exact kernel,
            see `sketch_jacobian`.
        kernel: how kernels come about, such as ``jaxttp.ntk.Sketched(4096, key)``, in place of the
            keywords that name it.
        max_bytes: bound on the exact kernel's working memory, in bytes.
        step_seconds: seconds of one training step, as `time_step` measures them: one number, or one
            for every batch size that occurs.

    Returns:
        A `Sweep`.

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
    check_known(params=params, x=x, y=y)
    x = check_samples("x", x)
    reading = Rule.of(thresholds, rule, metric, smooth, window)
    Keywords(relinearize=relinearize).check()
    targets = targets_of(target_loss, target_error)
    wanted = _Wanted.of(settings, count(x), reading, targets, key, protocol, step_seconds, rank_by)
    estimator = choose_kernel(sketch_dim, key, None, max_bytes, kernel)
    check_processes(x, estimator)
    losses = list(dict.fromkeys(one.loss for one in wanted.settings))
    problem = Problem.of(apply_fn, params, x, y, loss=losses[0], trainable=trainable)
    check_tokens(problem, estimator)
    y = problem.labels
    for loss in losses[1:]:
        problem.with_loss(loss, y)  # refuses labels that do not suit it
    lines = Linearizer(problem, estimator)
    swept = _sweep(lines.first, problem.f0, y, wanted)
    drawn: dict[str, Any] = {"key": key, "protocol": protocol}
    swept = follow_leaders(swept, lines, y, reading, relinearize=relinearize, **drawn)
    return with_trust(swept, lines, y, **drawn)


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
    step_seconds: float | Mapping[int | None, float] | None = None,
    rank_by: str = "shared",
) -> Sweep:
    """`sweep` for a kernel that exists already.

    Args:
        kernel: Theta (N, C, N, C), or (N, N) for K ⊗ I_C; an array, on a mesh, or a
            `jaxttp.ntk.StoredKernel`, which is read once for every product.
        f0: outputs before training (N, C).
        y: integer labels (N,) or targets (N, C).
        settings: what to forecast.
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
        rank_by: see `sweep`.

    Returns:
        A `Sweep`.

    Raises:
        ValueError: see `sweep`; bad shapes; targets of test samples.

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
    wanted = _Wanted.of(settings, n, reading, targets, key, protocol, step_seconds, rank_by)
    return _sweep(kernel, f0, y, wanted)


def _sweep(kernel: KernelLike, f0: ArrayLike, y: Any, wanted: "_Wanted") -> Sweep:
    """A sweep whose options were checked."""
    settings, reading = wanted.settings, wanted.rule
    problems = {
        loss: check_problem(kernel, f0, y, loss)[:4]
        for loss in dict.fromkeys(one.loss for one in settings)
    }
    found = _follow(problems, wanted)
    peaks = np.array([one.rates().max() for one in settings])
    stable = found.alive & ~rises(found.losses) & (peaks < found.in_square * found.limits)
    horizons = np.array([one.steps for one in settings])
    rules = (reading, *(target.rule(reading.smooth) for target in wanted.targets))
    times, *to_targets = (
        read_times(one.curve(found.losses, found.errors), stable, horizons, one) for one in rules
    )
    swept = Sweep(
        settings, len(next(iter(problems.values()))[1]), reading.thresholds, reading.kind, times,
        found.losses[:, -1], found.errors[:, -1], stable, found.limits, found.losses,
        wanted.seconds, reading.metric, found.errors if wanted.by_error else None,
        rate_limit=found.in_square * found.limits, targets=wanted.targets,
        target_steps=np.concatenate([times[:, :0], *to_targets], axis=1),
    )  # fmt: skip
    return swept if wanted.rank_by == "own" else with_shared_goal(swept, reading)


class _Wanted(NamedTuple):
    """What a sweep is asked for, checked before anything is computed."""

    settings: tuple[Hyperparameters, ...]
    rule: Rule
    targets: tuple[Target, ...]
    key: Array | None
    protocol: str
    seconds: np.ndarray | None
    rank_by: str

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
        step_seconds: float | Mapping[int | None, float] | None,
        rank_by: str,
    ) -> "_Wanted":
        check_choice("rank_by", rank_by, RANKINGS)
        settings = check_settings(settings)
        remedy = "A sweep is about the training samples; ask predict_training_time, with x_test."
        targets = check_targets(targets, known=TRAIN_CURVES, remedy=remedy)
        rule.check(min(one.steps for one in settings))
        sizes = [one.batch_size for one in settings if one.batch_size is not None]
        protocol = check_batches(max(sizes, default=None), key, protocol, n)
        check_known(key=key)
        return cls(
            settings, rule, targets, key, protocol, _step_seconds(step_seconds, settings), rank_by
        )


class _Followed(NamedTuple):
    """Curves of all settings, held at their ends, and what their rates are held against."""

    losses: np.ndarray
    errors: np.ndarray
    alive: np.ndarray
    limits: np.ndarray
    in_square: np.ndarray


def _follow(problems: Mapping[Any, tuple], wanted: _Wanted) -> _Followed:
    """All settings, those of a loss and a batch size together."""
    settings, by_error = wanted.settings, wanted.by_error
    groups: dict[tuple, list[int]] = defaultdict(list)
    for i, one in enumerate(settings):
        groups[get_loss(one.loss), one.batch_size].append(i)
    count, horizon = len(settings), max(one.steps for one in settings)
    out = _Followed(
        np.zeros((count, horizon + 1)), np.zeros((count, horizon + 1 if by_error else 1)),
        np.zeros(count, bool), np.zeros(count), np.ones(count),
    )  # fmt: skip
    for (_, batch_size), members in groups.items():
        theta, start, targets, loss = problem = problems[settings[members[0]].loss]
        n, c = start.shape
        indices = None
        if batch_size is not None:
            longest = max(settings[i].steps for i in members)
            indices = batch_indices(wanted.key, n, batch_size, longest, protocol=wanted.protocol)
        elsewhere = isinstance(theta, Streamed) or on_many_devices(theta)
        matrix = theta if elsewhere else flatten_kernel(theta, c)
        size = max(1, _CHUNK_BYTES // (5 * start.size * start.dtype.itemsize))
        for low in range(0, len(members), size):
            part = members[low : low + size]
            some = [settings[i] for i in part]
            found = _run(matrix, start, targets, loss, some, indices, by_error)
            out.losses[part] = held_to(found[0].T, horizon + 1)
            out.errors[part] = held_to(found[1].T, out.errors.shape[1])
            out.alive[part] = found[2]
        _set_limits(out, problem, settings, members, wanted.protocol)
    return out


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


def _step_seconds(
    given: float | Mapping[int | None, float] | None, settings: Sequence[Hyperparameters]
) -> np.ndarray | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        check_number("step_seconds", given, above=0.0)
        return np.full(len(settings), float(given))
    missing = {one.batch_size for one in settings} - set(given)
    if missing:
        raise ValueError(
            f"step_seconds has no entry for batch size {missing.pop()!r}; measure it with "
            "time_step(..., batch_size=...) (None stands for full batches)."
        )
    for size, seconds in given.items():
        check_number(f"step_seconds[{size!r}]", seconds, above=0.0)
    return np.array([float(given[one.batch_size]) for one in settings])


def _run(
    matrix: Kernel,
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
    found = heavy_ball(matrix, start, targets, rates, momenta, indices, loss, all_errors)
    curves, errors, alive = (np.asarray(part) for part in found)
    return curves.astype(np.float64), errors, alive
