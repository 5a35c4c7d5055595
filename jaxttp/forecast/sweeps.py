"""One kernel, a thousand settings: forecasts for whole grids of hyper-parameters.

All settings of one loss and batch size move together (`jaxttp.dynamics._heavy_ball`), so a step of
all of them is one matrix product.
"""

import csv
import dataclasses
import functools
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxttp._checks import check_choice, check_finite, check_number
from jaxttp._files import replaced
from jaxttp._result import RESULT, wrapped
from jaxttp._types import ApplyFn, Params
from jaxttp.adapters import check_per_sample
from jaxttp.adapters.inputs import check_samples
from jaxttp.crossing import check_reading, metric_time
from jaxttp.dynamics._heavy_ball import heavy_ball
from jaxttp.dynamics._kernels import check_problem, flatten_kernel
from jaxttp.dynamics._trajectory import Trajectory
from jaxttp.dynamics.batches import PROTOCOLS, batch_indices, check_batches
from jaxttp.dynamics.recursion import recursion
from jaxttp.dynamics.stability import max_learning_rate
from jaxttp.forecast._options import check_memory, check_model
from jaxttp.forecast._stability import Rates, batch_factor, rises, stability_message
from jaxttp.forecast._trust import learning_speeds, trust_in_speeds
from jaxttp.forecast.hyperparameters import Hyperparameters, schedule_name
from jaxttp.losses import Loss, encode_targets, get_loss
from jaxttp.ntk import empirical_ntk
from jaxttp.ntk._select import split_trainable

_CHUNK_BYTES = 64 << 20
SHOWN = 5
"""Settings that a sweep prints, and asks the network about."""


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Forecasts of many settings on one kernel; prints its best rows.

    Attributes:
        settings: what was forecast, S of them.
        samples: N, of the training data.
        thresholds: E of them.
        rule: the definition of training time, see `training_time`.
        steps: training times (S, E) in steps, -1 where a setting diverges or never gets there, as
            with an error that does not fall.
        final_loss: predicted mean loss on all samples at the horizon, (S,).
        final_error: predicted error at the horizon, (S,).
        stable: (S,), False where the forecast diverges, or any step's rate is beyond its limit (as
            in `Prediction.stable`); `message` says which. Such settings are not ranked.
        max_learning_rate: (S,), where a constant rate with this momentum and loss diverges at the
            start of training.
        loss: predicted loss curves (S, T + 1), T the longest horizon; a shorter one is held at its
            end.
        step_seconds: seconds of a step (S,), or None.
        metric: the curve that the training times were read off, "loss" or "error".
        error: predicted error curves (S, T + 1), with the metric "error"; else None.
        trust: what the network says of the settings that are shown first, where it was asked (by
            `sweep`): a sentence as `Prediction.trust`, or None where there is no doubt. Settings
            that are missing were not looked at.
        rate_limit: (S,), what every rate is held against: `max_learning_rate`, or for a schedule
            with mini-batches the mean-square limit, which is lower.
    """

    settings: tuple[Hyperparameters, ...]
    samples: int
    thresholds: tuple[float, ...]
    rule: str
    steps: np.ndarray
    final_loss: np.ndarray
    final_error: np.ndarray
    stable: np.ndarray
    max_learning_rate: np.ndarray
    loss: np.ndarray
    step_seconds: np.ndarray | None = None
    metric: str = "loss"
    error: np.ndarray | None = None
    trust: Mapping[int, str | None] = dataclasses.field(default_factory=dict)
    rate_limit: np.ndarray | None = None

    def message(self, i: int) -> str:
        """One line on the stability of setting i."""
        one = self.settings[i]
        limits = self.max_learning_rate if self.rate_limit is None else self.rate_limit
        rates = one.rates()
        if one.schedule == "constant":
            rates = rates[:1]
        in_square = limits[i] < self.max_learning_rate[i]
        beside = Rates(rates, rates / limits[i], one.batch_size if in_square else None)
        return stability_message(
            self.loss[i], beside, stable=bool(self.stable[i]), batch_size=one.batch_size
        )

    @property
    def warning(self) -> str | None:
        """One line on the settings that are not stable; None where all of them are."""
        unstable = np.flatnonzero(~self.stable)
        if not len(unstable):
            return None
        i = int(unstable[np.argmin(self.final_loss[unstable])])  # the one that looks best
        return f"{len(unstable)} not stable, as {self.settings[i]}: {self.message(i)}"

    def cost(self, threshold: float) -> np.ndarray:
        """What every setting spends to get there, (S,): seconds where known, else samples seen.

        Infinite where it diverges or never gets there.
        """
        column = self._column(threshold)
        each = self.step_seconds
        if each is None:
            each = np.array([one.batch_size or self.samples for one in self.settings])
        times = self.steps[:, column]
        return np.where(self.stable & (times >= 0), times * each, np.inf)

    def best(self, threshold: float) -> int:
        """The index of the setting that gets there with the fewest steps, then the lowest loss.

        With the rule "relative" (or "gap") every setting is measured by its own final loss, so that
        a slow one can seem early; with the rule "absolute" all go to the same loss.

        Raises:
            ValueError: an unknown threshold, or no setting that gets there.
        """
        ranking = self.ranking(threshold)
        if not ranking:
            raise ValueError(
                f"no setting reaches threshold={threshold:g}: all diverge or are too slow; try "
                f"learning rates below {self.max_learning_rate.min():.4g} or more steps."
            )
        return ranking[0]

    def ranking(self, threshold: float) -> tuple[int, ...]:
        """The settings that get there, by steps, then by the lowest final loss."""
        times = self.steps[:, self._column(threshold)]
        order = np.lexsort((self.final_loss, times))
        return tuple(int(i) for i in order if self.stable[i] and times[i] >= 0)

    def cheapest(self, threshold: float) -> tuple[int, ...]:
        """The settings that get there, by what they spend, then by the lowest final loss."""
        cost = self.cost(threshold)
        order = np.lexsort((self.final_loss, cost))
        return tuple(int(i) for i in order if np.isfinite(cost[i]))

    def pareto(self, threshold: float) -> tuple[int, ...]:
        """The settings that no other one beats in both cost and final loss, cheapest first."""
        cost = self.cost(threshold)
        order = [i for i in np.lexsort((self.final_loss, cost)) if np.isfinite(cost[i])]
        chosen: list[int] = []
        for i in order:
            if not chosen or self.final_loss[i] < self.final_loss[chosen[-1]]:
                chosen.append(int(i))
        return tuple(chosen)

    def rows(self) -> list[dict[str, Any]]:
        """One flat dictionary a setting, of plain values; None where there is no number."""
        out = []
        for i, one in enumerate(self.settings):
            row: dict[str, Any] = {
                "learning_rate": float(one.learning_rate),
                "momentum": float(one.momentum),
                "batch_size": one.batch_size,
                "schedule": schedule_name(one.schedule),
                "loss": get_loss(one.loss).name,
                "horizon": one.steps,
                "stable": bool(self.stable[i]),
                "max_learning_rate": float(self.max_learning_rate[i]),
                "final_loss": float(self.final_loss[i]),
                "final_error": float(self.final_error[i]),
            }
            for threshold, time in zip(self.thresholds, self.steps[i], strict=True):
                row[f"steps_{threshold:g}"] = int(time) if time >= 0 else None
                if self.step_seconds is not None:
                    seconds = float(time * self.step_seconds[i]) if time >= 0 else None
                    row[f"seconds_{threshold:g}"] = seconds
            row |= {"looked_at": i in self.trust, "trust": self.trust.get(i)}
            out.append(row)
        return out

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the rows to a CSV file."""
        rows = self.rows()
        with replaced(path) as place, place.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)

    def goal(self, threshold: float) -> str:
        """A threshold in words."""
        what = "" if self.metric == "loss" else " of the error"
        return f"{100 * threshold:g} %{what}" if self.rule == "relative" else f"{threshold:g}{what}"

    def _column(self, threshold: float) -> int:
        return self.thresholds.index(check_choice("threshold", threshold, self.thresholds))

    def __str__(self) -> str:
        middle = self.thresholds[len(self.thresholds) // 2]
        order = self.cheapest(middle)
        reached = len(order)
        lines = [
            f"Sweep of {len(self.settings)} settings, {int(self.stable.sum())} stable; "
            f"the first to {self.goal(middle)}:"
        ]
        for i in order[:SHOWN]:
            times = ", ".join(str(int(t)) for t in self.steps[i])
            lines.append(f"  {self.settings[i]!s:<40} steps {times}; loss {self.final_loss[i]:.4g}")
            if self.trust.get(i) is not None:
                lines.append(wrapped(f"    trust: {self.trust[i]}", 11))
        if not reached:
            lines.append("  none gets there")
        if self.warning is not None:
            which, why = self.warning.split(": ", 1)
            lines += [f"  {which}:", wrapped(f"    {why}", 4)]
        return "\n".join(lines)

    plot, _repr_html_, __repr__ = RESULT


def sweep(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    settings: Sequence[Hyperparameters],
    *,
    thresholds: Sequence[float] = (0.01, 0.1, 0.4),
    rule: str = "relative",
    metric: str = "loss",
    smooth: int = 1,
    window: int | None = None,
    key: Array | None = None,
    protocol: str | None = None,
    trainable: Any = None,
    max_bytes: int | None = None,
    step_seconds: float | Mapping[int | None, float] | None = None,
) -> Sweep:
    """Forecast every setting from ONE kernel, without a training step.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``, in evaluation mode.
        params: pytree of floating-point arrays, the weights before training.
        x: training samples (N, ...).
        y: integer labels (N,) or targets (N, C).
        settings: what to forecast; `grid` makes combinations.
        thresholds: the epsilons, shares in (0, 1) for the rule "relative".
        rule: the definition of training time, see `training_time`.
        metric: which curve it is read off, "loss" or "error".
        smooth: steps over which that curve is averaged first, see `smooth_curve`.
        window: steps of the rule "plateau".
        key: a `jax.random.key`, needed where a setting has a batch size. Settings of the same batch
            size see the same batches, so that they can be compared.
        protocol: how batches are drawn, where a setting has a batch size: "epochs" when None, see
            `jaxttp.dynamics.batch_indices`.
        trainable: which parameters train, as in `empirical_ntk`; all of them when None.
        max_bytes: bound on the kernel's working memory, in bytes.
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
        >>> result = sweep(lambda w, x: x @ w, jnp.zeros((3, 2)), x, y, settings)
        >>> result.steps.shape, result.settings[result.best(0.1)].learning_rate > 0
        ((4, 3), True)

    Source:
        TTP Section 5 forecasts one setting at a time with an ODE; the recursion on the outputs is
        exact for the linearised network (derived, tested against `recursion`).
    """
    x = check_samples("x", x)
    _check_options(
        settings, thresholds, rule, metric, smooth, window, key, protocol, step_seconds, len(x)
    )
    check_memory(None, max_bytes)
    check_finite("x", x)
    shape = check_model(apply_fn, params, x, trainable)
    check_finite("params", params)
    for loss in {one.loss for one in settings}:
        encode_targets(loss, y, jax.ShapeDtypeStruct(shape, x.dtype))
    check_per_sample(apply_fn, params, x)
    f0 = jax.jit(apply_fn)(params, x)
    kernel = empirical_ntk(apply_fn, params, x, trainable=trainable, max_bytes=max_bytes)
    swept = sweep_kernel(
        kernel, f0, y, settings, thresholds=thresholds, rule=rule, metric=metric, smooth=smooth,
        window=window, key=key, protocol=protocol, step_seconds=step_seconds,
    )  # fmt: skip
    selected, restore = split_trainable(params, trainable)
    part: ApplyFn = lambda weights, samples: apply_fn(restore(weights), samples)  # noqa: E731
    network = apply_fn if trainable is None else part
    return with_trust(swept, network, selected, x, y, kernel, f0, key=key, protocol=protocol)


def with_trust(
    swept: Sweep,
    network: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    kernel: ArrayLike,
    f0: Array,
    *,
    key: Array | None = None,
    protocol: str | None = None,
) -> Sweep:
    """The same sweep, with `Sweep.trust` for the settings that it shows first.

    Those are the five cheapest to the middle threshold and the first to every other one, each for
    six gradient evaluations (`learning_speeds`); what is compiled serves all of a batch size.

    Args:
        swept: of `sweep_kernel`.
        network: ``(params, x) -> outputs (N, C)``.
        params: the weights before training, the part that is trained.
        x: training samples (N, ...).
        y: integer labels (N,) or targets (N, C).
        kernel: its kernel.
        f0: its outputs (N, C).
        key: as there.
        protocol: as there.

    Returns:
        A `Sweep`.
    """
    middle = swept.thresholds[len(swept.thresholds) // 2]
    chosen = {i for e in swept.thresholds for i in swept.ranking(e)[:1]}
    chosen |= set(swept.cheapest(middle)[:SHOWN])
    trust: dict[int, str | None] = {}
    for i in sorted(chosen):
        one = swept.settings[i]
        theta, start, targets, loss, _, _ = check_problem(kernel, f0, y, one.loss)
        path = heavy_ball_path(
            theta, start, targets, jnp.asarray(one.rates(), start.dtype),
            jnp.asarray(one.momentum, start.dtype), key if one.batch_size else None,
            loss=loss, batch_size=one.batch_size, protocol=protocol or PROTOCOLS[0],
        )  # fmt: skip
        speeds = learning_speeds(
            network, params, x, targets, loss, theta, path, one.batch_size
        )  # fmt: skip
        trust[i] = trust_in_speeds(speeds, jnp.asarray(swept.loss[i, : one.steps + 1]))
    return dataclasses.replace(swept, trust=trust)


@functools.partial(jax.jit, static_argnames=("loss", "batch_size", "protocol"))
def heavy_ball_path(
    kernel: Array,
    start: Array,
    targets: Array,
    rates: Array,
    momentum: Array,
    key: Array | None,
    *,
    loss: Loss,
    batch_size: int | None,
    protocol: str = "epochs",
) -> Trajectory:
    """`recursion` for heavy-ball descent whose rates are arrays, so that settings share it."""
    optimizer = optax.chain(
        optax.trace(momentum),  # type: ignore
        optax.scale_by_schedule(lambda t: -rates[t]),
    )
    return recursion(
        kernel, start, targets, loss=loss, optimizer=optimizer, steps=len(rates),
        batch_size=batch_size, key=key, protocol=protocol,
    )  # fmt: skip


def sweep_kernel(
    kernel: ArrayLike,
    f0: ArrayLike,
    y: Any,
    settings: Sequence[Hyperparameters],
    *,
    thresholds: Sequence[float] = (0.01, 0.1, 0.4),
    rule: str = "relative",
    metric: str = "loss",
    smooth: int = 1,
    window: int | None = None,
    key: Array | None = None,
    protocol: str | None = None,
    step_seconds: float | Mapping[int | None, float] | None = None,
) -> Sweep:
    """`sweep` for a kernel that exists already.

    Args:
        kernel: Theta (N, C, N, C), or (N, N) for K ⊗ I_C.
        f0: outputs before training (N, C).
        y: integer labels (N,) or targets (N, C).
        settings: what to forecast.
        thresholds: see `sweep`.
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
        ValueError: see `sweep`; bad shapes.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxttp.forecast import grid
        >>> kernel = jnp.eye(4).reshape(2, 2, 2, 2)
        >>> settings = grid(learning_rate=(0.5, 1.0), steps=20)
        >>> sweep_kernel(kernel, jnp.zeros((2, 2)), jnp.array([0, 1]), settings).loss.shape
        (2, 21)
    """
    settings, thresholds, protocol, seconds = _check_options(
        settings, thresholds, rule, metric, smooth, window, key, protocol, step_seconds,
        np.shape(f0)[0] if np.ndim(f0) else None,
    )  # fmt: skip
    problems = {}
    groups: dict[tuple, list[int]] = defaultdict(list)
    for i, one in enumerate(settings):
        groups[get_loss(one.loss), one.batch_size].append(i)
        if one.loss not in problems:
            problems[one.loss] = check_problem(kernel, f0, y, one.loss)[:4]
    horizon = max(one.steps for one in settings)
    curves, limits = np.zeros((len(settings), horizon + 1)), np.zeros(len(settings))
    in_square = np.ones(len(settings))  # the limits of schedules with mini-batches, as a share
    by_error = metric == "error"
    errors = np.zeros((len(settings), horizon + 1 if by_error else 1))
    alive = np.zeros(len(settings), bool)
    n = 0
    for (_, batch_size), members in groups.items():
        theta, start, targets, exact_loss = problems[settings[members[0]].loss]
        n, c = start.shape
        indices = None
        if batch_size is not None:
            longest = max(settings[i].steps for i in members)
            indices = batch_indices(key, n, batch_size, longest, protocol=protocol)
        matrix = flatten_kernel(theta, c)
        limit = float(max_learning_rate(theta, start, targets, loss=exact_loss))
        size = max(1, _CHUNK_BYTES // (5 * start.size * start.dtype.itemsize))
        for low in range(0, len(members), size):
            part = members[low : low + size]
            some = [settings[i] for i in part]
            found = _run(matrix, start, targets, exact_loss, some, indices, by_error)
            curves[part] = _held(found[0].T, horizon + 1)
            errors[part], alive[part] = _held(found[1].T, errors.shape[1]), found[2]
        factors: dict[float, float] = {}
        for i in members:
            momentum = settings[i].momentum
            limits[i] = limit * (1.0 + momentum)
            if batch_size is None or np.ptp(settings[i].rates()) == 0:
                continue
            if momentum not in factors:
                problem = theta, start, targets, exact_loss
                factors[momentum] = batch_factor(problem, momentum, batch_size, protocol)
            in_square[i] = factors[momentum]
    final = curves[:, -1]
    peaks = np.array([one.rates().max() for one in settings])
    stable = alive & ~rises(curves) & (peaks < in_square * limits)
    times = np.full((len(settings), len(thresholds)), -1)
    horizons = np.array([one.steps for one in settings])
    for steps in set(horizons):
        some = np.flatnonzero(stable & (horizons == steps))
        for column, threshold in enumerate(thresholds):
            read = functools.partial(
                metric_time, threshold=threshold, metric=metric, rule=rule, smooth=smooth,
                window=window,
            )  # fmt: skip
            read_off = (errors if by_error else curves)[some, : steps + 1]
            times[some, column] = jax.vmap(read)(jnp.asarray(read_off))
    return Sweep(
        settings, n, thresholds, rule, times, final, errors[:, -1], stable, limits, curves, seconds,
        metric, errors if by_error else None, rate_limit=in_square * limits,
    )  # fmt: skip


def _check_options(
    settings: Sequence[Hyperparameters],
    thresholds: Sequence[float],
    rule: str,
    metric: str,
    smooth: int,
    window: int | None,
    key: Array | None,
    protocol: str | None,
    step_seconds: float | Mapping[int | None, float] | None,
    n: int | None,
) -> tuple[tuple[Hyperparameters, ...], tuple[float, ...], str, np.ndarray | None]:
    """Settings, thresholds, protocol and seconds, checked before anything is computed."""
    if isinstance(settings, Hyperparameters):
        raise TypeError("settings must hold Hyperparameters (see grid); put the one into a list.")
    settings = tuple(settings)
    if not settings:
        raise ValueError("settings must hold at least one Hyperparameters; got none.")
    for one in settings:
        if not isinstance(one, Hyperparameters):
            raise TypeError(f"settings must hold Hyperparameters (see grid); got {one!r}.")
    shortest = min(one.steps for one in settings)
    thresholds = check_reading(thresholds, rule, metric, smooth, window, shortest)
    sizes = [one.batch_size for one in settings if one.batch_size is not None]
    largest = max(sizes, default=None)
    protocol = check_batches(largest, key, protocol, n)
    return settings, thresholds, protocol, _step_seconds(step_seconds, settings)


def _held(curves: np.ndarray, length: int) -> np.ndarray:
    """Curves (S, t) held at their ends until they have this length."""
    return np.pad(curves, ((0, 0), (0, length - curves.shape[1])), mode="edge")


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
    matrix: Array,
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
