"""`jaxttp spectrum`: the eigenvalues of a kernel, and what of the labels lies where."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from jaxttp.cli._shell import (
    bad_input_exits,
    check_folder,
    print_json,
    progress_bar,
    say_written,
    write_json,
)


def spectrum(
    data: Annotated[str, typer.Option(help="As in `jaxttp predict`.")] = "digits",
    samples_per_class: Annotated[int, typer.Option(help="Images a class.")] = 30,
    loss: Annotated[
        str | None, typer.Option(help="cross_entropy, squared_error or binary_cross_entropy.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws samples and fresh weights.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, no table.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Folder for spectrum.json and spectrum.png.")
    ] = None,
) -> None:
    """Eigenvalues of the kernel before training, and how much is learned along which."""
    from jaxttp.pipeline import Settings, task_spectrum

    with bad_input_exits():
        check_folder(output)
        settings = Settings(data=data, samples_per_class=samples_per_class, loss=loss, seed=seed)
        with progress_bar() as report:
            result = task_spectrum(settings, progress=report)
    written = [] if output is None else _write(result, output)
    if as_json:
        print_json(result.to_json())
        return
    _print(result)
    say_written(written)


def _write(result: Any, folder: Path) -> list[Path]:
    from jaxttp.plots import plot_task_spectrum, save

    paths = [folder / "spectrum.json", folder / "spectrum.png"]
    write_json(paths[0], result.to_json())
    save(plot_task_spectrum(result), paths[1])
    return paths


def _print(result: Any) -> None:
    console = Console(highlight=False)
    console.print(result.task.description, soft_wrap=True)
    table = Table("share")
    for title in ("eigenvectors for the residual", "for the centred labels"):
        table.add_column(title, justify="right")
    for share in (0.5, 0.9, 0.99):
        heads = [str(result.head(share, of)) for of in ("residual", "labels")]
        table.add_row(f"{100 * share:g} %", *heads)
    console.print(table)
    values, law = result.values, result.law
    console.print(
        f"eigenvalues {values[0]:.4g} to {values[result.rank - 1]:.4g}, rank {result.rank} of "
        f"{len(values)}, condition number {result.condition:.4g}"
    )
    console.print(
        f"power law k^-{float(law.exponent):.2f} over ranks {law.window[0]} to {law.window[1]} "
        f"(R² {float(law.r_squared):.3f})"
    )
    console.print(f"largest stable learning rate: {result.max_learning_rate:.4g}")
