"""`jaxttp predict`: how long training takes."""

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
    progress_bar,
    say_written,
    write_json,
)


def predict(
    data: Annotated[
        str,
        typer.Option(
            help="digits (pre-trained ResNet); wine, breast_cancer, diabetes (MLP); with the extra "
            "`datasets`: mnist, cifar10, cifar100, caltech_birds2011, cars196, stanford_dogs, "
            "oxford_flowers102, dtd, food101, tfds:NAME; from a folder: mit67, fgvc_aircraft, "
            "minc2500, image_folder."
        ),
    ] = "digits",
    model: Annotated[
        str | None,
        typer.Option(
            help="resnet18, resnet34, resnet50, resnet20, resnet32, vgg5, vit_tiny, vit_small, "
            "vit_base (default: by the data)."
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="A safetensors file for the model (torchvision, timm, Hugging Face)."),
    ] = None,
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

    with bad_input_exits():
        check_folder(output)
        settings = Settings(
            data=data,
            model=model,
            weights=None if weights is None else str(weights),
            classes=_classes(classes),
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
            thresholds=parse_numbers("thresholds", thresholds, "0.01,0.1,0.4"),
            relinearize=relinearize,
            seed=seed,
        )
        with progress_bar() as report:
            result = forecast(settings, verify=verify, progress=report)
    written = [] if output is None else _write(result, output)
    if not result.prediction.stable:
        fail(f"{result.prediction.message}; choose a smaller learning rate.")
    _print(result)
    say_written(written)


def _classes(text: str | None) -> tuple[int, ...] | int | None:
    """A number of classes, or labels separated by commas."""
    if text is None:
        return None
    numbers = parse_numbers("classes", text, "5 or 0,3,7")
    if any(number != int(number) for number in numbers):
        raise ValueError(f"classes={text!r} must be whole numbers.")
    labels = tuple(int(number) for number in numbers)
    return labels if "," in text else labels[0]


def _write(result: Any, folder: Path) -> list[Path]:
    from jaxttp.plots import plot_forecast, save

    paths = [folder / "prediction.json", folder / "prediction.png"]
    write_json(paths[0], result.to_json())
    save(plot_forecast(result), paths[1])
    return paths


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
