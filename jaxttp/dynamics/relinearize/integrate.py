"""The integrator's loop: it takes segments up to the horizon and records the path."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxttp._core.checks import check_finite_value
from jaxttp._core.compile import jit
from jaxttp._core.types import Params
from jaxttp.dynamics._kernels import image_of
from jaxttp.dynamics._trajectory import RelinearizedTrajectory, curves
from jaxttp.dynamics.recursion import Linearization, Motion
from jaxttp.dynamics.relinearize.controller import Controller
from jaxttp.dynamics.relinearize.scaling import Scaling
from jaxttp.dynamics.relinearize.solver import (
    Arrival,
    Outcome,
    Prediction,
    Segment,
    Setup,
    State,
    at,
    combine,
    linearize,
    motion_of,
    predict,
    push_carried,
    split,
    step,
)
from jaxttp.ntk.kernels import Kernel


class TestPath(NamedTuple):
    """Test samples along a path.

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
        setup: constants of the path.
        state: its current point.
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
            kernel = check_finite_value(
                "kernel_test", setup.cross_fn(state.point, *setup.diagonals(state.scaling))
            )
            f = setup.outputs(state.point, setup.x_test)
            test = TestPath(kernel, _room(f, setup.steps))
        return cls(setup, state, room, room, test=test)

    def accept(self, segment: Segment, arrival: Arrival, ahead: Prediction) -> "Record":
        """The path with one more segment."""
        setup, state, end, run = self.setup, self.state, segment.end, arrival.run
        train, provisional = _append(
            self.train, self.provisional, run.records, ahead.train, arrival.outputs,
            segment.tau, state.step, end,
        )  # fmt: skip
        diverged_at = self.diverged_at if self.diverged_at >= 0 else int(run.diverged_at)
        test = None if self.test is None else self._follow_test(self.test, segment, arrival)
        new = state._replace(step=end, weights=arrival.weights, outputs=at(train, end))
        if end < setup.steps:
            velocities = tuple(
                combine(setup, state, segment.points, *split(setup, state, row))
                for row in run.rows[1:]
            )
            new = new._replace(
                point=segment.points[1], velocities=velocities, optimizer=run.state,
                scaling=segment.scaling,
            )  # fmt: skip
            linearization = linearize(setup, new, segment.kernel, new.point, segment.damping)
            new = new._replace(linearization=linearization)
        return Record(setup, new, train, provisional, diverged_at, test)

    def freeze(self, ahead: Prediction) -> "Record":
        """The path to the horizon with the current kernel."""
        setup, start = self.setup, self.state.step
        train, provisional = (_after(f, ahead.train, start) for f in (self.train, self.provisional))
        test = self.test
        if test is not None:
            pushed = self._push_test(self.state.point, test)
            ends = [Linearization(test.kernel, pushed)]
            motion = motion_of(setup, ends, at(test.path, start))
            path = _test_path(motion, ahead.coefficients, test.path, start, setup.steps, None)
            test = test._replace(path=path)
        diverged_at = self.diverged_at if self.diverged_at >= 0 else ahead.diverged_at
        state = self.state._replace(step=setup.steps)
        return Record(setup, state, train, provisional, diverged_at, test)

    def stop(self) -> "Record":
        """The path to the horizon with the last outputs that could be represented."""
        start, test = self.state.step, self.test
        train, provisional = (
            _after(f, at(f, start), start) for f in (self.train, self.provisional)
        )
        if test is not None:
            test = test._replace(path=_after(test.path, at(test.path, start), start))
        diverged_at = self.diverged_at if self.diverged_at >= 0 else start + 1
        state = self.state._replace(step=self.setup.steps)
        return Record(self.setup, state, train, provisional, diverged_at, test)

    def _follow_test(self, test: TestPath, segment: Segment, arrival: Arrival) -> TestPath:
        setup, start, run = self.setup, self.state.step, arrival.run
        assert setup.cross_fn is not None
        assert run.coefficients is not None
        far = segment.scaling
        kernels = test.kernel, setup.cross_fn(segment.points[1], *setup.diagonals(far))
        ends = [
            Linearization(kernel, self._push_test(point, test, scaling))
            for point, kernel, scaling in zip(segment.points, kernels, (None, far), strict=True)
        ]
        f = setup.outputs(arrival.weights, setup.x_test)
        motion = motion_of(setup, ends, at(test.path, start), segment.tau)
        path = _test_path(motion, run.coefficients, test.path, start, segment.end, f)
        return TestPath(kernels[1], path)

    def _push_test(self, point: Params, test: TestPath, far: Scaling | None = None) -> Array:
        return push_carried(self.setup, self.state, point, self.setup.x_test, test.path[0], far)


def integrate(
    setup: Setup, state: State, controller: Controller, report: Callable[[int, int], None]
) -> RelinearizedTrajectory:
    """The path to the horizon.

    Args:
        setup: constants of the path.
        state: before the first step.
        controller: where segments end.
        report: called with the number of kernels so far, and at most.
    """
    path = within = Record.of(setup, state)  # within: where it first crosses the edge of stability
    ends: list[int] = []
    rejected, frozen_from, edge_at = 0, -1, -1
    costs, ahead = setup.costs, predict(setup, state)
    while path.state.step < setup.steps:
        proposal = controller.propose(path.state.step, costs.kernels, ahead.path, costs.products)
        report(costs.kernels, controller.budget + 1)
        taken = step(setup, path.state, ahead, proposal.end, proposal.limit)
        is_rejected = taken.outcome is Outcome.REJECTED
        controller = controller.learn(proposal, taken.error, is_taken=not is_rejected)
        if is_rejected:
            rejected += 1
            continue
        if edge_at < 0 or setup.preconditioner is not None:
            within = path
        if edge_at < 0 and taken.sharpness > 1:
            edge_at = proposal.end
        if taken.outcome is Outcome.DIVERGED:
            path = path.stop()
        elif taken.outcome is Outcome.FROZEN:
            # Damped segments that stay beyond the edge up to the horizon are unreliable: the path
            # continues from before the first of them, with its kernel there.
            frozen_from = within.state.step
            ends = [end for end in ends if end <= frozen_from]
            path = within.freeze(predict(setup, within.state))
        else:
            assert taken.segment is not None  # it was accepted
            assert taken.arrival is not None
            path = path.accept(taken.segment, taken.arrival, ahead)
        ends.append(path.state.step)
        if path.state.step < setup.steps:
            ahead = predict(setup, path.state)
    report(setup.costs.kernels, setup.costs.kernels)
    paths = path.train, path.provisional
    loss, provisional = (curves(f, setup.targets, setup.loss)[0] for f in paths)
    is_end = np.isin(np.arange(setup.steps + 1), ends)
    uncertainty, local = _uncertainty(loss, provisional, is_end)
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


@jit
def _uncertainty(curve: Array, provisional: Array, is_end: Array) -> tuple[Array, Array]:
    """The loss's uncertainty, and every segment's largest change as a fraction of the decrease.

    The change by a correction at a segment's end acts on later steps like a shift in time: there it
    counts as the same fraction of the current loss.
    """
    change, decrease = jnp.abs(curve - provisional), jnp.abs(curve[0] - curve[-1])
    least = jnp.maximum(jax.lax.cummin(curve), jnp.finfo(curve.dtype).tiny)
    fractions = jnp.cumsum(jnp.where(is_end, change / least, 0.0))
    before = least * jnp.concatenate([jnp.zeros(1, curve.dtype), fractions[:-1]])
    segment = jnp.cumsum(is_end) - is_end  # the ends before each step
    local = jax.ops.segment_max(
        change, segment, num_segments=len(curve), indices_are_sorted=True
    )  # as many as there can be: one compiled function for any number of segments
    return change + before, local / jnp.where(decrease > 0, decrease, 1.0)


def _room(f: Array, steps: int) -> Array:
    """A path (T + 1, ., C) of constant outputs."""
    return jax.device_put(np.broadcast_to(np.asarray(f), (steps + 1, *f.shape)))


@jit
def _after(path: Array, continuation: Array, start: Array) -> Array:
    """A path with its outputs after step `start` replaced."""
    return jnp.where(jnp.arange(len(path))[:, None, None] > start, continuation, path)


@jit
def _append(
    train: Array,
    provisional: Array,
    corrected: Array,
    predicted: Array,
    f: Array,
    tau: Array,
    start: Array,
    end: Array,
) -> tuple[Array, Array]:
    """Both paths with one more segment, whose outputs end at f without a jump.

    The added difference grows with the square of the path length. A jump at the last step would
    move every training time near the segment's end.
    """
    ts = jnp.arange(len(train))
    inside = ((ts > start) & (ts <= end))[:, None, None]
    f = jnp.where(jnp.all(jnp.isfinite(f)), f, corrected[end])
    moved = corrected + (tau**2)[:, None, None] * (f - corrected[end])[None]
    return jnp.where(inside, moved, train), jnp.where(inside, predicted, provisional)


@jit
def _test_path(
    motion: Motion, coefficients: Array, path: Array, start: Array, end: Array, exact: Array | None
) -> Array:
    """Outputs on test samples (T + 1, M, C), moved by the updates of a run.

    Args:
        motion: of these samples, with their cross kernels (M, C, N, C).
        coefficients: of the run's weights at every step (T + 1, size).
        path: outputs up to the start.
        start: the run's first step.
        end: its last.
        exact: the network's outputs at its end (M, C), or None.
    """
    k, ts = len(motion.ends[0].pushed), jnp.arange(len(path))
    updates = jnp.diff(coefficients, axis=0)
    # Behind a diagonal there is one part for each end where it is applied.
    duals = updates[:, :-k].reshape(len(updates), -1, len(motion.ends), *motion.samples).sum(1)
    inside = (ts > start) & (ts <= end)

    def move(dual: Array, carried: Array, t: Array) -> list[Array]:
        images = [image_of(end.kernel, part) for end in motion.ends for part in dual]
        none = jnp.zeros(motion.duals, path.dtype)
        return motion.moves(jnp.concatenate([none, carried, *motion.joined(images)]), t)

    moves = jax.vmap(move)(duals, updates[:, -k:], ts[:-1])
    moved = [
        jnp.cumsum(jnp.pad(jnp.where(inside[1:, None], rows, 0.0), ((1, 0), (0, 0))), 0)
        for rows in moves
    ]
    outputs = jax.vmap(motion.outputs)(moved, ts)
    outputs = jnp.where(jnp.isfinite(outputs), outputs, motion.f[None])
    if exact is not None and motion.tau is not None:
        exact = jnp.where(jnp.all(jnp.isfinite(exact)), exact, outputs[end])
        outputs = outputs + (motion.tau**2)[:, None, None] * (exact - outputs[end])[None]
    return jnp.where(inside[:, None, None], outputs, path)
