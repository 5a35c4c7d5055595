"""`jaxttp report`: everything about a task on one page that opens offline."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from jaxttp.cli._options import (
    THRESHOLDS,
    AsJson,
    BatchSize,
    Data,
    LearningRate,
    Loss,
    Model,
    Momentum,
    NoCache,
    Quiet,
    SamplesPerClass,
    Seed,
    Steps,
    Thresholds,
    Verbose,
    Verify,
    Weights,
)
from jaxttp.cli._shell import Shell, parse_numbers


def report(
    data: Data = "digits",
    model: Model = None,
    weights: Weights = None,
    learning_rate: LearningRate = 0.005,
    momentum: Momentum = 0.0,
    batch_size: BatchSize = None,
    steps: Steps = 150,
    thresholds: Thresholds = THRESHOLDS,
    samples_per_class: SamplesPerClass = 30,
    loss: Loss = None,
    seed: Seed = 0,
    verify: Verify = False,
    output: Annotated[Path, typer.Option(help="Folder for report.html.")] = Path("."),
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_cache: NoCache = False,
) -> None:
    """Write one HTML page: forecast, sweep, spectrum, settings, versions; it opens offline."""
    from jaxttp.pipeline import Settings, report_task

    shell = Shell(output, as_json=as_json, quiet=quiet, verbose=verbose, cache=not no_cache)
    with shell.work() as tell:
        settings = Settings(
            data=data,
            model=model,
            weights=None if weights is None else str(weights),
            samples_per_class=samples_per_class,
            loss=loss,
            learning_rate=learning_rate,
            momentum=momentum,
            batch_size=batch_size,
            steps=steps,
            thresholds=parse_numbers("thresholds", thresholds, THRESHOLDS),
            seed=seed,
        )
        result = report_task(settings, verify=verify, progress=tell)
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
    console.print(result.forecast.task.description, soft_wrap=True)
    console.print(str(result.forecast.prediction), soft_wrap=True)


def _write(folder: Path, result: Any) -> list[Path]:
    from jaxttp.plots import save_report

    return [save_report(result, folder / "report.html")]
