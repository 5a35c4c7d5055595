"""Dynamics of the network linearized once, at its weights before training."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from jaxttp._core.checks import check_choice, check_integer
from jaxttp._core.types import Params
from jaxttp.dynamics._trajectory import Trajectory, curves
from jaxttp.dynamics.closed_form import closed_form
from jaxttp.dynamics.diffusion import NOISES, diffusion
from jaxttp.dynamics.flow import gradient_flow
from jaxttp.dynamics.optimizers import effective_learning_rate
from jaxttp.dynamics.stability import OPERATOR_STEPS, operator_curvature
from jaxttp.dynamics.weight_space import check_stepping, weight_space
from jaxttp.forecast.methods.base import (
    Doubt,
    Draws,
    Dynamics,
    Linearizer,
    Path,
    check_centre,
    largest_rate,
    recur,
)
from jaxttp.forecast.problem import Problem
from jaxttp.forecast.stability import Rates, rises
from jaxttp.forecast.training_setup import Descent
from jaxttp.forecast.uncertainty import (
    NO_CHECK,
    LinearizationCheck,
    check_linearization,
    diverges,
    recentered,
    speed_warning,
)
from jaxttp.losses import Loss
from jaxttp.losses.rule import Rule
from jaxttp.ntk.kernels import ntk_operator

FORMED = 2048
"""Outputs whose kernel is formed for its largest eigenvalue alone, at most."""


class OneKernel(Dynamics):
    """Dynamics on one kernel: the network is evaluated at predicted weights as a check."""

    def check_linearization(self, linearizer: Linearizer, descent: Descent) -> LinearizationCheck:
        """The check at weights on the path of the recursion."""
        return check_linearization(linearizer, descent) if linearizer.is_checked else NO_CHECK

    def doubt(self, path: Path, rule: Rule) -> Doubt | None:
        """See `Dynamics`: it holds for all times."""
        message = speed_warning(path.auxiliary, path.loss)
        return None if message is None else Doubt(message, 0)


@dataclasses.dataclass(frozen=True)
class Recursion(OneKernel):
    """Step for step, exact for the linearized network under a linear optimizer.

    Example:
        >>> Recursion().name
        'recursion'
    """

    name = "recursion"
    by_products = True

    def check(self, descent: Descent, weights: Params, loss: Loss) -> None:
        """See `Dynamics`: the optimizer is one linear filter for all weights."""
        if not descent.is_plain:
            descent.response(weights)

    def follow(self, linearizer: Linearizer, descent: Descent) -> Path:
        """See `Dynamics`."""
        trajectory = recur(linearizer, descent, **linearizer.cross)
        check = self.check_linearization(linearizer, descent)
        return Path.of(
            linearizer, trajectory.train, trajectory.test, diverged=diverges(trajectory),
            gradient_evaluations=check.passes, products=descent.steps, auxiliary=check,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Linear(Recursion):
    """Recursion for a network that is linear in its trained weights, whose kernel is constant.

    Example:
        >>> Linear().name
        'recursion'
    """

    is_judged_by_loss = True  # the path is the training's own


@dataclasses.dataclass(frozen=True)
class GradientFlow(OneKernel):
    """Gradient flow by an ODE solver, momentum by the effective rate eta/(1 - m).

    Example:
        >>> GradientFlow().name
        'ode'
    """

    name = "ode"
    by_products = True
    solve: ClassVar[Callable[..., Trajectory]] = staticmethod(gradient_flow)

    def check(self, descent: Descent, weights: Params, loss: Loss) -> None:
        """See `Dynamics`: gradient descent with full batches."""
        optimizer = None if descent.is_plain else descent.optimizer
        for name, value in (("optimizer", optimizer), ("batch_size", descent.batch_size)):
            if value is not None:
                raise ValueError(
                    f"{name} cannot be used with dynamics={self.name!r}; use 'recursion'."
                )

    def follow(self, linearizer: Linearizer, descent: Descent) -> Path:
        """See `Dynamics`."""
        problem = linearizer.problem
        trajectory = self.solve(
            linearizer.first, problem.f0, problem.targets, loss=problem.loss,
            ts=jnp.arange(descent.steps + 1, dtype=problem.f0.dtype),
            learning_rate=effective_learning_rate(descent.learning_rate, descent.momentum),
            **linearizer.cross,
        )  # fmt: skip
        # The flow's weights are those of the recursion.
        check = self.check_linearization(linearizer, descent)
        return Path.of(
            linearizer, trajectory.train, trajectory.test, gradient_evaluations=check.passes,
            auxiliary=check, products=descent.steps,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ClosedForm(GradientFlow):
    """The same flow exactly, for the squared error.

    Example:
        >>> ClosedForm().name
        'closed_form'
    """

    name = "closed_form"
    by_products = False
    solve: ClassVar[Callable[..., Trajectory]] = staticmethod(closed_form)

    def check(self, descent: Descent, weights: Params, loss: Loss) -> None:
        """See `Dynamics`: the squared error, gradient descent with full batches."""
        super().check(descent, weights, loss)
        if loss.name != "squared_error":
            raise ValueError(
                f"loss={loss.name!r} has no closed form; use 'squared_error', or dynamics='ode'."
            )


@dataclasses.dataclass(frozen=True)
class Noisy(OneKernel):
    """Many draws of the mini-batches, see `jaxttp.dynamics.diffusion`.

    Schedules and momentum are followed step by step: a batch moves the outputs by the rate of its
    step, and its noise goes through the velocity as its gradient does.

    Attributes:
        noise: the noise model.
        paths: how many.
        centre: the dynamics that the draws are moved to, followed with full batches; those of the
            SDE itself when None.

    Raises:
        ValueError: an unknown noise, no path, a centre with draws of its own.

    Example:
        >>> from jaxttp.forecast import Relinearized
        >>> Noisy(centre=Relinearized(4)).name
        'sde'
    """

    noise: str = "full"
    paths: int = 32
    centre: Dynamics | None = None
    name = "sde"
    is_centre = False

    def __post_init__(self) -> None:
        check_choice("noise", self.noise, NOISES)
        check_integer("paths", self.paths, at_least=1)
        if self.centre is not None:
            check_centre(self.centre)

    def check(self, descent: Descent, weights: Params, loss: Loss) -> None:
        """See `Dynamics`: a linear optimizer without weight decay, with mini-batches."""
        if descent.batch_size is None:
            raise ValueError(
                "dynamics='sde' is the noise of mini-batches; give batch_size (and key), or use "
                "'recursion' for full batches."
            )
        if not descent.is_plain and descent.response(weights).weight_decay:
            raise ValueError(
                "dynamics='sde' is for optimizers without weight decay; use 'recursion', with "
                "several keys for several draws, or leave the decay out."
            )
        if self.centre is not None:
            self.centre.check(descent.full, weights, loss)

    def view(self, problem: Problem) -> Problem:
        """See `Dynamics`; "diagonal" noise is diagonal in the eigenbasis of the whole kernel."""
        if self.noise == "diagonal":
            return problem.whole or problem
        return super().view(problem)

    def follow(self, linearizer: Linearizer, descent: Descent) -> Path:
        """See `Dynamics`."""
        problem, centre = linearizer.problem, None
        if self.centre is not None:
            centre = self.centre.follow(linearizer, descent.full)
        assert descent.batch_size is not None  # checked
        test: Any = linearizer.cross if centre is None else {}  # else the centre has them
        save = "outputs" if centre is None else "curves"
        paths = diffusion(
            linearizer.first, problem.f0, problem.targets, loss=problem.loss, steps=descent.steps,
            optimizer=descent.stepper, batch_size=descent.batch_size, key=descent.key,
            protocol=descent.protocol, noise=self.noise, paths=self.paths, save=save, **test,
        )  # fmt: skip
        if centre is None:
            assert paths.train is not None  # saved
            check = self.check_linearization(linearizer, descent)
            path = Path.of(
                linearizer, paths.train, paths.test, gradient_evaluations=check.passes,
                diverged=int(jnp.max(paths.diverged_at)) >= 0, auxiliary=check,
                products=self.paths * descent.steps,
            )  # fmt: skip
            losses = paths.loss
        else:
            plain = curves(recur(linearizer, descent.full).train, problem.targets, problem.loss)[0]
            losses = recentered(paths.loss, plain, centre.loss)
            products = centre.products + self.paths * descent.steps
            path = dataclasses.replace(centre, auxiliary=centre, products=products)
        draws = Draws(losses, paths.error)
        return dataclasses.replace(path, loss=jnp.median(losses, axis=0), draws=draws)

    def is_stable(self, path: Path, rates: Rates | None, descent: Descent) -> bool:
        """See `Dynamics`."""
        if self.centre is None:
            return super().is_stable(path, rates, descent)
        stable = self.centre.is_stable(path.auxiliary, rates, descent)
        return stable and not bool(rises(path.loss))

    def doubt(self, path: Path, rule: Rule) -> Doubt | None:
        """See `Dynamics`: that of the centre, or of one kernel."""
        if self.centre is None:
            return super().doubt(path, rule)
        return self.centre.doubt(path.auxiliary, rule)

    def plain_values(self) -> dict[str, Any]:
        """See `Dynamics`."""
        return {} if self.centre is None else self.centre.plain_values()


@dataclasses.dataclass(frozen=True)
class WeightSpace(Dynamics):
    """The linearized network under any optimizer, at the cost of training.

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

    def follow(self, linearizer: Linearizer, descent: Descent) -> Path:
        """See `Dynamics`."""
        problem = linearizer.problem
        trajectory = weight_space(
            problem.network, problem.weights, problem.x, problem.targets, loss=problem.loss,
            steps=descent.steps, optimizer=descent.stepper, **descent.batches,
            x_test=problem.x_test,
        )  # fmt: skip
        return Path.of(
            linearizer, trajectory.train, trajectory.test,
            diverged=int(trajectory.diverged_at) >= 0, gradient_evaluations=2 * descent.steps,
            auxiliary=trajectory,
        )  # fmt: skip

    def limit(self, linearizer: Linearizer, momentum: float) -> float:
        """See `Dynamics`; with many outputs the kernel is not formed, only multiplied by."""
        problem = linearizer.problem
        if problem.f0.size <= FORMED:
            return super().limit(linearizer, momentum)
        operator = ntk_operator(problem.network, problem.weights, problem.x)
        curvature = operator_curvature(operator, problem.f0, problem.targets, problem.loss)
        linearizer.passes += 2 * (OPERATOR_STEPS + 1)
        return largest_rate(np.asarray(curvature), momentum)

    def doubt(self, path: Path, rule: Rule) -> Doubt | None:
        """See `Dynamics`: that of its end."""
        trajectory = path.auxiliary
        if trajectory.warnings is None:
            return None
        return Doubt(trajectory.warnings, trajectory.doubted_from)
