"""`jaxttp predict`: how long training takes."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

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
    Output,
    Quiet,
    SamplesPerClass,
    Seed,
    Steps,
    Thresholds,
    Verbose,
    Verify,
    Weights,
)
from jaxttp.cli._shell import Shell, parse_numbers, seconds_text, write_json


def predict(
    data: Data = "digits",
    model: Model = None,
    weights: Weights = None,
    classes: Annotated[
        str | None, typer.Option(help="How many at random, or labels as 0,3,7 (default: all).")
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(help="Pixels a side (default: as in pre-training).")
    ] = None,
    trainable: Annotated[
        str, typer.Option(help="all weights, head alone, or lora: low-rank adapters alone.")
    ] = "all",
    rank: Annotated[int, typer.Option(help="Of the adapters.")] = 4,
    split: Annotated[str | None, typer.Option(help="A part of the data, such as train.")] = None,
    folder: Annotated[Path | None, typer.Option(help="The unpacked archive of the data.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder that keeps prepared samples.")] = None,
    learning_rate: LearningRate = 0.005,
    momentum: Momentum = 0.0,
    batch_size: BatchSize = None,
    steps: Steps = 150,
    thresholds: Thresholds = THRESHOLDS,
    samples_per_class: SamplesPerClass = 30,
    loss: Loss = None,
    relinearize: Annotated[
        str, typer.Option(help="Kernels rebuilt along the predicted path: 0 for none, or auto.")
    ] = "auto",
    seed: Seed = 0,
    verify: Verify = False,
    output: Output = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_cache: NoCache = False,
) -> None:
    """Forecast how long training takes, in steps and seconds, without training."""
    from jaxttp.pipeline import Settings, forecast

    shell = Shell(output, as_json=as_json, quiet=quiet, verbose=verbose, cache=not no_cache)
    with shell.work() as report:
        settings = Settings(
            data=data,
            model=model,
            weights=None if weights is None else str(weights),
            classes=_parse_classes(classes),
            image_size=image_size,
            trainable=trainable,
            rank=rank,
            split=split,
            folder=None if folder is None else str(folder),
            cache=None if cache is None else str(cache),
            samples_per_class=samples_per_class,
            loss=loss,
            learning_rate=learning_rate,
            momentum=momentum,
            batch_size=batch_size,
            steps=steps,
            thresholds=parse_numbers("thresholds", thresholds, THRESHOLDS),
            relinearize=_kernels(relinearize),
            seed=seed,
        )
        result = forecast(settings, verify=verify, progress=report)
    problem = None
    if not result.prediction.stable:
        problem = f"{result.prediction.message}; choose a smaller learning rate."
    shell.deliver(
        result.to_json(),
        lambda to: _print(to, result),
        lambda folder: _write(result, folder),
        problem=problem,
    )


def _parse_classes(text: str | None) -> tuple[int, ...] | int | None:
    """A number of classes, or labels separated by commas."""
    if text is None:
        return None
    numbers = parse_numbers("classes", text, "5 or 0,3,7")
    if any(number % 1 != 0 for number in numbers):
        raise ValueError(f"classes={text!r} must be whole numbers.")
    labels = tuple(int(number) for number in numbers)
    return labels if "," in text else labels[0]


def _kernels(text: str) -> int | str:
    """A number, or a word for the forecast to judge."""
    try:
        return int(text)
    except ValueError:
        return text


def _write(result: Any, folder: Path) -> list[Path]:
    from jaxttp.plots import save

    paths = [folder / "prediction.json", folder / "prediction.png"]
    write_json(paths[0], result.to_json())
    save(result.plot(), paths[1])
    return paths


def _print(console: Console, result: Any) -> None:
    prediction = result.prediction
    console.print(result.task.description, soft_wrap=True)
    table = Table("loss within")
    for title in ("steps", "seconds"):
        table.add_column(title, justify="right")
    real_steps, real_seconds = result.real_steps, result.real_seconds
    if real_steps is not None:
        for title in ("real steps", "real seconds"):
            table.add_column(title, justify="right")
    unsure = prediction.steps_uncertainty or {}
    for threshold, step in prediction.steps.items():
        row = [
            f"{100 * threshold:g} % of its drop",
            *_cells(step, result.seconds.get(threshold), unsure.get(threshold)),
        ]
        if real_steps is not None:
            finite = result.run.finite
            row += _cells(real_steps[threshold], real_seconds.get(threshold), stable=finite)
        table.add_row(*row)
    whole = prediction.horizon * result.step_time.seconds
    row = ["all steps", str(prediction.horizon), seconds_text(whole)]
    if result.run is not None:
        row += [str(prediction.horizon), seconds_text(result.run.seconds)]
    table.add_row(*row)
    console.print(table)
    final = f"final loss: predicted {float(prediction.loss[-1]):.4g}"
    if result.run is not None:
        final += f", real {float(result.run.loss[-1]):.4g}"
    console.print(final)
    rate = result.settings.learning_rate
    console.print(
        f"largest stable learning rate: {prediction.max_learning_rate:.4g} (given {rate:g})"
    )
    if prediction.trust is not None:
        console.print(f"trust: {prediction.trust}", soft_wrap=True)
    console.print(f"the forecast cost {prediction.cost}")


def _cells(
    step: int, seconds: float | None, unsure: int | None = None, *, stable: bool = True
) -> list[str]:
    if seconds is None:
        return ["not reached" if stable else "diverges", "-"]
    return [str(step) if unsure is None else f"{step} ± {unsure}", seconds_text(seconds)]
