"""`jaxttp predict`: how long training takes."""

from pathlib import Path
from typing import Any

from rich.console import Console

from jaxttp._core.checks import check_used
from jaxttp._core.progress import readable_time
from jaxttp.cli._options import Option, Options, takes
from jaxttp.cli._shell import figure, say
from jaxttp.cli._tables import cells, seconds_text, table


@takes(
    "seconds",
    text=Option("Task", "To fine-tune --model on: a file or a folder.", type=Path),
    lora=Option("Task", "Adapters: r=8,alpha=16,modules=q_proj+v_proj.", type=str),
    train=Option("Forecast", "Train for real, without a forecast.", False, flags=("--train",)),
    sequence_length=Option("Task", "Tokens of its sequences (default: 128).", type=int),
)
def predict(options: Options) -> None:
    """Forecast how long training takes, in steps and seconds, without training."""
    from jaxttp.pipeline import LoraSettings, fine_tuning_task, forecast

    shell, text, verify = options.shell, options["text"], options["verify"]
    if options["train"]:
        _train(options)
        return
    with shell.work() as report:
        if text is None:
            for name in ("lora", "sequence_length"):
                check_used(name, options[name], False, "it is for a language model's text, --text")
            result: Any = forecast(options.settings(), verify=verify, progress=report)
        elif options["lora"] is None:
            raise ValueError("lora is needed with text: which adapters, such as r=8,alpha=16.")
        else:  # a language model has too many outputs for a kernel
            result = fine_tuning_task(
                options.settings(), text=str(text), adapters=LoraSettings.read(options["lora"]),
                sequence_length=options["sequence_length"], verify=verify, progress=report,
            )  # fmt: skip
    if text is not None:
        problem = f"{result.found.warnings}." if result.found.diverged else None
    else:
        stable, message = result.prediction.stable, result.prediction.message
        problem = None if stable else f"{message}; choose a smaller learning rate."

    def show(console: Console) -> None:
        _print(console, result) if text is None else say(console, str(result))

    files = {"prediction.png": figure(result.plot)}
    shell.deliver("prediction", result.to_json(), show, files, problem=problem)


def _train(options: Options) -> None:
    from jaxttp.pipeline import train_task

    shell = options.shell
    with shell.work() as report:
        for name in ("text", "verify"):
            value = options[name] or None
            check_used(name, value, False, "--train trains a task of --data, without a forecast")
        result = train_task(options.settings(), progress=report)

    def show(console: Console) -> None:
        say(console, str(result.task))
        rows = table(result.settings.metric, "real steps", "real seconds")
        for words, step in result.steps.items():
            seconds = step * result.step_seconds
            rows.add_row(words, *cells(step, seconds, stable=result.run.finite))
        rows.add_row("all steps", str(result.settings.steps), seconds_text(result.run.seconds))
        console.print(rows)
        for name in ("loss", "error"):
            console.print(f"final {name}: {float(getattr(result.run, name)[-1]):.4g}")

    shell.deliver("training", result.to_json(), show, {"training.png": figure(result.plot)})


def _print(console: Console, result: Any) -> None:
    prediction, run = result.prediction, result.run
    seconds = prediction.horizon * result.step_time.seconds
    if run is None and seconds < 60 and result.settings.total_samples is None:
        say(console, f"this training takes about {readable_time(seconds)}: train it with --train")
    say(console, str(result.task))
    if (total := result.settings.total_samples) is not None:
        console.print(f"for {total:,} samples, read off these and their halves")
    real = [] if run is None else ["real steps", "real seconds"]
    rows = table(prediction.metric, "steps", "seconds", *real)
    horizon = prediction.horizon
    for arrival in result.arrivals.values():
        row = cells(arrival.steps, arrival.seconds, arrival.unsure, horizon=horizon)
        if run is not None:
            row += cells(arrival.real_steps, arrival.real_seconds, stable=run.finite)
        rows.add_row(arrival.words, *row)
    row = [str(horizon), seconds_text(seconds)]
    row += [] if run is None else [str(horizon), seconds_text(run.seconds)]
    rows.add_row("all steps", *row)
    console.print(rows)
    for name in ("loss", "error"):
        error, scale = (prediction.end_in_doubt, prediction.scale) if name == "loss" else ("", "")
        predicted = f"predicted {float(getattr(prediction, name)[-1]):.4g}{error}"
        real = "" if run is None else f", real {float(getattr(run, name)[-1]):.4g}"
        console.print(f"final {name}: {predicted}{real}{scale}")
    rate, limit = result.settings.learning_rate, prediction.max_learning_rate
    if result.settings.optimizer == "sgd":
        console.print(f"largest stable learning rate: {limit:.4g} (given {rate:g})")
    else:
        say(console, prediction.message)
    say(
        console,
        prediction.warnings and f"warning: {prediction.warnings}",
        prediction.plan and f"plan: {prediction.plan}",
        f"the forecast cost {prediction.cost}",
    )
