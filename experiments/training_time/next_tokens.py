"""Ours: language models fine-tuned by LoRA with next-token loss, foreseen and trained for real.

The measuring is `experiments.bench.lora`; the real curves are those that it keeps.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.bench import lora, lora_tasks
from experiments.bench.lora import LoraSettings, curves, judge
from experiments.bench.lora_tasks import EVERY, Task
from experiments.bench.stored import Row, load
from experiments.store import Pieces, runner
from jaxttp.plots import GREY, PREDICTED, REAL, tidy

CLAIM = {
    "ours-next-token": "LoRA with next-token loss is foreseen to 10 % of the loss's drop at a "
    "fifth of the training's counted cost, but not at the highest rates, nor over 3,000 steps at a "
    "tenth. (ours)",
}
SHOWN = (1, 2, 5, 9, 11, 18)
"""Of the reported tasks: of either choice of kernels, the best and the worst, one whose
rates cannot be held, one of 3,000 steps."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to show.

    Attributes:
        bench: as in `experiments.bench.lora`.
        shown: numbers of its reported tasks.
    """

    bench: LoraSettings = dataclasses.field(default_factory=LoraSettings)
    shown: tuple[int, ...] = SHOWN


@dataclasses.dataclass(frozen=True)
class Result:
    """Curves.

    Attributes:
        settings: which.
        rows: of real runs and forecasts, by name.
    """

    settings: Settings
    rows: dict[str, Row]


PRESETS = {"smoke": Settings(lora.PRESETS["smoke"], (0,)), "cpu": Settings()}
PRESETS["paper"] = PRESETS["cpu"]


def tasks_of(settings: Settings) -> tuple[Task, ...]:
    """The tasks that are shown."""
    found = settings.bench.tasks(False)
    return tuple(found[number] for number in settings.shown)


def pieces(settings: Settings) -> Pieces:
    """A forecast and a real curve for every task."""
    bench = settings.bench
    kept = {} if bench.few else {row["name"]: row for row in load(lora.REAL)}

    def one(task: Task) -> list[Row]:
        job = lora_tasks.make(task, bench.pretraining, Path(bench.folder))
        real = kept.get(task.name)
        if real is None or real["texts"] != lora_tasks.checksum():
            real = lora_tasks.real_run(task, job)
        held = lora.held_row(task, job, bench.share(task))
        return [real, {"name": f"held {task.name}", **held}]

    return {task.name: (lambda task=task: one(task)) for task in tasks_of(settings)}


run = runner(
    pieces,
    lambda settings, found: Result(
        settings, {row["name"]: row for rows in found.values() for row in rows}
    ),
)


def plot(result: Result) -> dict[str, Figure]:
    """A panel for each task: real, foreseen with its doubt, and the path before the correction."""
    tasks = tasks_of(result.settings)
    columns = min(3, len(tasks))
    rows = -(-len(tasks) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.5 * rows + 0.4), layout="constrained")
    panels = np.atleast_1d(figure.subplots(rows, columns, squeeze=False).ravel())
    for axes, task in zip(panels, tasks, strict=False):
        _panel(axes, task, result.rows)
    panels[0].legend(frameon=False, fontsize=9)
    return {"ours-next-token": figure}


def _panel(axes: Any, task: Task, rows: dict[str, Row]) -> None:
    held, found = rows[f"held {task.name}"], curves(rows, task)
    real = found["real"]
    at = EVERY * np.arange(len(real))
    off = np.array(held["off"])
    axes.plot(at, real, color=REAL, lw=2, label="real training")
    axes.fill_between(at, found["held"] - off, found["held"] + off, color=PREDICTED, alpha=0.18,
                      lw=0, label="estimated error")  # fmt: skip
    axes.plot(at, found["held"], color=PREDICTED, lw=2, ls="--", label="forecast")
    axes.plot(at, found["path"], color=GREY, lw=1.2, ls=":", label="held path")
    if held["diverged"]:
        words = "left its path, which it says"
    else:
        words = f"off by {judge(found['held'], real, task.steps)['curve']:.1f} % of the drop"
        if held["rate_share"] < 1:
            words += f"\n(followed at {held['rate_share']:g} of the rates, which it says)"
    lowest = min(real.min(), found["held"].min() if not held["diverged"] else real.min())
    axes.set_ylim(lowest - 0.05, real.max() + 0.35 * (real.max() - real.min()))
    axes.set_title(
        f"{task.base}, r={task.rank}, α/r={task.ratio:g}, {task.modules}, {task.optimizer} "
        f"{task.rate:g}\n{100 * held['share']:.0f} % of the cost: {words}",
        fontsize=10,
    )
    axes.set(xlabel="training step", ylabel="held-out loss, nats a byte")
    tidy(axes)


def measure(result: Result) -> dict[str, list[str]]:
    """Errors of curves and times."""
    lines = []
    for task in tasks_of(result.settings):
        held, found = result.rows[f"held {task.name}"], curves(result.rows, task)
        one = judge(found["held"], found["real"], task.steps)
        said = held["trust"] or "trusted"
        lines.append(
            f"{task.name}: off by {one['curve']:.1f} % of the drop at most, {one['end']:+.1f} % at "
            f"the end; 10 % of the drop at step {one['time']}, real {one['real']}; "
            f"{100 * held['share']:.0f} % of the training's gradients; {said}"
        )
    return {"ours-next-token": lines}
