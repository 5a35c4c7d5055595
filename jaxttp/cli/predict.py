"""`jaxttp predict`: how long training takes."""

from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from jaxttp._core.checks import check_used
from jaxttp.cli._options import Given, option, takes
from jaxttp.cli._shell import figure, say, write_json
from jaxttp.cli._tables import add_targets, cells, print_task, seconds_text, table


@takes("seconds")
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
    from jaxttp.pipeline import LoraSettings, fine_tuning_task, forecast

    shell, verify = given.shell, given["verify"]
    own = {"lora": lora, "sequence_length": sequence_length, "price_per_hour": price_per_hour}
    with shell.work() as report:
        if text is None:
            for name, value in own.items():
                check_used(name, value, False, "it is for a language model's text, --text")
            result: Any = forecast(given.settings(), verify=verify, progress=report)
        elif lora is None:
            raise ValueError("lora is needed with text: which adapters, such as r=8,alpha=16.")
        else:  # a language model has too many outputs for a kernel
            result = fine_tuning_task(
                given.settings(),
                text=str(text),
                adapters=LoraSettings.read(lora),
                sequence_length=sequence_length,
                price_per_hour=price_per_hour,
                verify=verify,
                progress=report,
            )
    files = {"prediction.png": figure(result.plot)}
    if text is not None:
        problem = f"{result.found.trust}." if result.found.diverged else None
        show = _print_fine_tuning
    else:
        stable, message = result.prediction.stable, result.prediction.message
        problem = None if stable else f"{message}; choose a smaller learning rate."
        show = _print
        if (columns := result.task.columns) is not None:
            files["columns.json"] = lambda path: write_json(path, columns.to_json())
    shell.deliver(
        "prediction", result.to_json(), lambda to: show(to, result), files, problem=problem
    )


def _print(console: Console, result: Any) -> None:
    prediction, run = result.prediction, result.run
    print_task(console, result.task)
    if (total := result.settings.total_samples) is not None:
        console.print(f"for {total:,} samples, read off these and their halves")
    real = [] if run is None else ["real steps", "real seconds"]
    rows = table(f"{prediction.metric} within", "steps", "seconds", *real)
    horizon, unsure = prediction.horizon, prediction.steps_uncertainty or {}
    for goal, step in prediction.steps.items():
        row = cells(step, result.seconds.get(goal), unsure.get(goal), horizon=horizon)
        if run is not None:
            row += cells(result.real_steps[goal], result.real_seconds.get(goal), stable=run.finite)
        rows.add_row(f"{100 * goal:g} % of its drop", *row)
    add_targets(rows, result.targets, stable=run is None or run.finite, horizon=horizon)
    row = [str(horizon), seconds_text(horizon * result.step_time.seconds)]
    row += [] if run is None else [str(horizon), seconds_text(run.seconds)]
    rows.add_row("all steps", *row)
    console.print(rows)
    for name in ("loss", "error"):
        doubt, scale = (prediction.end_in_doubt, prediction.scale) if name == "loss" else ("", "")
        ahead = f"predicted {float(getattr(prediction, name)[-1]):.4g}{doubt}"
        after = "" if run is None else f", real {float(getattr(run, name)[-1]):.4g}"
        console.print(f"final {name}: {ahead}{after}{scale}")
    rate, limit = result.settings.learning_rate, prediction.max_learning_rate
    if result.settings.optimizer == "sgd":
        console.print(f"largest stable learning rate: {limit:.4g} (given {rate:g})")
    else:
        say(console, prediction.message)
    say(
        console,
        prediction.out_of_reach,
        prediction.trust and f"trust: {prediction.trust}",
        prediction.plan and f"plan: {prediction.plan}",
        f"the forecast cost {prediction.cost}",
    )


def _print_fine_tuning(console: Console, result: Any) -> None:
    """The fine-tuning of a language model: its times by tokens seen, and what to make of it."""
    say(console, str(result.task), result.scale_words())
    clock, run, steps = result.clock, result.run, result.settings.steps
    price = [] if result.price_per_hour is None else ["price"]
    real = [] if run is None else ["real"]
    rows = table("held-out loss", "step", "between", "tokens", "seconds", *price, *real)
    for goal in result.goals:
        between = "-" if goal.earliest is None else f"{goal.earliest} - {goal.latest}"
        never = "never" if goal.earliest is not None else "see trust"
        row = [str(goal.step), between, f"{goal.tokens or 0:,}", seconds_text(goal.seconds)]
        row = row if goal.step >= 0 else [never, "-", "-", "-"]
        row += [f"{goal.cost or 0:.2f}" for _ in price]
        row += ["never" if goal.real_step < 0 else str(goal.real_step) for _ in real]
        rows.add_row(goal.words, *row)
    last = [f"{steps:,}", "", f"{steps * result.tokens_a_step:,}"]
    last += [seconds_text(clock.total_seconds), *(f"{clock.cost:.2f}" for _ in price)]
    rows.add_row("all steps", *last, *(f"{steps:,}" for _ in real))
    console.print(rows)
    for tokens, loss, off in result.tokens_and_loss():
        after = f"{loss:.4g} ± {off:.2g}" if off else f"{loss:.4g}"
        if run is not None:
            after += f", real {float(run.loss[tokens // result.tokens_a_step]):.4g}"
        console.print(f"after {tokens:,} tokens: loss {after}")
    took = None if run is None else f"the real training took {seconds_text(run.seconds)} s"
    say(console, took, *(f"trust: {line}" for line in result.trust), result.cost_words())
