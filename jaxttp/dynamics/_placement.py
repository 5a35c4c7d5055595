"""Where the segments of a re-linearised path end: at given steps, by path length or by error.

A placement is a value with one interface, as the step-size controllers of an ODE solver are: from
what is known (`PathView`) and its own memory it proposes the end of the next segment, and learns
from the error of a segment that was tried.
"""

import abc
import dataclasses
import itertools
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxttp._core.checks import check_integer

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


class PathView(NamedTuple):
    """What is known where a segment starts.

    Attributes:
        start: the step.
        steps: the horizon.
        kernels: built so far.
        path: the length of the path from here up to every step (T + 1,), as predicted; None where
            the placement does not look ahead.
    """

    start: int
    steps: int
    kernels: int
    path: np.ndarray | None


class Proposal(NamedTuple):
    """A segment to try: its end, the largest acceptable error (None for any), and the memory."""

    end: int
    limit: float | None
    memory: Any


class Placement(abc.ABC):
    """Where segments end."""

    looks_ahead: ClassVar[bool] = True
    """Whether `PathView.path` is wanted."""

    @property
    @abc.abstractmethod
    def planned(self) -> int:
        """Kernels after the first one, at most."""

    @abc.abstractmethod
    def begin(self) -> Any:
        """The memory before the first segment."""

    @abc.abstractmethod
    def propose(self, view: PathView, memory: Any) -> Proposal:
        """The next segment to try."""

    def at_edge(self) -> "Placement":
        """The placement once the path is at the edge of stability."""
        return self

    def learn(self, view: PathView, proposal: Proposal, error: float, taken: bool) -> Any:
        """The memory after a segment was tried, with its error estimate."""
        del view, error, taken
        return proposal.memory


@dataclasses.dataclass(frozen=True)
class AtSteps(Placement):
    """Segments with given ends, increasing to the horizon; the path need not be known."""

    looks_ahead = False
    ends: tuple[int, ...]

    @property
    def planned(self) -> int:
        """One kernel for every segment."""
        return len(self.ends)

    def begin(self) -> None:
        """Nothing to remember."""

    def propose(self, view: PathView, memory: None) -> Proposal:
        """The next end."""
        return Proposal(min(end for end in self.ends if end > view.start), None, memory)


@dataclasses.dataclass(frozen=True)
class ByLength(Placement):
    """A number of segments, placed by the length of the path as it is predicted so far."""

    segments: int

    @property
    def planned(self) -> int:
        """One kernel for every segment."""
        return self.segments

    def begin(self) -> tuple[int, float]:
        """Segments taken, and the length of the path so far."""
        return 0, 0.0

    def propose(self, view: PathView, memory: tuple[int, float]) -> Proposal:
        """The step at which the path has come the next share of its length."""
        assert view.path is not None  # it looks ahead
        (taken, come), segments = memory, min(self.segments, view.steps)
        k, path = taken + 1, come + view.path
        end = int(np.searchsorted(path, path[-1] * (k / segments) ** PATH_PLACEMENT))
        end = min(max(end, view.start + 1), view.steps - (segments - k))
        end = view.steps if k == segments else end
        return Proposal(end, None, (k, float(path[end])))


class _Try(NamedTuple):
    """The length that the next segment should have (None before the first), and its latest end."""

    length: float | None
    most: int | None
    covered: float


@dataclasses.dataclass(frozen=True)
class ByError(Placement):
    """Segments placed by their error estimate, at most `budget` of them.

    The estimate of a segment grows with the square of its length in weight space, so the next one
    gets the length sqrt(tolerance / estimate) times that of the last, and the provisional run to
    the horizon says at which step that length is reached.
    """

    tolerance: float
    budget: int
    more: bool = False

    def at_edge(self) -> "ByError":
        """Twice as many: the curvature that holds a path back turns with the weights."""
        return self if self.more else dataclasses.replace(self, budget=2 * self.budget, more=True)

    @property
    def planned(self) -> int:
        """All that it may build."""
        return self.budget

    def begin(self) -> _Try:
        """Nothing is known."""
        return _Try(None, None, 0.0)

    def propose(self, view: PathView, memory: _Try) -> Proposal:
        """The last step within the wanted length."""
        assert view.path is not None  # it looks ahead
        rest = view.path - view.path[view.start]
        length = FIRST_SHARE * rest[-1] if memory.length is None else memory.length
        # No shorter than where the kernels that are left would reach the horizon just so.
        used = min(view.kernels - 1, self.budget - 1) / self.budget
        begun, next_end = used**PATH_PLACEMENT, (used + 1 / self.budget) ** PATH_PLACEMENT
        least = rest[-1] * (next_end - begun) / (1 - begun)
        length = max(length, least)
        most = view.steps if memory.most is None else memory.most
        end = int(np.searchsorted(rest, length, side="right")) - 1  # the last not beyond it
        end = min(max(end, view.start + 1), most)
        if view.kernels >= self.budget:
            end = view.steps
        covered = rest[end]
        # No shorter one is left: by rounding the last may be longer than the least.
        shortest = view.kernels >= self.budget or bool(covered <= least)
        surely = end <= view.start + 1 or shortest
        limit = float("inf") if surely else REJECT * self.tolerance
        return Proposal(end, limit, _Try(length, most, float(covered)))

    def learn(self, view: PathView, proposal: Proposal, error: float, taken: bool) -> _Try:
        """The length for the tolerance, by the error of the segment that was tried."""
        ratio = SAFETY * (self.tolerance / max(error, 1e-30)) ** 0.5
        length = proposal.memory.covered * min(max(ratio, SHRINK), GROW)
        # One step may be longer than what is asked for: the same end must not be tried again.
        return _Try(length, None if taken else proposal.end - 1, 0.0)


def segment_ends(steps: int, rebuilds: int) -> tuple[int, ...]:
    """Where segments end if nothing is known of the path: early and dense, late and sparse.

    Args:
        steps: the horizon T.
        rebuilds: kernels built after the first, one at the end of every segment.

    Returns:
        Increasing step numbers, the last equal to `steps`.

    Example:
        >>> segment_ends(150, 4)
        (3, 22, 68, 150)
    """
    check_integer("rebuilds", rebuilds, at_least=0)
    segments = min(max(1, rebuilds), steps)
    ends: list[int] = []
    for k in range(1, segments + 1):
        wanted = round(steps * (k / segments) ** PLACEMENT)
        least = ends[-1] + 1 if ends else 1
        ends.append(min(max(wanted, least), steps - (segments - k)))
    return tuple(ends)


def check_ends(ends: tuple[int, ...], steps: int) -> tuple[int, ...]:
    """Ends that increase to the horizon, or a `ValueError`."""
    rising = all(a < b for a, b in itertools.pairwise((0, *ends)))
    if not rising or len(ends) == 0 or ends[-1] != steps:
        raise ValueError(f"ends must increase from above 0 to steps={steps}; got {ends}.")
    return ends
