"""Re-linearisation: the recursion with the kernel rebuilt along the predicted path.

A linearised network errs because its kernel moves while it trains. So follow the PREDICTED path:
after a segment of steps set w <- w + J^T a (one vector-Jacobian product over the data, no training
step), rebuild Theta and f there, and go on. That is a method of first order in the length of a
segment. The second order is a Heun step whose right-hand side is a kernel: run the segment with
Theta_s, build Theta* at its provisional end, and run the segment again with the kernel interpolated
between both. What the network then says at the segment's end beyond the kernels, the defect, drives
a last run of the segment, so that the dynamics answer to it.

What the correction changes is an error estimate at no cost. With ``rebuilds="auto"`` it places the
kernels as an adaptive ODE solver places its steps, in the length of the path through weight space,
which the provisional run knows beforehand. Velocities cross a segment's end in WEIGHT space; the
dual velocity re-used with a new kernel would not converge.

Mini-batches have two ways. A number of rebuilds follows the path of the very batches; with "auto"
kernels are built along the mean path, that of full batches, beside which the batches take their
steps (see `_accompany`).

A kernel that grows beyond the edge of stability makes the linearised network diverge where the real
one oscillates: the forecast follows the mean path there. With full batches and "auto" its steepest
modes are held back at the edge, as the oscillation does it (see `_central`), with up to twice as
many kernels; else, or where the network denies that, a kernel within the edge is held (see `_edge`
and `_walk`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import optax
from jaxtyping import Array

from jaxttp._core.checks import check_integer, check_leaves, check_number, is_concrete
from jaxttp._core.types import ApplyFn, Params
from jaxttp.adapters.inputs import check_network, check_samples
from jaxttp.dynamics._accompany import Batches, accompany, join, part_ways
from jaxttp.dynamics._placement import (
    AtSteps,
    ByError,
    ByLength,
    PathView,
    Placement,
    check_ends,
    segment_ends,
)
from jaxttp.dynamics._promoted import promote_all
from jaxttp.dynamics._subsets import Alongside, check_subsets, curves_of, follow_subsets, set_apart
from jaxttp.dynamics._trajectory import RelinearizedTrajectory
from jaxttp.dynamics._walk import (
    Course,
    Outcome,
    State,
    finish,
    look_ahead,
    predicted_drop,
    set_out,
    step,
)
from jaxttp.dynamics.batches import batch_indices
from jaxttp.dynamics.optimizers import HeavyBall
from jaxttp.losses import Loss
from jaxttp.ntk.kernels import Kernel


def relinearized_recursion(  # noqa: PLR0913
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    *,
    loss: str | Loss,
    optimizer: optax.GradientTransformation | HeavyBall,
    steps: int,
    kernel_fn: Callable[[Params], Kernel],
    rebuilds: int | str,
    ends: tuple[int, ...] | None = None,
    tolerance: float = 0.02,
    max_rebuilds: int = 16,
    batch_size: int | None = None,
    key: Array | None = None,
    protocol: str = "epochs",
    accumulators: Sequence[Params] = (),
    damp: bool | None = None,
    x_test: Any = None,
    kernel_test_fn: Callable[[Params], Kernel] | None = None,
    subsets: Sequence[Any] = (),
    progress: Callable[[int, int], None] | None = None,
) -> RelinearizedTrajectory:
    """The dual recursion with the kernel rebuilt along the predicted path.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``.
        params: the weights before training; bfloat16 and float16 are promoted to float32, samples
            with them, and a warning says so.
        x: samples (N, ...), an array or a pytree of arrays with N rows each.
        y: integer labels (N,) or targets (N, C).
        loss: a name or a `Loss`.
        optimizer: a linear optax transformation, as in `recursion`.
        steps: number of steps T.
        kernel_fn: ``params -> Theta``, (N, C, N, C) or (N, N), exact or sketched.
        rebuilds: kernels built after the first one, or "auto": as many as `tolerance` asks for,
            where it asks for them (not under `jit`).
        ends: where segments end. When None they end where the predicted path through weight space
            has come a share (k/K)^1.8 of its length (under `jit`: at `segment_ends`).
        tolerance: for "auto", the largest change of the loss curve by the second-order correction
            of one segment, as a share of the loss's drop. That is the error of FIRST order; the
            corrected curve is better.
        max_rebuilds: for "auto", no more kernels than that after the first; twice as many where
            modes are held back at the edge of stability.
        batch_size: samples a step; all of them when None. A number of rebuilds follows the very
            batches that the key draws, so that it becomes their training as it grows; "auto"
            rebuilds kernels along the mean path, that of full batches, and runs the batches with
            these, which takes fewer kernels and chases no noise.
        key: a `jax.random.key`, needed with `batch_size`.
        protocol: how batches are drawn, see `batch_indices`.
        accumulators: what the optimiser has accumulated before the first step, shaped like
            `params`, one for every accumulator of its state (heavy-ball has one, the velocity);
            none, or zeros, at the start of training.
        damp: whether the forecast follows the mean path where a kernel along it grows beyond the
            edge of stability, as a network does that oscillates there without diverging (not under
            `jit`). When None, unless the first kernel already is beyond it.
        x_test: test samples (M, ...), whose outputs are followed, too: between kernels by the cross
            kernel, interpolated as the kernel is, and at every end of a segment as the network has
            them. Give `kernel_test_fn` with them.
        kernel_test_fn: ``params -> Theta(x_test, x)``, (M, C, N, C) or (M, N); called where a
            segment was accepted.
        subsets: numbers of samples; for each the losses are followed beside, as if it were trained
            on alone by full batches, with this path's kernels and without the network. Both halves
            beside all samples say how training time grows with their number.
        progress: called with (kernels built, kernels in all; for "auto" at most).

    Returns:
        A `RelinearizedTrajectory`.

    Raises:
        ValueError: an optimiser that is not linear, bad labels, segments not ending at `steps`, a
            wrong number of accumulators, one of x_test and kernel_test_fn alone, subsets of other
            samples, or with accumulators.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxttp.ntk import empirical_ntk
        >>> f, w, x = lambda w, x: jnp.tanh(x @ w), jnp.zeros((2, 1)), jnp.eye(2)
        >>> path = relinearized_recursion(
        ...     f, w, x, jnp.ones((2, 1)), loss="squared_error", optimizer=optax.sgd(0.5), steps=10,
        ...     kernel_fn=lambda w: empirical_ntk(f, w, x), rebuilds=2)
        >>> path.ends, path.train.shape
        ((2, 10), (11, 2, 1))

    Source:
        Ours: no paper has it. Measured against real training in experiments/bench.
    """
    check_integer("steps", steps, at_least=1)
    check_network(apply_fn, params)
    if not callable(kernel_fn):
        raise TypeError(f"kernel_fn must be a function of the parameters; got {kernel_fn!r}.")
    x = check_samples("x", x)
    check_leaves("params", params)
    params, x, x_test = promote_all(params, x, x_test)
    placement = _placement(rebuilds, ends, steps, tolerance, max_rebuilds)
    if (x_test is None) != (kernel_test_fn is None):
        raise ValueError("x_test and kernel_test_fn belong together: give both or neither.")

    if len(subsets) and len(accumulators):
        raise ValueError("subsets are trained on from the start: leave accumulators out.")

    def draw(samples: int) -> Array | None:
        if batch_size is None:
            return None
        return batch_indices(key, samples, batch_size, steps, protocol=protocol)

    course, state = set_out(
        apply_fn, params, x, y, loss=loss, optimizer=optimizer, steps=steps, kernel_fn=kernel_fn,
        draw=draw, accumulators=accumulators, damp=damp, x_test=x_test, cross_fn=kernel_test_fn,
    )  # fmt: skip
    if not is_concrete(state.train) and placement.looks_ahead:
        if isinstance(placement, ByError):
            raise ValueError("rebuilds='auto' looks at values, so it does not work under jit.")
        placement = AtSteps(segment_ends(steps, placement.planned))
    report = progress or (lambda built, planned: None)
    batches, by_error = None, isinstance(placement, ByError)
    course = dataclasses.replace(course, by_error=by_error)
    if course.indices is not None and by_error:
        (course, state), batches = part_ways(course, state)
    apart = set_apart(course, state, check_subsets(subsets, state.train.shape[1]))
    state, beside, apart = _follow(course, state, placement, report, batches, apart)
    report(state.kernels, state.kernels)
    found = finish(course, state)
    found = found if beside is None else join(found, beside)
    return dataclasses.replace(
        found,
        subsets=tuple(map(curves_of, apart.each)),
        gradient_evaluations=found.gradient_evaluations + apart.passes,
    )


def _placement(
    rebuilds: int | str, ends: tuple[int, ...] | None, steps: int, tolerance: Any, most: Any
) -> Placement:
    """Where the segments end, from the arguments for it."""
    if isinstance(rebuilds, str):
        if rebuilds != "auto":
            raise ValueError(f"rebuilds must be an integer or 'auto'; got {rebuilds!r}.")
        if ends is not None:
            raise ValueError("rebuilds='auto' places the ends itself; leave ends out.")
        check_number("tolerance", tolerance, above=0.0)
        return ByError(tolerance, check_integer("max_rebuilds", most, at_least=1))
    planned = min(check_integer("rebuilds", rebuilds, at_least=1), steps)
    return ByLength(planned) if ends is None else AtSteps(check_ends(ends, steps))


def _follow(
    course: Course,
    state: State,
    placement: Placement,
    report: Callable[[int, int], None],
    batches: Batches | None,
    subsets: Alongside,
) -> tuple[State, Batches | None, Alongside]:
    """The path to the horizon, segment after segment; those of batches and of subsets beside it."""
    memory = placement.begin()
    while state.start < course.steps:
        if state.guard is not None:
            placement = placement.at_edge()
        whole, path, drop = None, None, 1.0
        if placement.looks_ahead:
            state, whole = look_ahead(course, state, course.steps)
            path, drop = whole.path, predicted_drop(course, whole)
        held = state.guard
        outcome = Outcome.REJECTED
        while outcome is Outcome.REJECTED:
            view = PathView(state.start, course.steps, state.kernels, path)
            proposal = placement.propose(view, memory)
            ahead = whole
            if ahead is None or proposal.end < course.steps or state.guard is not held:
                state, ahead = look_ahead(course, state, proposal.end)
            report(state.kernels, placement.planned + 1)
            before, taken = state, step(course, state, ahead, proposal.limit, drop)
            state, outcome = taken.state, taken.outcome
            memory = placement.learn(view, proposal, taken.error, outcome is Outcome.ACCEPTED)
            if batches is not None and outcome is not Outcome.REJECTED:
                batches = accompany(batches, before, taken)
            if outcome is not Outcome.REJECTED:
                subsets = follow_subsets(course, subsets, before, outcome, taken.far, state.start)
    return state, batches, subsets
