"""Seconds of a training run and of its forecast, estimated before either runs.

One gradient of the network at the samples is timed: it knows this machine, small layers and
depthwise convolutions. The forecast computes such gradients too, by the same compiled function.
Training is taken to run at its speed, the forecast at a fixed part of it. Plans stay in FLOPs, so
that the same call plans the same forecast on every machine.
"""

import dataclasses
import timeit
import warnings
from typing import NamedTuple

import jax

from jaxttp._core.progress import SHORT, readable_time
from jaxttp._core.types import Progress, take
from jaxttp.dynamics._network import outputs_and_pull
from jaxttp.forecast.cost import STEP, ForecastPlan, center_of, is_rebuilt
from jaxttp.forecast.problem import Problem
from jaxttp.forecast.uncertainty import sampled
from jaxttp.ntk.estimators import plan_of


@dataclasses.dataclass(frozen=True)
class SpeedModel:
    """Constants of the estimates, from 15 trainings on two cores (MLPs, ResNets, a ViT).

    Attributes:
        dispatch: seconds to start a step.
        forecast: FLOPs a second of a forecast over those of a gradient; of preconditioned networks.
        built: kernels that a forecast builds if the plan allows more, likewise.
        kernel: seconds that every kernel takes besides.
        compiling: compilation of a forecast over that of the forward pass.
    """

    dispatch: float = 5e-5
    forecast: tuple[float, float] = (1.1, 0.4)
    built: tuple[int, int] = (11, 22)
    kernel: float = 0.05
    compiling: float = 20.0


SPEED = SpeedModel()


class Seconds(NamedTuple):
    """Estimated seconds.

    Attributes:
        training: of the training run, without compilation.
        forecast: of its forecast, without compilation.
        compiling: of the forecast's compilation.
    """

    training: float
    forecast: float
    compiling: float

    @property
    def total(self) -> float:
        """Of the forecast, with compilation."""
        return self.forecast + self.compiling

    def __str__(self) -> str:
        training, total, compiling = map(readable_time, (self.training, self.total, self.compiling))
        text = f"training about {training}, forecast about {total}"
        text += f", {compiling} of it compiling" if self.compiling > 0.1 * self.total else ""
        less = "less" if self.training < self.total else "less than twice as much"
        return f"{text}; training costs {less}" if self.training < 2 * self.total else text


def estimate_seconds(
    plan: ForecastPlan,
    problem: Problem,
    steps: int,
    compile_seconds: float = 0.0,
    *,
    forecasts: int = 1,
    trainings: int = 1,
) -> Seconds:
    """Seconds of forecasts and of the trainings that they predict.

    Args:
        plan: of one forecast.
        problem: network and data.
        steps: of the training.
        compile_seconds: that the network's evaluation took to compile.
        forecasts: of that kind, at most.
        trainings: that are predicted.
    """
    # Its shape is one that forecasts of nonlinear networks need: nothing more is compiled for them.
    rows = len(problem.f0) if is_rebuilt(plan.dynamics) else sampled(len(problem.f0))
    x, direction = take(problem.x, slice(rows)), problem.f0[:rows]
    gradient = outputs_and_pull(problem.network)
    compute = lambda: jax.block_until_ready(gradient(problem.weights, x, direction))  # noqa: E731
    timed = STEP * plan_of(problem.whole or problem).forward * rows
    a_flop = min(timeit.repeat(compute, number=1, repeat=3)) / timed
    training = plan.training * a_flop + steps * SPEED.dispatch
    is_scaled = getattr(center_of(plan.dynamics), "is_scaled", False)
    built = min(plan.kernels, SPEED.built[is_scaled])
    flops = forecasts * plan.operations * built / plan.kernels
    forecast = flops * a_flop / SPEED.forecast[is_scaled] + SPEED.kernel * built
    return Seconds(trainings * training, forecast, SPEED.compiling * compile_seconds)


def announce(seconds: Seconds, progress: Progress | None, hint: str) -> None:
    """Say what a forecast of more than a few seconds will take, before it begins.

    Args:
        seconds: of the forecast.
        progress: is told; where there is none a warning is given if training costs less.
        hint: an alternative, for that warning.
    """
    is_long = seconds.total >= SHORT
    if is_long and progress is not None:
        progress(str(seconds), 0, 0)
    elif is_long and seconds.training < seconds.forecast:
        warnings.warn(f"{seconds}: {hint}", stacklevel=3)
