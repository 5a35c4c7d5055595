"""Step for step: the dual recursion of any linear optimiser on one kernel."""

import dataclasses
from typing import Any

from jaxttp._core.types import Params
from jaxttp.dynamics._trajectory import Trajectory
from jaxttp.dynamics.recursion import recursion
from jaxttp.forecast.methods.base import Dynamics, Linearizer, Path
from jaxttp.forecast.training_setup import Descent
from jaxttp.forecast.uncertainty import NOBODY, Subset, Witness, ask_network, trust_in_speeds
from jaxttp.losses import Loss
from jaxttp.losses.rule import Rule


def recur(lines: Linearizer, descent: Descent, **more: Any) -> Trajectory:
    """`recursion` of a problem's first kernel under a training."""
    problem = lines.problem
    return recursion(
        lines.first, problem.f0, problem.targets, loss=problem.loss, steps=descent.steps,
        optimizer=descent.stepper, **descent.batches, **more,
    )  # fmt: skip


class OneKernel(Dynamics):
    """What the dynamics on one kernel share: the network is asked how fast it learns further on."""

    def witness(self, lines: Linearizer, descent: Descent) -> Witness:
        """What the network says along the path of the recursion, whose weights are known."""
        if not lines.asks:
            return NOBODY
        problem = lines.problem
        whole = Subset(lines.first, problem.x, problem.targets, problem.f0)
        tangent = lines.tangents["initial_tangent"] if descent.decays else None

        def follow(part: Subset) -> Trajectory:
            own = tangent if tangent is None or part.rows is None else tangent[part.rows]
            return recursion(
                part.kernel, part.start, part.targets, loss=problem.loss, steps=descent.steps,
                optimizer=descent.stepper, initial_tangent=own,
            )  # fmt: skip

        return ask_network(problem.network, problem.weights, whole, problem.loss, follow)

    def trust(self, path: Path, rule: Rule) -> str | None:
        """See `Dynamics`."""
        return trust_in_speeds(path.witness, path.loss)


@dataclasses.dataclass(frozen=True)
class Recursion(OneKernel):
    """Step for step, exact for the linearised network under a linear optimiser.

    Example:
        >>> Recursion().name
        'recursion'
    """

    name = "recursion"
    by_products = True

    def check(self, descent: Descent, weights: Params, loss: Loss) -> None:
        """See `Dynamics`: the optimiser is one linear filter for all weights."""
        if not descent.is_plain:
            descent.response(weights)

    def follow(self, lines: Linearizer, descent: Descent) -> Path:
        """See `Dynamics`."""
        cross = lines.cross
        tangents = lines.tangents if descent.decays else {}
        found = recur(lines, descent, **cross, **tangents)
        assert found.diverged_at is not None  # steps can diverge
        witness = self.witness(lines, descent)
        return Path.of(
            lines, found.train, found.test, diverged=int(found.diverged_at) >= 0,
            gradient_evaluations=witness.passes, products=descent.steps, witness=witness,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Linear(Recursion):
    """Of a network that is linear in its trained weights: what rebuilt kernels come to, on one.

    Example:
        >>> Linear().name
        'recursion'
    """

    is_judged_by_loss = True  # the path is the training's own
