"""Whether the advice of `jaxttp.sweep` wins: its choice against the whole grid trained for real.

    python -m experiments.bench.advice [--preset smoke|cpu] [--part reported|tuning]
                                       [--batch-size B] [--minutes M] [--store FILE]

Every task has a grid of learning rates, as shares of the largest stable one up to beyond it, and
momenta. All of it is trained for real; the sweep names a goal and chooses a setting before that.
Beside it stand `jaxttp.race`, which trains openly, the first kernel alone, rules of thumb, a
learning-rate finder, what people do with real training (a tenth of every training, successive
halving, power laws through the first tenth), and others (`advice_rivals`). All are asked for the
fewest steps to the goal that the sweep named; the race is told it, or trains to the horizon
without. A rival's cost is real training, in trainings of one setting; the sweep's is its operations
by count, in the same unit.

With a batch size all of that is of mini-batches, the same ones for forecasts, races and trainings;
losses are those on all samples, after every step, which real training does not come to know: what
people do with it is flattered.
"""

import argparse
import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bench import accuracy_tasks, trust_tasks
from experiments.bench.advice_rivals import (
    BEYOND,
    is_reached,
    online_times,
    rivals,
    statistics,
    steps_to,
)
from experiments.bench.stored import go_on
from experiments.bench.trust_tasks import Job
from jaxttp import sweep
from jaxttp.dynamics.batches import batch_indices
from jaxttp.dynamics.stability import max_learning_rate
from jaxttp.forecast import Hyperparameters, grid, race
from jaxttp.forecast.problem import Problem
from jaxttp.losses import get_loss
from jaxttp.ntk import empirical_ntk

TENTH, STEEPEST = "a tenth of the lowest point", "the steepest point"
SEED = 7
"""Of the samples and weights that are drawn."""
PARTS = {
    "reported": (*accuracy_tasks.REPORTED, *trust_tasks.HELD_OUT),
    "tuning": (*accuracy_tasks.TUNING, *trust_tasks.FITTING),
}


@dataclasses.dataclass(frozen=True)
class AdviceSettings:
    """The grid, and which tasks."""

    shares: tuple[float, float, int] = (0.02, BEYOND, 10)
    momenta: tuple[float, ...] = (0.0, 0.6, 0.9)
    steps: int = 150
    only: tuple[str, ...] = ()
    batch_size: int | None = None

    def drawn(self) -> dict[str, Any]:
        """What says which batches there are."""
        return {} if self.batch_size is None else {"key": jax.random.key(SEED)}


PRESETS = {
    "smoke": AdviceSettings(shares=(0.1, 1.0, 3), momenta=(0.0,), steps=20, only=("wine, MLP",)),
    "cpu": AdviceSettings(),
}


def job_of(task: str, seed: int = SEED) -> Job:
    """The task of that name, of either set."""
    if task in trust_tasks.FITTING or task in trust_tasks.HELD_OUT:
        return trust_tasks.make(task, seed)
    return Job(*accuracy_tasks.make(task, seed, 1.0), "cross_entropy")


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
            steps=settings.steps, batch_size=settings.batch_size,
        )
    )  # fmt: skip


class Trainer:
    """Real training, one program for all settings of an algorithm on a task."""

    def __init__(self, job: Job):
        problem = Problem.of(*job.model, job.x, job.y, loss=job.loss)
        loss, self.data = get_loss(job.loss), (jnp.asarray(job.x), problem.targets)

        def value(params: Any, x: Any, targets: Any) -> Any:
            return loss.value(job.model.apply_fn(params, x), targets)

        self.params, self.value, self.loss = job.model.params, jax.jit(value), value

    @functools.cache  # noqa: B019
    def step(self, stepper: optax.GradientTransformation) -> Any:
        """A step of an algorithm whose numbers stand in its state."""

        @jax.jit
        def step(params: Any, state: Any, x: Any, targets: Any) -> tuple:
            now, gradient = jax.value_and_grad(self.loss)(params, x, targets)
            updates, state = stepper.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, now

        return step

    def run(self, one: Hyperparameters, rates: Any = None) -> np.ndarray:
        """The loss (T + 1,) under a setting; with these rates (T,) where they are given."""
        stepper, numbers = one.stepper()
        step, params, losses = self.step(stepper), self.params, []
        state: Any = stepper.init(params)
        for name, value in numbers.items():
            state.hyperparams[name] = jnp.asarray(value, state.hyperparams[name].dtype)
        rates = one.rates() if rates is None else rates
        size, rows = one.batch_size, None
        if size is not None:
            key = jax.random.key(SEED)
            rows = np.asarray(batch_indices(key, len(self.data[1]), size, len(rates)))
        for t, rate in enumerate(rates):
            state.hyperparams["rate"] = jnp.asarray(rate, state.hyperparams["rate"].dtype)
            data = self.data if rows is None else tuple(part[rows[t]] for part in self.data)
            before = None if rows is None else self.value(params, *self.data)
            params, state, now = step(params, state, *data)
            losses.append(now if before is None else before)
        return np.array([*map(float, losses), float(self.value(params, *self.data))])


def real_grid(job: Job, choices: tuple[Hyperparameters, ...]) -> np.ndarray:
    """Loss curves (S, T + 1)."""
    trainer = Trainer(job)
    return np.stack([trainer.run(one) for one in choices])


def finder(job: Job, choices: tuple[Hyperparameters, ...]) -> dict[str, float]:
    """Rates that a learning-rate finder names: momentum 0.9, rates rising over 100 steps."""
    rates = np.array([one.learning_rate for one in choices])
    tried = np.geomspace(rates.min() / 10, rates.max() * 10, 100)
    found = Hyperparameters(1.0, momentum=0.9, batch_size=choices[0].batch_size)
    losses = Trainer(job).run(found, tried)
    smooth, average = [], 0.0
    for t, loss in enumerate(losses[:-1]):
        average = 0.98 * average + 0.02 * loss
        smooth.append(average / (1 - 0.98 ** (t + 1)))
        if not np.isfinite(loss) or (t > 0 and smooth[-1] > 4 * min(smooth)):
            break
    curve = np.where(np.isfinite(smooth), smooth, np.inf)
    lowest = int(np.argmin(curve))
    kept = max(3, lowest + 1)
    slope = np.gradient(curve[:kept], np.log(tried[:kept]))
    return {TENTH: float(tried[lowest] / 10), STEEPEST: float(tried[int(np.argmin(slope))])}


def measure(task: str, settings: AdviceSettings) -> dict[str, Any]:
    """The sweep's advice, the first kernel's, and the whole grid for real; plain values."""
    jax.clear_caches()
    job, drawn = job_of(task), settings.drawn()
    choices = settings_of(job, settings)
    begun = time.perf_counter()
    found = sweep(*job.model, job.x, job.y, choices, **drawn)
    seconds = time.perf_counter() - begun
    alone = sweep(*job.model, job.x, job.y, choices, relinearize=0, **drawn)
    goal = found.targets[0].value if found.targets else None
    raced = race(*job.model, job.x, job.y, choices, target_loss=goal, **drawn)
    blind = race(*job.model, job.x, job.y, choices, **drawn)
    begun = time.perf_counter()
    real = real_grid(job, choices)
    grid_seconds = time.perf_counter() - begun
    return {
        "task": task,
        "goal": goal,
        "chosen": _first(found.ranking()),
        "predicted": int(found.times()[found.best()]) if found.ranking() else None,
        "followed": list(found.relinearized),
        "trainings": found.trainings,
        "seconds": seconds,
        "grid_seconds": grid_seconds,
        "statistics": statistics(job),
        "online": None if goal is None else online_times(job, choices, real, goal),
        "race": _first(raced.ranking()),
        "race_trainings": raced.trainings,
        "race_sure": raced.sure,
        "race_to_horizon": _first(blind.ranking()),
        "race_to_horizon_trainings": blind.trainings,
        "one_kernel": _first(alone.ranking()),
        "one_kernel_trainings": alone.trainings,
        "own_drop": _first(alone.ranking(alone.thresholds[len(alone.thresholds) // 2])),
        "finder": finder(job, choices),
        "rates": [one.learning_rate for one in choices],
        "momenta": [one.momentum for one in choices],
        "real": [[float(f"{v:.5g}") for v in curve] for curve in real],
    }


def _first(order: Any) -> int | None:
    return int(order[0]) if len(order) else None


def best_place(rows: list[dict[str, Any]]) -> int:
    """The place in the grid with the least mean excess over the best on some tasks."""
    excess = []
    for row in rows:
        times = np.array([steps_to(curve, row["goal"]) for curve in row["real"]])
        excess.append(np.minimum(times / times.min(), 10.0))
    return int(np.argmin(np.mean(excess, axis=0)))


def tables(rows: list[dict[str, Any]], fixed: int) -> str:
    """Every task, then every rival."""
    lines = ["| task | goal | best of the grid | sweep: forecast | real | over the best | cost "
             "| race: real | over the best | cost |", "|---" * 10 + "|"]  # fmt: skip
    regrets: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        times = np.array([steps_to(curve, row["goal"]) for curve in row["real"]])
        best = float(times.min())
        others = [one for one in rows if one is not row]
        for name, (place, cost) in rivals(row, fixed, others).items():
            time_ = float("inf") if place is None else float(times[place])
            regrets.setdefault(name, []).append((best, time_, cost))
        cells = []
        for name in ("jaxttp.sweep", "jaxttp.race"):
            _, real, cost = regrets[name][-1]
            over = f"{100 * (real / best - 1):.0f} %" if np.isfinite(real) else "never"
            cells.append(f"{real:.0f} | {over} | {cost:.2g}")
        lines.append(
            f"| {row['task']} | {row['goal']:g} | {best:.0f} | {row['predicted']} | "
            f"{' | '.join(cells)} |"
        )
    heads = (
        f"of {len(rows)} tasks", "within 10 % of the best, or a step", "twice as many, or never",
        "of these never", "mean excess, at most 10 times", "cost, trainings",
    )  # fmt: skip
    lines += ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, found in regrets.items():
        best, real, cost = (np.array(part) for part in zip(*found, strict=True))
        near = np.mean(real <= np.maximum(1.1 * best, best + 1))
        twice, never = np.mean(real >= 2 * best), np.mean(np.isinf(real))
        mean = np.mean(np.minimum(real / best, 10)) - 1
        lines.append(
            f"| {name} | {near:.0%} | {twice:.0%} | {never:.0%} | {100 * mean:.0f} % | "
            f"{np.mean(cost):.2g} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure what the store lacks, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--part", choices=PARTS, default="reported")
    parser.add_argument("--batch-size", type=int, help="samples a step (default: all)")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no task after that")
    parser.add_argument("--store", type=Path, help="a file of JSON lines (default: by preset)")
    arguments = parser.parse_args()
    size = arguments.batch_size
    settings = dataclasses.replace(PRESETS[arguments.preset], batch_size=size)
    words = "" if size is None else f"-batches-{size}"
    store = arguments.store or Path(f"advice-{arguments.preset}{words}.jsonl")
    wanted = settings.only or PARTS[arguments.part]
    jobs = ((task, functools.partial(measure, task, settings)) for task in wanted)
    rows = [
        row for row in go_on(store, jobs, arguments.minutes, key="task") if is_reached(row)
    ]  # fmt: skip
    tuned = [row for row in rows if row["task"] in PARTS["tuning"]]
    rows = [row for row in rows if row["task"] in wanted]
    print(tables(rows, best_place(tuned or rows)))
    if not tuned:
        print(
            "(the share and momentum are best on these tasks themselves: --part tuning was not run)"
        )


if __name__ == "__main__":
    main()
