"""What a sweep costs, and whether the learning rate it picks is a good one.

    python -m experiments.bench.sweep [cost] [rates] [--preset smoke|cpu]

cost: 1,000 settings on the main job's kernel against ONE real training of the same task, in turns
in this process, compilation apart. rates: the sweep's fastest of ten learning rates for 10 % of the
loss's drop, trained for real like all ten, on three tasks.
"""

import argparse
import dataclasses
import json
import statistics
import time

import jax
import numpy as np
import optax

from jaxttp import empirical_ntk, train
from jaxttp.forecast import grid, sweep_kernel, training_time
from jaxttp.pipeline import Settings, build_task

THRESHOLD = 0.1


@dataclasses.dataclass(frozen=True)
class SweepSettings:
    """What to measure."""

    rates: int = 100
    momenta: int = 10
    repeats: int = 5
    points: int = 10
    steps: int = 150
    samples_per_class: int = 30
    tasks: tuple[str, ...] = ("digits", "wine", "breast_cancer")


PRESETS = {
    "smoke": SweepSettings(
        rates=4, momenta=2, repeats=1, points=3, steps=10, samples_per_class=4, tasks=("wine",)
    ),
    "cpu": SweepSettings(),
}


def cost(settings: SweepSettings) -> dict[str, float]:
    """Seconds of the sweep and of one training, medians, and what compiling each took."""
    task = build_task(Settings(samples_per_class=settings.samples_per_class))
    kernel = empirical_ntk(*task.model, task.x)
    f0 = task.model.apply_fn(task.model.params, task.x)
    choices = grid(
        learning_rate=np.geomspace(1e-4, 2e-2, settings.rates),
        momentum=np.linspace(0, 0.9, settings.momenta),
        steps=settings.steps,
    )
    walls: dict[str, list[float]] = {"sweep": [], "training": []}
    first = time.perf_counter()
    sweep_kernel(kernel, f0, task.y, choices)
    first = time.perf_counter() - first
    compiling = 0.0
    for _ in range(settings.repeats):
        begun = time.perf_counter()
        sweep_kernel(kernel, f0, task.y, choices)
        walls["sweep"].append(time.perf_counter() - begun)
        run = train(
            *task.model, task.x, task.y, loss=task.loss, optimizer=optax.sgd(0.005),
            steps=settings.steps,
        )  # fmt: skip
        walls["training"].append(run.seconds)
        compiling = run.compile_seconds
    median = {name: statistics.median(values) for name, values in walls.items()}
    return {
        "settings": len(choices),
        "sweep": median["sweep"],
        "training": median["training"],
        "sweep_compile": first - median["sweep"],
        "training_compile": compiling,
    }


def rates(settings: SweepSettings, name: str) -> dict[str, object]:
    """The rate the sweep picks, and the real steps of all rates."""
    task = build_task(Settings(data=name, samples_per_class=settings.samples_per_class))
    kernel = empirical_ntk(*task.model, task.x)
    f0 = task.model.apply_fn(task.model.params, task.x)
    largest = np.linalg.eigvalsh(np.asarray(kernel, np.float64).reshape(f0.size, f0.size))[-1]
    choices = grid(
        learning_rate=np.geomspace(0.1, 3.0, settings.points) * len(task.x) / largest,
        steps=settings.steps,
    )
    swept = sweep_kernel(kernel, f0, task.y, choices, thresholds=(THRESHOLD,))
    best = swept.best(THRESHOLD)
    real = []
    for one in choices:
        run = train(
            *task.model, task.x, task.y, loss=task.loss, optimizer=one.optimizer(),
            steps=settings.steps,
        )  # fmt: skip
        finite = bool(np.all(np.isfinite(run.loss))) and float(run.loss[-1]) < float(run.loss[0])
        real.append(int(training_time(run.loss, THRESHOLD)) if finite else settings.steps)
        jax.clear_caches()
    return {
        "task": name,
        "chosen": best,
        "predicted": swept.steps[:, 0].tolist(),
        "real": real,
        "excess": real[best] / max(1, min(real)) - 1,
    }


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["cost", "rates"], help="cost, rates")
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    arguments = parser.parse_args()
    settings = PRESETS[arguments.preset]
    if "cost" in arguments.parts:
        print(json.dumps(cost(settings)), flush=True)
    if "rates" in arguments.parts:
        for name in settings.tasks:
            print(json.dumps(rates(settings, name)), flush=True)


if __name__ == "__main__":
    main()
