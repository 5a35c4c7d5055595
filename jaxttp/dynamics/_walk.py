"""A re-linearised path under construction: a state, and a step that takes one segment.

As an ODE solver's step is apart from the control of its size, a step here only takes the segment it
is told to take and says what came of it (`Outcome`); where segments end is for `_placement`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jaxtyping import Array

from jaxttp._core.checks import check_finite_value, is_concrete
from jaxttp._core.types import ApplyFn, Params
from jaxttp.dynamics._accumulators import gather, surveyed_before
from jaxttp.dynamics._central import NEAR, Guard
from jaxttp.dynamics._confirm import Far, confirm, is_contradicted
from jaxttp.dynamics._course import (
    Ahead,
    Beside,
    Course,
    Crossing,
    Outcome,
    State,
    combine,
    damping_at,
    differ,
    guarded,
    is_beyond,
    run_to,
    sharper,
    survey,
    survey_here,
    timed,
)
from jaxttp.dynamics._edge import Damping
from jaxttp.dynamics._network import compile_network
from jaxttp.dynamics._offsets import foreseen, offset_of
from jaxttp.dynamics._pieces import (
    as_shares,
    blank,
    empty_path,
    estimate,
    freeze,
    is_finite,
    loss_curve,
    row_of,
    settle,
    splice,
    zeros,
)
from jaxttp.dynamics._segment import Knot, Run, Start, chord, follow_beside
from jaxttp.dynamics._trajectory import RelinearizedTrajectory
from jaxttp.dynamics.filters import linear_filter, start_shares
from jaxttp.dynamics.optimizers import HeavyBall, same_program
from jaxttp.losses import Loss, encode_targets
from jaxttp.ntk.kernels import Kernel

DENIED = 4.0
"""A segment at the edge that the network denies counts as one of this error over the limit."""


def set_out(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    *,
    loss: str | Loss,
    optimizer: optax.GradientTransformation | HeavyBall,
    steps: int,
    kernel_fn: Callable[[Params], Kernel],
    draw: Callable[[int], Array | None],
    accumulators: Sequence[Params] = (),
    damp: bool | None = None,
    x_test: Any = None,
    cross_fn: Callable[[Params], Kernel] | None = None,
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
    begun, train, rows = blank(params, f, shares, steps)
    descent = same_program(optimizer, rows)
    inner = optimizer.init(rows)
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
    kernel, seconds = timed(kernel_fn, params)
    kernel = check_finite_value("kernel", kernel)  # a later one may not be, where a forecast ends
    vectors = [params, *(accumulators or begun)]
    duals, ones = [zeros(f.shape, f.dtype)] * len(shares), as_shares([1.0] * len(shares), f)
    here = Start(params, kernel, vectors, f, inner, duals, ones)
    state = State(
        here, None, train, train, jax.device_put(-1), seconds=(seconds,),
        beside=_beside(course, params), gathered=(False,) * len(shares),
    )  # fmt: skip
    bound = damping_at(course, state, kernel, f)
    state = sharper(state, bound)
    if damp is None and is_beyond(bound):  # a rate that is too large from the start
        course, bound = dataclasses.replace(course, damps=False), None
    return dataclasses.replace(course, indices=draw(f.shape[0])), state._replace(damping=bound)


def look_ahead(course: Course, state: State, end: int) -> tuple[State, Ahead]:
    """Run from here to step `end` with the kernel at hand; the path itself stays as it is."""
    state, pushed, products = survey_here(course, state)
    knot = Knot(state.here.kernel, pushed, state.damping)
    state, run = run_to(course, state, [knot], products, None, end)
    return state, Ahead(end, knot, products, run)


class SegmentStep(NamedTuple):
    """What came of a step.

    Attributes:
        state: the path after it.
        outcome: what came of it.
        error: the largest change of the loss curve by the correction, as a share of `drop`.
        far: what its second run knew, where it was accepted.
    """

    state: State
    outcome: Outcome
    error: float = 0.0
    far: "Far | None" = None


def step(
    course: Course, state: State, ahead: Ahead, limit: float | None = None, drop: float = 1.0
) -> SegmentStep:
    """Take the segment from here to the end of `ahead`, in second order.

    A kernel is built near the provisional end (see `_offsets`), and the segment is run again with
    the kernel interpolated; what the network then says beyond the kernels drives further runs. A
    segment that turns out to cross the edge of stability is taken again with its steepest modes
    held back (see `_central`); where the network denies that, shorter ones are tried before a
    kernel is held.

    Args:
        course: what does not change.
        state: where the path is.
        ahead: the provisional run.
        limit: the largest acceptable error; None accepts all, and the error is not computed.
        drop: what the error is measured by.

    Returns:
        A `SegmentStep`. A state that is held or diverged is at the horizon.
    """
    here, end = state.here, ahead.end
    state, provisional = combine(course, state, [here.point], ahead.run.rows[0])
    point = _seen_ahead(state, provisional)
    if not _is_known(ahead.run.rows[0]):
        return SegmentStep(stop(course, state), Outcome.DIVERGED)
    kernel, seconds = timed(course.kernel_fn, point)
    state = state._replace(seconds=(*state.seconds, seconds))
    if is_concrete(kernel) and not bool(is_finite(kernel)):
        return SegmentStep(stop(course, state), Outcome.DIVERGED)
    bound = damping_at(course, state, kernel, row_of(ahead.run.train, end))
    state, ahead, bound = _bent(course, state, ahead, kernel, bound)
    if course.central and state.guard is None and is_beyond(bound):
        state, ahead = look_ahead(course, guarded(course, state), end)
        return step(course, state, ahead, limit, drop)
    in_use = course.in_use(state)
    pushed, _ = survey(course, here, point, in_use)
    state = state._replace(passes=state.passes + sum(in_use))
    far = Far(
        [ahead.knot, Knot(kernel, pushed, bound)],
        [here.point, point],
        chord(ahead.knot, ahead.products, ahead.run.rows[0]),
    )
    guard = state.guard
    if bound is not None:
        state = _corrected(state, ahead, bound)
    state, run = run_to(course, state, far.knots, ahead.products, far.line, end)
    error = 0.0
    if limit is not None:
        error = _change(course, ahead.run.train, run.train, end, drop)
        if not error <= limit:
            return _rejected(state, guard, error)
    state = sharper(state, bound)
    if is_beyond(bound) and state.crossing is None:
        state, crossing = cross_edge(course, state)
        state = state._replace(crossing=crossing, edge_at=end)
    state, run, weights, f, defect = confirm(course, state, ahead, far, run)
    lost = course.damps and _is_lost(course, state, kernel, f, run, end)
    if lost and guard is not None and limit is not None and np.isfinite(limit):
        return _rejected(state, guard, DENIED * limit)
    if lost or (guard is None and end == course.steps and is_beyond(bound)):
        return SegmentStep(hold(course, state, guard, end, run.train), Outcome.HELD, error)
    state = state._replace(offset=offset_of(weights, provisional, state.offset))
    arrived = arrive(course, state, ahead, far, run, weights, f)
    far = far._replace(line=run.shares, defect=defect)
    return SegmentStep(arrived, Outcome.ACCEPTED, error, far)


def _seen_ahead(state: State, provisional: Params) -> Params:
    """Where to build a segment's second kernel, by its provisional end and the last offset.

    At that end itself where modes are held back at the edge of stability: the path turns with them.
    """
    if state.offset is None or state.guard is not None:
        return provisional
    return foreseen(provisional, state.offset)


def _is_known(row: Array) -> bool:
    """Whether the coefficients of weights are finite; not asked under `jit`, or of many devices."""
    if not is_concrete(row) or not row.is_fully_addressable:
        return True
    return bool(np.all(np.isfinite(np.asarray(row))))


def _bent(
    course: Course, state: State, ahead: Ahead, kernel: Kernel, bound: Damping | None
) -> tuple[State, Ahead, Damping | None]:
    """The state that knows whether the network bends, where damping acts; none if it does not."""
    acts = _acts(course, bound) or _acts(course, state.damping)
    if state.bends or not acts:
        return state, ahead, bound
    here = state.here
    if bool(differ(here.kernel, kernel)):
        near = state.damping or damping_at(course, state, here.kernel, here.f)
        return state._replace(bends=True, damping=near), ahead, bound
    if state.damping is not None:
        state, ahead = look_ahead(course, state._replace(damping=None), ahead.end)
    return state, ahead, None


def _is_lost(course: Course, state: State, kernel: Kernel, f: Array, run: Run, end: int) -> bool:
    """Whether the network denies a segment; one that is linear has nothing to deny."""
    denied = is_contradicted(course, state, f, run, end)
    return denied and (state.bends or bool(differ(state.here.kernel, kernel)))


def _acts(course: Course, bound: Damping | None) -> bool:
    """Whether there may be a mode that is damped or held back."""
    return bound is not None and (course.noise is not None or float(bound.largest) > NEAR)


def _corrected(state: State, ahead: Ahead, bound: Damping) -> State:
    """The state whose guard, if it has one, knows the curvatures at the provisional end."""
    if state.guard is None:
        return state
    assert ahead.run.curvatures is not None  # the run ahead was held back
    return state._replace(guard=state.guard.corrected(ahead.run.curvatures, bound.values))


def _rejected(state: State, guard: Guard | None, error: float) -> SegmentStep:
    """Nothing is taken, and what the second run had learnt of the guard's modes is forgotten."""
    state = state._replace(guard=guard, rejected=state.rejected + 1)
    return SegmentStep(state, Outcome.REJECTED, error)


def arrive(
    course: Course, state: State, ahead: Ahead, far: Far, run: Run, weights: Params, f: Array
) -> State:
    """The state after a segment that was accepted."""
    train, provisional, diverged_at, f = settle(
        state.provisional, ahead.run.train, state.diverged_at, run, f, state.start, ahead.end
    )
    if state.beside is not None:
        state = _arrive_beside(course, state, far, run, weights, ahead.end)
    if state.central_from < 0 and state.guard is not None:
        bears = state.guard.bears(run.curvatures)
        state = state._replace(central_from=state.start if bears else -1)
    here, before = state.here, state.here
    if ahead.end < course.steps:
        state, carried, duals, shares = gather(course, state, ahead, far, run, weights)
        point, kernel = far.points[-1], far.knots[-1].kernel
        here = Start(point, kernel, [weights, *carried], f, run.state, duals, shares)
    state = state._replace(
        here=here, train=train, provisional=provisional, diverged_at=diverged_at,
        ends=(*state.ends, ahead.end), guard=None, surveyed=None,
    )  # fmt: skip
    if ahead.end == course.steps:
        return state
    state = surveyed_before(course, state, before.vectors, ahead, far)
    bound = damping_at(course, state, here.kernel, f)
    acts = _acts(course, bound)
    if acts and not state.bends and not bool(differ(before.kernel, here.kernel)):
        acts, bound = False, None
    state = state._replace(damping=bound, bends=state.bends or acts)
    near = acts and course.central
    return guarded(course, state) if near else state


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
    in_use, beside = course.in_use(state), state.beside
    assert beside is not None
    here = state.here._replace(f=beside.f)
    pushed, _ = survey(dataclasses.replace(course, x=course.x_test), here, point, in_use)
    return state._replace(passes=state.passes + sum(in_use)), pushed


def _beside(course: Course, params: Params) -> Beside | None:
    """The test samples before training."""
    if course.x_test is None or course.cross_fn is None:
        return None
    f = compile_network(course.apply_fn)[0](params, course.x_test)
    kernel = check_finite_value("kernel_test", course.cross_fn(params))
    return Beside(kernel, f, empty_path(f, course.steps))


def hold(course: Course, state: State, guard: Guard | None, end: int, abandoned: Array) -> State:
    """Follow the last kernel within the edge to the horizon.

    A network that stays at the edge of stability is held there by its own oscillation: its
    kernel grows no further, while the mean path of damped steps would let it grow on. Where modes
    are held back and the network denies it all the same, it is the kernel at hand, held back.
    """
    crossing = state.crossing
    if guard is not None:
        state, crossing = state._replace(guard=guard), None
    if crossing is None:
        state, crossing = cross_edge(course, state)
    start, run, test = crossing
    train, provisional = splice(state.train, state.provisional, run.train, abandoned, start, end)
    return state._replace(
        crossing=crossing, train=train, provisional=provisional, diverged_at=run.diverged_at,
        ends=(*(e for e in state.ends if e <= start), course.steps), held_from=start,
        beside=None if test is None else state.beside._replace(path=test),  # type: ignore[union-attr]
    )  # fmt: skip


def cross_edge(course: Course, state: State) -> tuple[State, Crossing]:
    """What would be held from here on."""
    state, plain = look_ahead(course, state, course.steps)
    beside = state.beside
    if beside is None:
        return state, Crossing(state.start, plain.run, None)
    state, pushed = _push_beside(course, state, state.here.point)
    knot = Knot(beside.kernel, pushed)
    test = follow_beside([knot], plain.run, beside.f, beside.path, state.start, course.steps, None)
    return state, Crossing(state.start, plain.run, test)


def stop(course: Course, state: State) -> State:
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


def _change(course: Course, provisional: Array, final: Array, end: int, drop: float) -> float:
    """The largest change of the losses up to `end` by the correction, as a share of the drop."""
    before, after = (
        np.asarray(loss_curve(course.loss, path, course.targets))[: end + 1]
        for path in (provisional, final)
    )
    change = float(np.max(np.abs(before - after))) / max(drop, 1e-30)
    return change if np.isfinite(change) else float("inf")


def predicted_drop(course: Course, ahead: Ahead) -> float:
    """By how much the loss falls from step 0 to the horizon, by a run that goes there."""
    curve = np.asarray(loss_curve(course.loss, ahead.run.train, course.targets))
    return float(np.abs(curve[0] - curve[-1]))


def finish(course: Course, state: State) -> RelinearizedTrajectory:
    """The finished path, its loss and the error estimate."""
    is_end = np.isin(np.arange(course.steps + 1), state.ends)
    loss, before = (
        loss_curve(course.loss, path, course.targets) for path in (state.train, state.provisional)
    )
    ts, uncertainty, local = estimate(loss, before, is_end)
    count = len(state.ends)
    local = jax.device_put(np.asarray(local)[:count]) if is_concrete(local) else local[:count]
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
        steps_run=state.run,
        sharpest=state.sharpest,
        central_from=state.central_from,
    )
