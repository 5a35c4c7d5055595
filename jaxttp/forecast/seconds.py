"""Seconds of a training run and of its forecast, estimated before either runs.

A forward pass of the network at the samples is timed: it knows this machine, small layers and
depthwise convolutions. Training and forecast are taken to run at a fixed part of its speed. Plans
stay in FLOPs, so that the same call plans the same forecast on every machine.
"""

import dataclasses
import timeit
import warnings
from typing import NamedTuple

import jax

from jaxttp._core.progress import SHORT, readable_time
from jaxttp._core.types import Progress
from jaxttp.dynamics._network import evaluation
from jaxttp.forecast.cost import ForecastPlan
from jaxttp.forecast.problem import Problem
from jaxttp.ntk.estimators import plan_of


@dataclasses.dataclass(frozen=True)
class SpeedModel:
    """Constants of the estimates, from 18 trainings on two cores (MLPs, CNNs, ResNets, a ViT).

    Attributes:
        training: speed of training steps, in FLOPs a second, over that of a forward pass.
        dispatch: seconds to start a step.
        forecast: speed of a forecast over that of a forward pass.
        kernel: seconds that every kernel takes besides.
        compiling: compilation of a forecast over that of the forward pass.
    """

    training: float = 0.9
    dispatch: float = 1e-4
    forecast: float = 0.45
    kernel: float = 0.05
    compiling: float = 20.0


SPEED = SpeedModel()


class Seconds(NamedTuple):
    """Estimated seconds.

    Attributes:
        training: of the training run, without compilation.
        forecast: of its forecast, at most, without compilation.
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
        text = f"training about {training}, forecast at most about {total}"
        text += f", {compiling} of it compiling" if self.compiling > 0.1 * self.total else ""
        return f"{text}; training costs less" if self.training < self.total else text


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
    whole = problem.whole or problem
    evaluate = evaluation(whole.apply_fn)  # compiled when the problem was made
    passes = timeit.repeat(
        lambda: jax.block_until_ready(evaluate(whole.params, whole.x)), number=1, repeat=2
    )
    forward = plan_of(whole).forward * whole.f0.shape[0]
    a_flop = min(passes) / forward
    training = plan.training * a_flop / SPEED.training + steps * SPEED.dispatch
    forecast = forecasts * plan.operations * a_flop / SPEED.forecast + SPEED.kernel * plan.kernels
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
