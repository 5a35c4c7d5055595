"""`jaxttp report`: everything about a task on one page that opens offline."""

from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from jaxttp.cli._options import Given, Instead, takes
from jaxttp.cli._shell import print_task
from jaxttp.cli._vocabulary import option


@takes(
    without={
        "seconds": "it always times a step: seconds are half of the answer",
        "total_samples": "sweep and spectrum are of the samples drawn; `predict` knows it",
    },
    instead={
        "output": Instead(
            "it makes a page in any case",
            default=Path("."),
            annotation=Annotated[Path, option("Output", "Folder for report.html.")],
        )
    },
)
def report(given: Given) -> None:
    """Write one HTML page: forecast, sweep, spectrum, settings, versions; it opens offline."""
    from jaxttp.pipeline import report_task

    shell = given.shell
    with shell.work() as tell:
        result = report_task(given.settings(), verify=given["verify"], progress=tell)
    prediction, problem = result.forecast.prediction, None
    if not prediction.stable:
        problem = f"{prediction.message}; choose a smaller learning rate."
    shell.deliver(
        result.to_json(),
        lambda to: _print(to, result),
        lambda folder: _write(folder, result),
        problem=problem,
    )


def _print(console: Console, result: Any) -> None:
    print_task(console, result.forecast.task)
    console.print(str(result.forecast.prediction), soft_wrap=True)
    for one in result.forecast.targets:
        when = f"step {one.steps}" if one.steps >= 0 else "not reached"
        console.print(f"  {one.words:<26} {when:>12}")


def _write(folder: Path, result: Any) -> list[Path]:
    from jaxttp.plots import save_report

    return [save_report(result, folder / "report.html")]
