"""`jaxttp compare`: which network to train, all weights or some, and why."""

from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Column, Table

from jaxttp.cli._options import Given, Instead, because, takes
from jaxttp.cli._race import print_race
from jaxttp.cli._shell import print_task, seconds_text, write_json
from jaxttp.cli._vocabulary import GOALS, MODELS, flag, model_choices, option


@takes(
    without={
        "trainable": "`--train` names several",
        **because(
            "every start is trained by heavy-ball descent at one rate; `predict` forecasts other "
            "trainings",
            "optimizer", "nesterov", "weight_decay", "schedule", "warmup",
        ),
        "total_samples": "starts are compared on the samples drawn; `predict` knows it",
        "budget": "every start is followed alike, as `--relinearize` says",
        **because("it decomposes every start's kernel, on one device", "mesh", "distributed"),
        "verify": "it forecasts several trainings: give one of them to `predict --verify`",
    },
    instead={
        "model": Instead(
            "several may be given",
            annotation=Annotated[
                list[str] | None,
                option(
                    "Task", f"Again for more: {MODELS}", metavar="<str>",
                    autocompletion=model_choices,
                ),
            ],
        ),
        "weights": Instead(
            "several may be given, and `random`",
            annotation=Annotated[
                list[str] | None,
                option(
                    "Task", "safetensors, or random; one a model, or several for one.",
                    metavar="<str>",
                ),
            ],
        ),
        "learning_rate": Instead(
            "every start gets its own best one",
            annotation=Annotated[
                float | None, option("Training", "Of all of them (default: the best for each).")
            ],
        ),
        "thresholds": Instead(
            "its goals are the same losses for all: a tenth and a half of the largest first one",
            annotation=Annotated[
                str | None,
                option("Goals", "For --rule (default: 0.1 and 0.5 of the largest first loss)."),
            ],
        ),
    },
)  # fmt: skip
def compare(
    given: Given,
    *,
    train: Annotated[
        str | None,
        option(
            "Task",
            "Of all, head, last (head and last block), bias, lora, and others such as "
            "lora:r=8:alpha=16 (default: the first four, or all of several networks).",
        ),
    ] = None,
    rule: Annotated[
        str, option("Goals", "absolute (the same loss for all), relative, gap or plateau.")
    ] = "absolute",
    race: Annotated[
        bool, flag("Training", "Train all in heats, at many rates, in place of forecasts.")
    ] = False,
) -> None:
    """Forecast several networks or choices of what to train, ranked, with the kernel's reasons."""
    from jaxttp.pipeline import compare_task

    if race:
        _race(given, train, rule)
        return
    shell = given.shell
    with shell.work() as report:
        asked, goals = given["thresholds"], GOALS["thresholds"].parse
        task, found = compare_task(
            **_starts(given, train),
            learning_rate=given["learning_rate"],
            thresholds=None if asked is None or goals is None else goals(asked),
            rule=rule,
            time_steps=given["seconds"],
            progress=report,
        )
    plain = {
        "task": task.description,
        "note": task.note,
        "rule": found.rule,
        "metric": found.metric,
        "thresholds": list(found.thresholds),
        "targets": [target.words() for target in found.targets],
        "trainings": found.trainings,
        "rows": [_finite(row) for row in found.rows()],
    }
    shell.deliver(
        plain,
        lambda to: _print(to, task, found),
        lambda folder: _write(plain, found, task, folder),
    )


def _starts(given: Given, train: str | None) -> dict[str, Any]:
    """What a comparison and a race are of."""
    from jaxttp.pipeline import pair_networks

    return {
        "settings": given.settings(leave=("model", "weights", "learning_rate", "thresholds")),
        "names": None if train is None else [name.strip() for name in train.split(",")],
        "networks": pair_networks(given["model"] or (), given["weights"] or ()),
    }


def _race(given: Given, train: str | None, rule: str) -> None:
    """All starts by real training in heats."""
    from jaxttp._core.checks import check_used
    from jaxttp.pipeline import race_starts_task

    shell, rate = given.shell, given["learning_rate"]
    with shell.work() as report:
        why = "a race is to one loss, or to the lowest: name it by --target-loss"
        check_used("thresholds", given["thresholds"], False, why)
        check_used("rule", None if rule == "absolute" else rule, False, why)
        asked = _starts(given, train)
        if rate is not None:
            asked["learning_rates"] = (rate,)
        task, found = race_starts_task(**asked, progress=report)
    plain = {"task": task.description, "note": task.note} | found.to_json()

    def write(folder: Path) -> list[Path]:
        from jaxttp.plots import save

        paths = [folder / "race.json", folder / "race.png"]
        write_json(paths[0], plain)
        save(found.plot(title=task.description), paths[1])
        return paths

    def say(console: Console) -> None:
        print_task(console, task)
        print_race(console, found)

    problem = None if found.ranking() else f"{found.advice}."
    shell.deliver(plain, say, write, problem=problem)


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    bad = (float("inf"), -float("inf"))
    return {k: None if v != v or v in bad else v for k, v in row.items()}


def _write(plain: dict[str, Any], found: Any, task: Any, folder: Path) -> list[Path]:
    from jaxttp.plots import save

    paths = [folder / "comparison.json", folder / "comparison.png"]
    write_json(paths[0], plain)
    save(found.plot(title=task.description), paths[1])
    return paths


def _print(console: Console, task: Any, found: Any) -> None:
    import numpy as np

    from jaxttp.adapters import output_shape

    print_task(console, task)
    # Targets, where there are any, say all; else the hardest goal that anybody reaches is timed.
    steps, spent = found.steps, found.seconds()
    goals = [f"{found.metric} {goal:.3g}" for goal in found.thresholds]
    reached = [k for k in range(len(goals)) if np.any(steps[:, k] >= 0)]
    column = min(reached, key=lambda k: found.thresholds[k], default=0)
    if found.targets:
        steps, spent, column = found.target_steps, found.target_seconds(), 0
        goals = [f"{target.metric} {target.value:.3g}" for target in found.targets]
    table = Table(Column("train", no_wrap=True))
    for goal in goals:
        table.add_column(f"steps to {goal}", justify="right")
    timed = f"seconds to {goals[column]}"
    for title in (timed, "rate", "final loss"):
        table.add_column(title, justify="right")
    why = Table(Column("why", no_wrap=True))
    for title in ("speed", "aligned", "condition number", "rank"):
        why.add_column(title, justify="right")
    outputs = output_shape(task.model.apply_fn, task.model.params, task.x)
    rounding = np.prod(outputs) * np.finfo(np.float32).eps
    for i, name in enumerate(found.names):
        reason = found.explanations[i]
        times = [str(t) if t >= 0 else "-" for t in steps[i]]
        seconds = spent[i, column]
        hidden = reason.condition_number * rounding > 0.5
        table.add_row(
            name, *times, seconds_text(seconds) if np.isfinite(seconds) else "-",
            f"{found.settings[i].learning_rate:.3g}", f"{found.final_loss[i]:.3g}",
        )  # fmt: skip
        why.add_row(
            name, f"{reason.speed:.2f}", f"{reason.alignment:.0%}",
            f"{'≥ ' if hidden else ''}{reason.condition_number:.2g}", str(reason.rank),
        )  # fmt: skip
    console.print(table)
    console.print(why)
    for name, trust in zip(found.names, found.trust, strict=False):
        if trust is not None:
            console.print(f"trust, {name}: {trust}", soft_wrap=True)
    for words in found.gaps():
        console.print(words, soft_wrap=True)
    if found.price:
        words = found.price.replace("jaxttp.race_starts", "a race (--race)")
        console.print(words, soft_wrap=True)
    console.print(
        "speed: share of the fastest descent that the labels get; aligned: share of their gradient "
        "along the 10 leading eigenvectors",
        soft_wrap=True,
    )
    console.print(
        f"condition number: eigenvalues below {rounding:.1g} of the largest are rounding and are "
        "left out, ≥ where the others reach down to that; rank: how many are left",
        soft_wrap=True,
    )
