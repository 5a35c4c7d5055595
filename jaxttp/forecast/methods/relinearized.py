"""The recursion with kernels rebuilt along the predicted path."""

import dataclasses
import functools
import math
from typing import Any, ClassVar

from jaxttp._core.checks import check_integer, check_number
from jaxttp._core.types import Params
from jaxttp.dynamics.preconditioned import PreconditionedFilter, preconditioned_filter
from jaxttp.dynamics.relinearize import relinearized_recursion
from jaxttp.forecast.methods.base import Doubt, Dynamics, Linearizer, Path
from jaxttp.forecast.stability import Rates
from jaxttp.forecast.training_setup import Descent
from jaxttp.forecast.uncertainty import path_warning
from jaxttp.losses import Loss
from jaxttp.losses.rule import Rule

MOST = 16
"""Kernels after the first that "auto" takes at most."""
FEW = 12
"""Behind a diagonal, a path that ends with fewer kernels because no more are allowed is doubted. In
87 tuning runs with fewer, 59 of 209 times were within 10 %; in 7 runs with more, 21 of 21."""


@dataclasses.dataclass(frozen=True)
class Relinearized(Dynamics):
    """Second-order relinearization, see `jaxttp.dynamics.relinearized_recursion`.

    Attributes:
        rebuilds: kernels after the first, along the path; "auto" for as many as `tolerance` needs.
        tolerance: for "auto", see `relinearized_recursion`; None for 0.02 up to 300 steps, and
            inversely proportional to the steps beyond (0.01 for 600).
        most: for "auto", the most kernels after the first; segments are longer where it binds.
        products: for "auto", the most Jacobian products, and how many a kernel counts for.

    Raises:
        ValueError: numbers out of range.

    Example:
        >>> Relinearized(4)
        Relinearized(rebuilds=4, tolerance=None, most=16)
    """

    rebuilds: int | str = "auto"
    tolerance: float | None = None
    most: int = MOST
    products: tuple[float, float] = dataclasses.field(
        default=(math.inf, 0.0), repr=False, compare=False
    )
    name = "recursion"
    by_products = True
    is_judged_by_loss = True
    accuracy: ClassVar[float] = 0.02
    """The default tolerance of short training runs."""

    def __post_init__(self) -> None:
        if self.rebuilds != "auto":
            hint = "It counts kernels after the first; 'auto' chooses."
            check_integer("rebuilds", self.rebuilds, at_least=1, hint=hint)
        if self.tolerance is not None:
            check_number("tolerance", self.tolerance, above=0.0)
        check_integer("most", self.most, at_least=1)

    def check(self, descent: Descent, weights: Params, loss: Loss) -> None:
        """See `Dynamics`: the optimizer is one linear filter for all weights."""
        if not descent.is_plain:
            descent.response(weights)

    def follow(self, linearizer: Linearizer, descent: Descent) -> Path:
        """See `Dynamics`."""
        problem, tolerance = linearizer.problem, self.tolerance
        if tolerance is None:
            # Loss curves of long training runs are flatter: the same change of a loss moves times
            # by more. Half the tolerance was slightly more accurate, for 20 % more kernels.
            tolerance = self.accuracy * min(1.0, 300 / descent.steps)
        trajectory = relinearized_recursion(
            problem.network, problem.weights, problem.x, problem.targets, loss=problem.loss,
            steps=descent.steps, optimizer=self.optimizer_of(descent, problem.weights),
            **descent.batches,
            tolerance=tolerance, max_rebuilds=self.most, max_products=self.products,
            rebuilds=self.rebuilds,
            x_test=problem.x_test, **self.kernel_functions(linearizer),
            progress=lambda done, total: linearizer.report("kernels", done, total),
        )  # fmt: skip
        return Path.of(
            linearizer, trajectory.train, trajectory.test,
            diverged=int(trajectory.diverged_at) >= 0,
            gradient_evaluations=trajectory.gradient_evaluations,
            uncertainty=trajectory.loss_uncertainty, products=trajectory.steps_run,
            frozen_from=trajectory.frozen_from if trajectory.frozen_from >= 0 else None,
            auxiliary=trajectory,
        )  # fmt: skip

    def optimizer_of(self, descent: Descent, weights: Params) -> Any:
        """The optimizer, for `relinearized_recursion`."""
        return descent.optimizer

    def kernel_functions(self, linearizer: Linearizer) -> dict[str, Any]:
        """The functions of weights that compute kernels, for `relinearized_recursion`."""
        linearizer.estimate  # noqa: B018 - before the network counts passes
        cross = None if linearizer.problem.x_test is None else linearizer.cross_at
        return {"kernel_fn": linearizer.at, "kernel_test_fn": cross}

    def doubt(self, path: Path, rule: Rule) -> Doubt | None:
        """See `Dynamics`: the error has no estimate from the step where the kernel is frozen."""
        message = path_warning(path.auxiliary, rule)
        return None if message is None else Doubt(message, path.frozen_from)

    def plain_values(self) -> dict[str, Any]:
        """See `Dynamics`."""
        return {"relinearize": self.rebuilds}


@dataclasses.dataclass(frozen=True)
class Preconditioned(Relinearized):
    """The same behind a diagonal of past gradients: Adam, AdamW and their relatives.

    Attributes:
        rebuilds: see `Relinearized`.
        tolerance: see there; None for 0.006 up to 300 steps.
        most: see there. In 5 tuning runs that needed more than 16 kernels times to 1 % were off by
            8 steps with 32, and by 12 steps with 16.
        optimizer: the filter and the diagonal, where they are known.

    Example:
        >>> Preconditioned().rebuilds
        'auto'

    Source:
        See `jaxttp.dynamics.preconditioned`.
    """

    most: int = 2 * MOST
    optimizer: PreconditionedFilter | None = dataclasses.field(
        default=None, repr=False, compare=False
    )
    accuracy = 0.006
    is_scaled = True

    def check(self, descent: Descent, weights: Params, loss: Loss) -> None:
        """See `Dynamics`: the optimizer is one linear filter behind a diagonal."""
        if descent.is_plain:
            raise ValueError("Preconditioned follows an optimizer; use Relinearized for a rate.")
        self.optimizer_of(descent, weights)

    def optimizer_of(self, descent: Descent, weights: Params) -> Any:
        """See `Relinearized`."""
        if self.optimizer is not None:
            return self.optimizer
        return preconditioned_filter(descent.optimizer, weights, descent.steps)

    def kernel_functions(self, linearizer: Linearizer) -> dict[str, Any]:
        """See `Relinearized`."""
        x_test = linearizer.problem.x_test
        cross = None if x_test is None else functools.partial(linearizer.scaled, x=x_test)
        return {"kernel_fn": linearizer.scaled, "kernel_test_fn": cross}

    def doubt(self, path: Path, rule: Rule) -> Doubt | None:
        """See `Dynamics`: in addition, few kernels are too few for a diagonal that turns."""
        found = super().doubt(path, rule)
        if found is None and self.most < FEW and path.auxiliary.kernels > self.most:
            return Doubt(
                f"the budget allows {path.auxiliary.kernels} kernels, and this optimizer needs "
                f"{FEW} or more: with fewer, most times were off by more than 10 % in tuning "
                "runs; budget=inf builds as many as it takes, or train, which may cost less",
                None,
            )
        return found

    def rates(self, linearizer: Linearizer, descent: Descent) -> tuple[float, Rates | None]:
        """See `Dynamics`: the limit of the optimizer's rate moves with its diagonal."""
        return math.inf, None
