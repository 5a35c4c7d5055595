"""Some of the samples, trained on alone, beside a path of all of them: its kernels, their steps.

How much sooner half the samples come to a loss says how much later twice as many do. Paths of
halves with kernels of their own would cost as much as that of the whole again, and what either is
off by would count in full. With the kernels of the whole they cost products, and are off as the
whole is when it is followed in the same way: the subset of all samples.

Every subset takes the steps of full batches between the knots of the path, as its weights in the
loss: nothing but the targets is its own, whatever a kernel lies in. The network is not asked, but
for J w_0 at a knot where weights decay. Weights and what an optimiser has accumulated go on as
multiples of w_0 and J^T of coefficients at the present knot (see `_accumulators`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp._core.checks import check_array
from jaxttp._core.compile import jit
from jaxttp._core.types import Params
from jaxttp.dynamics._confirm import Far
from jaxttp.dynamics._course import Course, Outcome, State, damping_at, run_to
from jaxttp.dynamics._kernels import apply_kernel
from jaxttp.dynamics._network import compile_network
from jaxttp.dynamics._pieces import as_shares, loss_curve, row_of, zeros
from jaxttp.dynamics._segment import Chord, Knot, Run
from jaxttp.dynamics._trajectory import SubsetCurves
from jaxttp.losses import Loss
from jaxttp.ntk.kernels import Kernel

NEAR = 0.5
"""From this share of the edge of stability on a subset's own edge is looked at."""


class Apart(NamedTuple):
    """A subset's path.

    Attributes:
        course: with its weights in the targets.
        unseen: targets in which the other samples have the weights; None where there are none.
        state: where it is.
        multiples: what the vectors that coefficients refer to hold of its weights there (1 + k,).
        scale: the weights there are w_0 times this, and
        dual: J^T of this (N, C).
    """

    course: Course
    unseen: Array | None
    state: State
    multiples: Array
    scale: Array
    dual: Array


class Alongside(NamedTuple):
    """All subsets where the path is.

    Attributes:
        each: the subsets.
        origin: the weights before training, w_0.
        pushed: J w_0 at the path's knot (N, C); zeros where they cannot enter the outputs.
        passes: products with a Jacobian so far.
    """

    each: list[Apart]
    origin: Params
    pushed: Array
    passes: int = 0


def check_subsets(subsets: Sequence[Any], samples: int) -> list[np.ndarray]:
    """Numbers of samples, each once.

    Raises:
        ValueError: none, or what is no number of a sample.
    """
    found = []
    for rows in subsets:
        rows = np.asarray(check_array("subsets", rows))
        counted = rows.ndim == 1 and np.issubdtype(rows.dtype, np.integer) and len(rows) > 0
        if not counted or rows.min() < 0 or rows.max() >= samples or len(set(rows)) < len(rows):
            raise ValueError(
                f"subsets must hold numbers of samples, 0..{samples - 1}, each once; got {rows}."
            )
        found.append(rows)
    return found


def set_apart(course: Course, state: State, subsets: list[np.ndarray]) -> Alongside:
    """All subsets before the first step.

    Args:
        course: of the path.
        state: of the path, before its first step.
        subsets: numbers of the samples.
    """
    origin, pushed = state.here.vectors[0], zeros(state.here.f.shape, state.here.f.dtype)
    begun = Alongside([_begin(course, state, rows) for rows in subsets], origin, pushed)
    return _pushing(course, begun, state.here.point) if subsets else begun


def _begin(course: Course, state: State, rows: np.ndarray) -> Apart:
    weights = np.zeros(len(course.targets), state.train.dtype)
    weights[rows] = len(weights) / len(rows)
    rest = np.where(weights == 0, 1.0, 0.0).astype(weights.dtype)
    unseen = None
    if rest.any():
        unseen = _with_weights(course.loss, course.targets, rest / rest.mean())
    alone = dataclasses.replace(
        course, loss=_weighing(course.loss), indices=None, noise=None, x_test=None, cross_fn=None,
        targets=_with_weights(course.loss, course.targets, weights), by_error=False,
    )  # fmt: skip
    begun, f = state._replace(beside=None, guard=None, damping=None), state.here.f
    multiples = as_shares([1.0, *course.shares], f)
    return Apart(alone, unseen, begun, multiples, jnp.ones((), f.dtype), zeros(f.shape, f.dtype))


def _pushing(course: Course, subsets: Alongside, point: Params) -> Alongside:
    """The subsets with J w_0 at another knot."""
    if not course.decays:
        return subsets
    pushed = compile_network(course.apply_fn)[2](point, course.x, subsets.origin)
    return subsets._replace(pushed=pushed, passes=subsets.passes + 1)


def follow_subsets(
    course: Course, subsets: Alongside, before: State, outcome: Outcome, far: Far | None, end: int
) -> Alongside:
    """All subsets after a step of the path.

    Args:
        course: of the path.
        subsets: where they are.
        before: where the path was.
        outcome: what came of the step.
        far: both ends of an accepted segment.
        end: where the path is now.
    """
    if not subsets.each:
        return subsets
    kernels, pushed, line, moved = [before.here.kernel], [subsets.pushed], None, subsets
    if outcome is Outcome.ACCEPTED:
        assert far is not None
        assert not isinstance(far.line, Chord)  # of the run that was taken
        moved = _pushing(course, subsets, far.points[-1])
        kernels, pushed = [knot.kernel for knot in far.knots], [subsets.pushed, moved.pushed]
        line = far.line
    knots = list(zip(kernels, pushed, strict=True))  # held, or stopped: the last kernel goes on
    return moved._replace(each=[_take(each, before, knots, line, end) for each in subsets.each])


def _take(
    subset: Apart,
    before: State,
    knots: list[tuple[Kernel, Array]],
    line: Array | None,
    end: int,
) -> Apart:
    """A subset after a segment of the path, with kernels and J w_0 at its knots."""
    course, state, mean = subset.course, subset.state, before.here
    count, dtype = 1 + len(course.shares), mean.f.dtype
    here = state.here._replace(
        point=mean.point, kernel=mean.kernel, vectors=[mean.vectors[0]] * count
    )
    state = state._replace(here=here)
    mine = []
    for kernel, origin in knots:
        is_near = before.sharpest > NEAR
        bound = damping_at(course, state, kernel, here.f) if is_near else None
        pushed = zeros((count, *mean.f.shape), dtype)
        if course.decays:
            pushed = _pushed(kernel, origin, subset.scale, subset.dual, subset.multiples)
        mine.append(Knot(kernel, pushed, bound))
    products = zeros((count, count), dtype)  # of lengths, which nobody asks for
    state, run = run_to(course, state, mine, products, line, end)
    (scale, dual), duals, shares = _arrived(run, subset.multiples, subset.scale, subset.dual)
    here = here._replace(
        f=row_of(run.train, end), state=run.state, duals=list(duals), shares=shares
    )
    alive = jnp.where(state.diverged_at >= 0, state.diverged_at, run.diverged_at)
    state = state._replace(here=here, train=run.train, ends=(*state.ends, end), diverged_at=alive)
    return subset._replace(
        state=state, multiples=jnp.ones_like(subset.multiples), scale=scale, dual=dual
    )


def curves_of(subset: Apart) -> SubsetCurves:
    """What was found of a subset."""
    course, path = subset.course, subset.state.train
    unseen = None if subset.unseen is None else loss_curve(course.loss, path, subset.unseen)
    loss = loss_curve(course.loss, path, course.targets)
    return SubsetCurves(loss, unseen, subset.state.diverged_at, subset.state.run)


@jit
def _pushed(kernel: Kernel, origin: Array, scale: Array, dual: Array, multiples: Array) -> Array:
    """J v (1 + k, N, C) of multiples of the weights scale w_0 + J^T dual."""
    own = scale * origin + apply_kernel(kernel, dual)
    return multiples[:, None, None] * own[None]


@jit
def _arrived(
    run: Run, multiples: Array, scale: Array, dual: Array
) -> tuple[tuple[Array, Array], Array, Array]:
    """Where a segment has brought a subset, in the terms of its end.

    Returns:
        scale and dual of the weights; the accumulators as J^T of (k, N, C) and multiples of those
        weights (k,).
    """
    size, shape = dual.size, dual.shape

    def parts(row: Array) -> tuple[Array, Array]:
        both = row[:size] + row[size : 2 * size]
        return both.reshape(shape), row[2 * size :][: len(multiples)] @ multiples

    moved, kept = parts(run.rows[0])
    safe = jnp.where(kept == 0, 1.0, kept)
    duals, shares = [], []
    for row in run.rows[1:]:
        own, share = parts(row)
        share = share / safe
        duals.append(own - share * moved)  # the weights of the start are those of the end without
        shares.append(share)
    none = jnp.zeros((0, *shape), dual.dtype)
    carried = (jnp.stack(duals), jnp.stack(shares)) if duals else (none, none[:, 0, 0])
    return (kept * scale, kept * dual + moved), *carried


def _with_weights(loss: Loss, targets: Array, weights: np.ndarray) -> Array:
    """Targets that carry a weight of every sample (N,) for `_weighing`."""
    column = jnp.asarray(weights, targets.dtype)[:, None]
    if not loss.weighted:
        return jnp.concatenate([targets, column], axis=1)
    values, known = jnp.split(targets, 2, axis=1)
    return jnp.concatenate([values, known * column], axis=1)


def _weighing(loss: Loss) -> Loss:
    """The loss whose targets carry weights."""
    if loss.weighted:
        return loss
    sample_loss = _Weighed(loss.sample_loss)
    return dataclasses.replace(loss, sample_loss=sample_loss, error=_no_error, contrasts_of=0)


@dataclasses.dataclass(frozen=True)
class _Weighed:
    """A sample's loss times its weight; equal where the losses are."""

    sample_loss: Callable[[Array, Array], Array]

    def __call__(self, outputs: Array, both: Array) -> Array:
        return both[-1] * self.sample_loss(outputs, both[:-1])


def _no_error(outputs: Array, both: Array) -> Array:
    del both  # the error rate of subsets is not used
    return jnp.zeros((), outputs.dtype)
