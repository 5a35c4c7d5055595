"""The integrator's loop: it takes segments until the horizon, and records the path."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxttp._core.checks import check_finite_value
from jaxttp._core.compile import jit
from jaxttp.dynamics._kernels import apply_kernel
from jaxttp.dynamics._trajectory import RelinearizedTrajectory, curves
from jaxttp.dynamics.recursion import Linearization, Motion
from jaxttp.dynamics.relinearize.controller import Controller, Proposal
from jaxttp.dynamics.relinearize.solver import (
    Arrival,
    Outcome,
    Prediction,
    Segment,
    Setup,
    State,
    Step,
    at,
    combine,
    linearize,
    predict,
    push_all,
    step,
)
from jaxttp.ntk.kernels import Kernel


class TestPath(NamedTuple):
    """Test samples beside a path.

    Attributes:
        kernel: Theta(x_test, x) at the state's point.
        path: outputs (T + 1, M, C), filled up to the state's step.
    """

    kernel: Kernel
    path: Float[Array, "t m c"]


@dataclasses.dataclass(frozen=True)
class Record:
    """A path from step 0 to the state's step.

    Attributes:
        setup: whose path it is.
        state: where it is.
        train: outputs (T + 1, N, C).
        provisional: the same before the second-order correction.
        diverged_at: the first step whose outputs could not be represented, or -1.
        test: of the test samples, or None.
    """

    setup: Setup
    state: State
    train: Float[Array, "t n c"]
    provisional: Float[Array, "t n c"]
    diverged_at: int = -1
    test: TestPath | None = None

    @classmethod
    def of(cls, setup: Setup, state: State) -> "Record":
        """Before the first step."""
        room = _room(state.outputs, setup.steps)
        test = None
        if setup.cross_fn is not None:
            kernel = check_finite_value("kernel_test", setup.cross_fn(state.point))
            f = setup.outputs(state.point, setup.x_test)
            test = TestPath(kernel, _room(f, setup.steps))
        return cls(setup, state, room, room, test=test)

    def accept(self, segment: Segment, arrival: Arrival, ahead: Prediction) -> "Record":
        """With a segment more, which was predicted."""
        setup, state, end = self.setup, self.state, segment.end
        found = arrival.run
        train, provisional = _settle(
            self.train, self.provisional, found.records, ahead.train, arrival.outputs,
            segment.tau, state.step, end,
        )  # fmt: skip
        diverged_at = self.diverged_at if self.diverged_at >= 0 else int(found.diverged_at)
        test = None if self.test is None else self._follow_test(segment, arrival)
        new = state._replace(step=end, weights=arrival.weights, outputs=at(train, end))
        if end < setup.steps:
            rows = found.rows[1:]
            velocities = tuple(combine(setup, state, segment.points, row) for row in rows)
            new = new._replace(
                point=segment.points[1], velocities=velocities, optimizer=found.state
            )
            here = linearize(setup, new, segment.kernels[1], new.point, segment.damping)
            new = new._replace(here=here)
        return Record(setup, new, train, provisional, diverged_at, test)

    def freeze(self, ahead: Prediction) -> "Record":
        """With the current kernel to the horizon: oscillation keeps a network from leaving it."""
        setup, start = self.setup, self.state.step
        train, provisional = (_after(f, ahead.train, start) for f in (self.train, self.provisional))
        test = self.test
        if test is not None:
            pushed = self._push_test(self.state.point, test)
            motion = Motion([Linearization(test.kernel, pushed)], at(test.path, start))
            path = _others(motion, ahead.coefficients, test.path, start, setup.steps, None)
            test = test._replace(path=path)
        diverged_at = self.diverged_at if self.diverged_at >= 0 else ahead.diverged_at
        state = self.state._replace(step=setup.steps)
        return Record(setup, state, train, provisional, diverged_at, test)

    def stop(self) -> "Record":
        """With the last outputs that could be represented, to the horizon."""
        start = self.state.step
        paths = [self.train, self.provisional] + ([] if self.test is None else [self.test.path])
        train, provisional, *rest = (_after(path, at(path, start), start) for path in paths)
        test = None if self.test is None else self.test._replace(path=rest[0])
        diverged_at = self.diverged_at if self.diverged_at >= 0 else start + 1
        state = self.state._replace(step=self.setup.steps)
        return Record(self.setup, state, train, provisional, diverged_at, test)

    def _follow_test(self, segment: Segment, arrival: Arrival) -> TestPath:
        setup, test, start = self.setup, self.test, self.state.step
        assert test is not None  # asked for where there are any
        assert setup.cross_fn is not None
        kernel = setup.cross_fn(segment.points[1])
        kernels = zip(segment.points, (test.kernel, kernel), strict=True)
        ends = [Linearization(each, self._push_test(point, test)) for point, each in kernels]
        f = setup.outputs(arrival.weights, setup.x_test)
        motion = Motion(ends, at(test.path, start), segment.tau)
        path = _others(
            motion, arrival.run.coefficients, test.path, start, segment.end, f  # type: ignore[arg-type]
        )  # fmt: skip
        return TestPath(kernel, path)

    def _push_test(self, point: object, test: TestPath) -> Array:
        carried = [self.state.weights if self.setup.decays else None, *self.state.velocities]
        return push_all(self.setup, point, self.setup.x_test, carried, test.path[0])


def integrate(
    setup: Setup,
    state: State,
    controller: Controller,
    report: Callable[[int, int], None],
) -> RelinearizedTrajectory:
    """The path to the horizon.

    Args:
        setup: what does not change.
        state: before the first step.
        controller: where segments end.
        report: told of kernels so far and at most.
    """
    path = within = Record.of(setup, state)  # within: where it first crosses the edge of stability
    ends: list[int] = []
    rejected, frozen_from, edge_at = 0, -1, -1
    while path.state.step < setup.steps:
        ahead = predict(setup, path.state)
        proposal, taken, controller, again = _take(setup, path.state, ahead, controller, report)
        rejected += again
        if edge_at < 0:
            within = path
        if edge_at < 0 and taken.sharpness > 1:
            edge_at = proposal.end
        if taken.outcome is Outcome.DIVERGED:
            path = path.stop()
        elif taken.outcome is Outcome.FROZEN:
            # Beyond the edge until the horizon, damped segments cannot be trusted: the path goes on
            # from before the first of them, with the kernel of that time.
            frozen_from = within.state.step
            ends = [end for end in ends if end <= frozen_from]
            path = within.freeze(predict(setup, within.state))
        else:
            assert taken.segment is not None  # it was accepted
            assert taken.arrival is not None
            path = path.accept(taken.segment, taken.arrival, ahead)
        ends.append(path.state.step)
    report(setup.costs.kernels, setup.costs.kernels)
    loss, uncertainty, local = _estimate(path, np.isin(np.arange(setup.steps + 1), ends))
    return RelinearizedTrajectory(
        ts=jax.device_put(np.arange(setup.steps + 1, dtype=loss.dtype)),
        train=path.train,
        test=None if path.test is None else path.test.path,
        loss=loss,
        loss_uncertainty=uncertainty,
        ends=tuple(ends),
        local_errors=jax.device_put(np.asarray(local)[: len(ends)]),
        rejected=rejected,
        diverged_at=jax.device_put(np.asarray(path.diverged_at)),
        edge_at=edge_at,
        frozen_from=frozen_from,
        kernels=setup.costs.kernels,
        gradient_evaluations=setup.costs.products,
        steps_run=setup.costs.steps,
    )


def _take(
    setup: Setup,
    state: State,
    ahead: Prediction,
    controller: Controller,
    report: Callable[[int, int], None],
) -> tuple[Proposal, Step, Controller, int]:
    """The next segment that is not rejected, and how many were."""
    rejected = 0
    while True:
        proposal = controller.propose(state.step, setup.costs.kernels, ahead.path)
        report(setup.costs.kernels, controller.budget + 1)
        taken = step(setup, state, ahead, proposal.end, proposal.limit)
        is_taken = taken.outcome is not Outcome.REJECTED
        controller = controller.learn(proposal, taken.error, is_taken=is_taken)
        if is_taken:
            return proposal, taken, controller, rejected
        rejected += 1


def _estimate(path: Record, is_end: np.ndarray) -> tuple[Array, Array, Array]:
    """The loss, its uncertainty, and every segment's largest change as a fraction of the decrease.

    What a correction changed at a segment's end acts on later steps like a shift in time: it counts
    there as the same fraction of the loss, which falls.
    """
    targets, loss_of = path.setup.targets, path.setup.loss
    loss, before = (curves(f, targets, loss_of)[0] for f in (path.train, path.provisional))
    return loss, *_uncertainty(loss, before, is_end)


@jit
def _uncertainty(curve: Array, provisional: Array, is_end: Array) -> tuple[Array, Array]:
    change, drop = jnp.abs(curve - provisional), jnp.abs(curve[0] - curve[-1])
    least = jnp.maximum(jax.lax.cummin(curve), jnp.finfo(curve.dtype).tiny)
    fractions = jnp.cumsum(jnp.where(is_end, change / least, 0.0))
    before = least * jnp.concatenate([jnp.zeros(1, curve.dtype), fractions[:-1]])
    segment = jnp.cumsum(is_end) - is_end  # the ends before each step
    local = jax.ops.segment_max(
        change, segment, num_segments=len(curve), indices_are_sorted=True
    )  # as many as there can be: one compiled function for any number of segments
    return change + before, local / jnp.where(drop > 0, drop, 1.0)


def _room(f: Array, steps: int) -> Array:
    """A path (T + 1, ., C) of outputs that stay."""
    return jax.device_put(np.broadcast_to(np.asarray(f), (steps + 1, *f.shape)))


@jit
def _after(path: Array, rest: Array, start: Array) -> Array:
    """A path that goes on as another one after step `start`."""
    return jnp.where(jnp.arange(len(path))[:, None, None] > start, rest, path)


@jit
def _settle(
    train: Array,
    provisional: Array,
    found: Array,
    before: Array,
    f: Array,
    tau: Array,
    start: Array,
    end: Array,
) -> tuple[Array, Array]:
    """Both paths with a segment more, whose outputs arrive at f without a jump.

    The difference grows with the square of the path covered. Put on the last step alone it would
    move every training time near the segment's end.
    """
    ts = jnp.arange(len(train))
    inside = ((ts > start) & (ts <= end))[:, None, None]
    f = jnp.where(jnp.all(jnp.isfinite(f)), f, found[end])
    moved = found + (tau**2)[:, None, None] * (f - found[end])[None]
    return jnp.where(inside, moved, train), jnp.where(inside, before, provisional)


@jit
def _others(
    motion: Motion,
    coefficients: Array,
    path: Array,
    start: Array,
    end: Array,
    arrived: Array | None,
) -> Array:
    """Outputs on other samples (T + 1, M, C), moved by the updates of a run.

    Args:
        motion: of these samples, with their cross kernels (M, C, N, C).
        coefficients: of the run's weights at every step (T + 1, size).
        path: outputs up to the start.
        start: the run's first step.
        end: its last.
        arrived: the network's outputs at its end (M, C); None where these are not known.
    """
    count, k, classes = len(motion.ends), len(motion.ends[0].pushed), path.shape[2]
    updates = jnp.diff(coefficients, axis=0)
    parts = jnp.split(updates[:, : updates.shape[1] - k], count, axis=1)
    first, *rest = (part.reshape(len(updates), -1, classes) for part in parts)
    carried, ts = updates[:, -k:], jnp.arange(len(path))
    if motion.tau is None:
        (end_of,) = motion.ends
        moves = apply_kernel(end_of.kernel, first) + jnp.tensordot(carried, end_of.pushed, 1)
    else:
        # J(tau) (J_near^T p + J_far^T q) with J(tau) = (1 - tau) J_near + tau J_far, where the mean
        # of both kernels stands for the products J_near J_far^T, which nobody has computed.
        (near, far), tau, both = motion.ends, motion.tau[:-1, None, None], first + rest[0]
        moves = apply_kernel(near.kernel, ((1 - tau) * both + first) / 2)
        moves = moves + apply_kernel(far.kernel, (tau * both + rest[0]) / 2)
        moves = moves + (1 - tau) * jnp.tensordot(carried, near.pushed, 1)
        moves = moves + tau * jnp.tensordot(carried, far.pushed, 1)
    inside = ((ts > start) & (ts <= end))[:, None, None]
    moves = jnp.where(inside[1:], moves, 0.0)
    moved = motion.f[None] + jnp.concatenate([jnp.zeros_like(moves[:1]), jnp.cumsum(moves, 0)])
    moved = jnp.where(jnp.isfinite(moved), moved, motion.f[None])
    if arrived is not None and motion.tau is not None:
        arrived = jnp.where(jnp.all(jnp.isfinite(arrived)), arrived, moved[end])
        moved = moved + (motion.tau**2)[:, None, None] * (arrived - moved[end])[None]
    return jnp.where(inside, moved, path)
