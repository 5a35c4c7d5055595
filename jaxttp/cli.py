"""The command line: arguments in, `jaxttp.pipeline` called, a table, a figure and JSON out."""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Before you train: how long will it take, and will it converge?",
)


@app.callback()
def _root() -> None:
    """Before you train: how long will it take, and will it converge?"""


def _parse_thresholds(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"thresholds={text!r} must be numbers separated by commas, such as 0.01,0.1,0.4."
        ) from None


@app.command()
def predict(
    data: Annotated[
        str,
        typer.Option(
            help="digits (pre-trained ResNet); wine, breast_cancer, diabetes (MLP); mnist, cifar10 "
            "(MLP; downloaded, with the extra `datasets`)."
        ),
    ] = "digits",
    learning_rate: Annotated[float, typer.Option(help="Of gradient descent.")] = 0.005,
    momentum: Annotated[float, typer.Option(help="Heavy-ball momentum in [0, 1).")] = 0.0,
    batch_size: Annotated[int | None, typer.Option(help="Samples a step (default: all).")] = None,
    steps: Annotated[int, typer.Option(help="The horizon T in steps.")] = 150,
    thresholds: Annotated[
        str, typer.Option(help="Shares of the loss's drop that define training times.")
    ] = "0.01,0.1,0.4",
    samples_per_class: Annotated[int, typer.Option(help="Images a class.")] = 30,
    loss: Annotated[
        str | None, typer.Option(help="cross_entropy, squared_error or binary_cross_entropy.")
    ] = None,
    relinearize: Annotated[
        int, typer.Option(help="Kernels rebuilt along the predicted path (0: none).")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Draws samples, fresh weights and batches.")] = 0,
    verify: Annotated[
        bool, typer.Option("--verify", help="Also train for real, and put it beside the forecast.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Folder for prediction.json and prediction.png.")
    ] = None,
) -> None:
    """Forecast how long training takes, in steps and seconds, without training."""
    from jaxttp.pipeline import Settings, forecast

    with _bad_input_exits():
        if output is not None and output.exists() and not output.is_dir():
            raise ValueError(f"output={str(output)!r} is a file; give a folder.")
        settings = Settings(
            data=data,
            samples_per_class=samples_per_class,
            loss=loss,
            learning_rate=learning_rate,
            momentum=momentum,
            batch_size=batch_size,
            steps=steps,
            thresholds=_parse_thresholds(thresholds),
            relinearize=relinearize,
            seed=seed,
        )
        with _progress() as report:
            result = forecast(settings, verify=verify, progress=report)
    if output is not None:
        _write(result, output)
    if not result.prediction.stable:
        _fail(f"{result.prediction.message}; choose a smaller learning rate.")
    _print(result)
    if output is not None:
        print(f"written: {output / 'prediction.json'}, {output / 'prediction.png'}")


def _write(result: Any, folder: Path) -> None:
    from jaxttp.plots import plot_forecast, save

    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result.to_json(), indent=1, allow_nan=False)
    (folder / "prediction.json").write_text(text + "\n")
    save(plot_forecast(result), folder / "prediction.png")


def _print(result: Any) -> None:
    prediction, console = result.prediction, Console(highlight=False)
    console.print(result.task.description, soft_wrap=True)
    table = Table("loss within")
    for title in ("steps", "seconds"):
        table.add_column(title, justify="right")
    real_steps, real_seconds = result.real_steps, result.real_seconds
    if real_steps is not None:
        for title in ("real steps", "real seconds"):
            table.add_column(title, justify="right")
    for threshold, step in prediction.steps.items():
        row = [f"{100 * threshold:g} % of its drop", str(step), f"{result.seconds[threshold]:.2f}"]
        if real_steps is not None:
            row += _real_cells(real_steps[threshold], real_seconds.get(threshold))
        table.add_row(*row)
    whole = prediction.horizon * result.step_time.seconds
    row = ["all steps", str(prediction.horizon), f"{whole:.2f}"]
    if result.run is not None:
        row += [str(prediction.horizon), f"{result.run.seconds:.2f}"]
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
    console.print(f"the forecast cost {prediction.cost}")


def _real_cells(step: int, seconds: float | None) -> list[str]:
    return ["diverges", "-"] if seconds is None else [str(step), f"{seconds:.2f}"]


@contextlib.contextmanager
def _progress() -> Iterator[Any]:
    """A bar on standard error, for people only."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    silent = not sys.stderr.isatty()  # a console calls itself a terminal under FORCE_COLOR
    with Progress(*columns, console=console, transient=True, disable=silent) as bar:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                for task in tasks.values():
                    bar.update(task, visible=False)
                tasks[stage] = bar.add_task(stage, total=None if total <= 1 else total)
            bar.update(tasks[stage], completed=done)

        report("loading", 0, 1)
        yield report


@contextlib.contextmanager
def _bad_input_exits() -> Iterator[None]:
    try:
        yield
    except (ValueError, ImportError) as problem:
        _fail(str(problem))


def _fail(message: str) -> None:
    print(f"jaxttp: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(2)


def main() -> None:
    """Run the command line."""
    app()
