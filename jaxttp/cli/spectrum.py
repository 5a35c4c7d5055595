"""`jaxttp spectrum`: the eigenvalues of a kernel, and what of the labels lies where."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxttp.cli._options import Given, because, takes
from jaxttp.cli._shell import print_task, write_json
from jaxttp.cli._vocabulary import FORECAST, GOALS, TRAINING


@takes(
    without=because("a kernel before training depends on no training", TRAINING, GOALS, FORECAST)
)
def spectrum(given: Given) -> None:
    """Eigenvalues of the kernel before training, and how much is learned along which."""
    from jaxttp.pipeline import task_spectrum

    shell = given.shell
    with shell.work() as report:
        result = task_spectrum(given.settings(), progress=report)
    shell.deliver(
        result.to_json(), lambda to: _print(to, result), lambda folder: _write(result, folder)
    )


def _write(result: Any, folder: Path) -> list[Path]:
    from jaxttp.plots import save

    paths = [folder / "spectrum.json", folder / "spectrum.png"]
    write_json(paths[0], result.to_json())
    save(result.plot(), paths[1])
    return paths


def _print(console: Console, result: Any) -> None:
    print_task(console, result.task)
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
