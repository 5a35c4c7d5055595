"""Gradient flow: the limit of small steps, integrated by diffrax or in closed form."""

import abc
import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxttp._core.types import Params
from jaxttp.dynamics._trajectory import Trajectory
from jaxttp.dynamics.closed_form import closed_form
from jaxttp.dynamics.flow import gradient_flow
from jaxttp.dynamics.optimizers import effective_learning_rate
from jaxttp.forecast.methods.base import Linearizer, Path
from jaxttp.forecast.methods.recursion import OneKernel
from jaxttp.forecast.training_setup import Descent
from jaxttp.losses import Loss


class _Flow(OneKernel):
    """What both flows share."""

    def check(self, descent: Descent, weights: Params, loss: Loss) -> None:
        """See `Dynamics`: gradient descent with full batches."""
        given = (
            ("optimizer", None if descent.is_plain else descent.optimizer),
            ("batch_size", descent.batch_size),
        )
        for name, value in given:
            if value is not None:
                raise ValueError(
                    f"{name} cannot be used with dynamics={self.name!r}; use 'recursion'."
                )

    @abc.abstractmethod
    def solve(self, lines: Linearizer, **common: Any) -> Trajectory:
        """The flow of a problem's first kernel."""

    def follow(self, lines: Linearizer, descent: Descent) -> Path:
        """See `Dynamics`."""
        dtype = lines.problem.f0.dtype
        found = self.solve(
            lines, ts=jnp.arange(descent.steps + 1, dtype=dtype),
            learning_rate=effective_learning_rate(descent.learning_rate, descent.momentum),
            **lines.cross,
        )  # fmt: skip
        witness = self.witness(lines, descent)  # the flow's weights are those of the recursion
        return Path.of(
            lines, found.train, found.test, gradient_evaluations=witness.passes, witness=witness,
            products=descent.steps,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GradientFlow(_Flow):
    """Gradient flow by an ODE solver, momentum by the effective rate eta/(1 - m).

    Example:
        >>> GradientFlow().name
        'ode'
    """

    name = "ode"
    by_products = True

    def solve(self, lines: Linearizer, **common: Any) -> Trajectory:
        """See `gradient_flow`."""
        problem = lines.problem
        return gradient_flow(lines.first, problem.f0, problem.targets, loss=problem.loss, **common)


@dataclasses.dataclass(frozen=True)
class ClosedForm(_Flow):
    """The same flow exactly, for the squared error.

    Example:
        >>> ClosedForm().name
        'closed_form'
    """

    name = "closed_form"

    def check(self, descent: Descent, weights: Params, loss: Loss) -> None:
        """See `Dynamics`: the squared error, gradient descent with full batches."""
        super().check(descent, weights, loss)
        if loss.name != "squared_error":
            raise ValueError(
                f"loss={loss.name!r} has no closed form; use 'squared_error', or dynamics='ode'."
            )

    def solve(self, lines: Linearizer, **common: Any) -> Trajectory:
        """See `closed_form`."""
        problem = lines.problem
        return closed_form(lines.first, problem.f0, problem.targets, loss=problem.loss, **common)
