"""`jaxttp extrapolate`: how long training takes on all the data, from the kernel of a part."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from jaxttp.cli._options import (
    THRESHOLDS,
    AsJson,
    Data,
    LearningRate,
    Momentum,
    NoCache,
    Output,
    Quiet,
    Seed,
    Steps,
    Thresholds,
    Verbose,
    Verify,
)
from jaxttp.cli._shell import Shell, parse_numbers, write_json


def extrapolate(
    data: Data = "digits",
    subset: Annotated[int, typer.Option(help="Samples of the kernel, N0.")] = 100,
    samples_per_class: Annotated[
        int | None, typer.Option(help="Images a class to forecast for (default: all).")
    ] = None,
    learning_rate: LearningRate = 0.005,
    momentum: Momentum = 0.0,
    steps: Steps = 150,
    thresholds: Thresholds = THRESHOLDS,
    loss: Annotated[
        str, typer.Option(help="squared_error extrapolates the spectrum; others use the subset's.")
    ] = "squared_error",
    method: Annotated[
        str | None,
        typer.Option(help="resolvent (default) or power_law, for the squared error's spectrum."),
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(help="Correction of the power law's slope (default: none).")
    ] = None,
    seed: Seed = 0,
    verify: Verify = False,
    output: Output = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_cache: NoCache = False,
) -> None:
    """Forecast training on all samples from the kernel of a few; how far off its halves are."""
    from jaxttp.pipeline import Settings, extrapolate_task

    shell = Shell(output, as_json=as_json, quiet=quiet, verbose=verbose, cache=not no_cache)
    with shell.work() as report:
        settings = Settings(
            data=data,
            samples_per_class=samples_per_class,
            loss=loss,
            learning_rate=learning_rate,
            momentum=momentum,
            steps=steps,
            thresholds=parse_numbers("thresholds", thresholds, THRESHOLDS),
            seed=seed,
        )
        result = extrapolate_task(
            settings, subset=subset, verify=verify, method=method, alpha=alpha, progress=report
        )
    problem = None
    if not result.found.stable:
        problem = f"diverges at learning rate {learning_rate:g}; choose a smaller one."
    shell.deliver(
        result.to_json(),
        lambda to: _print(to, result),
        lambda folder: _write(result, folder),
        problem=problem,
    )


def _write(result: Any, folder: Path) -> list[Path]:
    from jaxttp.plots import save

    paths = [folder / "extrapolation.json", folder / "extrapolation.png"]
    write_json(paths[0], result.to_json())
    save(result.plot(), paths[1])
    return paths


def _print(console: Console, result: Any) -> None:
    found, real = result.found, result.real_steps
    console.print(result.task.description, soft_wrap=True)
    table = Table("loss within")
    for title in ("steps", "halves of the subset off by") + (
        ("real steps",) if real is not None else ()
    ):
        table.add_column(title, justify="right")
    for threshold, step in found.steps.items():
        spread = found.spread[threshold]
        halves = f"{spread:.1f}" if math.isfinite(spread) else "-"
        row = [f"{100 * threshold:g} % of its drop"]
        row += [str(step), halves] if step >= 0 else ["not reached", "-"]
        if real is not None:
            never = "not reached" if result.run.finite else "diverges"
            row.append(str(real[threshold]) if real[threshold] >= 0 else never)
        table.add_row(*row)
    console.print(table)
    console.print(f"from {found.subset} to {found.samples} samples")
    final = f"final loss: predicted {found.loss[-1]:.4g}"
    if result.run is not None:
        final += f", real {float(result.run.loss[-1]):.4g}"
    console.print(final)
    if found.spectrum is not None:
        console.print(found.spectrum.message, soft_wrap=True)
