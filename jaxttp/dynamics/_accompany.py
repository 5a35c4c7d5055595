"""Mini-batches beside the mean path: its kernels, their own steps.

Which batches will be drawn nobody knows ahead, and kernels rebuilt along one draw chase its noise:
kicks of single batches in stiff directions, which the network's own curvature takes back, grow in a
linearisation that was made in the middle of one. So kernels are built along the mean path, that of
full batches, and the batches take their steps with these: every segment is run again from where
the batches are, with what the kernels were found to miss of the mean path, and what the network
says at THEIR weights at its end drives it as it drives the mean path. Between knots kernels are
mixed as on the mean path at the same step: by their own way along the chord the noise would enter
the kernel. No kernel is built for them.

Beyond the edge of mini-batches (`_batch_edge`) kernels alone would drive both apart, so the modes
that are beyond it are damped, in the batches' steps and in the mean path, which then stays where
the batches are; not for a linear network, in which nothing takes a kick back. Where their loss
rises all the same the batches are left: from there on they go the mean path at half its speed, or
at the pace at which they had come along it so far where that is lower.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp.dynamics._confirm import Far, confirm
from jaxttp.dynamics._course import (
    Ahead,
    Course,
    Outcome,
    State,
    damping_at,
    differ,
    run_to,
    survey,
    survey_here,
)
from jaxttp.dynamics._edge import Damping
from jaxttp.dynamics._pieces import loss_curve, loss_value, row_of
from jaxttp.dynamics._segment import Knot
from jaxttp.dynamics._trajectory import RelinearizedTrajectory
from jaxttp.dynamics._walk import SegmentStep, arrive, finish, stop

SPEED = 0.5
"""Steps of the mean path that batches come a step once they are left, at most: in five trainings of
a CNN on digits (batches of 16 to 64, momentum 0.9) it was 0.3 to 0.8, the median 0.55."""
RISEN = 0.1
"""A loss that rises in a segment by more than this share of its start is not believed."""


class Batches(NamedTuple):
    """The batches' path.

    Attributes:
        course: with the batches.
        state: where they are.
        reached: since they were left, at the end of `state`: the step of the mean path at which its
            loss was theirs; None before.
        speed: steps of the mean path that they come a step from there on.
    """

    course: Course
    state: State
    reached: float | None = None
    speed: float = 1.0


def part_ways(course: Course, state: State) -> tuple[tuple[Course, State], Batches]:
    """Course and state of the mean path, and the batches beside it."""
    course = dataclasses.replace(course, noise=course.indices)
    state = state._replace(damping=damping_at(course, state, state.here.kernel, state.here.f))
    return (dataclasses.replace(course, indices=None), state), Batches(course, state)


def accompany(batches: Batches, before: State, taken: SegmentStep) -> Batches:
    """The batches after a segment of the mean path.

    Args:
        batches: where they are.
        before: where the mean path was, at the same step.
        taken: what came of its segment.
    """
    course, state = batches.course, batches.state
    if batches.reached is not None:
        return batches
    here = state.here._replace(point=before.here.point, kernel=before.here.kernel)
    state = state._replace(here=here)
    batches = batches._replace(state=state)
    if taken.outcome is Outcome.DIVERGED:
        return batches._replace(state=stop(course, state))
    if taken.outcome is Outcome.HELD:
        return _leave(batches, before)
    assert taken.far is not None  # it was accepted
    cross = None if taken.state.beside is None else taken.state.beside.kernel
    course = dataclasses.replace(course, cross_fn=None if cross is None else lambda _: cross)
    bounds, far = (None, None), taken.far.knots[-1].kernel
    bends = bool(differ(before.here.kernel, far))
    state = state._replace(bends=state.bends or bends)
    if course.damps and bends:
        bounds = (state.damping, damping_at(course, state, far, here.f))
    found = _take(course, state, taken.far, bounds, taken.state.start)
    is_denied = bends and _rises(course, state, found)
    if not is_denied:
        return batches._replace(state=found)
    left = _leave(batches, before)
    assert left.reached is not None
    pace = left.reached / before.start if before.start else 1.0
    return left._replace(speed=min(SPEED, pace))


def _take(
    course: Course, state: State, mean: Far, bounds: tuple[Damping | None, ...], end: int
) -> State:
    """The segment to `end` between the knots of the mean path."""
    state, pushed, products = survey_here(course, state)
    in_use = course.in_use(state)
    remote, _ = survey(course, state.here, mean.points[-1], in_use)
    near, far = mean.knots
    knots = [Knot(near.kernel, pushed, bounds[0]), Knot(far.kernel, remote, bounds[1])]
    mine = Far(knots, mean.points, mean.line, mean.defect)
    state, run = run_to(course, state, knots, products, mine.line, end, mine.defect)
    state = state._replace(passes=state.passes + sum(in_use))
    ahead = Ahead(end, knots[0], products, run)
    state, run, weights, f, _ = confirm(course, state, ahead, mine, run)
    return arrive(course, state, ahead, mine, run, weights, f)


def _rises(course: Course, state: State, found: State) -> bool:
    """Whether the loss rises in a segment, by the network at its end."""
    first = row_of(found.train, 0)
    outputs = (row_of(found.train, found.start), state.here.f, first)
    now, begun, first = (float(loss_value(course.loss, f, course.targets)) for f in outputs)
    return not now <= begun + RISEN * first


def _leave(batches: Batches, mean: State) -> Batches:
    """From here on they go the mean path."""
    course, state = batches.course, batches.state
    losses = np.asarray(loss_curve(course.loss, mean.train, course.targets))[: mean.start + 1]
    loss = float(loss_value(course.loss, state.here.f, course.targets))
    above = np.flatnonzero(losses >= loss)
    if len(above) == 0:  # they have come nowhere
        return batches._replace(reached=0.0)
    last = int(above[-1])
    if last == mean.start:
        return batches._replace(reached=float(last))
    high, low = losses[last], losses[last + 1]
    return batches._replace(reached=float(last + (high - loss) / (high - low)))


def join(mean: RelinearizedTrajectory, batches: Batches) -> RelinearizedTrajectory:
    """What was found of the batches, with the ends, kernels and costs of the mean path.

    The error estimate is the larger of both: what the second order changed in the mean path, and
    what the network corrected of the batches'; where they were left, what it changes whether they
    are slower than the mean path from there on.
    """
    course, state = batches.course, batches.state
    if batches.reached is not None:
        state = _behind(mean, batches)
    found = finish(course, state)
    return dataclasses.replace(
        mean,
        train=found.train,
        test=found.test,
        provisional=found.provisional,
        loss=found.loss,
        loss_uncertainty=jnp.maximum(mean.loss_uncertainty, found.loss_uncertainty),
        diverged_at=jnp.where(found.diverged_at >= 0, found.diverged_at, mean.diverged_at),
        left_at=batches.state.start if batches.speed < 1 else -1,
        gradient_evaluations=mean.gradient_evaluations + found.gradient_evaluations,
        steps_run=mean.steps_run + found.steps_run,
    )


def _behind(mean: RelinearizedTrajectory, batches: Batches) -> State:
    """The batches at the horizon: behind the mean path from where they are on."""
    state, reached = batches.state, batches.reached
    assert reached is not None  # they were left
    ts, start = np.arange(len(mean.ts)), state.start
    rest = (ts > start)[:, None, None]
    since = np.maximum(ts - start, 0)
    later = reached + since  # at the speed of the mean path
    slower = reached + batches.speed * since

    def go_on(path: Array, other: Array, at: np.ndarray) -> Array:
        low = np.floor(at).astype(int)
        part = jnp.asarray(at - low, path.dtype)[:, None, None]
        high = np.minimum(low + 1, len(ts) - 1)
        return jnp.where(rest, (1 - part) * other[low] + part * other[high], path)

    beside = state.beside
    if beside is not None:
        assert mean.test is not None  # both follow them
        beside = beside._replace(path=go_on(beside.path, mean.test, slower))
    return state._replace(
        train=go_on(state.train, mean.train, slower),
        provisional=go_on(state.provisional, mean.train, later),
        beside=beside,
        ends=mean.ends,
    )
