"""`jaxttp predict`: how long training takes."""

from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Column, Table

from jaxttp._core.checks import check_used
from jaxttp.cli import _fine_tuning
from jaxttp.cli._goals import add_targets, cells
from jaxttp.cli._options import Given, because, takes
from jaxttp.cli._shell import print_task, seconds_text, write_json
from jaxttp.cli._vocabulary import option


@takes(without=because("it always times a step: seconds are half of the answer", "seconds"))
def predict(
    given: Given,
    *,
    text: Annotated[
        Path | None, option("Task", "To fine-tune --model on: a file or a folder.")
    ] = None,
    lora: Annotated[
        str | None, option("Task", "Adapters: r=8,alpha=16,modules=q_proj+v_proj.")
    ] = None,
    sequence_length: Annotated[
        int | None, option("Task", "Tokens of its sequences (default: 128).")
    ] = None,
    price_per_hour: Annotated[
        float | None, option("Forecast", "Of this device, with --text.")
    ] = None,
) -> None:
    """Forecast how long training takes, in steps and seconds, without training."""
    from jaxttp.pipeline import forecast

    shell = given.shell
    own = {"lora": lora, "sequence_length": sequence_length, "price_per_hour": price_per_hour}
    if text is not None:
        _fine_tune(given, text=str(text), **own)
        return
    with shell.work() as report:
        for name, value in own.items():
            check_used(name, value, False, "it is for a language model's text, --text")
        result = forecast(given.settings(), verify=given["verify"], progress=report)
    problem = None
    if not result.prediction.stable:
        problem = f"{result.prediction.message}; choose a smaller learning rate."
    shell.deliver(
        result.to_json(),
        lambda to: _print(to, result),
        lambda folder: _write(result, folder),
        problem=problem,
    )


def _fine_tune(
    given: Given, *, text: str, lora: str | None, sequence_length: int | None,
    price_per_hour: float | None,
) -> None:  # fmt: skip
    """A language model on a text, which has too many outputs for a kernel."""
    from jaxttp.pipeline import LoraSettings, fine_tuning_task

    shell = given.shell
    with shell.work() as report:
        if lora is None:
            raise ValueError("lora is needed with text: which adapters, such as r=8,alpha=16.")
        result = fine_tuning_task(
            given.settings(), text=text, adapters=LoraSettings.read(lora),
            sequence_length=sequence_length, price_per_hour=price_per_hour,
            verify=given["verify"], progress=report,
        )  # fmt: skip
    shell.deliver(
        result.to_json(),
        lambda to: _fine_tuning.show(to, result),
        lambda folder: _fine_tuning.write(result, folder),
        problem=f"{result.found.trust}." if result.found.diverged else None,
    )


def _write(result: Any, folder: Path) -> list[Path]:
    from jaxttp.plots import save

    paths = [folder / "prediction.json", folder / "prediction.png"]
    write_json(paths[0], result.to_json())
    save(result.plot(), paths[1])
    if (columns := result.task.columns) is not None:
        paths.append(folder / "columns.json")
        write_json(paths[-1], columns.to_json())
    return paths


def _print(console: Console, result: Any) -> None:
    prediction, run = result.prediction, result.run
    print_task(console, result.task)
    if (total := result.settings.total_samples) is not None:
        console.print(f"for {total:,} samples, read off these and their halves")
    table = Table(Column(f"{prediction.metric} within", no_wrap=True))
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
            *cells(
                step,
                result.seconds.get(threshold),
                unsure.get(threshold),
                horizon=prediction.horizon,
            ),
        ]
        if real_steps is not None:
            row += cells(real_steps[threshold], real_seconds.get(threshold), stable=run.finite)
        table.add_row(*row)
    finite = run is None or run.finite
    add_targets(table, result.targets, stable=finite, horizon=prediction.horizon)
    whole = prediction.horizon * result.step_time.seconds
    row = ["all steps", str(prediction.horizon), seconds_text(whole)]
    if run is not None:
        row += [str(prediction.horizon), seconds_text(run.seconds)]
    table.add_row(*row)
    console.print(table)
    for name in ("loss", "error"):
        final = f"final {name}: predicted {float(getattr(prediction, name)[-1]):.4g}"
        final += prediction.end_in_doubt if name == "loss" else ""
        if run is not None:
            final += f", real {float(getattr(run, name)[-1]):.4g}"
        final += prediction.scale if name == "loss" else ""
        console.print(final)
    if result.settings.optimizer == "sgd":
        rate = result.settings.learning_rate
        console.print(
            f"largest stable learning rate: {prediction.max_learning_rate:.4g} (given {rate:g})"
        )
    else:
        console.print(prediction.message, soft_wrap=True)
    for line in prediction.returns:
        console.print(line, soft_wrap=True)
    if prediction.out_of_reach is not None:
        console.print(prediction.out_of_reach, soft_wrap=True)
    if prediction.trust is not None:
        console.print(f"trust: {prediction.trust}", soft_wrap=True)
    if prediction.plan is not None:
        console.print(f"plan: {prediction.plan}", soft_wrap=True)
    console.print(f"the forecast cost {prediction.cost}", soft_wrap=True)
