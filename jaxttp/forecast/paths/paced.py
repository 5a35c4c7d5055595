"""One kernel, whose clock the network sets."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp.dynamics._trajectory import Trajectory
from jaxttp.forecast._retiming import (
    Clock,
    Sight,
    look,
    places_to_look,
    retime,
    uncertainty,
)
from jaxttp.forecast._trust import trust_in_loss
from jaxttp.forecast.descent import Descent
from jaxttp.forecast.paths.base import Linearizer, Path
from jaxttp.forecast.paths.recursion import Recursion, recur
from jaxttp.ntk.estimators import Exact
from jaxttp.rule import Rule

DOUBTED = 5.0
"""From such a change of the clock on it is doubted in words."""


@dataclasses.dataclass(frozen=True)
class Paced(Recursion):
    """The recursion on one kernel, whose steps take as long as the network says along its path.

    At three predicted places the network is asked for its loss and its gradient, which costs what
    the question does how far one kernel can be trusted; see `jaxttp.forecast._retiming`. A linear
    network is followed step for step, as by `Recursion`. Outputs, errors and test curves are those
    of the predicted step that has the loss. With mini-batches the clock is that of full batches.

    Example:
        >>> Paced().name
        'paced'
    """

    name = "paced"

    def follow(self, lines: Linearizer, descent: Descent) -> Path:
        """See `Dynamics`."""
        tangents = lines.tangents if descent.decays else {}
        found = recur(lines, descent, **lines.cross, **tangents)
        mean, products = found, descent.steps
        if descent.batch_size is not None:
            mean, products = recur(lines, descent.full, **tangents), 2 * descent.steps
        assert found.diverged_at is not None  # steps can diverge
        assert mean.diverged_at is not None
        diverged = int(found.diverged_at) >= 0
        path = Path.of(lines, found.train, found.test, diverged=diverged, products=products)
        if diverged or int(mean.diverged_at) >= 0:
            return path
        return self._paced(lines, descent, path, mean)

    def _paced(self, lines: Linearizer, descent: Descent, path: Path, mean: Trajectory) -> Path:
        problem = lines.problem
        curve = np.asarray(lines.curves(mean.train)[0], np.float64)
        if not np.all(curve > 0):
            return path
        steps = places_to_look(curve)
        if steps and not isinstance(lines.estimator, Exact):
            steps = [0, *steps]  # how far the kernel is off at the start
        sights = look(
            problem.network, problem.weights, problem.x, problem.targets, problem.loss,
            lines.first, mean, steps, descent.batch_size,
        )  # fmt: skip
        clock = retime(curve, sights, descent.spent_rates())

        def retimed(values: Array | None, *, falls: bool = False) -> Any:
            if values is None:
                return None
            found = clock.of(np.asarray(values))
            return jnp.asarray(found * clock.factors.astype(found.dtype) if falls else found)

        loss = retimed(path.loss, falls=True)
        off = uncertainty(np.asarray(loss, np.float64), clock.doubt)
        return dataclasses.replace(
            path,
            outputs=retimed(path.outputs),
            loss=loss,
            error=retimed(path.error),
            test_loss=retimed(path.test_loss),
            test_error=retimed(path.test_error),
            uncertainty=jnp.asarray(off, path.loss.dtype),
            gradient_evaluations=sum(1 if sight.step == 0 else 2 for sight in sights),
            witness=(sights, clock),
        )

    def trust(self, path: Path, rule: Rule) -> str | None:
        """See `Dynamics`."""
        rising = trust_in_loss(path.loss, "the real network may not survive that; try a lower rate")
        if rising is not None or path.witness is None:
            return rising
        sights, clock = path.witness
        return _words(sights, clock)


def _words(sights: list[Sight], clock: Clock) -> str | None:
    """What the network said against one kernel."""
    surer = "more kernels (a larger budget) would be surer"
    if clock.used < len(sights):
        away = sights[clock.used]
        what = "the loss of the network is no lower than before"
        if not np.isfinite(away.loss) or not np.isfinite(away.speed):
            what = "the network is not finite"
        return (
            f"at the weights predicted for step {away.step} {what}, so that nothing tells how fast "
            f"it learns from there on; {surer}"
        )
    farthest = max(clock.ratios, key=lambda ratio: abs(np.log(ratio)), default=1.0)
    if max(farthest, 1 / farthest) < DOUBTED:
        return None
    fast = "fast" if farthest > 1 else "slowly"
    return (
        f"further on the network learns {max(farthest, 1 / farthest):.2g} times as {fast} as its "
        f"kernel before training has it, by which times were set; {surer}"
    )
