"""What the network says at the end of a segment, and the segment done again until both agree."""

from typing import Any, NamedTuple

from jaxtyping import Array

from jaxttp._core.checks import is_concrete
from jaxttp._core.types import Params
from jaxttp.dynamics._course import Ahead, Course, State, combine, run_to
from jaxttp.dynamics._network import compile_network
from jaxttp.dynamics._pieces import better, loss_value, more_defect, row_of, zeros
from jaxttp.dynamics._segment import Chord, Knot, Run

SWEEPS = 3
"""How often at most a segment is done again with the defect at its end.

The defect is what the network says there beyond what the kernels do. Along stiff directions
training would have contracted it at once; added to the outputs afterwards it would stay.
"""
SMALL_DEFECT = 1e-2
"""A defect that moves the loss by less than this share of the drop so far is left as it is. On 33
trainings of tuning tasks over 600 steps a tenth of it took a third more of the network, by
mini-batches half as much again, and was no truer; three times as much was less true."""
AT_EDGE = 1e-3
"""The same share beyond the edge of stability."""
TRUSTED = 0.25
"""Least share of the predicted fall of the loss that the network must confirm (trust regions)."""
DOUBT_FROM = 0.05
"""Falls of less than this share of the drop so far are not held against the network."""
RISE = 2.0
"""A stable forecast whose loss comes to this multiple of its start is not believed."""


class Far(NamedTuple):
    """What the second run of a segment knows.

    Attributes:
        knots: both.
        points: in weight space.
        line: the way between them: the chord, or the shares of it step by step.
        defect: what the kernels were found to miss at its end (N, C); None where that is not known.
    """

    knots: list[Knot]
    points: list[Params]
    line: Chord | Array
    defect: Array | None = None


def confirm(
    course: Course, state: State, ahead: Ahead, far: Far, run: Run
) -> tuple[State, Run, Params, Array, Array]:
    """Do a segment again until the network agrees at its end.

    Args:
        course: what does not change.
        state: where the segment starts.
        ahead: its provisional run.
        far: both ends, with the defect that the run has taken into account.
        run: the segment.

    Returns:
        The state, the run, weights and outputs at its end, and the defect of that run.
    """
    end = ahead.end
    state, weights, f = _end_of(course, state, far, run)
    defect = zeros(f.shape, f.dtype) if far.defect is None else far.defect
    missed, done = None, False
    for _ in range(SWEEPS):
        done = done | _is_small(course, state, f, run, end)
        if is_concrete(done) and done:
            break
        more, missed = more_defect(defect, f, run.train, end, missed, course.loss)
        state, again = run_to(course, state, far.knots, ahead.products, far.line, end, more)
        state, new_weights, new_f = _end_of(course, state, far, again)
        before, after = (run, weights, f, defect), (again, new_weights, new_f, more)
        (run, weights, f, defect), is_better = better(before, after, end, course.loss, done)
        done = done | ~is_better
    return state, run, weights, f, defect


def _end_of(course: Course, state: State, far: Far, run: Run) -> tuple[State, Params, Array]:
    """The weights at a segment's end, and what the network says there."""
    state, weights = combine(course, state, far.points, run.rows[0])
    return state, weights, compile_network(course.apply_fn)[0](weights, course.x)


def _losses(course: Course, state: State, f: Array, run: Run, end: int) -> tuple[Any, ...]:
    """Losses: of the network at `end`, of the run there, where the segment starts, at step 0."""
    outputs = (f, row_of(run.train, end), state.here.f, row_of(run.train, 0))
    found = (loss_value(course.loss, each, course.targets) for each in outputs)
    return tuple(float(each) if is_concrete(each) else each for each in found)


def _is_small(course: Course, state: State, f: Array, run: Run, end: int) -> Any:
    """Whether the network agrees with the kernels on the loss."""
    now, then, _, first = _losses(course, state, f, run, end)
    small = SMALL_DEFECT if state.sharpest <= 1.0 else AT_EDGE
    return abs(now - then) <= small * abs(first - now)


def is_contradicted(course: Course, state: State, f: Array, run: Run, end: int) -> bool:
    """Whether the network at a segment's end denies what the kernels say of its loss."""
    now, then, begun, first = _losses(course, state, f, run, end)
    if not max(now, then) <= RISE * max(first, begun):
        return True
    expected = begun - then
    return expected > DOUBT_FROM * abs(first - then) and begun - now < TRUSTED * expected
