"""Class sketches that the network denies, and what is planned in their place.

A class sketch is off by a fifth to all of the kernel. Where it is rebuilt the network says at the
end of a segment where its weights really are; where a segment went too far by such a kernel, the
predicted loss jumps there. Losses of real full batches at stable rates do not, nor did those of any
forecast by class sketches of the tuning tasks, by more than 0.008 of their drop. On a ResNet-18 and
a ResNet20 of BatchNorm, over 600 steps, they jumped by 0.1 to 1 of it, and said so in a wide
uncertainty alone. What jumps is forecast again, by exact kernels where what is left of the budget
has room for one, and else by the first class sketch.
"""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from jaxttp.forecast.descent import Descent
from jaxttp.forecast.paths.base import Dynamics
from jaxttp.forecast.planner import (
    ForecastPlan,
    fits,
    is_rebuilt,
    on_one_kernel,
    plan_forecast,
)
from jaxttp.forecast.prediction import Prediction
from jaxttp.forecast.problem import Problem
from jaxttp.ntk.estimators import ClassSketched, Exact

JUMP = 0.05
"""A predicted loss that rises by more than this share of its drop is given up."""


def jump_of(loss: Float[Array | np.ndarray, " t"]) -> float:
    """By how much a curve rises above its least value so far, at most, as a share of its drop.

    Example:
        >>> round(jump_of(np.array([1.0, 0.5, 0.7, 0.2])), 6)
        0.25
    """
    curve = np.asarray(loss, np.float64)
    drop = float(curve[0] - curve.min())
    rise = float(np.max(curve - np.minimum.accumulate(curve)))
    return rise / drop if drop > 0 else 0.0


def plan_again(
    plan: ForecastPlan,
    found: Prediction,
    dynamics: Dynamics,
    problem: Problem,
    descent: Descent,
) -> ForecastPlan | None:
    """Another plan, where the network denies class sketches; None where all is well.

    Args:
        plan: by which a forecast was made.
        found: the forecast.
        dynamics: as asked for, before the plan.
        problem: network and data.
        descent: the training.
    """
    by_class = isinstance(plan.kernel, ClassSketched) and is_rebuilt(plan.dynamics)
    if not by_class or descent.batch_size is not None or jump_of(found.loss) <= JUMP:
        return None
    room = plan.budget - found.cost.operations
    if room > 0 and fits(Exact(), problem):
        share = room / plan.training
        other = plan_forecast(dynamics, problem, descent, Exact(), budget=share)
        if other.operations <= room:
            return other
    alone, share = on_one_kernel(dynamics), plan.budget / plan.training
    return plan_forecast(alone, problem, descent, plan.kernel, budget=share)


def together(first: Prediction, second: Prediction) -> Prediction:
    """A forecast that came after another, with what both cost."""
    one, other = first.cost, second.cost
    added: dict[str, Any] = {
        name: getattr(one, name) + getattr(other, name)
        for name in ("kernels", "gradient_evaluations", "operations")
    }
    return dataclasses.replace(second, cost=dataclasses.replace(other, **added))


GIVEN_UP = "class sketches before, by which the predicted loss jumped, were given up"
"""Said of a plan that took another's place."""
