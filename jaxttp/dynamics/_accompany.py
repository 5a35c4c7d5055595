"""Mini-batches beside the mean path: its kernels, their own steps.

Which batches will be drawn nobody knows ahead, and kernels rebuilt along one draw chase its noise:
kicks of single batches in stiff directions, which the network's own curvature takes back, grow in a
linearisation that was made in the middle of one. So kernels are built along the mean path, that of
full batches, and the batches take their steps with these: every segment is run again from where
the batches are, and what the network says at THEIR weights at its end drives it as it drives the
mean path. Between knots kernels are mixed as on the mean path at the same step: by their own way
along the chord the noise would enter the kernel. No kernel is built for them.
"""

import dataclasses

import jax.numpy as jnp

from jaxttp.dynamics._course import Ahead, Course, Outcome, State, run_to, survey
from jaxttp.dynamics._segment import Knot
from jaxttp.dynamics._trajectory import RelinearizedTrajectory
from jaxttp.dynamics._walk import Far, SegmentStep, arrive, confirm, cross_edge, finish, hold, stop


def part_ways(course: Course, state: State) -> tuple[tuple[Course, State], tuple[Course, State]]:
    """Course and state of the mean path, and of the batches beside it, who follow test samples."""
    mean = dataclasses.replace(course, indices=None, x_test=None, cross_fn=None)
    beside = dataclasses.replace(course, damps=False)  # the mean path's knots bring their damping
    return (mean, state._replace(beside=None)), (beside, state)


def accompany(course: Course, state: State, before: State, taken: SegmentStep, end: int) -> State:
    """The batches' path after a segment of the mean path.

    Args:
        course: theirs.
        state: where they are.
        before: where the mean path was, at the same step.
        taken: what came of its segment.
        end: the segment's end.

    Returns:
        Their state where the mean path is now.
    """
    here = state.here._replace(point=before.here.point, kernel=before.here.kernel)
    state = state._replace(here=here, damping=before.damping)
    if taken.outcome is Outcome.DIVERGED:
        return stop(course, state)
    if before.crossing is None and taken.state.crossing is not None:
        state, crossing = cross_edge(course, state)
        state = state._replace(crossing=crossing)
    if taken.outcome is Outcome.HELD:
        return hold(course, state, end, state.train)
    assert taken.far is not None  # it was accepted
    return _take(course, state, taken.far, end)


def _take(course: Course, state: State, mean: Far, end: int) -> State:
    """The segment to `end` between the knots of the mean path."""
    here, in_use = state.here, course.in_use(state.start)
    first, last = mean.points
    pushed, products = survey(course, here, first, in_use)
    remote, _ = survey(course, here, last, in_use)
    near, far = mean.knots
    knots = [Knot(near.kernel, pushed, near.damping), Knot(far.kernel, remote, far.damping)]
    mine = Far(knots, mean.points, mean.line)
    run = run_to(course, state, knots, products, mine.line, end)
    state = state._replace(passes=state.passes + 2 * sum(in_use))
    ahead = Ahead(end, knots[0], products, run)
    state, run, weights, f = confirm(course, state, ahead, mine, run)
    return arrive(course, state, ahead, mine, run, weights, f)


def join(mean: RelinearizedTrajectory, course: Course, state: State) -> RelinearizedTrajectory:
    """What was found of the batches, with the ends, kernels and costs of the mean path.

    The error estimate is the larger of both: what the second order changed in the mean path, and
    what the network corrected of the batches'.
    """
    found = finish(course, state)
    return dataclasses.replace(
        mean,
        train=found.train,
        test=found.test,
        provisional=found.provisional,
        loss=found.loss,
        loss_uncertainty=jnp.maximum(mean.loss_uncertainty, found.loss_uncertainty),
        diverged_at=found.diverged_at,
        gradient_evaluations=mean.gradient_evaluations + found.gradient_evaluations,
    )
