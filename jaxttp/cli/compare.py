"""`jaxttp compare`: which network to train, all weights or some, and why."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from jaxttp.cli._options import (
    AsJson,
    BatchSize,
    Data,
    Loss,
    Momentum,
    NoCache,
    Output,
    Quiet,
    SamplesPerClass,
    Seconds,
    Seed,
    Steps,
    Verbose,
)
from jaxttp.cli._shell import Shell, seconds_text, write_json


def compare(
    data: Data = "digits",
    train: Annotated[
        str | None,
        typer.Option(
            help="Of all, head, last (head and last block), bias (biases only), lora (default: the "
            "first four, or all of several networks)."
        ),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="As in `jaxttp predict`; give it again for more.")
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(help="A safetensors file, or random; one a model, or several for one model."),
    ] = None,
    image_size: Annotated[int | None, typer.Option(help="Pixels a side, for all models.")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Of all of them (default: the best for each).")
    ] = None,
    momentum: Momentum = 0.0,
    batch_size: BatchSize = None,
    steps: Steps = 150,
    rule: Annotated[
        str, typer.Option(help="absolute (the same loss for all), relative, gap or plateau.")
    ] = "absolute",
    metric: Annotated[str, typer.Option(help="loss, or error (misclassified share).")] = "loss",
    samples_per_class: SamplesPerClass = 30,
    loss: Loss = None,
    seed: Seed = 0,
    seconds: Seconds = True,
    output: Output = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_cache: NoCache = False,
) -> None:
    """Forecast several networks or choices of what to train, ranked, with the kernel's reasons."""
    from jaxttp.pipeline import Settings, compare_task, pair_networks

    shell = Shell(output, as_json=as_json, quiet=quiet, verbose=verbose, cache=not no_cache)
    with shell.work() as report:
        settings = Settings(
            data=data,
            samples_per_class=samples_per_class,
            loss=loss,
            momentum=momentum,
            batch_size=batch_size,
            steps=steps,
            seed=seed,
            image_size=image_size,
        )
        task, found = compare_task(
            settings,
            None if train is None else [name.strip() for name in train.split(",")],
            networks=pair_networks(model or (), weights or ()),
            learning_rate=learning_rate,
            rule=rule,
            metric=metric,
            time_steps=seconds,
            progress=report,
        )
    plain = {
        "task": task.description,
        "rule": found.rule,
        "metric": found.metric,
        "thresholds": list(found.thresholds),
        "rows": [_finite(row) for row in found.rows()],
    }
    shell.deliver(
        plain,
        lambda to: _print(to, task, found),
        lambda folder: _write(plain, found, task, folder),
    )


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

    console.print(task.description, soft_wrap=True)
    spent = found.seconds()
    # The hardest goal that anybody reaches: one target for all.
    reached = [k for k in range(len(found.thresholds)) if np.any(found.steps[:, k] >= 0)]
    column = min(reached, key=lambda k: found.thresholds[k], default=0)
    table = Table("train")
    for goal in found.thresholds:
        table.add_column(f"steps to {found.metric} {goal:.3g}", justify="right")
    timed = f"seconds to {found.metric} {found.thresholds[column]:.3g}"
    for title in (timed, "rate", "final loss"):
        table.add_column(title, justify="right")
    why = Table("why")
    for title in ("speed", "aligned", "condition number", "rank"):
        why.add_column(title, justify="right")
    outputs = output_shape(task.model.apply_fn, task.model.params, task.x)
    rounding = np.prod(outputs) * np.finfo(np.float32).eps
    for i, name in enumerate(found.names):
        reason = found.explanations[i]
        times = [str(t) if t >= 0 else "-" for t in found.steps[i]]
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
