"""How accurate are forecasts of AdamW, and what do they cost? Predicted against real training runs.

    python -m experiments.bench.adam [--preset smoke|tuning|cpu] [--minutes M] [--store FILE]

Every run is a task, a rate, a batch size, a schedule, a clipping norm and a horizon. The training
is forecast by kernels, without a bound on their cost and within the default budget, in weight space
along one linearization, and by 10 % of its steps and a power law. A forecast of momentum on the
same task, without a bound, gives the cost that kernels have there. A time to 0.5, 0.25 or 0.1 of
the first loss is right within 10 % or two steps, an end within a factor of 1.25 or 1 % of the loss
decrease. Runs whose real loss rises above its start are left out. Nothing was tuned on the tasks of
"cpu".
"""

import functools
import math
import time
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from scipy.optimize import least_squares

from experiments.bench import accuracy_tasks, warning_tasks
from experiments.bench.harness import Row, go_on, head, line, parser, store_of
from jaxttp import predict_training_time, train, training_time

MODULE = "experiments.bench.adam"


class Run(NamedTuple):
    """A training with AdamW.

    Attributes:
        rate: the highest learning rate.
        batch: samples a step; None for all.
        warm: whether with warm-up and cosine.
        clip: the global norm that gradients are clipped to, or None.
        steps: of the training.
    """

    rate: float
    batch: int | None = None
    warm: bool = False
    clip: float | None = None
    steps: int = 150

    @property
    def group(self) -> str:
        """The row of the table."""
        parts = ["all" if self.batch is None else str(self.batch)]
        parts += [] if self.clip is None else [f"clipped at {self.clip:g}"]
        return ", ".join([*parts, f"{self.steps} steps"])


RUNS = (
    Run(1e-3, 32), Run(3e-3, 32, warm=True), Run(1e-3), Run(3e-3),
    Run(3e-3, 32, clip=1.0), Run(1e-3, clip=1.0),
)  # fmt: skip
LONG = Run(1e-3, steps=600)
"""With the tasks of LONG_TASKS."""
LONG_TASKS = (
    "digits even, ResNet",
    "digits 5-9, MLP",
    "patches, ResNet",
    "CNN, digits to inverted",
)
LEVELS = (0.5, 0.25, 0.1)
THRESHOLDS = (0.01, 0.1, 0.4)
METHODS: dict[str, Row] = {
    "kernels": {"budget": math.inf}, "kernels, default budget": {},
    "weight space": {"relinearize": 0},
}  # fmt: skip
PRESETS = {
    "smoke": tuple(accuracy_tasks.TUNING)[:1],
    "tuning": (*accuracy_tasks.TUNING, *warning_tasks.FITTING),
    "cpu": (*tuple(accuracy_tasks.REPORTED)[:5], *warning_tasks.HELD_OUT),
}


def measure(name: str, task: str, run: Run) -> Row:
    """The real curve, and each forecast's with its cost."""
    job = warning_tasks.any_task(task, 0)
    loss = getattr(job, "loss", "cross_entropy")
    schedule: Any = run.rate
    if run.warm:
        schedule = optax.warmup_cosine_decay_schedule(0.0, run.rate, run.steps // 10, run.steps)
    optimizer = optax.adamw(schedule, weight_decay=0.01)
    if run.clip is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(run.clip), optimizer)
    key = None if run.batch is None else jax.random.key(3)
    batch = None if run.batch is None else min(run.batch, len(job.x) // 2)
    how = {"loss": loss, "batch_size": batch, "key": key, "steps": run.steps}
    adam = how | {"optimizer": optimizer}
    real = train(*job.model, job.x, job.y, **adam)
    out: Row = {"name": name, "task": task, "group": run.group, **run._asdict()}
    out |= {"real": rounded(real.loss), "seconds": real.seconds, "forecasts": {}}
    for method, options in METHODS.items():
        out["forecasts"][method] = forecast(job, adam | options)
    tenth = {"loss": rounded(power_law(np.asarray(real.loss, np.float64))), "fraction": 0.1}
    out["forecasts"]["10 % of the training run, power law"] = tenth
    out["momentum"] = momentum(task, run.batch, run.steps)
    return out


@functools.cache
def momentum(task: str, batch: int | None, steps: int) -> Row:
    """The forecast of momentum with the same samples."""
    job = warning_tasks.any_task(task, 0)
    how = {"loss": getattr(job, "loss", "cross_entropy"), "steps": steps, "momentum": 0.9}
    if batch is not None:
        how |= {"batch_size": min(batch, len(job.x) // 2), "key": jax.random.key(3)}
    return forecast(job, how | {"learning_rate": 0.1, "budget": math.inf})


def forecast(job: Any, how: Row) -> Row:
    """A forecast's curve, warning and cost; made twice, of which the second compiles nothing."""
    predict_training_time(*job.model, job.x, job.y, **how)
    begun = time.process_time()
    found = predict_training_time(*job.model, job.x, job.y, **how)
    return {
        "loss": rounded(found.loss), "cpu": time.process_time() - begun,
        "fraction": found.cost.operations / found.cost.training_operations,
        "kernels": found.cost.kernels, "warned": found.warnings is not None,
        "stable": found.stable,
    }  # fmt: skip


def power_law(loss: np.ndarray, fraction: float = 0.1) -> np.ndarray:
    """The first fraction of a training, carried on as c + a (1 + t / b)^-p, (T + 1,)."""
    steps = len(loss) - 1
    seen = max(4, round(fraction * steps))
    t, scale = np.arange(steps + 1), float(loss[0])

    def curve(free: np.ndarray, t: np.ndarray) -> np.ndarray:
        a, b, p, c = np.exp(free)
        return c + a * (1 + t / b) ** -p

    start = np.log([scale, max(1.0, seen / 4), 1.0, 0.01 * scale])
    known = np.log(np.maximum(loss[: seen + 1], 1e-30))
    found = least_squares(
        lambda free: np.log(curve(free, t[: seen + 1])) - known, start,
        bounds=(start - 12, start + 12),
    )  # fmt: skip
    return np.append(loss[: seen + 1], curve(found.x, t[seen + 1 :]))


def rounded(loss: Any) -> list[float]:
    """A curve in six digits."""
    return [float(f"{value:.6g}") for value in np.asarray(loss, np.float64)]


def judge(guess: np.ndarray, real: np.ndarray) -> tuple[list[bool], bool, list[int]]:
    """Which times and whether the end are right, and errors of the times to 1, 10 and 40 %."""
    right = []
    for level in LEVELS:
        true, found = (
            int(training_time(c, level * real[0], rule="absolute")) for c in (real, guess)
        )
        if true > 0:
            right.append(found > 0 and abs(found - true) <= max(0.1 * true, 2))
    decrease = real[0] - real[-1]
    factor = max(guess[-1], 1e-12) / max(real[-1], 1e-12)
    ends = max(factor, 1 / factor) <= 1.25 or abs(guess[-1] - real[-1]) <= 0.01 * decrease
    times = [[int(training_time(c, e)) for c in (real, guess)] for e in THRESHOLDS]
    return right, bool(ends), [abs(a - b) for a, b in times]


def table(rows: list[Row]) -> str:
    """Errors and cost by batches and method."""
    lines = [head((
        "batches, steps", "forecast", "runs", "times right", "ends right",
        "error at 1 / 10 / 40 %, steps", "wrong, warned", "right, warned",
        "FLOPs, forecast / training", "FLOPs / momentum's", "CPU s / momentum's",
    ))]  # fmt: skip
    rows = [row for row in rows if max(row["real"]) <= 1.02 * row["real"][0]]
    for group in dict.fromkeys(row["group"] for row in rows):
        some = [row for row in rows if row["group"] == group]
        for method in some[0]["forecasts"]:
            found = [row["forecasts"][method] for row in some]
            judged = [
                judge(np.array(f["loss"]), np.array(row["real"]))
                for f, row in zip(found, some, strict=True)
            ]
            times = [right for rights, _, _ in judged for right in rights]
            cells = [
                group, method, len(some), f"{sum(times)} of {len(times)}",
                f"{sum(end for _, end, _ in judged)} of {len(judged)}",
                " / ".join(f"{e:.1f}" for e in np.mean([off for *_, off in judged], axis=0)),
            ]  # fmt: skip
            if "warned" in found[0]:
                good = np.array([all(rights) for rights, _, _ in judged])
                warned = np.array([f["warned"] for f in found])
                cells += [f"{sum(warned & ~good)} of {sum(~good)}"]
                cells += [f"{sum(warned & good)} of {sum(good)}"]
                pairs = [(f, row["momentum"]) for f, row in zip(found, some, strict=True)]
                cells += [f"{np.median([f['fraction'] for f in found]):.2g}"]
                cells += [
                    f"{np.median([f[name] / m[name] for f, m in pairs]):.2g}"
                    for name in ("fraction", "cpu")
                ]
            lines.append(line(cells + [""] * (11 - len(cells))))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> list[Row]:
    """Measure what the store lacks, and print the table."""
    options = parser(MODULE, __doc__, PRESETS).parse_args(arguments)
    jobs = []
    for task in PRESETS[options.preset]:
        for run in (*RUNS, *[LONG] * (task in LONG_TASKS)):
            name = f"{task}/{tuple(run)}"
            jobs.append((name, lambda name=name, task=task, run=run: measure(name, task, run)))
    rows = go_on(store_of(MODULE, options), jobs, options.minutes)
    print(table(rows))
    return rows


if __name__ == "__main__":
    main()
