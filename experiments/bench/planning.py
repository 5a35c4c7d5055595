"""What a budget buys: how much more accurate forecasts become by more kernels and wider sketches.

    python -m experiments.bench.planning [--preset smoke|cpu|long] [--minutes M] [--store FILE]

On the tuning tasks of `accuracy_tasks`, the fitting half of `warning_tasks` and its FINE_TUNED, of
whose accuracy nothing is reported, every training is run for real and forecast with at most 0, 1,
2, 4, 8 or 16 kernels after the first, exact or sketched. The tables hold what the planner's
constants are read off: the mean error of a time as a fraction of it, that of the end as a fraction
of the drop, the kernels built, and the operations as a fraction of the training's (median), full
batches and mini-batches apart. ("Kernels after the first" are at most what is asked for.)
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax

from experiments.bench.accuracy import AccuracySettings, Run, plan
from experiments.bench.accuracy_tasks import TUNING
from experiments.bench.harness import Row, go_on, head, line, parser, store_of
from experiments.bench.warning_tasks import FINE_TUNED, FITTING, any_task
from jaxttp import empirical_ntk, predict_training_time, train, training_time
from jaxttp.ntk import ClassSketched, Exact, Sketched

MODULE = "experiments.bench.planning"
THRESHOLDS = (0.01, 0.1, 0.4)
FRACTIONS = (0.5, 0.25, 0.1)
"""Absolute targets, as fractions of the loss before training."""
SLACK = 2
"""Errors of so many steps are of no account."""
WAYS = ((0.0, None, 0.3), (0.9, None, 0.1), (0.0, 32, 0.2), (0.9, 32, 0.05), (0.0, None, 0.8))
"""How the fitting tasks are trained, in turns: momentum, samples a batch, effective rate."""


@dataclasses.dataclass(frozen=True)
class PlanningSettings:
    """What to measure; `kernels` are (estimator or width, at most so many after the first)."""

    tasks: tuple[str, ...] = tuple(TUNING)
    fitting: tuple[str, ...] = tuple(FITTING)
    fine_tuned: tuple[str, ...] = tuple(FINE_TUNED)
    runs: int = 3
    steps: int = 150
    kernels: tuple[tuple[str | int, int], ...] = (
        *(("exact", most) for most in (0, 1, 2, 4, 8, 16)),
        *((width, most) for width in (128, 512, 2048) for most in (0, 4)),
        *(("class sketch", most) for most in (0, 1, 2, 4, 8, 16)),
    )


PRESETS = {
    "smoke": PlanningSettings(
        ("moons, MLP",), (), (), runs=1, steps=20,
        kernels=(("exact", 0), ("exact", 1), (16, 0), ("class sketch", 0)),
    ),
    "cpu": PlanningSettings(),
    "long": PlanningSettings(steps=600),
}  # fmt: skip


def runs_of(settings: PlanningSettings) -> list[Run]:
    """The trainings, the tuning tasks' first."""
    tuning = AccuracySettings(tasks=settings.tasks, runs=settings.runs, steps=settings.steps)
    fitting = [
        Run(task, i, 1.0, *WAYS[(place + i) % len(WAYS)])
        for place, task in enumerate(settings.fitting)
        for i in range(settings.runs)
    ]
    fine_tuned = [
        Run(task, i, 1.0, *way) for task in settings.fine_tuned for i, way in enumerate(WAYS[:2])
    ]
    return plan(tuning) + fitting + fine_tuned


def measure(run: Run, settings: PlanningSettings) -> Row:
    """One training and all its forecasts; plain values."""
    job = any_task(run.task, run.seed, run.head_scale)
    kernel = np.asarray(empirical_ntk(*job.model, job.x), np.float64)
    size = kernel.shape[0] * kernel.shape[1]
    largest = float(np.linalg.eigvalsh(kernel.reshape(size, size))[-1]) / len(job.x)
    eta = run.rate * (1 - run.momentum) / largest
    common = {"loss": job.loss, "steps": settings.steps, "batch_size": run.batch_size}
    real = train(
        *job.model, job.x, job.y, optimizer=optax.sgd(eta, run.momentum or None),
        key=jax.random.key(run.seed + 50), **common,
    ).loss  # fmt: skip
    out: Row = {"name": run.name, "batches": run.batch_size is not None}
    if not np.all(np.isfinite(real)):
        return out | {"diverged": True}
    found = []
    for kind, most in settings.kernels:
        guess = predict_training_time(
            *job.model, job.x, job.y, learning_rate=eta, momentum=run.momentum, relinearize=most,
            kernel=_estimator(kind), thresholds=THRESHOLDS, **common,
            key=None if run.batch_size is None else jax.random.key(run.seed + 90),
        )  # fmt: skip
        found.append({
            "kernel": kind, "most": most, "kernels": guess.cost.kernels,
            "fraction": guess.cost.operations / guess.cost.training_operations,
            "times": reading_errors(np.asarray(guess.loss), guess.stable, np.asarray(real)),
            "end": float(abs(guess.loss[-1] - real[-1]) / max(real[0] - real.min(), 1e-12)),
        })  # fmt: skip
    return out | {"forecasts": found}


def _estimator(kind: str | int) -> Any:
    if kind == "class sketch":
        return ClassSketched(jax.random.key(7))
    return Exact() if kind == "exact" else Sketched(int(kind), jax.random.key(7))


def reading_errors(guess: np.ndarray, stable: bool, real: np.ndarray) -> list[float]:
    """By how much of themselves times are off, at most 1; where the real one gets there.

    Args:
        guess: the predicted loss, (T + 1,).
        stable: whether the forecast is; else no time is predicted.
        real: the loss, (T + 1,).
    """
    out = []
    for rule, targets in (("relative", THRESHOLDS), ("absolute", real[0] * np.array(FRACTIONS))):
        for target in targets:
            true = int(training_time(real, float(target), rule=rule))
            if true > 0:
                time = int(training_time(guess, float(target), rule=rule)) if stable else -1
                off = abs(time - true)
                fraction = 1.0 if time < 0 else 0.0 if off <= SLACK else off / true
                out.append(min(1.0, fraction))
    return out


def table(rows: list[Row]) -> str:
    """Errors and cost by kernel and number of kernels."""
    rows = [row for row in rows if not row.get("diverged")]
    lines = [head((
        "kernel", "kernels after the first", "built", "error of a time", "of the end",
        "of the training (batches)",
    ))]  # fmt: skip
    kinds = dict.fromkeys((one["kernel"], one["most"]) for row in rows for one in row["forecasts"])
    for kind in kinds:
        own = [
            (row["batches"], one) for row in rows for one in row["forecasts"]
            if (one["kernel"], one["most"]) == kind
        ]  # fmt: skip
        times = np.mean([fraction for _, one in own for fraction in one["times"]])
        built = np.mean([one["kernels"] for _, one in own])
        end = np.mean([min(1.0, one["end"]) for _, one in own])
        fractions = [
            [one["fraction"] for batches, one in own if batches == drawn] for drawn in (False, True)
        ]
        full, noisy = (f"{np.median(some):.2g}" if some else "-" for some in fractions)
        cells = (f"{built:.1f}", f"{times:.3f}", f"{end:.3f}", f"{full} ({noisy})")
        lines.append(line((*kind, *cells)))
    return "\n".join(lines)


def main() -> None:
    """Measure what the store does not have yet, and print the tables."""
    options = parser(MODULE, __doc__, PRESETS).parse_args()
    settings = PRESETS[options.preset]
    jobs = ((run.name, functools.partial(measure, run, settings)) for run in runs_of(settings))
    rows = go_on(store_of(MODULE, options), jobs, options.minutes)
    for words, part in (("tuning", TUNING), ("fitting", FITTING), ("fine-tuned", FINE_TUNED)):
        if some := [row for row in rows if row["name"].split("/")[0] in part]:
            print(f"\n{words}, {len(some)} trainings:\n\n{table(some)}")


if __name__ == "__main__":
    main()
