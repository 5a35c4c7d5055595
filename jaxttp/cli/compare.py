"""`jaxttp compare`: which network to train, all weights or some, and why."""

import math
from typing import Any

from rich.console import Console

from jaxttp.cli._options import SEVERAL, TASK, Given, Option, names, takes
from jaxttp.cli._shell import figure, say
from jaxttp.cli._tables import deliver_race, print_task, seconds_text, table


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
    race=Option(
        "Training", "Train all in heats, at many rates, in place of forecasts.", False,
        flags=("--race",),
    ),
)  # fmt: skip
def compare(given: Given) -> None:
    """Forecast several networks or choices of what to train, ranked, with the kernel's reasons."""
    from jaxttp.pipeline import compare_task, pair_networks, race_starts_task

    shell, rate = given.shell, given["learning_rate"]
    with shell.work() as report:
        starts: dict[str, Any] = {
            "settings": given.settings(leave=("model", "weights", "learning_rate")),
            "names": given["train"],
            "networks": pair_networks(given["model"] or (), given["weights"] or ()),
            "progress": report,
        }
        if given["race"]:
            rates: dict[str, Any] = {} if rate is None else {"learning_rates": (rate,)}
            result: Any = race_starts_task(**starts, **rates)
        else:
            result = compare_task(**starts, learning_rate=rate, time_steps=given["seconds"])
    if given["race"]:
        deliver_race(shell, *result)
        return
    task, found = result
    swept = found.sweep
    plain = {
        "task": task.description,
        "note": task.note,
        "rule": swept.rule.kind,
        "metric": swept.rule.metric,
        "thresholds": list(swept.thresholds),
        "targets": [target.words() for target in swept.targets],
        "trainings": swept.trainings,
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
    import numpy as np

    from jaxttp.adapters import output_shape

    print_task(console, task)
    # Targets, where there are any, say all; else the hardest goal that anybody reaches is timed.
    swept, column = found.sweep, 0
    steps, goals = swept.target_steps, list(swept.targets)
    if not goals:
        steps, goals = swept.steps, list(swept.thresholds)
        reached = [k for k in range(len(goals)) if np.any(steps[:, k] >= 0)]
        column = min(reached, key=lambda k: goals[k], default=0)
    spent = None if swept.step_seconds is None else swept.cost(goals[column])
    goals = [swept.goal(goal) for goal in goals]
    titles = [f"steps to {goal}" for goal in goals]
    times = table("train", *titles, f"seconds to {goals[column]}", "rate", "final loss")
    why = table("why", "speed", "aligned", "condition number", "rank")
    outputs = output_shape(task.model.apply_fn, task.model.params, task.x)
    rounding = np.prod(outputs) * np.finfo(np.float32).eps
    for i, name in enumerate(found.names):
        seconds = None if spent is None or np.isinf(spent[i]) else spent[i]
        reason = found.explanations[i]
        sign = "≥ " if reason.condition_number * rounding > 0.5 else ""
        times.add_row(
            name,
            *(str(step) if step >= 0 else "-" for step in steps[i]),
            seconds_text(seconds),
            f"{swept.settings[i].learning_rate:.3g}",
            f"{swept.final_loss[i]:.3g}",
        )
        why.add_row(
            name,
            f"{reason.speed:.2f}",
            f"{reason.alignment:.0%}",
            f"{sign}{reason.condition_number:.2g}",
            str(reason.rank),
        )
    console.print(times)
    console.print(why)
    say(
        console,
        *(f"trust, {found.names[i]}: {words}" for i, words in swept.trust.items() if words),
        found.price,
        "speed: share of the fastest descent that the labels get; aligned: share of their gradient "
        "along the 10 leading eigenvectors",
        f"condition number: eigenvalues below {rounding:.1g} of the largest are rounding and are "
        "left out, ≥ where the others reach down to that; rank: how many are left",
    )
