"""Which checkpoint trains fastest: `jaxttp.compare` and `jaxttp.race_starts` against training.

    python -m experiments.bench.checkpoints [--preset smoke|cpu] [--minutes M] [--store FILE]

Checkpoints of one small network, pre-trained on other digits, on patches of photographs, for longer
or shorter, or not at all, get the same fresh head. `compare` ranks them by its forecast of the
steps to a goal; it offers no test loss.
`jaxttp.race_starts` trains checkpoints and rates in heats, and is told the goal. The truth is real
training of all at every rate of a grid: steps by the rate that is at the goal first, the end by the
one of the lowest training loss. The first tenths of those trainings stand beside as rivals.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.advice import steps_to
from experiments.bench.checkpoints_tables import tables
from experiments.bench.checkpoints_tasks import (
    CHECKPOINTS,
    TARGETS,
    Target,
    checkpoint,
    draw,
    headed,
)
from experiments.bench.stored import go_on
from jaxttp import Candidate, compare, grid, race_starts
from jaxttp._core.traced import network_of
from jaxttp.losses import get_loss

MOMENTUM = 0.9
LOSS = "cross_entropy"


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """Which checkpoints and targets, how many samples, and the real grid.

    Attributes:
        rates: the grid, from, to and how many, geometric; the same for every checkpoint.
        goal: the loss to get to, as a share of ln C.
        shorter: pre-training has so many times fewer steps.
        relinearize: of `compare`.
    """

    checkpoints: tuple[str, ...] = tuple(CHECKPOINTS)
    targets: tuple[str, ...] = tuple(TARGETS)
    samples: int = 150
    tested: int = 500
    steps: int = 150
    rates: tuple[float, float, int] = (0.0025, 0.32, 11)
    goal: float = 0.2
    shorter: int = 1
    relinearize: int | str = "auto"


PRESETS = {
    "smoke": CheckpointSettings(
        checkpoints=("untrained", "digits 0-4, 20 steps"), targets=("digits 5-9",), samples=20,
        tested=20, steps=10, rates=(0.02, 0.04, 2), goal=0.9, shorter=10, relinearize=0,
    ),
    "cpu": CheckpointSettings(),
}  # fmt: skip


def forecasts(
    candidates: Mapping[str, Candidate], task: Target, goal: float, settings: CheckpointSettings
) -> dict[str, Any]:
    """What `compare` says of checkpoints, along rebuilt kernels and by the first ones alone.

    Its cost is what its sweeps count: kernels, passes and products, in real trainings; the looks at
    the network for `trust` (at most six passes) are not in it.
    """
    out = {}
    for name, relinearize in (("followed", settings.relinearize), ("first", 0)):
        begun = time.perf_counter()
        found = compare(
            candidates, task.x, task.y, momentum=MOMENTUM, loss=LOSS, steps=settings.steps,
            target_loss=goal, relinearize=relinearize, time_steps=False,
        )  # fmt: skip
        out[name] = {
            "order": list(found.names),
            "steps": {
                one: int(t) for one, (t,) in zip(found.names, found.target_steps, strict=True)
            },
            "rates": {
                one: s.learning_rate for one, s in zip(found.names, found.settings, strict=True)
            },
            "final_loss": dict(zip(found.names, map(float, found.final_loss), strict=True)),
            "speed": {one: w.speed for one, w in zip(found.names, found.explanations, strict=True)},
            "trust": dict(zip(found.names, found.trust, strict=True)),
            "trainings": found.trainings,
            "seconds": time.perf_counter() - begun,
        }
    return out


@functools.cache
def _program(apply_fn: Any) -> tuple[Any, Any]:
    """A step of heavy-ball descent, and the loss and accuracy; compiled once a number of labels."""
    network, value = network_of(apply_fn).run, get_loss(LOSS).value

    def loss(params: Any, x: Any, targets: Any) -> Any:
        return value(network(params, x), targets)

    @jax.jit
    def step(params: Any, velocity: Any, rate: Any, x: Any, targets: Any) -> tuple:
        now, gradient = jax.value_and_grad(loss)(params, x, targets)
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradient)
        return jax.tree.map(lambda p, v: p - rate * v, params, velocity), velocity, now

    @jax.jit
    def end(params: Any, x: Any, targets: Any) -> tuple:
        found = network(params, x)
        right = jnp.argmax(found, axis=1) == jnp.argmax(targets, axis=1)
        return value(found, targets), jnp.mean(right)

    return step, end


def train(apply_fn: Any, params: Any, task: Target, rate: float, steps: int) -> dict[str, Any]:
    """Real training with all samples: the loss (T + 1,), and at the end on the test samples."""
    step, end = _program(apply_fn)
    x, targets = jnp.asarray(task.x), jax.nn.one_hot(task.y, task.classes)
    velocity, losses = jax.tree.map(jnp.zeros_like, params), []
    for _ in range(steps):
        params, velocity, now = step(params, velocity, rate, x, targets)
        losses.append(now)
    last, _ = end(params, x, targets)
    loss, accuracy = end(
        params, jnp.asarray(task.x_test), jax.nn.one_hot(task.y_test, task.classes)
    )
    curve = [float(f"{float(value):.5g}") for value in (*losses, last)]
    return {"loss": curve, "test_loss": float(loss), "test_accuracy": float(accuracy)}


def measure(target: str, settings: CheckpointSettings) -> dict[str, Any]:
    """Forecasts, scores and real training of every checkpoint on a target; plain values."""
    task = draw(target, settings.samples, settings.tested)
    goal = float(settings.goal * np.log(task.classes))
    models = {
        name: headed(checkpoint(name, settings.shorter), task.classes)
        for name in settings.checkpoints
    }
    candidates = {name: Candidate(*model) for name, model in models.items()}
    row: dict[str, Any] = {
        "target": target,
        "goal": goal,
        "forecasts": forecasts(candidates, task, goal, settings),
        "rates": np.geomspace(*settings.rates).tolist(),
    }
    begun = time.perf_counter()
    run = functools.partial(train, task=task, steps=settings.steps)
    row["real"] = {
        name: [run(*model, rate=rate) for rate in row["rates"]] for name, model in models.items()
    }
    row["seconds"] = time.perf_counter() - begun
    advised = row["forecasts"]["followed"]["rates"]
    row["at_advised"] = {
        name: _finite(steps_to(run(*model, rate=advised[name])["loss"], goal))
        for name, model in models.items()
    }
    return with_race(row, settings)


def with_race(row: dict[str, Any], settings: CheckpointSettings) -> dict[str, Any]:
    """A row with a race of all checkpoints, run where it was measured before races were here."""
    if "race" in row:
        return row
    task = draw(row["target"], settings.samples, settings.tested)
    candidates = {
        name: Candidate(*headed(checkpoint(name, settings.shorter), task.classes))
        for name in settings.checkpoints
    }
    choices = grid(
        learning_rate=row["rates"], momentum=MOMENTUM, loss=LOSS, steps=settings.steps
    )  # fmt: skip
    begun = time.perf_counter()
    found = race_starts(candidates, task.x, task.y, choices, target_loss=row["goal"])
    first = found.ranking()
    return row | {
        "race": {
            "order": list(found.order),
            "trainings": found.trainings,
            "steps": int(found.times[first[0]]) if first else -1,
            "seconds": time.perf_counter() - begun,
        }
    }


def _finite(steps: float) -> int:
    """-1 for never."""
    return int(steps) if np.isfinite(steps) else -1


def main() -> None:
    """Measure what the store lacks, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no target after that")
    parser.add_argument("--store", type=Path, help="a file of JSON lines (default: by preset)")
    arguments = parser.parse_args()
    settings = PRESETS[arguments.preset]
    store = arguments.store or Path(f"checkpoints-{arguments.preset}.jsonl")
    jobs = ((name, functools.partial(measure, name, settings)) for name in settings.targets)
    rows = go_on(store, jobs, arguments.minutes, key="target")
    rows = [with_race(row, settings) for row in rows if row["target"] in settings.targets]
    print(tables(rows))


if __name__ == "__main__":
    main()
