"""`jaxttp sweep`: which learning rate, momentum, batch and schedule, from one kernel."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from jaxttp.cli._options import (
    THRESHOLDS,
    AsJson,
    Data,
    Loss,
    NoCache,
    Output,
    Quiet,
    SamplesPerClass,
    Seconds,
    Seed,
    Steps,
    Thresholds,
    Verbose,
)
from jaxttp.cli._shell import Shell, parse_numbers, seconds_text, write_json

FASTEST = 5
"""Settings in the first table."""


def sweep(
    data: Data = "digits",
    learning_rates: Annotated[
        str | None, typer.Option(help="As 0.001,0.01 (default: 16 around the largest stable one).")
    ] = None,
    momenta: Annotated[str, typer.Option(help="Heavy-ball momenta in [0, 1).")] = "0,0.9",
    batch_sizes: Annotated[
        str | None, typer.Option(help="As 16,64; 0 stands for all samples (default: all).")
    ] = None,
    schedules: Annotated[
        str, typer.Option(help="Of constant, linear, cosine, warmup_cosine.")
    ] = "constant",
    steps: Steps = 150,
    thresholds: Thresholds = THRESHOLDS,
    threshold: Annotated[
        float | None, typer.Option(help="The one that the advice is for (default: the middle one).")
    ] = None,
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
    """Forecast a grid of settings from one kernel, and advise a learning rate."""
    from jaxttp.pipeline import Settings, sweep_task

    shell = Shell(output, as_json=as_json, quiet=quiet, verbose=verbose, cache=not no_cache)
    with shell.work() as report:
        settings = Settings(
            data=data,
            samples_per_class=samples_per_class,
            loss=loss,
            steps=steps,
            thresholds=parse_numbers("thresholds", thresholds, THRESHOLDS),
            seed=seed,
        )
        rates = None
        if learning_rates is not None:
            rates = parse_numbers("learning_rates", learning_rates, "0.001,0.01")
        result = sweep_task(
            settings,
            learning_rates=rates,
            momenta=parse_numbers("momenta", momenta, "0,0.9"),
            batch_sizes=_batches(batch_sizes),
            schedules=[name.strip() for name in schedules.split(",")],
            threshold=threshold,
            metric=metric,
            time_steps=seconds,
            progress=report,
        )
    problem = None
    if result.fastest is None:
        problem = (
            f"no setting reaches {result.threshold:g} stably; try rates below "
            f"{result.max_learning_rate:.4g}, or more steps."
        )
    shell.deliver(
        result.to_json(),
        lambda to: _print(to, result),
        lambda folder: _write(result, folder),
        problem=problem,
    )


def _batches(text: str | None) -> tuple[int | None, ...]:
    if text is None:
        return (None,)
    numbers = parse_numbers("batch_sizes", text, "16,64")
    if any(number % 1 != 0 or number < 0 for number in numbers):
        raise ValueError(f"batch_sizes={text!r} must be whole numbers, 0 for all samples.")
    return tuple(int(number) or None for number in numbers)


def _write(result: Any, folder: Path) -> list[Path]:
    from jaxttp.plots import save

    paths = [folder / name for name in ("sweep.json", "sweep.csv", "sweep.png")]
    write_json(paths[0], result.to_json())
    result.sweep.to_csv(paths[1])
    save(result.plot(), paths[2])
    return paths


def _print(console: Console, result: Any) -> None:
    swept = result.sweep
    console.print(result.task.description, soft_wrap=True)
    goal = swept.goal(result.threshold)
    column = swept.thresholds.index(result.threshold)
    cost = swept.cost(result.threshold)
    for heading, chosen in (
        (f"fewest steps to {goal}", swept.ranking(result.threshold)[:FASTEST]),
        (f"cheapest to {goal}", swept.pareto(result.threshold)),
    ):
        table = Table("setting", title=heading)
        for title in ("steps", "seconds", "loss at the end", "error"):
            table.add_column(title, justify="right")
        for i in chosen:
            timed = "-" if swept.step_seconds is None else seconds_text(cost[i])
            table.add_row(
                str(swept.settings[i]), str(swept.steps[i, column]), timed,
                f"{swept.final_loss[i]:.4g}", f"{swept.final_error[i]:.4g}",
            )  # fmt: skip
        console.print(table)
    console.print(
        f"steps to {goal}: each setting is measured by its own drop, so look at the loss at the "
        "end, too (in Python, rule='absolute' measures all by the same loss); cheapest: those that "
        "no other setting beats in both cost and loss at the end",
        soft_wrap=True,
    )
    console.print(f"{len(swept.settings)} settings, {int(swept.stable.sum())} of them stable")
    if swept.warning is not None:
        console.print(swept.warning, soft_wrap=True)
    console.print(f"largest stable learning rate: {result.max_learning_rate:.4g} (no momentum)")
    if result.fastest is not None:
        best = swept.settings[result.fastest]
        console.print(f"fastest to {goal}: {best} ({swept.steps[result.fastest, column]} steps)")
        if swept.trust.get(result.fastest) is not None:
            console.print(f"trust: {swept.trust[result.fastest]}", soft_wrap=True)
