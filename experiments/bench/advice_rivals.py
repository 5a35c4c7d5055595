"""What the advice of `jaxttp.sweep` is held against: what people do, and what else was proposed.

Every rival chooses a setting of a grid, for a goal that it is told. From the real curves of a grid
it sees what it would have trained, and no more. `forest` is a regression forest on statistics of
the kernel before training and of the setting, as proposed for predicting training times, fitted on
the settings of the other tasks. `online_times` carries a tenth of every training on by
`jaxttp.forecast.online`, by losses and one kernel.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy.optimize import curve_fit
from sklearn.ensemble import RandomForestRegressor

from experiments.bench.trust_tasks import Job
from jaxttp.forecast import Hyperparameters
from jaxttp.forecast.closed_loop import online
from jaxttp.forecast.problem import Problem
from jaxttp.ntk import empirical_ntk

Row = dict[str, Any]
BEYOND = 2.5
"""The highest rate of a grid, as a share of the largest stable one."""
FAR = 4.0
"""Times of the forest are at most so many horizons, also for never."""


def steps_to(curve: Any, goal: float) -> float:
    """The first step at or below a goal, infinite for never."""
    curve = np.asarray(curve, np.float64)
    below = np.flatnonzero(curve <= goal)
    is_there = len(below) > 0 and bool(np.all(np.isfinite(curve[: below[0]])))
    return float(below[0]) if is_there else float("inf")


def is_reached(row: Row) -> bool:
    """Whether any setting gets to a goal: else no choice is better than another."""
    goal = row["goal"]
    return goal is not None and any(np.isfinite(steps_to(curve, goal)) for curve in row["real"])


def rivals(row: Row, fixed: int, others: Sequence[Row] = ()) -> dict[str, tuple[int | None, float]]:
    """What others choose, and what that costs in trainings of one setting.

    Args:
        row: of `measure`.
        fixed: the place in the grid that was best on other tasks.
        others: the rows of other tasks, which the forest is fitted on.
    """
    real = np.array(row["real"])
    rates, momenta, steps = np.array(row["rates"]), np.array(row["momenta"]), real.shape[1] - 1
    tenth, count = max(1, steps // 10), len(real)
    seen = np.where(np.isfinite(real), real, np.inf)

    def nearest(rate: float, momentum: float) -> int:
        alike = np.flatnonzero(momenta == momentum)
        return int(alike[np.argmin(np.abs(np.log(rates[alike] / rate)))])

    limit = rates.max() / BEYOND
    high = float(momenta.max())
    kernel = row["one_kernel_trainings"]
    out: dict[str, tuple[int | None, float]] = {
        "jaxttp.race": (row["race"], row["race_trainings"]),
        "jaxttp.race, to the horizon": (row["race_to_horizon"], row["race_to_horizon_trainings"]),
        "jaxttp.sweep": (row["chosen"], row["trainings"]),
        "its first kernel alone": (row["one_kernel"], kernel),
        "that, each by its own drop": (row["own_drop"], kernel),
        "half the largest stable rate, no momentum": (nearest(0.5 * limit, float(momenta.min())),
                                                      kernel),
        "half the largest stable rate, momentum 0.9": (nearest(0.5 * limit, high), kernel),
        "the share and momentum best on other tasks": (fixed, kernel),
    }  # fmt: skip
    for name, rate in row["finder"].items():
        out[f"rate finder, {name}, momentum 0.9"] = (nearest(rate, high), 100 / steps)
    out["a tenth of every training, the lowest"] = (
        int(np.argmin(seen[:, tenth])), count * tenth / steps
    )  # fmt: skip
    alive, done, cost = np.arange(count), 0, 0.0
    for upto in (tenth, 3 * tenth, 9 * tenth):
        cost += len(alive) * (upto - done) / steps
        alive, done = alive[np.argsort(seen[alive, upto])][: max(1, len(alive) // 3)], upto
    out["successive halving, by thirds"] = (int(alive[0]), cost)
    out["a tenth of each, carried on by Online"] = (
        int(np.argmin(row["online"])), count * tenth / steps + kernel
    )  # fmt: skip
    out["a forest on kernel statistics, other tasks"] = (forest(row, others), kernel)
    laws = [power_law(curve[: tenth + 1], row["goal"]) for curve in seen]
    out["power laws through a tenth of each"] = (int(np.argmin(laws)), count * tenth / steps)
    return out


def power_law(curve: np.ndarray, goal: float) -> float:
    """When a + b (t + 1)^-c, fitted to the beginning of a curve, is at a goal."""
    if curve.min() <= goal:
        return float(np.argmax(curve <= goal))
    if not np.all(np.isfinite(curve)):
        return float("inf")
    t = np.arange(len(curve)) + 1.0
    try:
        (a, b, c), _ = curve_fit(
            lambda t, a, b, c: a + b * t**-c, t, curve, (0.5 * curve.min(), curve[0], 0.5),
            bounds=((0, 0, 1e-3), (np.inf, np.inf, 5)),
        )  # fmt: skip
    except RuntimeError:
        return float("inf")
    return float(((goal - a) / b) ** (-1 / c)) if a < goal and b > 0 else float("inf")


def statistics(job: Job) -> dict[str, float]:
    """Numbers of a task before training: of its kernel, its loss, and its margins."""
    problem = Problem.of(*job.model, job.x, job.y, loss=job.loss)
    f0, targets, n = problem.f0, problem.targets, len(problem.f0)
    kernel = jnp.asarray(empirical_ntk(*job.model, job.x)).reshape(f0.size, f0.size)
    values = jnp.linalg.eigvalsh(kernel)
    gradient = problem.loss.gradient(f0, targets).reshape(-1)
    right = jnp.sum(f0 * targets, axis=-1)
    other = jnp.max(jnp.where(targets > 0.5, -jnp.inf, f0), axis=-1)
    margins = right - other if f0.shape[1] > 1 else -jnp.abs(f0 - targets)[:, 0]
    found = {
        "trace": jnp.log(jnp.sum(values) / values[-1]),
        "largest": jnp.log(values[-1] / n),
        "speed": jnp.log(gradient @ kernel @ gradient / (values[-1] * gradient @ gradient)),
        "gradient": jnp.log(gradient @ gradient / n),
        "loss": problem.loss.value(f0, targets),
        "margin": jnp.mean(margins),
        "spread": jnp.std(margins),
        "outputs": jnp.log(float(f0.shape[1])),
        "samples": jnp.log(float(n)),
    }
    return {name: float(value) for name, value in found.items()}


def online_times(
    job: Job, choices: Sequence[Hyperparameters], curves: np.ndarray, goal: float
) -> list[float]:
    """When every training is at a goal, from its first tenth of losses and one kernel.

    Args:
        job: the task.
        choices: S settings of heavy-ball descent.
        curves: their real losses (S, T + 1), of which a tenth is looked at.
        goal: the loss.

    Returns:
        Steps (S,), infinite for never.
    """
    kernel = empirical_ntk(*job.model, job.x)
    f0 = job.model.apply_fn(job.model.params, job.x)
    tenth, found = max(1, (curves.shape[1] - 1) // 10), []
    for one, curve in zip(choices, curves, strict=True):
        seen = curve[: tenth + 1]
        if not np.all(np.isfinite(seen)):
            found.append(float("inf"))
            continue
        whole = dataclasses.replace(one, batch_size=None)
        ahead = online(kernel, f0, job.y, whole, losses=seen)
        found.append(steps_to(ahead.loss, goal) if ahead.stable else float("inf"))
    return found


def described(row: Row) -> np.ndarray:
    """What the forest is told of every setting of a task (S, F)."""
    known = row["statistics"]
    rates, momenta = np.array(row["rates"]), np.array(row["momenta"])
    own = np.log(rates / (1 - momenta)) + known["largest"]
    goal = np.log(row["goal"] / known["loss"])
    common = [*known.values(), goal]
    return np.column_stack([own, momenta, np.tile(common, (len(rates), 1))])


def forest(row: Row, others: Sequence[Row]) -> int | None:
    """The setting that a regression forest, fitted on other tasks, has at the goal first.

    Args:
        row: of `advice.measure`.
        others: the rows of other tasks.

    Returns:
        Its place in the grid; None without others.
    """
    if not others:
        return None
    x = np.concatenate([described(one) for one in others])
    y = np.concatenate([_log_times(one) for one in others])
    fitted = RandomForestRegressor(300, min_samples_leaf=2, random_state=0).fit(x, y)
    return int(np.argmin(fitted.predict(described(row))))


def _log_times(row: Row) -> np.ndarray:
    real = np.array(row["real"])
    times = np.array([steps_to(curve, row["goal"]) for curve in real])
    return np.log(np.clip(times, 1, FAR * (real.shape[1] - 1)))
