"""`jaxttp gauss-newton`: exact Gauss-Newton steps, forecast and real."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from jaxttp.cli._shell import (
    bad_input_exits,
    check_folder,
    fail,
    parse_numbers,
    print_json,
    progress_bar,
    say_written,
    write_json,
)


def gauss_newton(
    data: Annotated[str, typer.Option(help="digits, wine, breast_cancer, diabetes.")] = "digits",
    samples_per_class: Annotated[int, typer.Option(help="Samples a class.")] = 30,
    loss: Annotated[
        str | None, typer.Option(help="squared_error (default) or cross_entropy.")
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Share of a whole step.")] = 0.5,
    steps: Annotated[int, typer.Option(help="How many.")] = 12,
    blocks: Annotated[int, typer.Option(help="Of the reversible network.")] = 2,
    bottleneck: Annotated[
        int | None, typer.Option(help="Hidden units m (default: twice the samples, full rank).")
    ] = None,
    pseudoinverse: Annotated[
        str, typer.Option(help="exact, truncate, damp or tikhonov.")
    ] = "truncate",
    rtol: Annotated[float, typer.Option(help="Of the pseudo-inverse.")] = 1e-6,
    thresholds: Annotated[
        str, typer.Option(help="Shares of the loss's drop that define training times.")
    ] = "0.01,0.1,0.4",
    seed: Annotated[int, typer.Option(help="Draws samples and weights.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, no table.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Folder for gauss_newton.json and gauss_newton.png.")
    ] = None,
) -> None:
    """Train a reversible network by exact Gauss-Newton steps, beside their forecast."""
    from jaxttp.pipeline import StepSettings, gauss_newton_task

    with bad_input_exits():
        check_folder(output)
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
            thresholds=parse_numbers("thresholds", thresholds, "0.01,0.1,0.4"),
            seed=seed,
        )
        with progress_bar() as report:
            result = gauss_newton_task(settings, progress=report)
    written = [] if output is None else _write(result, output)
    if not result.stable:
        fail(
            f"diverges at learning rate {learning_rate:g}; choose a smaller one, more hidden units "
            "(--bottleneck) or a larger --rtol."
        )
    if as_json:
        print_json(result.to_json())
        return
    _print(result)
    say_written(written)


def _write(result: Any, folder: Path) -> list[Path]:
    from jaxttp.plots import plot_steps, save

    paths = [folder / "gauss_newton.json", folder / "gauss_newton.png"]
    write_json(paths[0], result.to_json())
    save(plot_steps(result), paths[1])
    return paths


def _print(result: Any) -> None:
    console = Console(highlight=False)
    console.print(result.description, soft_wrap=True)
    table = Table("loss within")
    for title in ("forecast steps", "real steps"):
        table.add_column(title, justify="right")
    for threshold, (ahead, real) in result.times().items():
        table.add_row(f"{100 * threshold:g} % of its drop", str(ahead), str(real))
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
