"""`jaxttp compare`: which network to train, all weights or some, and why."""

import math
from typing import Any

from rich.console import Console

from jaxttp.cli._options import SEVERAL, TASK, Given, Option, names, takes
from jaxttp.cli._shell import figure, say
from jaxttp.cli._tables import print_task


@takes(
    ("trainable", "optimizer", "nesterov", "weight_decay", "schedule", "warmup"),
    ("total_samples", "budget", "verify", "mesh", "thresholds"),
    model=Option("Task", f"Again for more: {TASK['model'].words}", type=SEVERAL),
    weights=Option(
        "Task", "safetensors, or random; one a model, or several for one.", type=SEVERAL
    ),
    learning_rate=Option("Training", "Of all of them (default: the best for each).", type=float),
    train=Option(
        "Task",
        "Of all, head, last (head and last block), bias, lora, and others such as "
        "lora:r=8:alpha=16 (default: the first four, or all of several networks).",
        type=str,
        parse=names,
    ),
)  # fmt: skip
def compare(given: Given) -> None:
    """Forecast several networks or choices of what to train, ranked, with the kernel's reasons."""
    from jaxttp.pipeline import compare_task, pair_networks

    shell = given.shell
    with shell.work() as report:
        task, found = compare_task(
            given.settings(leave=("model", "weights", "learning_rate")),
            given["train"],
            networks=pair_networks(given["model"] or (), given["weights"] or ()),
            learning_rate=given["learning_rate"],
            time_steps=given["seconds"],
            progress=report,
        )
    result = found.sweep
    plain = {
        "task": task.description,
        "note": task.note,
        "rule": result.rule.kind,
        "metric": result.rule.metric,
        "thresholds": list(result.thresholds),
        "targets": [target.words() for target in result.targets],
        "trainings": result.trainings,
        "rows": [_finite(row) for row in found.rows()],
    }
    files = {"comparison.png": figure(lambda: found.plot(title=task.description))}
    shell.deliver("comparison", plain, lambda to: _print(to, task, found), files)


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def _print(console: Console, task: Any, found: Any) -> None:
    print_task(console, task)
    say(console, str(found))
