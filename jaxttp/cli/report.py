"""`jaxttp report`, everything about a task on one page, and `jaxttp spectrum`, its kernel alone."""

from pathlib import Path
from typing import Any

from rich.console import Console

from jaxttp.cli._options import FORECAST, GOALS, TRAINING, Option, Options, takes
from jaxttp.cli._shell import figure, say
from jaxttp.cli._tables import table


@takes(
    ("seconds", "total_samples"),
    output=Option("Output", "Folder for report.html.", Path("."), Path),
)
def report(options: Options) -> None:
    """Write one HTML page: forecast, sweep, spectrum, settings, versions; it opens offline."""
    from jaxttp.pipeline import report_task

    shell = options.shell
    with shell.work() as progress:
        result = report_task(options.settings(), verify=options["verify"], progress=progress)

    def page(path: Path) -> None:
        from jaxttp.plots import save_report

        save_report(result, path)

    task, prediction, problem = result.forecast.task, result.forecast.prediction, None
    if not prediction.stable:
        problem = f"{prediction.message}; choose a smaller learning rate."
    show, files = lambda to: say(to, str(task), str(prediction)), {"report.html": page}
    shell.deliver(None, result.to_json(), show, files, problem=problem)


@takes(TRAINING, GOALS, set(FORECAST) - {"mesh"})
def spectrum(options: Options) -> None:
    """Eigenvalues of the kernel before training, and how much is learned along which."""
    from jaxttp.pipeline import task_spectrum

    shell = options.shell
    with shell.work() as report:
        result = task_spectrum(options.settings(), progress=report)
    files = {"spectrum.png": figure(result.plot)}
    shell.deliver("spectrum", result.to_json(), lambda to: _print(to, result), files)


def _print(console: Console, result: Any) -> None:
    say(console, str(result.task))
    rows = table("fraction", "eigenvectors for the residual", "for the centred labels")
    for fraction in (0.5, 0.9, 0.99):
        heads = (str(result.head(fraction, of)) for of in ("residual", "labels"))
        rows.add_row(f"{100 * fraction:g} %", *heads)
    console.print(rows)
    values, law = result.values, result.law
    say(
        console,
        f"eigenvalues {values[0]:.4g} to {values[result.rank - 1]:.4g}, rank {result.rank} of "
        f"{len(values)}, condition number {result.condition:.4g}",
        f"power law k^-{float(law.exponent):.2f} over ranks {law.window[0]} to {law.window[1]} "
        f"(R² {float(law.r_squared):.3f})",
        f"largest stable learning rate: {result.max_learning_rate:.4g}",
    )
