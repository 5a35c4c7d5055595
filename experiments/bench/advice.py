"""Whether the advice of `jaxttp.sweep` wins: its choice against the whole grid trained for real.

    python -m experiments.bench.advice [--preset smoke|cpu] [--part reported|tuning] [--minutes M]
                                       [--store FOLDER] [--report]

Every task has a grid of learning rates, as shares of the largest stable one up to beyond it, and
momenta. All of it is trained for real; the sweep names a goal and chooses a setting before that.
Beside it stand the first kernel alone, rules of thumb, a learning-rate finder, and what people do
with real training: a tenth of every training, successive halving, power laws through the first
tenth. All are asked for the fewest steps to the goal that the sweep named. A rival's cost is real
training, in trainings of one setting; the sweep's is its operations by count, in the same unit.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.optimize import curve_fit

from experiments.bench import accuracy_tasks, trust_tasks
from experiments.bench.trust_tasks import Job
from jaxttp import sweep
from jaxttp.dynamics.stability import max_learning_rate
from jaxttp.forecast import Hyperparameters, Sweep, grid
from jaxttp.forecast.problem import Problem
from jaxttp.losses import get_loss
from jaxttp.ntk import empirical_ntk

PARTS = {
    "reported": (*accuracy_tasks.REPORTED, *trust_tasks.HELD_OUT),
    "tuning": (*accuracy_tasks.TUNING, *trust_tasks.FITTING),
}


@dataclasses.dataclass(frozen=True)
class AdviceSettings:
    """The grid, and which tasks."""

    shares: tuple[float, float, int] = (0.02, 2.5, 10)
    momenta: tuple[float, ...] = (0.0, 0.6, 0.9)
    steps: int = 150
    only: tuple[str, ...] = ()


PRESETS = {
    "smoke": AdviceSettings(shares=(0.1, 1.0, 3), momenta=(0.0,), steps=20, only=("wine, MLP",)),
    "cpu": AdviceSettings(),
}


def job_of(task: str) -> Job:
    """The task of that name, of either set."""
    if task in trust_tasks.FITTING or task in trust_tasks.HELD_OUT:
        return trust_tasks.make(task, 5)
    return Job(*accuracy_tasks.make(task, 5, 1.0), "cross_entropy")


def settings_of(job: Job, settings: AdviceSettings) -> tuple[Hyperparameters, ...]:
    """The grid of a task, momenta first."""
    kernel = empirical_ntk(*job.model, job.x)
    f0 = job.model.apply_fn(job.model.params, job.x)
    problem = Problem.of(*job.model, job.x, job.y, loss=job.loss)
    limit = float(max_learning_rate(kernel, f0, problem.targets, loss=job.loss))
    rates = limit * np.geomspace(*settings.shares)
    return tuple(
        one
        for momentum in settings.momenta
        for one in grid(
            learning_rate=rates.tolist(), momentum=(momentum,), loss=job.loss,
            steps=settings.steps,
        )
    )  # fmt: skip


class Trainer:
    """Real training by heavy-ball descent, one program for all settings of a task."""

    def __init__(self, job: Job):
        loss, targets = (
            get_loss(job.loss),
            Problem.of(*job.model, job.x, job.y, loss=job.loss).targets,
        )
        x = jnp.asarray(job.x)

        def value(params: Any) -> Any:
            return loss.value(job.model.apply_fn(params, x), targets)

        @jax.jit
        def step(params: Any, velocity: Any, rate: Any, momentum: Any) -> tuple:
            now, gradient = jax.value_and_grad(value)(params)
            velocity = jax.tree.map(lambda v, g: momentum * v + g, velocity, gradient)
            params = jax.tree.map(lambda p, v: p - rate * v, params, velocity)
            return params, velocity, now

        self.params, self.step, self.value = job.model.params, step, jax.jit(value)

    def run(self, rates: Any, momentum: float) -> np.ndarray:
        """The loss (T + 1,) with these rates (T,)."""
        params, losses = self.params, []
        velocity = jax.tree.map(jnp.zeros_like, params)
        for rate in rates:
            params, velocity, now = self.step(params, velocity, float(rate), momentum)
            losses.append(now)
        return np.array([*map(float, losses), float(self.value(params))])


def real_grid(job: Job, choices: tuple[Hyperparameters, ...]) -> np.ndarray:
    """Loss curves (S, T + 1)."""
    trainer = Trainer(job)
    return np.stack([trainer.run(one.rates(), one.momentum) for one in choices])


def finder(job: Job, choices: tuple[Hyperparameters, ...]) -> dict[str, float]:
    """Rates that a learning-rate finder names: momentum 0.9, rates rising over 100 steps."""
    rates = np.array([one.learning_rate for one in choices])
    tried = np.geomspace(rates.min() / 10, rates.max() * 10, 100)
    losses = Trainer(job).run(tried, 0.9)
    smooth, average = [], 0.0
    for t, loss in enumerate(losses[:-1]):
        average = 0.98 * average + 0.02 * loss
        smooth.append(average / (1 - 0.98 ** (t + 1)))
        if not np.isfinite(loss) or (t > 0 and smooth[-1] > 4 * min(smooth)):
            break
    smooth = np.array(smooth)
    smooth = np.where(np.isfinite(smooth), smooth, np.inf)
    kept = max(3, int(np.argmin(smooth)) + 1)
    slope = np.gradient(smooth[:kept], np.log(tried[:kept]))
    return {
        "a tenth of the lowest": float(tried[int(np.argmin(smooth))] / 10),
        "steepest": float(tried[int(np.argmin(slope))]),
    }
