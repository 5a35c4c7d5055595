"""How often the first of a race is the best of its grid, beside how often `Race.sure` says so.

    python -m experiments.bench.races [--preset smoke|cpu] [--part reported|tuning] [--draws 20 21]
                                      [--batch-size B] [--minutes M] [--store FILE]

The tasks are those of `experiments.bench.advice`, drawn anew; the grids are its thirty settings of
gradient descent, ten rates of AdamW, and both together. All of it is trained for real. The goals
lie at shares of the drop to where the best of a grid ends: three of them, near and far. With a
batch size all trainings see the same mini-batches, and a race looks at the loss now and then.
"""

import argparse
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.bench.advice import PARTS, PRESETS, AdviceSettings, job_of, real_grid, settings_of
from experiments.bench.advice import steps_to as reached
from experiments.bench.stored import go_on
from jaxttp.forecast import grid, race

SHARES = (0.3, 0.1, 0.03)
"""Of the drop to where the best of a grid ends, from above: the goals."""
ADAMW = (1e-4, 1e-1, 10)
"""Rates: the lowest, the highest, how many."""
SLOW = ("digits even, ResNet", "digits 3-7, ResNet", "patches, ResNet", "digits odd, ResNet",
        "shipped ResNet, noisy digits", "shipped ResNet, digits 5-9")  # fmt: skip
"""Tasks of which only the first draw is measured: a grid of them takes minutes."""
Row = dict[str, Any]


def measure(task: str, draw: int, settings: AdviceSettings) -> Row:
    """All grids of one draw of a task, for real, and races through them."""
    jax.clear_caches()
    job = job_of(task, draw)
    descent = settings_of(job, settings)
    rates = np.geomspace(*ADAMW).tolist()
    adamw = grid(
        learning_rate=rates, algorithm="adamw", loss=job.loss, steps=settings.steps,
        batch_size=settings.batch_size,
    )  # fmt: skip
    real = dict(zip((*descent, *adamw), real_grid(job, (*descent, *adamw)), strict=True))
    readings = []
    for name, choices in (("gradient descent", descent), ("AdamW", adamw),
                          ("both", (*descent, *adamw))):  # fmt: skip
        curves = np.array([real[one] for one in choices])
        ends = np.where(np.isfinite(curves[:, -1]), curves[:, -1], np.inf)
        for share in SHARES:
            goal = float(ends.min() + share * (curves[0, 0] - ends.min()))
            found = race(
                *job.model, job.x, job.y, choices, target_loss=goal, **settings.drawn()
            )  # fmt: skip
            times = np.array([reached(curve, goal) for curve in curves])
            first = found.ranking()
            readings.append({
                "grid": name, "share": share, "goal": goal, "best": float(times.min()),
                "real": float(times[first[0]]) if first else None,
                "first": str(choices[first[0]]) if first else None,
                "best_is": str(choices[int(np.argmin(times))]),
                "sure": found.sure, "trainings": found.trainings, "settings": len(choices),
            })  # fmt: skip
    return {"name": f"{task} {draw}", "readings": readings}


def tables(rows: list[Row]) -> str:
    """How often, for every grid and goal."""
    heads = (
        "grid", "goal, share of the drop", "readings", "within 10 % of the best, or a step",
        "said", "twice as many, or never", "mean excess, at most 10 times", "cost, trainings",
        "grid, trainings",
    )  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    readings = [reading for row in rows for reading in row["readings"]]
    for name in dict.fromkeys(one["grid"] for one in readings):
        for share in (*SHARES, None):
            some = [o for o in readings if o["grid"] == name and share in (o["share"], None)]
            best = np.array([one["best"] for one in some])
            real = np.array([np.inf if one["real"] is None else one["real"] for one in some])
            near = np.mean(real <= np.maximum(1.1 * best, best + 1))
            said = [one["sure"] for one in some if one["sure"] is not None]
            over = np.mean(np.minimum(real / np.maximum(best, 1), 10)) - 1
            lines.append(
                f"| {name} | {'all' if share is None else share} | {len(some)} | {near:.0%} | "
                f"{np.mean(said):.0%} | {np.mean(real >= np.maximum(2 * best, best + 2)):.0%} | "
                f"{100 * over:.0f} % | {np.mean([one['trainings'] for one in some]):.2g} | "
                f"{some[0]['settings']} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure what the store lacks, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--part", choices=PARTS, default="reported")
    parser.add_argument("--draws", type=int, nargs="+", default=[20, 21, 22])
    parser.add_argument("--batch-size", type=int, help="samples a step (default: all)")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no task after that")
    parser.add_argument("--store", type=Path, help="a file of JSON lines (default: by preset)")
    arguments = parser.parse_args()
    size = arguments.batch_size
    settings = dataclasses.replace(PRESETS[arguments.preset], batch_size=size)
    words = "" if size is None else f"-batches-{size}"
    store = arguments.store or Path(f"races-{arguments.preset}{words}.jsonl")
    wanted = [
        (task, draw)
        for draw in arguments.draws
        for task in settings.only or PARTS[arguments.part]
        if draw == arguments.draws[0] or task not in SLOW
    ]
    jobs = (
        (f"{task} {draw}", functools.partial(measure, task, draw, settings))
        for task, draw in sorted(wanted, key=lambda one: one[0] in SLOW)  # those come last
    )
    print(tables(go_on(store, jobs, arguments.minutes)))


if __name__ == "__main__":
    main()
