"""What a budget buys: how much truer forecasts become by more kernels and by wider sketches.

    python -m experiments.bench.planning [--preset smoke|cpu|long] [--minutes M] [--store FILE]

On the tuning tasks of `accuracy_tasks`, the fitting half of `trust_tasks` and its FINE_TUNED, of
whose accuracy nothing is reported, every training is run for real and forecast with at most 0, 1,
2, 4, 8 or 16 kernels after the first, exact or sketched. The tables that it prints are the
constants of `jaxttp.forecast.planner`: the mean error of a time as a share of it by the number of
kernels, what a sketch adds to it, and what a kernel costs in ways through the network and in runs
of the horizon.
"""

import argparse
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from experiments.bench.accuracy import AccuracySettings, Run, plan
from experiments.bench.accuracy_tasks import TUNING
from experiments.bench.accuracy_tasks import make as make_tuning
from experiments.bench.stored import go_on
from experiments.bench.trust_tasks import FINE_TUNED, FITTING, RECIPES, Job
from experiments.bench.trust_tasks import make as make_other
from jaxttp import train
from jaxttp.forecast import (
    Descent,
    Problem,
    Recursion,
    Relinearized,
    Rule,
    forecast_training,
)
from jaxttp.forecast._witness import passes_asked
from jaxttp.forecast.price import Price
from jaxttp.losses.rule import training_time
from jaxttp.ntk import ClassSketched, Exact, Sketched, empirical_ntk
from jaxttp.ntk.estimators import KernelEstimator

THRESHOLDS = (0.01, 0.1, 0.4)
SHARES = (0.5, 0.25, 0.1)
"""Absolute goals, as shares of the loss before training."""
SLACK = 2
"""Errors of so many steps are of no account."""
WAYS = ((0.0, None, 0.3), (0.9, None, 0.1), (0.0, 32, 0.2), (0.9, 32, 0.05), (0.0, None, 0.8))
"""How the fitting tasks are trained, in turns: momentum, samples a batch, effective rate."""
FINE_WAYS = WAYS[:2]
"""How every one of FINE_TUNED is."""


@dataclasses.dataclass(frozen=True)
class PlanningSettings:
    """What to measure."""

    tasks: tuple[str, ...] = tuple(TUNING)
    fitting: tuple[str, ...] = tuple(FITTING)
    fine_tuned: tuple[str, ...] = tuple(FINE_TUNED)
    runs: int = 3
    steps: int = 150
    kernels: tuple[int, ...] = (0, 1, 2, 4, 8, 16)
    widths: tuple[int, ...] = (128, 512, 2048)
    sketched: tuple[int, ...] = (0, 4)
    by_class: tuple[int, ...] = (0, 1, 2, 4, 8, 16)


PRESETS = {
    "smoke": PlanningSettings(
        tasks=("moons, MLP",),
        fitting=(),
        fine_tuned=(),
        runs=1,
        steps=20,
        kernels=(0, 1),
        widths=(16,),
        sketched=(0,),
        by_class=(0,),
    ),
    "cpu": PlanningSettings(),
    "long": PlanningSettings(steps=600, widths=(), sketched=()),
}


def runs_of(settings: PlanningSettings) -> list[Run]:
    """The trainings, the tuning tasks' first."""
    tuning = AccuracySettings(tasks=settings.tasks, runs=settings.runs, steps=settings.steps)
    fitting = [
        Run(task, i, 1.0, *WAYS[(place + i) % len(WAYS)])
        for place, task in enumerate(settings.fitting)
        for i in range(settings.runs)
    ]
    fine_tuned = [
        Run(task, i, 1.0, *way) for task in settings.fine_tuned for i, way in enumerate(FINE_WAYS)
    ]
    return plan(tuning) + fitting + fine_tuned


def _job(run: Run) -> Job:
    if run.task in RECIPES:
        return make_other(run.task, run.seed)
    return Job(*make_tuning(run.task, run.seed, run.head_scale), "cross_entropy")


def measure(run: Run, settings: PlanningSettings) -> dict[str, Any]:
    """One training and all its forecasts; plain values."""
    job = _job(run)
    kernel = np.asarray(empirical_ntk(*job.model, job.x), np.float64)
    size = kernel.shape[0] * kernel.shape[1]
    largest = float(np.linalg.eigvalsh(kernel.reshape(size, size))[-1]) / len(job.x)
    eta = run.rate * (1 - run.momentum) / largest
    real = train(
        *job.model, job.x, job.y, loss=job.loss, steps=settings.steps,
        optimizer=optax.sgd(eta, run.momentum or None), batch_size=run.batch_size,
        key=jax.random.key(run.seed + 50),
    )  # fmt: skip
    out: dict[str, Any] = {"name": run.name, "batches": run.batch_size is not None}
    if not np.all(np.isfinite(real.loss)):
        return out | {"diverged": True}
    ways = [("exact", most) for most in settings.kernels]
    ways += [(str(width), most) for width in settings.widths for most in settings.sketched]
    ways += [("class sketch", most) for most in settings.by_class]
    found = []
    for width, most in ways:
        estimator = _estimator(width)
        key = None if run.batch_size is None else jax.random.key(run.seed + 90)
        descent = Descent.of(
            learning_rate=eta, momentum=run.momentum, steps=settings.steps,
            batch_size=run.batch_size, key=key,
        )  # fmt: skip
        found.append(_forecast(job, descent, estimator, most, real.loss) | {"width": width})
    return out | {"outputs": size, "forecasts": found}


def _estimator(name: str) -> KernelEstimator:
    if name == "class sketch":
        return ClassSketched(jax.random.key(7))
    return Exact() if name == "exact" else Sketched(int(name), jax.random.key(7))


def _forecast(
    job: Job, descent: Descent, estimator: KernelEstimator, most: int, real: Any
) -> dict[str, Any]:
    """The errors of one forecast, and what it did."""
    problem = Problem.of(*job.model, job.x, job.y, loss=job.loss).contrasted()
    way = Relinearized(most=most) if most else Recursion()
    guess = forecast_training(
        problem, descent, dynamics=way, kernel=estimator, rule=Rule(THRESHOLDS)
    )
    price = Price.of(problem, descent, estimator)
    kernels = guess.cost.kernels
    passes = passes_asked(len(job.x))  # a part of one, which the cost rounds
    if most:
        passes = guess.cost.gradient_evaluations - kernels * estimator.passes(problem)
    products = guess.cost.operations - price.forecast(kernels, passes, 0)
    return {
        "most": most,
        "kernels": kernels,
        "passes": passes,
        "runs": products / price.product / descent.steps,
        "times": reading_errors(np.asarray(guess.loss), guess.stable, np.asarray(real)),
        "end": float(abs(guess.loss[-1] - real[-1]) / max(real[0] - real.min(), 1e-12)),
    }


def reading_errors(guess: np.ndarray, stable: bool, real: np.ndarray) -> list[float]:
    """By how much of themselves times are off, at most 1; where the real one gets there.

    Args:
        guess: the predicted loss, (T + 1,).
        stable: whether it is said to come about; else nothing is foreseen.
        real: the loss, (T + 1,).
    """
    out = []
    for rule, goals in (("relative", THRESHOLDS), ("absolute", real[0] * np.array(SHARES))):
        for goal in goals:
            true = int(training_time(real, float(goal), rule=rule))
            if true > 0:
                time = int(training_time(guess, float(goal), rule=rule)) if stable else -1
                off = abs(time - true)
                share = 1.0 if time < 0 else 0.0 if off <= SLACK else off / true
                out.append(min(1.0, share))
    return out


def tables(rows: list[dict[str, Any]]) -> str:
    """The tables that the planner's constants are read off."""
    rows = [row for row in rows if not row.get("diverged")]
    ways = dict.fromkeys((one["width"], one["most"]) for row in rows for one in row["forecasts"])
    lines = [
        f"{len(rows)} trainings of {len({row['name'].split('/')[0] for row in rows})} tasks",
        "",
        "| kernel | kernels after the first, at most | built | error of a time | of the end | "
        "ways through the network a kernel (batches) | runs a kernel (batches) |",
        "|---|---|---|---|---|---|---|",
    ]
    for width, most in ways:
        own = [
            (row, one) for row in rows for one in row["forecasts"]
            if (one["width"], one["most"]) == (width, most)
        ]  # fmt: skip
        times = np.mean([share for _, one in own for share in one["times"]])
        cells = [width, f"{most}", f"{_mean(one['kernels'] for _, one in own):.1f}"]
        cells += [f"{times:.3f}", f"{_mean(min(1.0, one['end']) for _, one in own):.3f}"]
        for name in ("passes", "runs"):
            full, noisy = (
                _mean(one[name] / one["kernels"] for row, one in own if row["batches"] == drawn)
                for drawn in (False, True)
            )
            cells.append(f"{full:.1f} ({noisy:.1f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(values: Any) -> float:
    several = list(values)
    return float(np.mean(several)) if several else float("nan")


def main() -> None:
    """Measure what the store does not have yet, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no run after that")
    parser.add_argument("--store", type=Path, help="a file of JSON lines (default: by preset)")
    arguments = parser.parse_args()
    settings = PRESETS[arguments.preset]
    store = arguments.store or Path(f"planning-{arguments.preset}.jsonl")
    jobs = ((run.name, functools.partial(measure, run, settings)) for run in runs_of(settings))
    rows = go_on(store, jobs, arguments.minutes)
    for words, part in (("tuning", TUNING), ("fitting", FITTING), ("fine-tuned", FINE_TUNED)):
        some = [row for row in rows if row["name"].split("/")[0] in part]
        if some:
            print(f"\n{words}: {tables(some)}")


if __name__ == "__main__":
    main()
