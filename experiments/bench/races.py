"""Which setting? What `jaxttp.race` and `jaxttp.sweep` choose, against the whole grid trained.

    python -m experiments.bench.races [--preset smoke|cpu] [--part reported|tuning] [--draws 20 21]
                                      [--batch-size B] [--minutes M] [--store FILE]

Every task has thirty settings of gradient descent (ten rates from 0.02 to 2.5 times the largest
stable one, three momenta), ten rates of AdamW, and both together. All of it is trained for real.
The targets lie at fractions of the drop to where the best of a grid ends: three of them, near and
far. The table says how often the first of a race, and of a sweep of gradient descent, is within 10
% of the best setting's steps (or one step), how often twice as late or never there, and the cost in
trainings of one setting (of a sweep by count). With a batch size all trainings see the same
mini-batches.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from experiments.bench import accuracy_tasks, warning_tasks
from experiments.bench.harness import Row, go_on, head, line, parser, store_of
from jaxttp import empirical_ntk, grid, race, sweep, train
from jaxttp.dynamics.stability import max_learning_rate
from jaxttp.forecast import Hyperparameters

MODULE = "experiments.bench.races"
FRACTIONS = (0.3, 0.1, 0.03)
"""Of the drop to where the best of a grid ends, from above: the targets."""
KEY = 7
"""Of the mini-batches."""
PARTS = {
    "reported": (*accuracy_tasks.REPORTED, *warning_tasks.HELD_OUT),
    "tuning": (*accuracy_tasks.TUNING, *warning_tasks.FITTING),
}


@dataclasses.dataclass(frozen=True)
class RaceSettings:
    """The grids: rates in units of the largest stable one and of AdamW (low, high, how many)."""

    fractions: tuple[float, float, int] = (0.02, 2.5, 10)
    momenta: tuple[float, ...] = (0.0, 0.6, 0.9)
    adamw: tuple[float, float, int] = (1e-4, 1e-1, 10)
    steps: int = 150
    only: tuple[str, ...] = ()
    batch_size: int | None = None


PRESETS = {
    "smoke": RaceSettings((0.1, 1.0, 3), (0.0,), (1e-3, 1e-2, 2), steps=20, only=("wine, MLP",)),
    "cpu": RaceSettings(),
}


def measure(task: str, draw: int, settings: RaceSettings) -> Row:
    """All grids of one draw of a task, for real, and races and sweeps through them."""
    jax.clear_caches()
    job = warning_tasks.any_task(task, draw)
    kernel, f0 = empirical_ntk(*job.model, job.x), job.model.apply_fn(job.model.params, job.x)
    limit = float(max_learning_rate(kernel, f0, job.y, loss=job.loss))
    common = {"loss": job.loss, "steps": settings.steps, "batch_size": settings.batch_size}
    rates = (limit * np.geomspace(*settings.fractions)).tolist()
    descent = grid(learning_rate=rates, momentum=settings.momenta, **common)
    adamw = grid(learning_rate=np.geomspace(*settings.adamw).tolist(), algorithm="adamw", **common)
    drawn = {} if settings.batch_size is None else {"key": jax.random.key(KEY)}

    def real(one: Hyperparameters) -> np.ndarray:
        optimizer = one.optimizer()
        return train(*job.model, job.x, job.y, optimizer=optimizer, **common, **drawn).loss

    curves = {one: np.asarray(real(one)) for one in (*descent, *adamw)}
    readings = []
    for name, choices in (
        ("gradient descent", descent), ("AdamW", adamw), ("both", (*descent, *adamw))
    ):  # fmt: skip
        ends = np.array([curves[one][-1] for one in choices])
        ends = np.where(np.isfinite(ends), ends, np.inf)
        for fraction in FRACTIONS:
            target = float(ends.min() + fraction * (curves[choices[0]][0] - ends.min()))
            times = np.array([steps_to(curves[one], target) for one in choices])
            asked = (*job.model, job.x, job.y, choices)
            row = {"grid": name, "fraction": fraction, "best": float(times.min())}
            row["settings"] = len(choices)
            found = {"race": race(*asked, target_loss=target, **drawn)}
            if name == "gradient descent":
                found["sweep"] = sweep(*asked, target_loss=target, **drawn)
            for kind, one in found.items():
                order = one.ranking()
                row[kind] = float(times[order[0]]) if len(order) else np.inf
                row[f"{kind} cost"] = one.trainings
            readings.append(row)
    return {"name": f"{task} {draw}", "readings": readings}


def steps_to(curve: np.ndarray, target: float) -> float:
    """The first step below a loss, infinite for never.

    Example:
        >>> steps_to(np.array([1.0, 0.5, 0.2]), 0.3), steps_to(np.array([1.0, np.nan]), 0.3)
        (2.0, inf)
    """
    below = np.flatnonzero(curve < target)
    return float(below[0]) if len(below) else np.inf


def table(rows: list[Row]) -> str:
    """How often, for every grid, chooser and target."""
    lines = [head((
        "grid", "chosen by", "target, fraction of the drop", "readings",
        "within 10 % of the best, or a step", "twice as many, or never",
        "mean excess, at most 10 times", "cost, trainings", "grid, trainings",
    ))]  # fmt: skip
    readings = [reading for row in rows for reading in row["readings"]]
    for name in dict.fromkeys(one["grid"] for one in readings):
        for kind in ("race", "sweep"):
            for fraction in (*FRACTIONS, None):
                some = [
                    one for one in readings
                    if one["grid"] == name and kind in one and fraction in (one["fraction"], None)
                ]  # fmt: skip
                if some:
                    lines.append(
                        line((name, kind, fraction or "all", len(some), *_cells(some, kind)))
                    )
    return "\n".join(lines)


def _cells(some: list[Row], kind: str) -> list[Any]:
    best, real = (np.array([one[key] for one in some]) for key in ("best", kind))
    near = np.mean(real <= np.maximum(1.1 * best, best + 1))
    late = np.mean(real >= np.maximum(2 * best, best + 2))
    over = np.mean(np.minimum(real / np.maximum(best, 1), 10)) - 1
    cost = np.mean([one[f"{kind} cost"] for one in some])
    return [
        f"{near:.0%}", f"{late:.0%}", f"{100 * over:.0f} %",
        f"{cost:.2g}", some[0]["settings"],
    ]  # fmt: skip


def main() -> None:
    """Measure what the store lacks, and print the table."""
    command = parser(MODULE, __doc__, PRESETS)
    command.add_argument("--part", choices=PARTS, default="reported")
    command.add_argument("--draws", type=int, nargs="+", default=[20, 21, 22])
    command.add_argument("--batch-size", type=int, help="samples a step (default: all)")
    options = command.parse_args()
    settings = dataclasses.replace(PRESETS[options.preset], batch_size=options.batch_size)
    jobs = (
        (f"{task} {draw}", functools.partial(measure, task, draw, settings))
        for draw in options.draws
        for task in settings.only or PARTS[options.part]
    )
    store = store_of(MODULE, options, options.part, options.batch_size)
    print(table(go_on(store, jobs, options.minutes)))


if __name__ == "__main__":
    main()
