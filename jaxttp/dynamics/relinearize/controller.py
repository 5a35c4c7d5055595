"""Where segments of a relinearized path end: the step-size control of the integrator."""

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from jaxttp._core.checks import check_integer, check_number


@dataclasses.dataclass(frozen=True)
class Controls:
    """The numbers of relinearization, and where they come from.

    Measured where a line has figures; the others are rules of thumb, as in solvers of ODEs.

    Attributes:
        first: fraction of the single-kernel forecast's path that the first adaptive segment covers.
        safety: factor on the length predicted to meet the tolerance, as in solvers of ODEs.
        shrink: a segment is no shorter than this times the one before,
        grow: and no longer than that.
        reject: a segment whose error exceeds this many tolerances is taken again, shorter.
        spacing: of a fixed number K of segments, the k-th ends at (k/K)^spacing of the path.
        defect: a defect that moves the loss by less than this fraction of its decrease so far is
            not corrected. On 33 runs of tuning tasks 0.001 took a third more Jacobian products and
            was no more accurate; 0.03 was less accurate.
        damped: modes beyond the edge of stability move as if at this fraction of it. On 10 runs of
            other tasks near the edge times were on average 7.8 steps off at 0.95, and 8.3 at 0.5.
    """

    first: float = 0.1
    safety: float = 0.9
    shrink: float = 0.25
    grow: float = 4.0
    reject: float = 2.0
    spacing: float = 1.8
    defect: float = 0.01
    damped: float = 0.95


CONTROLS = Controls()


class Proposal(NamedTuple):
    """A segment to try.

    Attributes:
        end: its last step.
        limit: the largest acceptable error; infinite where no shorter segment is left.
        covered: its length.
    """

    end: int
    limit: float
    covered: float


@dataclasses.dataclass(frozen=True)
class Controller:
    """Chooses the end of the next segment.

    With a tolerance: the error of a segment grows with the square of its length in weight space, so
    the next one gets sqrt(tolerance / error) times the length of the last, and the prediction to
    the horizon gives the step of this length. Without: a fixed number of segments.

    Attributes:
        steps: the horizon T.
        budget: kernels after the first, at most.
        tolerance: of the loss curve's change by a segment's correction, as a fraction of the loss's
            decrease; None for `budget` segments of any error.
        ends: of segments, where the caller sets them.
        length: of the next segment; None before the first.
        latest: its last step at most.
        sign_step: the end of the first segment behind a diagonal of past gradients: the first step
            that moves the weights goes along the gradient's signs. None for others.
        products: Jacobian products at most, and how many of them every kernel counts for.
    """

    steps: int
    budget: int
    tolerance: float | None = None
    ends: tuple[int, ...] | None = None
    length: float | None = None
    latest: int | None = None
    sign_step: int | None = None
    products: tuple[float, float] = (math.inf, 0.0)

    @classmethod
    def of(cls, rebuilds: Any, steps: int, tolerance: Any, most: Any) -> "Controller":
        """From the arguments of `relinearized_recursion`."""
        if isinstance(rebuilds, str):
            if rebuilds != "auto":
                raise ValueError(
                    f"rebuilds must be an integer, 'auto' or the steps to rebuild at; got "
                    f"{rebuilds!r}."
                )
            check_number("tolerance", tolerance, above=0.0)
            return cls(steps, check_integer("max_rebuilds", most, at_least=1), tolerance)
        if isinstance(rebuilds, tuple):
            is_rising = all(a < b for a, b in itertools.pairwise((0, *rebuilds)))
            if not is_rising or not rebuilds or rebuilds[-1] != steps:
                raise ValueError(
                    f"rebuilds must increase from above 0 to steps={steps}; got {rebuilds}."
                )
            return cls(steps, len(rebuilds), ends=rebuilds)
        return cls(steps, min(check_integer("rebuilds", rebuilds, at_least=1), steps))

    def propose(self, start: int, kernels: int, path: np.ndarray, products: int = 0) -> Proposal:
        """The next segment.

        Args:
            start: its first step.
            kernels: built so far.
            path: the predicted length of the path from `start` up to every step (T + 1,).
            products: computed so far.
        """
        if self.ends is not None:
            end = min(end for end in self.ends if end > start)
            return Proposal(end, np.inf, path[end])
        # Segment k of K ends at (k/K)^spacing of the path, not at equal lengths. The next segment's
        # length by this rule is the least: with shorter ones the kernels that are left would not
        # reach the horizon.
        # Kernels that cost more products than planned are fewer.
        budget, (allowed, a_kernel) = self.budget, self.products
        if kernels > 1 and allowed < math.inf:
            left = (allowed - products - a_kernel * kernels) / (products / kernels + a_kernel)
            budget = min(budget, kernels - 1 + max(int(left), 1))
        used = min(kernels - 1, budget - 1) / budget
        begun, after = used**CONTROLS.spacing, (used + 1 / budget) ** CONTROLS.spacing
        least = path[-1] * (after - begun) / (1 - begun)
        length, latest = least, self.steps if self.latest is None else self.latest
        if self.tolerance is None:
            latest = self.steps - max(budget - kernels, 0)
        else:
            target = CONTROLS.first * path[-1] if self.length is None else self.length
            length = max(target, least)
        end = int(np.searchsorted(path, length, side="right")) - 1  # the last not beyond it
        end = min(max(end, start + 1), latest)
        is_first = self.sign_step is not None and start < self.sign_step
        if is_first:
            end = int(self.sign_step or 0)
        # The last segment has to reach the horizon, with any error.
        is_last = kernels >= budget and not is_first
        if is_last:
            end = self.steps
        is_shortest = is_first or is_last or end <= start + 1 or bool(path[end] <= least)
        limit = np.inf
        if self.tolerance is not None and not is_shortest:
            limit = CONTROLS.reject * float(self.tolerance)
        return Proposal(end, limit, float(path[end]))

    def learn(self, proposal: Proposal, error: float, *, is_taken: bool) -> "Controller":
        """The controller after a segment was tried, by its error."""
        if self.tolerance is None:
            return self
        if self.sign_step is not None and is_taken and error == 0.0:
            # A single step has no correction: its error of 0 is no measure of the next segment.
            length = 2 * proposal.covered if self.length is None else self.length
            return dataclasses.replace(self, length=length, latest=None)
        ratio = CONTROLS.safety * (self.tolerance / max(error, 1e-30)) ** 0.5
        length = proposal.covered * min(max(ratio, CONTROLS.shrink), CONTROLS.grow)
        # A single step may be longer than `length`: the same end must not be tried again.
        latest = None if is_taken else proposal.end - 1
        return dataclasses.replace(self, length=length, latest=latest)
