"""`jaxttp gauss-newton`: exact Gauss-Newton steps, forecast and real."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from jaxttp.cli._options import (
    THRESHOLDS,
    AsJson,
    BundledData,
    NoCache,
    Output,
    Quiet,
    SamplesPerClass,
    Seed,
    Thresholds,
    Verbose,
)
from jaxttp.cli._shell import Shell, parse_numbers, write_json


def gauss_newton(
    data: BundledData = "digits",
    samples_per_class: SamplesPerClass = 30,
    loss: Annotated[
        str | None, typer.Option(help="squared_error (default) or cross_entropy.")
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="Share of a whole step (default: 0.5, halved until it is stable)."),
    ] = None,
    steps: Annotated[int, typer.Option(help="How many.")] = 12,
    blocks: Annotated[int, typer.Option(help="Of the reversible network.")] = 2,
    bottleneck: Annotated[
        int | None, typer.Option(help="Hidden units m (default: twice the samples, full rank).")
    ] = None,
    pseudoinverse: Annotated[
        str, typer.Option(help="exact, truncate, damp, tikhonov or noise.")
    ] = "truncate",
    rtol: Annotated[
        float | None,
        typer.Option(help="Of the pseudo-inverse (default: 1e-6, or the first that is stable)."),
    ] = None,
    thresholds: Thresholds = THRESHOLDS,
    seed: Seed = 0,
    output: Output = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_cache: NoCache = False,
) -> None:
    """Train a reversible network by exact Gauss-Newton steps, beside their forecast."""
    from jaxttp.pipeline import StepSettings, gauss_newton_task

    shell = Shell(output, as_json=as_json, quiet=quiet, verbose=verbose, cache=not no_cache)
    with shell.work() as report:
        settings = StepSettings(
            data=data,
            samples_per_class=samples_per_class,
            loss=loss,
            learning_rate=learning_rate,
            steps=steps,
            blocks=blocks,
            bottleneck=bottleneck,
            pseudoinverse=pseudoinverse,
            rtol=rtol,
            thresholds=parse_numbers("thresholds", thresholds, THRESHOLDS),
            seed=seed,
        )
        result = gauss_newton_task(settings, progress=report)
    shell.deliver(
        result.to_json(),
        lambda to: _print(to, result),
        lambda folder: _write(result, folder),
        problem=result.problem,
    )


def _write(result: Any, folder: Path) -> list[Path]:
    from jaxttp.plots import save

    paths = [folder / "gauss_newton.json", folder / "gauss_newton.png"]
    write_json(paths[0], result.to_json())
    save(result.plot(), paths[1])
    return paths


def _print(console: Console, result: Any) -> None:
    console.print(result.description, soft_wrap=True)
    table = Table("loss within")
    for title in ("forecast steps", "real steps"):
        table.add_column(title, justify="right")
    for threshold, (ahead, real) in result.times().items():
        cells = [str(time) if time >= 0 else "not reached" for time in (ahead, real)]
        table.add_row(f"{100 * threshold:g} % of its drop", *cells)
    console.print(table)
    ranks = result.ranks
    console.print(
        f"loss {result.loss[0]:.4g} to {result.loss[-1]:.4g} (forecast "
        f"{float(result.forecast.loss[-1]):.4g}), error {result.error[0]:.3g} to "
        f"{result.error[-1]:.3g}"
    )
    console.print(
        f"ranks {ranks.min()} to {ranks.max()} of {result.samples} samples, relative residual of "
        f"the first step {result.residual:.1e}"
    )
    if result.too_fine:
        rtols = " and ".join(f"{rtol:g}" for rtol in result.too_fine)
        console.print(f"rtol {result.settings.rtol:g}, as every rate diverged with {rtols}")
    if result.diverged:
        rates = ", ".join(f"{rate:g}" for rate in result.diverged)
        console.print(f"learning rate {result.settings.learning_rate:g}, as {rates} diverged")
    if result.shortfall is not None:
        console.print(f"not exact: {result.shortfall}", soft_wrap=True)
