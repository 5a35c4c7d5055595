"""How often are forecasts wrong, and do they say so? Warnings against the errors of real trainings.

    python -m experiments.bench.warnings [--preset smoke|cpu] [--tasks PART] [--minutes M]
                                      [--store FILE] [--report]

Every run is a task of `warning_tasks`, trained by gradient descent, momentum or mini-batches,
with a constant rate or a schedule. A forecast is wrong if a time to 1, 10 or 40 % of the loss
decrease is off by more than 13 % of the real one and two steps; forecasts that diverge
are left out. The batches are those of the real training: other draws move times, too, which is what
bands are for. The table counts, by the number of kernels, wrong and right forecasts and how many of
each are warned of. What is measured is kept line by line in the store.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.harness import Row, go_on, head, line, load, parser, store_of
from experiments.bench.warning_tasks import FITTING, HELD_OUT, make
from jaxttp import empirical_ntk, predict_training_time, train, training_time
from jaxttp.dynamics.stability import max_learning_rate
from jaxttp.forecast import Hyperparameters

MODULE = "experiments.bench.warnings"
THRESHOLDS = (0.01, 0.1, 0.4)
WRONG, SLACK = 0.13, 2
"""A time is wrong that is off by more than this fraction of the real one, and by more steps."""


class Way(NamedTuple):
    """How to train; the peak rate is a fraction of the largest stable one with this momentum."""

    momentum: float
    batch_size: int | None
    schedule: str
    fraction: float


WAYS = (
    Way(0.0, None, "constant", 0.1), Way(0.9, None, "constant", 0.03),
    Way(0.0, 16, "constant", 0.1), Way(0.0, None, "constant", 0.3),
    Way(0.9, None, "cosine", 0.05), Way(0.0, 32, "constant", 0.2),
    Way(0.0, None, "constant", 0.8), Way(0.9, None, "linear", 0.2),
    Way(0.9, 32, "cosine", 0.03), Way(0.0, None, "cosine", 0.5),
    Way(0.9, None, "warmup_cosine", 0.1), Way(0.0, 32, "cosine", 0.3),
    Way(0.0, None, "warmup_cosine", 1.2), Way(0.9, None, "constant", 0.1),
    Way(0.9, 16, "constant", 0.01), Way(0.0, None, "linear", 0.15),
    Way(0.9, None, "cosine", 0.4), Way(0.9, 32, "warmup_cosine", 0.06),
)  # fmt: skip
"""Every task takes every second one, the next task the others."""
SLOW = (
    Way(0.0, None, "constant", 0.02), Way(0.9, None, "cosine", 0.004),
    Way(0.0, 32, "linear", 0.04), Way(0.9, 32, "constant", 0.002),
)  # fmt: skip
"""And every task takes these, at which linearizations mostly hold."""


@dataclasses.dataclass(frozen=True)
class TrustSettings:
    """What to measure: tasks, steps, and how often kernels are rebuilt."""

    tasks: tuple[str, ...] = (*FITTING, *HELD_OUT)
    steps: int = 120
    ways: int | None = None
    rebuilds: tuple[int | str, ...] = (0, 1, 2, "auto")


PRESETS = {
    "smoke": TrustSettings(("random MLP, rings",), steps=20, ways=1, rebuilds=(0, 1)),
    "cpu": TrustSettings(),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One training."""

    task: str
    way: Way
    seed: int

    @property
    def name(self) -> str:
        """What it is kept under."""
        return f"{self.task}/seed {self.seed}/{'/'.join(map(str, self.way))}"


def plan(settings: TrustSettings) -> list[Run]:
    """The runs of all tasks."""
    return [
        Run(task, way, i % 3)
        for place, task in enumerate(settings.tasks)
        for ways in (WAYS[place % 2 :: 2], SLOW)
        for i, way in enumerate(ways[: settings.ways])
    ]


def measure(run: Run, settings: TrustSettings) -> Row:
    """Train for real, and forecast with so many kernels; plain values."""
    job, way = make(run.task, run.seed), run.way
    x, (apply_fn, params) = jnp.asarray(job.x), job.model
    kernel, f0 = empirical_ntk(apply_fn, params, x), jax.jit(apply_fn)(params, x)
    limit = float(max_learning_rate(kernel, f0, job.y, loss=job.loss, momentum=way.momentum))
    setting = Hyperparameters(
        way.fraction * limit, way.momentum, way.batch_size, way.schedule, job.loss, settings.steps
    )
    common: dict[str, Any] = {
        "loss": job.loss, "optimizer": setting.optimizer(), "steps": settings.steps,
        "batch_size": way.batch_size,
        "key": None if way.batch_size is None else jax.random.key(run.seed + 50),
    }  # fmt: skip
    real = train(apply_fn, params, x, job.y, **common)
    row = {"name": run.name, "task": run.task, "real": np.asarray(real.loss).tolist()}
    row["forecasts"] = {}
    for rebuilds in settings.rebuilds:
        found = predict_training_time(
            apply_fn, params, x, job.y, relinearize=rebuilds, thresholds=THRESHOLDS, **common
        )
        row["forecasts"][str(rebuilds)] = {
            "loss": np.asarray(found.loss).tolist() if found.stable else None,
            "warnings": found.warnings, "kernels": found.cost.kernels,
        }  # fmt: skip
    return row


def off(curve: Any, real: Any) -> float:
    """The largest error of the three times, as a fraction of the real one."""
    if not np.all(np.isfinite(real)):
        return np.inf
    pairs = [[int(training_time(c, e)) for c in (curve, real)] for e in THRESHOLDS]
    return max(abs(a - b) / max(b, 1) if abs(a - b) > SLACK else 0.0 for a, b in pairs)


def report(rows: Iterable[Row]) -> str:
    """The table."""
    rows = list(rows)
    titles = ("rebuilt", "tasks", "runs", "wrong", "of them warned", "right", "of them warned")
    lines = [head(titles)]
    kinds = dict.fromkeys(kind for row in rows for kind in row["forecasts"])
    for kind in kinds:
        for words, tasks in (("fitting", FITTING), ("held out", HELD_OUT)):
            some = [(r["forecasts"][kind], r["real"]) for r in rows if r["task"] in tasks]
            some = [(found, real) for found, real in some if found["loss"] is not None]
            if not some:
                continue
            wrong = np.array([off(found["loss"], real) > WRONG for found, real in some], bool)
            warned = np.array([found["warnings"] is not None for found, _ in some], bool)
            cells = []
            for part in (wrong, ~wrong):
                fraction = f"{100 * warned[part].mean():.0f} %" if part.any() else "-"
                cells += [int(part.sum()), fraction]
            lines.append(line((kind, words, len(some), *cells)))
    return "\n".join(lines)


def main() -> None:
    """Run from the command line."""
    command = parser(MODULE, __doc__, PRESETS)
    command.add_argument("--tasks", default="", help="only those whose name holds this")
    command.add_argument("--report", action="store_true", help="print the table, measure nothing")
    options = command.parse_args()
    settings, store = PRESETS[options.preset], store_of(MODULE, options)
    jobs = (
        (run.name, functools.partial(measure, run, settings))
        for run in plan(settings)
        if options.tasks in run.task
    )
    print(report(load(store) if options.report else go_on(store, jobs, options.minutes)))


if __name__ == "__main__":
    main()
