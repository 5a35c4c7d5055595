"""`jaxttp extrapolate`: how long training takes on all the data, from the kernel of a part."""

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


def extrapolate(
    data: Annotated[str, typer.Option(help="As in `jaxttp predict`.")] = "digits",
    subset: Annotated[int, typer.Option(help="Samples of the kernel, N0.")] = 100,
    samples_per_class: Annotated[
        int | None, typer.Option(help="Images a class to forecast for (default: all).")
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Of gradient descent.")] = 0.005,
    momentum: Annotated[float, typer.Option(help="Heavy-ball momentum in [0, 1).")] = 0.0,
    steps: Annotated[int, typer.Option(help="The horizon T in steps.")] = 150,
    thresholds: Annotated[
        str, typer.Option(help="Shares of the loss's drop that define training times.")
    ] = "0.01,0.1,0.4",
    loss: Annotated[
        str, typer.Option(help="squared_error extrapolates the spectrum; others use the subset's.")
    ] = "squared_error",
    method: Annotated[
        str, typer.Option(help="resolvent, or power_law, for the squared error's spectrum.")
    ] = "resolvent",
    alpha: Annotated[float, typer.Option(help="Correction of the power law's slope.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Draws samples, fresh weights and the subset.")] = 0,
    verify: Annotated[
        bool, typer.Option("--verify", help="Also train on all samples for real.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, no table.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Folder for extrapolation.json and extrapolation.png.")
    ] = None,
) -> None:
    """Forecast training on all samples from the kernel of a few, with its spread."""
    from jaxttp.pipeline import Settings, extrapolate_task

    with bad_input_exits():
        check_folder(output)
        settings = Settings(
            data=data,
            samples_per_class=samples_per_class,
            loss=loss,
            learning_rate=learning_rate,
            momentum=momentum,
            steps=steps,
            thresholds=parse_numbers("thresholds", thresholds, "0.01,0.1,0.4"),
            seed=seed,
        )
        with progress_bar() as report:
            result = extrapolate_task(
                settings, subset=subset, verify=verify, method=method, alpha=alpha,
                progress=report,
            )  # fmt: skip
    written = [] if output is None else _write(result, output)
    if not result.found.stable:
        fail(f"diverges at learning rate {learning_rate:g}; choose a smaller one.")
    if as_json:
        print_json(result.to_json())
        return
    _print(result)
    say_written(written)


def _write(result: Any, folder: Path) -> list[Path]:
    from jaxttp.plots import plot_extrapolation, save

    paths = [folder / "extrapolation.json", folder / "extrapolation.png"]
    write_json(paths[0], result.to_json())
    save(plot_extrapolation(result), paths[1])
    return paths


def _print(result: Any) -> None:
    console, found, real = Console(highlight=False), result.found, result.real_steps
    console.print(result.task.description, soft_wrap=True)
    table = Table("loss within")
    for title in ("steps", "± spread") + (("real steps",) if real is not None else ()):
        table.add_column(title, justify="right")
    for threshold, step in found.steps.items():
        row = [f"{100 * threshold:g} % of its drop", str(step), f"{found.spread[threshold]:.1f}"]
        if real is not None:
            row.append(str(real[threshold]) if real[threshold] >= 0 else "diverges")
        table.add_row(*row)
    console.print(table)
    console.print(f"from {found.subset} to {found.samples} samples")
    final = f"final loss: predicted {found.loss[-1]:.4g}"
    if result.run is not None:
        final += f", real {float(result.run.loss[-1]):.4g}"
    console.print(final)
    if found.spectrum is not None:
        console.print(found.spectrum.message, soft_wrap=True)
