"""All settings of a sweep along the first linearisation.

All settings of one loss and batch size move together (`heavy_ball_curves`), so a step of all of
them is one matrix product. Algorithms that are not heavy-ball descent are followed one by
one (`jaxttp.forecast.one_by_one`).
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxttp._core.checks import check_choice, check_known, check_number
from jaxttp.dynamics._kernels import check_problem
from jaxttp.dynamics.batches import batch_indices, check_batches
from jaxttp.dynamics.recursion import heavy_ball_curves
from jaxttp.dynamics.stability import max_learning_rate
from jaxttp.forecast._curves import held_to, read_times
from jaxttp.forecast._shared import with_shared_goal
from jaxttp.forecast._stability import batch_factor, rises
from jaxttp.forecast.hyperparameters import Hyperparameters, check_settings
from jaxttp.forecast.one_by_one import Alone, follow_alone
from jaxttp.forecast.paths.base import Linearizer
from jaxttp.forecast.swept import Sweep
from jaxttp.losses import Loss, get_loss
from jaxttp.losses.rule import TRAIN_CURVES, Rule, Target, check_targets
from jaxttp.ntk.kernels import Kernel, KernelLike

_CHUNK_BYTES = 64 << 20
RANKINGS = ("shared", "own")
"""What settings are measured by, where no target is given."""


class Wanted(NamedTuple):
    """What a sweep is asked for, checked before anything is computed.

    Attributes:
        settings: which.
        rule: by which times are read.
        targets: losses and errors to get below.
        key: of the batches.
        protocol: how they are drawn.
        seconds: of a step of every setting (S,), or None.
        rank_by: "shared" or "own".
    """

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
        step_seconds: float | Mapping[int | None, float] | Sequence[float] | np.ndarray | None,
        rank_by: str = RANKINGS[0],
    ) -> "Wanted":
        """Checked; of N samples, where that is known."""
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
    alone: np.ndarray

    @classmethod
    def of(cls, wanted: Wanted) -> "_Followed":
        """Room for them."""
        count, horizon = len(wanted.settings), max(one.steps for one in wanted.settings)
        columns = horizon + 1 if wanted.by_error else 1
        return cls(
            np.zeros((count, horizon + 1)), np.zeros((count, columns)), np.zeros(count, bool),
            np.zeros(count), np.ones(count), np.zeros(count, bool),
        )  # fmt: skip

    def put(self, i: int, one: Alone) -> None:
        """Setting i, which was followed by itself and is `alive` where that was stable."""
        loss, error = (np.asarray(c, np.float64) for c in (one.path.loss, one.path.error))
        self.losses[i] = held_to(loss, self.losses.shape[1])
        columns = self.errors.shape[1]
        self.errors[i] = held_to(error, columns) if columns > 1 else error[-1]
        self.alive[i], self.limits[i], self.alone[i] = one.stable, one.limit, True


def screen(lines: Linearizer, y: Any, wanted: Wanted) -> Sweep:
    """A sweep of a network along its first linearisation alone.

    Args:
        lines: of the problem.
        y: integer labels (N,) or targets (N, C).
        wanted: the options of `sweep`, checked.
    """
    found = _Followed.of(wanted)
    others = [i for i, one in enumerate(wanted.settings) if not one.is_heavy_ball]
    alone = follow_alone(
        [wanted.settings[i] for i in others], lines, y, wanted.rule, key=wanted.key,
        protocol=wanted.protocol, progress=lines.progress,
    )  # fmt: skip
    if len(others) < len(wanted.settings):
        _follow_together(found, lines.first, lines.problem.f0, y, wanted)
    for i, one in zip(others, alone, strict=True):
        found.put(i, one)
    swept = _read(found, len(lines.problem.f0), wanted)
    return dataclasses.replace(
        swept, trust={i: one.trust for i, one in zip(others, alone, strict=True)},
        simulated=frozenset(i for i, one in zip(others, alone, strict=True) if one.simulated),
        trainings=sum((one.cost for one in alone), 0.0) if alone else None,
        notes=lines.problem.notes,
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


def _read(found: _Followed, n: int, wanted: Wanted) -> Sweep:
    """Curves as a sweep."""
    settings, reading = wanted.settings, wanted.rule
    peaks = np.array([one.rates().max() for one in settings])
    stable = found.alive & ~rises(found.losses) & (peaks < found.in_square * found.limits)
    stable = np.where(found.alone, found.alive, stable)
    horizons = np.array([one.steps for one in settings])
    rules = (reading, *(target.rule(reading.smooth) for target in wanted.targets))
    times, *to_targets = (
        read_times(one.curve(found.losses, found.errors), stable, horizons, one) for one in rules
    )
    swept = Sweep(
        settings, n, reading.thresholds, reading.kind, times,
        found.losses[:, -1], found.errors[:, -1], stable, found.limits, found.losses,
        wanted.seconds, reading.metric, found.errors if wanted.by_error else None,
        rate_limit=found.in_square * found.limits, targets=wanted.targets,
        target_steps=np.concatenate([times[:, :0], *to_targets], axis=1),
    )  # fmt: skip
    return swept if wanted.rank_by == "own" else with_shared_goal(swept, reading)


def _follow_together(
    out: _Followed, kernel: KernelLike, f0: ArrayLike, y: Any, wanted: Wanted
) -> None:
    """All heavy-ball settings, those of a loss and a batch size together."""
    settings, by_error = wanted.settings, wanted.by_error
    groups: dict[tuple, list[int]] = defaultdict(list)
    for i, one in enumerate(settings):
        if one.is_heavy_ball:
            groups[get_loss(one.loss), one.batch_size].append(i)
    losses = dict.fromkeys(settings[i].loss for members in groups.values() for i in members)
    problems = {loss: check_problem(kernel, f0, y, loss)[:4] for loss in losses}
    horizon = max(one.steps for one in settings)
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
            found = _run(theta, start, targets, loss, some, indices, by_error)
            out.losses[part] = held_to(found[0].T, horizon + 1)
            out.errors[part] = held_to(found[1].T, out.errors.shape[1])
            out.alive[part] = found[2]
        _set_limits(out, problem, settings, members, wanted.protocol)


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


def _step_seconds(given: Any, settings: Sequence[Hyperparameters]) -> np.ndarray | None:
    if given is None:
        return None
    if not isinstance(given, Mapping) and np.ndim(given) == 1:
        if len(given) != len(settings):
            raise ValueError(
                f"step_seconds must be one number a setting, {len(settings)}; got {len(given)}."
            )
        for i, seconds in enumerate(given):
            check_number(f"step_seconds[{i}]", seconds, above=0.0)
        return np.asarray(given, np.float64)
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
