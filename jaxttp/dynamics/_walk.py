"""A re-linearised path under construction: a state, and a step that takes one segment.

As an ODE solver's step is apart from the control of its size, a step here only takes the segment it
is told to take and says what came of it (`Outcome`); where segments end is for `_placement`.
"""

import dataclasses
import enum
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxttp._checks import check_finite_value, is_concrete
from jaxttp._types import ApplyFn, Params
from jaxttp.dynamics._edge import Damping, stabilise
from jaxttp.dynamics._network import compile_network, kept
from jaxttp.dynamics._pieces import (
    better,
    compile_combine,
    compile_survey,
    empty_path,
    estimate,
    freeze,
    is_finite,
    loss_curve,
    loss_drop,
    loss_values,
    more_drift,
    no_vectors,
    row_of,
    scaled,
    settle,
    splice,
)
from jaxttp.dynamics._segment import (
    Chord,
    Knot,
    Run,
    Start,
    chord,
    follow_beside,
    run_segment,
)
from jaxttp.dynamics._trajectory import RelinearizedTrajectory
from jaxttp.dynamics.filters import linear_filter, start_shares
from jaxttp.dynamics.optimizers import HeavyBall, Optimizer, inlined, same_program
from jaxttp.losses import Loss, encode_targets

SWEEPS = 3
"""How often at most a segment is done again with the defect at its end as a drift.

The defect is what the network says there beyond what the kernels do. Along stiff directions
training would have contracted it at once; added to the outputs afterwards it would stay.
"""
SMALL_DEFECT = 1e-3
"""A defect that moves the loss by less than this share of the drop so far is left as it is."""
TRUSTED = 0.25
"""Least share of the predicted fall of the loss that the network must confirm (trust regions)."""
DOUBT_FROM = 0.05
"""Falls of less than this share of the drop so far are not held against the network."""
RISE = 2.0
"""A stable forecast whose loss comes to this multiple of its start is not believed."""


class Outcome(enum.Enum):
    """What came of a step."""

    ACCEPTED = "the segment is part of the path"
    REJECTED = "its error is too large, so that nothing was taken"
    HELD = "a kernel was held to the horizon: the network stays at the edge, or denies the forecast"
    DIVERGED = "the network left the representable numbers: the last outputs that did not are held"


@dataclasses.dataclass(frozen=True)
class Course:
    """What does not change along a path.

    Attributes:
        apply_fn: the network.
        x: samples.
        kernel_fn: params -> Theta.
        loss: the loss.
        targets: as encoded.
        optimizer: see `same_program`.
        steps: the horizon T.
        indices: the batches (T, B), or None.
        shares: what the accumulators of a fresh state hold, as multiples of the weights.
        decays: whether the initial weights can enter the outputs.
        moving: whether accumulators came along.
        damps: whether modes beyond the edge of stability are damped.
        x_test: samples whose outputs are followed beside, or None.
        cross_fn: params -> Theta(x_test, x), with them.
    """

    apply_fn: ApplyFn
    x: Any
    kernel_fn: Callable[[Params], Array]
    loss: Loss
    targets: Array
    optimizer: Optimizer
    steps: int
    indices: Array | None
    shares: tuple[float, ...]
    decays: bool
    moving: bool
    damps: bool
    x_test: Any = None
    cross_fn: Callable[[Params], Array] | None = None

    def in_use(self, start: int) -> tuple[bool, ...]:
        """Which of the vectors that coefficients refer to can enter the outputs."""
        begun = (share != 0 for share in self.shares)
        return (self.decays, *(self.moving or start > 0 or each for each in begun))


class Beside(NamedTuple):
    """Test samples along a path from step 0 to step `start`.

    Attributes:
        kernel: Theta(x_test, x) at the point of linearisation.
        f: outputs there (M, C).
        path: outputs (T + 1, M, C), filled up to `start`.
    """

    kernel: Array
    f: Array
    path: Array


class Crossing(NamedTuple):
    """Where a path first crosses the edge of stability, and what is held if it stays there.

    Attributes:
        start: of the segment that crosses it.
        run: from there to the horizon with the kernel at hand.
        test: the test samples along it (T + 1, M, C), or None.
    """

    start: int
    run: Run
    test: Array | None


class State(NamedTuple):
    """A path from step 0 to step `start`.

    Attributes:
        here: the point of linearisation and what is carried there.
        damping: what keeps steps there stable, or None.
        train: outputs (T + 1, N, C), filled up to `start`.
        provisional: the same before the second-order correction.
        diverged_at: first step whose outputs could not be represented, or -1.
        ends: where segments end.
        crossing: the first segment that crosses the edge of stability; None for never.
        edge_at: the end of that segment, or -1.
        held_from: the step from which on a kernel is held, or -1.
        rejected: segments that were not taken.
        passes: products with a Jacobian so far.
        seconds: of every kernel built so far.
        beside: the test samples, or None.
    """

    here: Start
    damping: Damping | None
    train: Array
    provisional: Array
    diverged_at: Array
    ends: tuple[int, ...] = ()
    crossing: Crossing | None = None
    edge_at: int = -1
    held_from: int = -1
    rejected: int = 0
    passes: int = 0
    seconds: tuple[float, ...] = ()
    beside: Beside | None = None

    @property
    def start(self) -> int:
        """The step where the next segment starts."""
        return self.ends[-1] if self.ends else 0

    @property
    def kernels(self) -> int:
        """Kernels built so far."""
        return len(self.seconds)


class Ahead(NamedTuple):
    """A run from here on with the kernel at hand alone, to `end`."""

    end: int
    knot: Knot
    products: Array
    run: Run

    @property
    def path(self) -> np.ndarray:
        """The length of the path through weight space up to every step (T + 1,), from here."""
        return np.cumsum(np.asarray(self.run.length, np.float64))


def set_out(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    *,
    loss: str | Loss,
    optimizer: optax.GradientTransformation | HeavyBall,
    steps: int,
    kernel_fn: Callable[[Params], Array],
    draw: Callable[[int], Array | None],
    accumulators: Sequence[Params] = (),
    damp: bool | None = None,
    x_test: Any = None,
    cross_fn: Callable[[Params], Array] | None = None,
) -> tuple[Course, State]:
    """The course, and the state before the first step.

    Args:
        apply_fn: the network.
        params: the weights before training.
        x: samples.
        y: labels or targets.
        loss: a name or a `Loss`.
        optimizer: linear.
        steps: the horizon T.
        kernel_fn: params -> Theta.
        draw: number of samples -> batches (T, B), or None.
        accumulators: see `relinearized_recursion`.
        damp: see there.
        x_test: see there.
        cross_fn: params -> Theta(x_test, x), with them.
    """
    f = compile_network(apply_fn)[0](params, x)
    targets, loss = encode_targets(loss, y, f)
    decays = False
    if not isinstance(optimizer, HeavyBall):
        decays = linear_filter(optimizer, params, steps=steps).weight_decay is not False
    shares = start_shares(optimizer)
    descent = same_program(optimizer)
    inner = optimizer.init(jnp.zeros(2 * f.size + 1 + len(shares), f.dtype))
    if accumulators and len(accumulators) != len(shares):
        raise ValueError(
            f"accumulators must hold one pytree for each of the optimizer's {len(shares)} "
            f"accumulators; got {len(accumulators)}."
        )
    course = Course(
        apply_fn, x, kernel_fn, loss, targets, descent, steps, None, shares,
        # An average of weights takes its share from the weights themselves.
        decays or any(shares), bool(accumulators), damp is not False and is_concrete(f), x_test,
        cross_fn,
    )  # fmt: skip
    kernel, seconds = _timed(kernel_fn, params)
    kernel = check_finite_value("kernel", kernel)  # a later one may not be, where a forecast ends
    vectors = [params, *(accumulators or [scaled(params, share) for share in shares])]
    train = empty_path(f, steps)
    state = State(
        Start(params, kernel, vectors, f, inner), None, train, train, jnp.asarray(-1),
        seconds=(seconds,), beside=_beside(course, params),
    )  # fmt: skip
    bound = _damping(course, state, kernel, f)
    if damp is None and _is_beyond(bound):  # a rate that is too large from the start
        course, bound = dataclasses.replace(course, damps=False), None
    return dataclasses.replace(course, indices=draw(f.shape[0])), state._replace(damping=bound)


def look_ahead(course: Course, state: State, end: int) -> tuple[State, Ahead]:
    """Run from here to step `end` with the kernel at hand; the path itself stays as it is."""
    here, in_use = state.here, course.in_use(state.start)
    pushed, products = _survey(course, here, here.point, in_use)
    knot = Knot(here.kernel, pushed, state.damping)
    run = _run(course, state, [knot], products, None, end)
    return state._replace(passes=state.passes + sum(in_use)), Ahead(end, knot, products, run)


class SegmentStep(NamedTuple):
    """What came of a step.

    Attributes:
        state: the path after it.
        outcome: what came of it.
        error: the largest change of the loss curve by the correction, as a share of `drop`.
    """

    state: State
    outcome: Outcome
    error: float = 0.0


def step(
    course: Course, state: State, ahead: Ahead, limit: float | None = None, drop: float = 1.0
) -> SegmentStep:
    """Take the segment from here to the end of `ahead`, in second order.

    A kernel is built at the provisional end, and the segment is run again with the kernel
    interpolated; what the network then says beyond the kernels drives further runs.

    Args:
        course: what does not change.
        state: where the path is.
        ahead: the provisional run.
        limit: the largest acceptable error; None accepts all, and the error is not computed.
        drop: what the error is measured by.

    Returns:
        A `SegmentStep`. A state that is held or diverged is at the horizon.
    """
    here, start, end = state.here, state.start, ahead.end
    state, point = _combine(course, state, [here.point], ahead.run.rows[0])
    kernel, seconds = _timed(course.kernel_fn, point)
    state = state._replace(seconds=(*state.seconds, seconds))
    if is_concrete(kernel) and not bool(is_finite(kernel)):
        return SegmentStep(_stop(course, state), Outcome.DIVERGED)
    bound = _damping(course, state, kernel, row_of(ahead.run.train, end))
    in_use = course.in_use(start)
    pushed, _ = _survey(course, here, point, in_use)
    state = state._replace(passes=state.passes + sum(in_use))
    far = Far(
        [ahead.knot, Knot(kernel, pushed, bound)],
        [here.point, point],
        chord(ahead.knot, ahead.products, ahead.run.rows[0]),
    )
    run = _run(course, state, far.knots, ahead.products, far.line, end)
    error = 0.0
    if limit is not None:
        error = _change(course, ahead.run.train, run.train, end) / max(drop, 1e-30)
        error = error if np.isfinite(error) else float("inf")
        if not error <= limit:
            return SegmentStep(state._replace(rejected=state.rejected + 1), Outcome.REJECTED, error)
    if _is_beyond(bound) and state.crossing is None:
        state, crossing = _cross_edge(course, state)
        state = state._replace(crossing=crossing, edge_at=end)
    state, run, weights, f = _confirm(course, state, ahead, far, run)
    lost = course.damps and _is_contradicted(course, state, f, run, end)
    if lost or (end == course.steps and _is_beyond(bound)):
        return SegmentStep(_hold(course, state, end, run.train), Outcome.HELD, error)
    arrived = _arrive(course, state, ahead, far, run, weights, f)
    return SegmentStep(arrived, Outcome.ACCEPTED, error)


class Far(NamedTuple):
    """What the second run of a segment knows: both knots, their points, the chord between them."""

    knots: list[Knot]
    points: list[Params]
    line: Chord


def _confirm(
    course: Course, state: State, ahead: Ahead, far: Far, run: Run
) -> tuple[State, Run, Params, Array]:
    """Do a segment again until the network agrees at its end; the weights and outputs there."""
    start, end = state.start, ahead.end
    state, weights, f = _end_of(course, state, far, run)
    drift = jnp.zeros_like(f)
    for _ in range(SWEEPS):
        if _is_small(course, state, f, run, end):
            break
        drift = more_drift(drift, f, run.train, start, end)
        again = _run(course, state, far.knots, ahead.products, far.line, end, drift)
        state, new_weights, new_f = _end_of(course, state, far, again)
        run, weights, f = better((run, weights, f), (again, new_weights, new_f), end)
    return state, run, weights, f


def _arrive(
    course: Course, state: State, ahead: Ahead, far: Far, run: Run, weights: Params, f: Array
) -> State:
    """The state after a segment that was accepted."""
    train, provisional, diverged_at, f = settle(
        state.provisional, ahead.run.train, state.diverged_at, run, f, state.start, ahead.end
    )
    if state.beside is not None:
        state = _arrive_beside(course, state, far, run, weights, ahead.end)
    here, carried = state.here, []
    if ahead.end < course.steps:
        for row in run.rows[1:]:
            state, vector = _combine(course, state, far.points, row)
            carried.append(vector)
        here = Start(far.points[-1], far.knots[-1].kernel, [weights, *carried], f, run.state)
    state = state._replace(
        here=here, train=train, provisional=provisional, diverged_at=diverged_at,
        ends=(*state.ends, ahead.end),
    )  # fmt: skip
    if ahead.end == course.steps:
        return state
    return state._replace(damping=_damping(course, state, here.kernel, f))


def _arrive_beside(
    course: Course, state: State, far: Far, run: Run, weights: Params, end: int
) -> State:
    """The test samples after a segment: kernels and outputs there, and the way between."""
    beside, (here, there) = state.beside, far.points
    assert beside is not None  # it is asked for where there are any
    assert course.cross_fn is not None
    kernel = course.cross_fn(there)
    state, near = _push_beside(course, state, here)
    state, remote = _push_beside(course, state, there)
    f = compile_network(course.apply_fn)[0](weights, course.x_test)
    knots = [Knot(beside.kernel, near), Knot(kernel, remote)]
    path = follow_beside(knots, run, beside.f, beside.path, state.start, end, f)
    return state._replace(beside=Beside(kernel, row_of(path, end), path))


def _push_beside(course: Course, state: State, point: Params) -> tuple[State, Array]:
    """J v on the test samples at `point` for the vectors that are carried (k, M, C)."""
    in_use, beside = course.in_use(state.start), state.beside
    assert beside is not None
    here = state.here._replace(f=beside.f)
    pushed, _ = _survey(dataclasses.replace(course, x=course.x_test), here, point, in_use)
    return state._replace(passes=state.passes + sum(in_use)), pushed


def _beside(course: Course, params: Params) -> Beside | None:
    """The test samples before training."""
    if course.x_test is None or course.cross_fn is None:
        return None
    f = compile_network(course.apply_fn)[0](params, course.x_test)
    kernel = check_finite_value("kernel_test", course.cross_fn(params))
    return Beside(kernel, f, empty_path(f, course.steps))


def _hold(course: Course, state: State, end: int, abandoned: Array) -> State:
    """Follow the last kernel within the edge to the horizon.

    A network that stays at the edge of stability is held there by its own oscillation: its
    kernel grows no further, while the mean path of damped steps would let it grow on.
    """
    crossing = state.crossing
    if crossing is None:
        state, crossing = _cross_edge(course, state)
    start, run, test = crossing
    train, provisional = splice(state.train, state.provisional, run.train, abandoned, start, end)
    return state._replace(
        crossing=crossing, train=train, provisional=provisional, diverged_at=run.diverged_at,
        ends=(*(e for e in state.ends if e <= start), course.steps), held_from=start,
        beside=None if test is None else state.beside._replace(path=test),  # type: ignore[union-attr]
    )  # fmt: skip


def _cross_edge(course: Course, state: State) -> tuple[State, Crossing]:
    """What would be held from here on."""
    state, plain = look_ahead(course, state, course.steps)
    beside = state.beside
    if beside is None:
        return state, Crossing(state.start, plain.run, None)
    state, pushed = _push_beside(course, state, state.here.point)
    knot = Knot(beside.kernel, pushed)
    test = follow_beside([knot], plain.run, beside.f, beside.path, state.start, course.steps, None)
    return state, Crossing(state.start, plain.run, test)


def _stop(course: Course, state: State) -> State:
    """Hold the last outputs that can be represented."""
    beside, start = state.beside, state.start
    train, provisional, diverged_at = freeze(
        state.train, state.provisional, state.diverged_at, state.here.f, start
    )
    if beside is not None:
        test, _, _ = freeze(beside.path, beside.path, state.diverged_at, beside.f, start)
        beside = beside._replace(path=test)
    return state._replace(
        train=train, provisional=provisional, diverged_at=diverged_at,
        ends=(*state.ends, course.steps), beside=beside,
    )  # fmt: skip


def _run(
    course: Course,
    state: State,
    knots: list[Knot],
    products: Array,
    line: Chord | None,
    end: int,
    drift: Array | None = None,
) -> Run:
    here = state.here
    return inlined(run_segment, course.optimizer)(
        course.optimizer, course.loss, knots, here, products, line, state.start, end, state.train,
        course.targets, course.indices, jnp.zeros_like(here.f) if drift is None else drift,
        record=state.beside is not None,
    )  # fmt: skip


def _damping(course: Course, state: State, kernel: Array, f: Array) -> Damping | None:
    """What keeps steps with this kernel stable; nothing where that is not wanted."""
    if not course.damps:
        return None
    return stabilise(
        course.optimizer, course.shares, state.here.state, kernel, f, course.targets, course.loss
    )


def _is_beyond(bound: Damping | None) -> bool:
    return bound is not None and float(bound.largest) > 1.0


def _timed(kernel_fn: Callable[[Params], Array], params: Params) -> tuple[Array, float]:
    """A kernel, and the seconds that it took."""
    begun = time.perf_counter()
    kernel = kernel_fn(params)
    if is_concrete(kernel):
        jax.block_until_ready(kernel)
    return kernel, time.perf_counter() - begun


def _survey(
    course: Course, here: Start, point: Params, in_use: tuple[bool, ...]
) -> tuple[Array, Array]:
    """J v at `point` for the vectors in use (k, N, C), and their products with each other (k, k).

    Both are zero for a vector that cannot enter the outputs.
    """
    if not any(in_use):
        return no_vectors(here.f, len(in_use))
    return kept(compile_survey, course.apply_fn)(point, course.x, here.vectors, here.f, in_use)


def _combine(
    course: Course, state: State, points: list[Params], row: Array
) -> tuple[State, Params]:
    """The weight-space vector whose coefficients are `row`."""
    here = state.here
    vector, _ = kept(compile_combine, course.apply_fn)(
        points, course.x, here.vectors, row, here.f, False
    )
    return state._replace(passes=state.passes + len(points)), vector


def _end_of(course: Course, state: State, far: Far, run: Run) -> tuple[State, Params, Array]:
    """The weights at a segment's end, and what the network says there."""
    here = state.here
    weights, f = kept(compile_combine, course.apply_fn)(
        far.points, course.x, here.vectors, run.rows[0], here.f, True
    )
    assert f is not None  # it was asked for
    return state._replace(passes=state.passes + len(far.points)), weights, f


def _change(course: Course, provisional: Array, final: Array, end: int) -> float:
    """The largest change of the loss curve up to `end` by the correction."""
    before, after = (
        np.asarray(loss_curve(course.loss, path, course.targets))[: end + 1]
        for path in (provisional, final)
    )
    return float(np.max(np.abs(before - after)))


def _is_small(course: Course, state: State, f: Array, run: Run, end: int) -> bool:
    """Whether the network agrees with the kernels on the loss; not known under `jit`."""
    values = loss_values(course.loss, course.targets, f, state.here.f, run.train, end)
    if not is_concrete(values):
        return False
    now, then, _, first = np.asarray(values)
    return bool(np.abs(now - then) <= SMALL_DEFECT * np.abs(first - now))


def _is_contradicted(course: Course, state: State, f: Array, run: Run, end: int) -> bool:
    """Whether the network at a segment's end denies what the kernels say of its loss."""
    values = loss_values(course.loss, course.targets, f, state.here.f, run.train, end)
    now, then, begun, first = map(float, np.asarray(values))
    if not max(now, then) <= RISE * max(first, begun):
        return True
    expected = begun - then
    return expected > DOUBT_FROM * abs(first - then) and begun - now < TRUSTED * expected


def predicted_drop(course: Course, ahead: Ahead) -> float:
    """By how much the loss falls from step 0 to the horizon, by a run that goes there."""
    return float(loss_drop(course.loss, course.targets, ahead.run.train))


def finish(course: Course, state: State) -> RelinearizedTrajectory:
    """The finished path, its loss and the error estimate."""
    is_end = np.isin(np.arange(course.steps + 1), state.ends)
    ts, loss, uncertainty, local = estimate(
        course.loss, course.targets, state.train, state.provisional, is_end
    )
    count = len(state.ends)
    local = jnp.asarray(np.asarray(local)[:count]) if is_concrete(local) else local[:count]
    return RelinearizedTrajectory(
        ts=ts,
        train=state.train,
        test=None if state.beside is None else state.beside.path,
        provisional=state.provisional,
        loss=loss,
        loss_uncertainty=uncertainty,
        ends=state.ends,
        local_errors=local,
        rejected=state.rejected,
        diverged_at=state.diverged_at,
        edge_at=state.edge_at,
        held_from=state.held_from,
        kernels=state.kernels,
        kernel_seconds=state.seconds,
        gradient_evaluations=state.passes,
    )
