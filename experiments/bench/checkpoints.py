"""Which checkpoint trains fastest: `jaxttp.compare` against scores of transferability.

    python -m experiments.bench.checkpoints [--preset smoke|cpu] [--minutes M] [--store FILE]

Checkpoints of one small network, pre-trained on other digits, on patches of photographs, for longer
or shorter, or not at all, get the same fresh head. `compare` ranks them by its forecast of the
steps to a goal; it offers no test loss. LogME, LEEP (by the head of the pre-training; the
untrained one has a random head), LEAD, and the accuracy of neighbours (leave-one-out, k = 5 by
cosine, the library's default: the paper's k was not to be had) rank them by features. Of LEAD (Hu
et al. 2024) no more than descriptions of its algorithm were to be had, which leave its rate open:
it is such that a class goes 1 - 1/e of the way in the mean, of each checkpoint or over all. The
truth is real training of all at every rate of a grid: steps by the rate that is at the goal first,
the end by the one of the lowest training loss. The first tenths of those trainings stand beside as
rivals.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import weightedtau

from experiments.bench.advice import steps_to
from experiments.bench.checkpoints_tasks import (
    CHECKPOINTS,
    TARGETS,
    Target,
    checkpoint,
    draw,
    headed,
    outputs,
)
from experiments.bench.stored import go_on
from jaxttp import Candidate, compare
from jaxttp._quick import quick
from jaxttp.forecast import comparison
from jaxttp.forecast.price import STEP
from jaxttp.losses import get_loss
from jaxttp.representation import lead, lead_speeds, leep, logme, neighbor_accuracy

MOMENTUM = 0.9
LOSS = "cross_entropy"
LEADS = ("LEAD", "LEAD, one rate for all")
WORST = 10.0
"""Times the best at which what takes longer, or never gets there, counts in means."""


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
    follow, out = comparison.follow_leaders, {}
    for name, relinearize in (("followed", settings.relinearize), ("first", 0)):
        spent: list[float] = []

        def counting(*args: Any, spent: list[float] = spent, **keywords: Any) -> Any:
            swept = follow(*args, **keywords)
            spent.append(float(swept.trainings or 0.0))
            return swept

        begun = time.perf_counter()
        with mock.patch.object(comparison, "follow_leaders", counting):
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
            "trainings": sum(spent),
            "seconds": time.perf_counter() - begun,
        }
    return out


def scores(name: str, task: Target, settings: CheckpointSettings) -> dict[str, float]:
    """The scores of a checkpoint on the samples to train on, the larger the better."""
    features, probabilities = outputs(checkpoint(name, settings.shorter), task.x)
    return {
        "LogME": float(logme(features, task.y)),
        "LEEP": float(leep(probabilities, task.y)),
        "kNN": neighbor_accuracy(features, task.y),
    }


def lead_scores(target: str, settings: CheckpointSettings) -> dict[str, dict[str, float]]:
    """LEAD of every checkpoint on a target, each by a rate of its own, and by one for all."""
    task = draw(target, settings.samples, settings.tested)
    key, names = jax.random.key(0), settings.checkpoints
    features = {name: outputs(checkpoint(name, settings.shorter), task.x)[0] for name in names}
    speeds = [lead_speeds(features[name], task.y, key=key).mean() for name in names]
    time = 1.0 / float(np.mean(speeds))
    return {
        name: {
            LEADS[0]: lead(features[name], task.y, key=key),
            LEADS[1]: lead(features[name], task.y, key=key, time=time),
        }
        for name in names
    }


def with_lead(row: dict[str, Any], settings: CheckpointSettings) -> dict[str, Any]:
    """A row with LEAD among its scores, computed where it was measured before LEAD was here."""
    if all(set(LEADS) <= set(found) for found in row["scores"].values()):
        return row
    added = lead_scores(row["target"], settings)
    return row | {"scores": {name: old | added[name] for name, old in row["scores"].items()}}


@functools.cache
def _program(apply_fn: Any) -> tuple[Any, Any]:
    """A step of heavy-ball descent, and the loss and accuracy; compiled once a number of labels."""
    network, value = quick(apply_fn), get_loss(LOSS).value

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
        "scores": {name: scores(name, task, settings) for name in models},
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
    return with_lead(row, settings)


def _finite(steps: float) -> int:
    """-1 for never."""
    return int(steps) if np.isfinite(steps) else -1


def truth(row: dict[str, Any]) -> dict[str, np.ndarray]:
    """Of every checkpoint: real steps to the goal (inf for never), test accuracy and loss (K,).

    Steps are those of the rate that is at the goal first. What is first can be at the edge of
    stability and thrown back later, so that accuracy and loss on the test samples are those of the
    rate with the lowest training loss at the end.
    """
    out: dict[str, list[float]] = {"steps": [], "accuracy": [], "loss": [], "rate": []}
    for runs in row["real"].values():
        times = [steps_to(run["loss"], row["goal"]) for run in runs]
        last = [run["loss"][-1] if np.isfinite(run["loss"][-1]) else np.inf for run in runs]
        first, lowest = int(np.argmin(times)), runs[int(np.argmin(last))]
        out["steps"].append(times[first])
        out["rate"].append(row["rates"][first])
        out["accuracy"].append(lowest["test_accuracy"])
        out["loss"].append(lowest["test_loss"])
    return {name: np.array(values) for name, values in out.items()}


def methods(row: dict[str, Any]) -> dict[str, tuple[np.ndarray, float]]:
    """A score of every checkpoint, the larger the better, and what all cost in real trainings."""
    names = list(row["real"])
    followed, first = row["forecasts"]["followed"], row["forecasts"]["first"]

    def place(order: list[str]) -> np.ndarray:
        return -np.array([order.index(name) for name in names], float)

    def of(values: Mapping[str, float]) -> np.ndarray:
        found = np.array([values[name] for name in names], float)
        return np.where(np.isfinite(found), found, -1e30)

    curves = np.array([[run["loss"] for run in runs] for runs in row["real"].values()])
    curves = np.where(np.isfinite(curves), curves, 1e30)
    _, rates, length = curves.shape
    steps, middle = length - 1, (rates - 1) // 2
    tenth = max(1, steps // 10)
    out = {
        "jaxttp.compare": (place(followed["order"]), followed["trainings"]),
        "its forecast of the last loss": (
            of({name: -loss for name, loss in followed["final_loss"].items()}),
            followed["trainings"],
        ),
        "its first kernels alone": (place(first["order"]), first["trainings"]),
        "the kernel's `speed`": (of(first["speed"]), first["trainings"]),
    }
    forward = len(names) / (STEP * steps)
    for score in ("LogME", "LEEP", *LEADS, "kNN"):
        out[score] = (of({name: row["scores"][name][score] for name in names}), forward)
    out["a tenth of a training each, at the middle rate"] = (
        -curves[:, middle, tenth], len(names) * tenth / steps
    )  # fmt: skip
    out["a tenth of a training each, at every rate"] = (
        -curves[:, :, tenth].min(axis=1), len(names) * rates * tenth / steps
    )  # fmt: skip
    return out


def judged(row: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Every method against the truth of a target.

    Weighted Kendall tau is +1 where the higher score always has the fewer real steps (those that
    never get there tie as the last), or the higher test accuracy, or the lower test loss; the
    weights are `scipy.stats.weightedtau`'s, hyperbolic, so that the first places count most. Where
    scores tie for the first place the means over them are the choice.
    """
    real = truth(row)
    steps = np.where(np.isfinite(real["steps"]), real["steps"], 1e30)
    excess = np.minimum(real["steps"] / real["steps"].min(), WORST)
    lost = real["accuracy"].max() - real["accuracy"]
    names = list(row["real"])
    known = {**methods(row), "any of them, in the mean": (np.zeros(len(names)), 0.0)}
    return {
        method: {
            "tau_steps": _tau(score, -steps),
            "tau_accuracy": _tau(score, real["accuracy"]),
            "tau_loss": _tau(score, -real["loss"]),
            "chosen": int(np.argmax(score)),
            "excess": float(np.mean(excess[score == score.max()])) - 1,
            "lost": float(np.mean(lost[score == score.max()])),
            "cost": cost,
        }
        for method, (score, cost) in known.items()
    }


def _tau(score: np.ndarray, real: np.ndarray) -> float:
    if np.ptp(score) == 0 or np.ptp(real) == 0:
        return 0.0
    found: Any = weightedtau(score, real)
    return float(found.statistic)


def tables(rows: list[dict[str, Any]]) -> str:
    """The checkpoints, the targets, every method over all of them, and tau target by target."""
    rows = [row for row in rows if np.isfinite(truth(row)["steps"]).any()]
    if not rows:
        return "No checkpoint gets to the goal of any target."
    parts = (_real_table(rows), _target_table(rows), _method_table(rows), _tau_table(rows))
    return "\n\n".join("\n".join(lines) for lines in parts)


def _head(*cells: str) -> list[str]:
    return [f"| {' | '.join(cells)} |", "|---" * len(cells) + "|"]


def _steps(value: float) -> str:
    return f"{value:.0f}" if np.isfinite(value) and value >= 0 else "never"


def _real_table(rows: list[dict[str, Any]]) -> list[str]:
    """Real steps and test accuracies, and the forecast of the steps."""
    lines = _head("real steps (forecast), test accuracy", *(row["target"] for row in rows))
    known = [truth(row) for row in rows]
    for i, name in enumerate(rows[0]["real"]):
        cells = [
            f"{_steps(real['steps'][i])} ({_steps(row['forecasts']['followed']['steps'][name])}), "
            f"{real['accuracy'][i]:.1%}"
            for row, real in zip(rows, known, strict=True)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _target_table(rows: list[dict[str, Any]]) -> list[str]:
    """What `compare` chose, and how far its forecasts are from training at its rates."""
    lines = _head(
        "target", "goal", "best", "steps", "chosen by compare", "steps", "at its own rate",
        "forecast", "`trust` doubts", "cost", "forecasts off at their own rates, median",
    )  # fmt: skip
    for row in rows:
        names, steps = list(row["real"]), truth(row)["steps"]
        followed = row["forecasts"]["followed"]
        best, chosen = int(np.argmin(steps)), names.index(followed["order"][0])
        pairs = [(followed["steps"][name], row["at_advised"][name]) for name in names]
        off = [abs(a - b) / max(b, 1) for a, b in pairs if a >= 0 and b >= 0]
        missed = sum((a >= 0) != (b >= 0) for a, b in pairs)
        words = f"{np.median(off):.0%}" if off else "-"
        words += f"; {missed} of {len(pairs)} reached by one alone" if missed else ""
        lines.append(
            f"| {row['target']} | {row['goal']:.2g} | {names[best]} | {_steps(steps[best])} | "
            f"{names[chosen]} | {_steps(steps[chosen])} | "
            f"{_steps(row['at_advised'][names[chosen]])} | "
            f"{_steps(followed['steps'][names[chosen]])} | "
            f"{sum(why is not None for why in followed['trust'].values())} of {len(names)} | "
            f"{followed['trainings']:.3g} | {words} |"
        )
    return lines


def _method_table(rows: list[dict[str, Any]]) -> list[str]:
    """Means over targets."""
    lines = _head(
        f"mean of {len(rows)} targets", "tau: fewer steps", "tau: test accuracy",
        "tau: lower test loss", "steps over the best", "accuracy lost, points", "cost, trainings",
    )  # fmt: skip
    found = [judged(row) for row in rows]
    for method in found[0]:
        mean = {
            key: float(np.mean([one[method][key] for one in found]))
            for key in ("tau_steps", "tau_accuracy", "tau_loss", "excess", "lost", "cost")
        }
        lines.append(
            f"| {method} | {mean['tau_steps']:.2f} | {mean['tau_accuracy']:.2f} | "
            f"{mean['tau_loss']:.2f} | {100 * mean['excess']:.0f} % | {100 * mean['lost']:.1f} | "
            f"{mean['cost']:.2g} |"
        )
    return lines


def _tau_table(rows: list[dict[str, Any]]) -> list[str]:
    """Tau to the real steps, and the regret, target by target."""
    lines = _head("tau: fewer steps; steps over the best", *(row["target"] for row in rows))
    found = [judged(row) for row in rows]
    for method in found[0]:
        cells = [f"{one[method]['tau_steps']:.2f}; {one[method]['excess']:.0%}" for one in found]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


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
    rows = [with_lead(row, settings) for row in rows if row["target"] in settings.targets]
    print(tables(rows))


if __name__ == "__main__":
    main()
