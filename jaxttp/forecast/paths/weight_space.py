"""The linearised network trained in weight space, by any optimiser."""

import dataclasses

from jaxttp._types import Params
from jaxttp.dynamics.weight_space import check_stepping, weight_space
from jaxttp.forecast.descent import Descent
from jaxttp.forecast.paths.base import Dynamics, Linearizer, Path
from jaxttp.losses import Loss
from jaxttp.rule import Rule


@dataclasses.dataclass(frozen=True)
class WeightSpace(Dynamics):
    """The linearised network under any optimiser, at the cost of training.

    Example:
        >>> WeightSpace().name
        'weight_space'
    """

    name = "weight_space"
    kernels = False

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
            gradient_evaluations=2 * descent.steps, witness=found.trust,
        )  # fmt: skip

    def trust(self, path: Path, rule: Rule) -> str | None:
        """See `Dynamics`."""
        return path.witness
