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

A kernel that grows beyond the edge of stability makes the linearised network diverge where the real
one oscillates: the forecast follows the mean path there, and where that stays beyond the edge, or
the network denies it, the last kernel within (see `_edge` and `_walk`).
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optax
from jaxtyping import Array

from jaxttp._checks import check_integer, check_number, is_concrete
from jaxttp._types import ApplyFn, Params
from jaxttp.dynamics._walk import RelinearizedTrajectory, Walk
from jaxttp.dynamics.batches import batch_indices
from jaxttp.losses import Loss

PLACEMENT = 2.75
"""Segment k of K ends at T (k/K)^PLACEMENT where the path is not known."""
PATH_PLACEMENT = 1.8
"""Segment k of K ends when the path has (k/K)^PATH_PLACEMENT of its length."""
FIRST_SHARE = 0.1
"""Share of the plain forecast's path that the first adaptive segment covers."""
SAFETY, SHRINK, GROW = 0.9, 0.25, 4.0
"""The adaptive controller's caution, and bounds on the change of a segment's length."""
REJECT = 2.0
"""A segment whose error estimate exceeds REJECT times the tolerance is done again, shorter."""


def segment_ends(steps: int, rebuilds: int, *, order: int = 2) -> tuple[int, ...]:
    """Where segments end if nothing is known of the path: early and dense, late and sparse.

    Args:
        steps: the horizon T.
        rebuilds: kernels built after the first.
        order: 2 builds a kernel at the end of every segment, the last one included; 1 builds none
            at the horizon, so it has one segment more.

    Returns:
        Increasing step numbers, the last equal to `steps`.

    Example:
        >>> segment_ends(150, 4)
        (3, 22, 68, 150)
    """
    check_integer("rebuilds", rebuilds, at_least=0)
    segments = max(1, rebuilds if order == 2 else rebuilds + 1)
    segments = min(segments, steps)
    ends: list[int] = []
    for k in range(1, segments + 1):
        wanted = round(steps * (k / segments) ** PLACEMENT)
        least = ends[-1] + 1 if ends else 1
        ends.append(min(max(wanted, least), steps - (segments - k)))
    return tuple(ends)


def relinearized_recursion(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    *,
    loss: str | Loss,
    optimizer: optax.GradientTransformation,
    steps: int,
    kernel_fn: Callable[[Params], Array],
    rebuilds: int | str,
    order: int = 2,
    ends: tuple[int, ...] | None = None,
    tolerance: float = 0.02,
    max_rebuilds: int = 16,
    batch_size: int | None = None,
    key: Array | None = None,
    protocol: str = "epochs",
    accumulators: Sequence[Params] = (),
    damp: bool | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RelinearizedTrajectory:
    """The dual recursion with the kernel rebuilt along the predicted path.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``.
        params: the weights before training.
        x: samples (N, ...).
        y: integer labels (N,) or targets (N, C).
        loss: a name or a `Loss`.
        optimizer: a linear optax transformation, as in `recursion`.
        steps: number of steps T.
        kernel_fn: ``params -> Theta``, (N, C, N, C) or (N, N), exact or sketched.
        rebuilds: kernels built after the first one, or "auto": as many as `tolerance` asks for,
            where it asks for them (order 2 only; not under `jit`).
        order: 1 or 2.
        ends: where segments end. When None they end where the predicted path through weight space
            has come a share (k/K)^1.8 of its length (under `jit`: at `segment_ends`).
        tolerance: for "auto", the largest change of the loss curve by the second-order correction
            of one segment, as a share of the loss's drop. That is the error of FIRST order; the
            corrected curve is better.
        max_rebuilds: for "auto", no more kernels than that after the first.
        batch_size: samples a step; all of them when None.
        key: a `jax.random.key`, needed with `batch_size`.
        protocol: how batches are drawn, see `batch_indices`.
        accumulators: what the optimiser has accumulated before the first step, shaped like
            `params`, one for every accumulator of its state (heavy-ball has one, the velocity);
            none, or zeros, at the start of training.
        damp: whether the forecast follows the mean path where a kernel along it grows beyond the
            edge of stability, as a network does that oscillates there without diverging (order 2,
            not under `jit`). When None, unless the first kernel already is beyond it.
        progress: called with (kernels built, kernels in all; for "auto" at most).

    Returns:
        A `RelinearizedTrajectory`.

    Raises:
        ValueError: an optimiser that is not linear, bad labels, segments not ending at `steps`, a
            wrong number of accumulators.

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
    if order not in (1, 2):
        raise ValueError(f"order must be 1 or 2; got {order!r}.")
    auto = isinstance(rebuilds, str)
    if auto:
        if rebuilds != "auto":
            raise ValueError(f"rebuilds must be an integer or 'auto'; got {rebuilds!r}.")
        if order != 2 or ends is not None:
            raise ValueError("rebuilds='auto' needs order=2 and places the ends itself.")
        check_number("tolerance", tolerance, above=0.0)
        planned = check_integer("max_rebuilds", max_rebuilds, at_least=1)
    else:
        planned = min(check_integer("rebuilds", rebuilds, at_least=1), steps)
        if ends is not None:
            rising = all(a < b for a, b in itertools.pairwise((0, *ends)))
            if not rising or len(ends) == 0 or ends[-1] != steps:
                raise ValueError(f"ends must increase from above 0 to steps={steps}; got {ends}.")
            planned = len(ends) - 1 + (order == 2)
    walk = Walk(
        apply_fn, params, x, y, loss, optimizer, steps, kernel_fn, order, accumulators, damp
    )
    if batch_size is not None:
        n = walk.here.f.shape[0]
        walk.indices = batch_indices(key, n, batch_size, steps, protocol=protocol)
    walk.report = lambda: None if progress is None else progress(walk.network.kernels, planned + 1)
    rejected = 0
    if ends is None and not auto and not is_concrete(walk.train):
        ends = segment_ends(steps, planned, order=order)
    if ends is not None:
        for start, end in itertools.pairwise((0, *ends)):
            if not walk.gave_up:
                walk.advance(start, end, walk.explore(start, end))
    elif auto:
        rejected = _adapt(walk, steps, tolerance, planned)
    else:
        _divide(walk, steps, planned + (order == 1))
    if progress is not None:
        progress(walk.network.kernels, walk.network.kernels)
    return walk.result(rejected)


def _divide(walk: Walk, steps: int, segments: int) -> None:
    """Place a given number of segments by the length of the path, as it is predicted so far."""
    segments, start, come = min(segments, steps), 0, 0.0
    for k in range(1, segments + 1):
        explored = walk.explore(start, steps)
        path = come + np.cumsum(np.asarray(explored[2].length, np.float64))
        end = int(np.searchsorted(path, path[-1] * (k / segments) ** PATH_PLACEMENT))
        end = steps if k == segments else min(max(end, start + 1), steps - (segments - k))
        come = float(path[end])
        walk.advance(start, end, explored if end == steps else walk.explore(start, end))
        if walk.gave_up:
            return
        start = end


def _adapt(walk: Walk, steps: int, tolerance: float, budget: int) -> int:
    """Place segments by their error estimate; returns how many were rejected.

    The estimate of a segment grows with the square of its length in weight space, so the next one
    gets the length sqrt(tolerance / estimate) times that of the last, and the provisional run to
    the horizon says at which step that length is reached.
    """
    if not is_concrete(walk.train):
        raise ValueError("rebuilds='auto' looks at values, so it does not work under jit.")
    start, rejected, length = 0, 0, None
    errors: list[float] = []

    def accept(provisional: Array, final: Array) -> bool:
        curves = [np.asarray(walk.curve(path[: end + 1])) for path in (provisional, final)]
        drop = abs(float(curves[1][0]) - floor)
        error = float(np.max(np.abs(curves[0] - curves[1]))) / max(drop, 1e-30)
        errors.append(error if np.isfinite(error) else float("inf"))
        return errors[-1] <= REJECT * tolerance or end <= start + 1 or shortest

    while start < steps:
        explored = walk.explore(start, steps)
        floor = float(walk.loss.value(explored[2].train[-1], walk.targets))
        path = np.cumsum(np.asarray(explored[2].length, np.float64))
        rest = path - path[start]
        if length is None:
            length = FIRST_SHARE * rest[-1]
        most = steps
        while True:
            # No shorter than where the kernels that are left would reach the horizon just so.
            used = min(walk.network.kernels - 1, budget - 1) / budget
            begun, next_end = used**PATH_PLACEMENT, (used + 1 / budget) ** PATH_PLACEMENT
            least = rest[-1] * (next_end - begun) / (1 - begun)
            length = max(length, least)
            end = int(np.searchsorted(rest, length, side="right")) - 1  # the last not beyond it
            end = min(max(end, start + 1), most)
            if walk.network.kernels >= budget:
                end = steps
            covered = rest[end]
            # No shorter one is left: by rounding the last may be longer than the least.
            shortest = walk.network.kernels >= budget or bool(covered <= least)
            segment = explored if end == steps else walk.explore(start, end)
            taken = walk.advance(start, end, segment, accept)
            if walk.gave_up:
                return rejected
            ratio = SAFETY * (tolerance / max(errors[-1], 1e-30)) ** 0.5
            length = covered * min(max(ratio, SHRINK), GROW)
            if taken:
                break
            rejected, most = rejected + 1, end - 1  # one step may be longer than what is asked for
        start = end
    return rejected
