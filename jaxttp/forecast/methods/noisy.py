"""Mini-batch noise as an SDE, around the path of the linearised network or of any dynamics."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxttp._core.checks import check_choice, check_integer
from jaxttp._core.types import Params
from jaxttp.dynamics._trajectory import curves
from jaxttp.dynamics.diffusion import NOISES, diffusion
from jaxttp.forecast.methods.base import Draws, Dynamics, Linearizer, Path, check_centre
from jaxttp.forecast.methods.recursion import OneKernel, recur
from jaxttp.forecast.problem import Problem
from jaxttp.forecast.stability import Rates, rises
from jaxttp.forecast.training_setup import Descent
from jaxttp.forecast.uncertainty import recentred
from jaxttp.losses import Loss
from jaxttp.losses.rule import Rule


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
        """See `Dynamics`: a linear optimiser without weight decay, with mini-batches."""
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
        """See `Dynamics`; "diagonal" noise is so in the eigenbasis of the whole kernel."""
        if self.noise == "diagonal":
            return problem.whole or problem
        return super().view(problem)

    def follow(self, lines: Linearizer, descent: Descent) -> Path:
        """See `Dynamics`."""
        problem, centre = lines.problem, None
        if self.centre is not None:
            centre = self.centre.follow(lines, descent.full)
        assert descent.batch_size is not None  # checked
        test: Any = lines.cross if centre is None else {}  # else the centre follows them
        save = "outputs" if centre is None else "curves"
        found = diffusion(
            lines.first, problem.f0, problem.targets, loss=problem.loss, steps=descent.steps,
            optimizer=descent.stepper, batch_size=descent.batch_size, key=descent.key,
            protocol=descent.protocol, noise=self.noise, paths=self.paths, save=save, **test,
        )  # fmt: skip
        if centre is None:
            assert found.train is not None  # the outputs were asked for
            witness = self.witness(lines, descent)
            path = Path.of(
                lines, found.train, found.test, gradient_evaluations=witness.passes,
                diverged=int(jnp.max(found.diverged_at)) >= 0, witness=witness,
                products=self.paths * descent.steps,
            )  # fmt: skip
            losses = found.loss
        else:
            plain = curves(recur(lines, descent.full).train, problem.targets, problem.loss)[0]
            losses = recentred(found.loss, plain, centre.loss)
            products = centre.products + self.paths * descent.steps
            path = dataclasses.replace(centre, witness=centre, products=products)
        draws = Draws(losses, found.error)
        return dataclasses.replace(path, loss=jnp.median(losses, axis=0), draws=draws)

    def is_stable(self, path: Path, rates: Rates | None, descent: Descent) -> bool:
        """See `Dynamics`."""
        if self.centre is None:
            return super().is_stable(path, rates, descent)
        followed = path.witness  # with what its own centre looks at
        return self.centre.is_stable(followed, rates, descent) and not bool(rises(path.loss))

    def trust(self, path: Path, rule: Rule) -> str | None:
        """See `Dynamics`: that of the centre, or of one kernel."""
        if self.centre is None:
            return super().trust(path, rule)
        return self.centre.trust(path.witness, rule)

    def doubted_from(self, path: Path) -> int | None:
        """See `Dynamics`: that of the centre, or of one kernel."""
        if self.centre is None:
            return super().doubted_from(path)
        return self.centre.doubted_from(path.witness)

    def plain_values(self) -> dict[str, Any]:
        """See `Dynamics`."""
        return {} if self.centre is None else self.centre.plain_values()
