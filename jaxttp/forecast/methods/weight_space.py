"""The linearised network trained in weight space, by any optimiser."""

import dataclasses

from jaxttp._core.types import Params
from jaxttp.dynamics.stability import OPERATOR_STEPS, operator_curvature, rate_limit
from jaxttp.dynamics.weight_space import check_stepping, weight_space
from jaxttp.forecast.methods.base import Dynamics, Linearizer, Path
from jaxttp.forecast.training_setup import Descent
from jaxttp.losses import Loss
from jaxttp.losses.rule import Rule
from jaxttp.ntk.kernels import ntk_operator

FORMED = 2048
"""Outputs whose kernel is formed for its largest eigenvalue alone, at most."""


@dataclasses.dataclass(frozen=True)
class WeightSpace(Dynamics):
    """The linearised network under any optimiser, at the cost of training.

    Example:
        >>> WeightSpace().name
        'weight_space'
    """

    name = "weight_space"
    kernels = False
    by_products = True

    def check(self, descent: Descent, weights: Params, loss: Loss) -> None:
        """See `Dynamics`."""
        check_stepping(descent.optimizer, weights)

    def follow(self, lines: Linearizer, descent: Descent) -> Path:
        """See `Dynamics`."""
        problem = lines.problem
        found = weight_space(
            problem.network, problem.weights, problem.x, problem.targets, loss=problem.loss,
            steps=descent.steps, optimizer=descent.stepper, **descent.batches,
            x_test=problem.x_test,
        )  # fmt: skip
        return Path.of(
            lines, found.train, found.test, diverged=int(found.diverged_at) >= 0,
            gradient_evaluations=2 * descent.steps, witness=found,
        )  # fmt: skip

    def limit(self, lines: Linearizer, momentum: float) -> float:
        """See `Dynamics`; of many outputs by products with a kernel that is not formed."""
        problem = lines.problem
        if problem.f0.size <= FORMED:
            return super().limit(lines, momentum)
        operator = ntk_operator(problem.network, problem.weights, problem.x)
        curvature = operator_curvature(operator, problem.f0, problem.targets, problem.loss)
        lines.passes += 2 * (OPERATOR_STEPS + 1)
        return float(rate_limit(curvature, momentum))

    def trust(self, path: Path, rule: Rule) -> str | None:
        """See `Dynamics`."""
        return path.witness.trust

    def doubted_from(self, path: Path) -> int | None:
        """See `Dynamics`."""
        return path.witness.doubted_from
