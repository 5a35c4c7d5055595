"""Class sketches that the network denies, and what is planned in their place.

A class sketch is off by a fifth to all of the kernel. Where it is rebuilt the network says at the
end of a segment where its weights really are; where a segment went too far by such a kernel, the
predicted loss jumps there. Losses of real full batches at stable rates do not, nor did those of any
forecast by class sketches of the tuning tasks, by more than 0.008 of their drop. On a ResNet-18 and
a ResNet20 of BatchNorm, over 600 steps, they jumped by 0.1 to 1 of it, and said so in a wide
uncertainty alone. Or the path sees that the network denies what rebuilt kernels say, and holds an
earlier one from there on. Either is forecast again, by exact kernels or sketches of all outputs as
far as what is left of the budget goes. Where it buys none that is rebuilt, a path that jumps gives
way to one kernel, and one that holds a kernel stays.
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
    of_outputs,
    on_one_kernel,
    plan_forecast,
)
from jaxttp.forecast.prediction import Prediction
from jaxttp.forecast.problem import Problem
from jaxttp.ntk.estimators import ClassSketched

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
    sketch = plan.kernel
    if not isinstance(sketch, ClassSketched) or not is_rebuilt(plan.dynamics):
        return None
    jumps = jump_of(found.loss) > JUMP
    if descent.batch_size is not None or not (jumps or found.held_from is not None):
        return None
    room = plan.budget - found.cost.operations
    share = room / plan.training
    plans = [
        plan_forecast(dynamics, problem, descent, kernel, budget=share)
        for kernel in of_outputs(problem, sketch.key)
        if room > 0 and fits(kernel, problem)
    ]
    plans = [other for other in plans if other.operations <= room]
    best = min(plans, key=lambda other: other.error, default=None)
    if best is not None and (jumps or is_rebuilt(best.dynamics)):
        return best
    if not jumps:
        return None
    alone, share = on_one_kernel(dynamics), plan.budget / plan.training
    return plan_forecast(alone, problem, descent, sketch, budget=share)


def together(first: Prediction, second: Prediction) -> Prediction:
    """A forecast that came after another, with what both cost."""
    one, other = first.cost, second.cost
    added: dict[str, Any] = {
        name: getattr(one, name) + getattr(other, name)
        for name in ("kernels", "gradient_evaluations", "operations")
    }
    return dataclasses.replace(second, cost=dataclasses.replace(other, **added))


GIVEN_UP = "class sketches before, which the network denies, were given up"
"""Said of a plan that took another's place."""
