"""`jaxttp compare`: which network to train, all weights or some, and why."""

from jaxttp._core.results import plain_number
from jaxttp.cli._options import SEVERAL, TASK, Option, Options, names, takes
from jaxttp.cli._shell import figure, say


@takes(
    ("trainable", "optimizer", "nesterov", "weight_decay", "schedule", "warmup"),
    ("total_samples", "budget", "verify", "mesh", "thresholds"),
    model=Option("Task", f"Again for more: {TASK['model'].help}", type=SEVERAL),
    weights=Option("Task", "safetensors or random; one a model, or several for one.", type=SEVERAL),
    learning_rate=Option("Training", "Of all of them (default: the best for each).", type=float),
    train=Option(
        "Task", "Of all, head, last (head and last block), bias, lora, and others such as "
        "lora:r=8:alpha=16 (default: the first four, or all of several networks).",
        type=str, parse=names,
    ),
)  # fmt: skip
def compare(options: Options) -> None:
    """Forecast several networks or choices of what to train, ranked, with the kernel's reasons."""
    from jaxttp.pipeline import compare_task, pair_networks

    shell = options.shell
    with shell.work() as report:
        task, comparison = compare_task(
            options.settings(leave=("model", "weights", "learning_rate")),
            options["train"],
            networks=pair_networks(options["model"] or (), options["weights"] or ()),
            learning_rate=options["learning_rate"],
            time_steps=options["seconds"],
            progress=report,
        )
    result, rows = comparison.sweep, []
    for row in comparison.rows():
        rows.append({k: plain_number(v) if isinstance(v, float) else v for k, v in row.items()})
    plain = {
        "task": task.description,
        "note": task.note,
        "rule": result.rule.kind,
        "metric": result.rule.metric,
        "thresholds": list(result.thresholds),
        "targets": [target.words() for target in result.targets],
        "trainings": result.trainings,
        "rows": rows,
    }
    files = {"comparison.png": figure(lambda: comparison.plot(title=task.description))}
    shell.deliver("comparison", plain, lambda to: say(to, str(task), str(comparison)), files)
