"""`jaxttp sweep`: which learning rate, momentum, batch and schedule, from one kernel."""

from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from jaxttp.cli._options import Given, because, takes
from jaxttp.cli._shell import parse_numbers, print_task, seconds_text, write_json
from jaxttp.cli._vocabulary import flag, option
from jaxttp.rule import Target

FASTEST = 5
"""Settings in the first table."""


@takes(
    without={
        "learning_rate": "`--learning-rates` names several",
        "momentum": "`--momenta` names several",
        "batch_size": "`--batch-sizes` names several",
        "schedule": "`--schedules` names several",
        **because(
            "all settings are heavy-ball descent; `predict` forecasts others one by one",
            "optimizer", "nesterov", "weight_decay",
        ),
        "total_samples": "settings are compared on the samples drawn; `predict` knows it",
        "budget": "every setting that is followed has that of one forecast",
        "verify": "it forecasts several trainings: give one of them to `predict --verify`",
    }
)  # fmt: skip
def sweep(
    given: Given,
    *,
    learning_rates: Annotated[
        str | None, option("Training", "As 0.001,0.01 (default: 16 around the largest stable one).")
    ] = None,
    momenta: Annotated[str, option("Training", "Heavy-ball, from 0 to below 1.")] = "0,0.9",
    batch_sizes: Annotated[
        str | None, option("Training", "As 16,64; 0 stands for all samples (default: all).")
    ] = None,
    schedules: Annotated[
        str, option("Training", "Of constant, linear, cosine, warmup_cosine.")
    ] = "constant",
    threshold: Annotated[
        float | None,
        option("Goals", "What the advice is for (default: middle one, or first target)."),
    ] = None,
    race: Annotated[
        bool, flag("Training", "Train all in heats to that loss, not forecast the leading again.")
    ] = False,
) -> None:
    """Forecast a grid of settings from one kernel, the leading ones again, and advise a rate."""
    from jaxttp.pipeline import sweep_task

    shell = given.shell
    with shell.work() as report:
        rates = None
        if learning_rates is not None:
            rates = parse_numbers("learning_rates", learning_rates, "0.001,0.01")
        result = sweep_task(
            given.settings(),
            learning_rates=rates,
            momenta=parse_numbers("momenta", momenta, "0,0.9"),
            batch_sizes=_batches(batch_sizes),
            schedules=[name.strip() for name in schedules.split(",")],
            threshold=threshold,
            time_steps=given["seconds"],
            race_them=race,
            progress=report,
        )
    problem = None
    if result.fastest is None:
        problem = (
            f"no setting gets to {result.sweep.goal(result.threshold)} stably; try rates below "
            f"{result.max_learning_rate:.4g}, or more steps."
        )
    shell.deliver(
        result.to_json(),
        lambda to: _print(to, result),
        lambda folder: _write(result, folder),
        problem=problem,
    )


def _batches(text: str | None) -> tuple[int | None, ...]:
    if text is None:
        return (None,)
    numbers = parse_numbers("batch_sizes", text, "16,64")
    if any(number % 1 != 0 or number < 0 for number in numbers):
        raise ValueError(f"batch_sizes={text!r} must be whole numbers, 0 for all samples.")
    return tuple(int(number) or None for number in numbers)


def _write(result: Any, folder: Path) -> list[Path]:
    from jaxttp.plots import save

    paths = [folder / name for name in ("sweep.json", "sweep.csv", "sweep.png")]
    write_json(paths[0], result.to_json())
    result.sweep.to_csv(paths[1])
    save(result.plot(), paths[2])
    return paths


def _print(console: Console, result: Any) -> None:
    from jaxttp.forecast.swept import SHARED

    swept = result.sweep
    print_task(console, result.task)
    goal = swept.goal(result.threshold)
    cost = swept.cost(result.threshold)
    for heading, chosen in (
        (f"fewest steps to {goal}", swept.ranking(result.threshold)[:FASTEST]),
        (f"cheapest to {goal}", swept.pareto(result.threshold)),
    ):
        table = Table("setting", title=heading)
        for title in ("steps", "seconds", "loss at the end", "error"):
            table.add_column(title, justify="right")
        for i in chosen:
            timed = "-" if swept.step_seconds is None else seconds_text(cost[i])
            risk = " (may not train)" if i in swept.unsure else ""
            table.add_row(
                str(swept.settings[i]) + risk, swept.time_words(i, result.threshold), timed,
                f"{swept.final_loss[i]:.4g}", f"{swept.final_error[i]:.4g}",
            )  # fmt: skip
        console.print(table)
    if swept.shared and result.threshold == swept.ranked_by:
        console.print(f"{goal} is {SHARED}; --target-loss names another", soft_wrap=True)
    if swept.rule == "relative" and not isinstance(result.threshold, Target):
        console.print(
            f"steps to {goal}: each setting is measured by its own drop, so look at the loss at "
            "the end, too (--target-loss measures all by the same loss)",
            soft_wrap=True,
        )
    console.print(
        "cheapest: those that no other setting beats in both cost and loss at the end",
        soft_wrap=True,
    )
    console.print(
        f"{len(swept.settings)} settings, {int(swept.stable.sum())} of them stable; {swept.depth}",
        soft_wrap=True,
    )
    if swept.price and result.race is None:
        console.print(swept.price + _cheaper(swept), soft_wrap=True)
    if swept.warning is not None:
        console.print(swept.warning, soft_wrap=True)
    console.print(f"largest stable learning rate: {result.max_learning_rate:.4g} (no momentum)")
    if result.race is not None:
        console.print(f"race, trained for real: {result.race.price}", soft_wrap=True)
        console.print(result.race.advice, soft_wrap=True)
    elif result.fastest is not None:
        if result.threshold == swept.ranked_by:
            console.print(swept.advice, soft_wrap=True)
        else:
            best = swept.settings[result.fastest]
            time = swept.time_words(result.fastest, result.threshold)
            console.print(f"fastest to {goal}: {best} ({time} steps)")
        if swept.tie and result.threshold == swept.ranked_by:
            console.print(swept.tie, soft_wrap=True)
        if swept.trust.get(result.fastest) is not None:
            console.print(f"trust: {swept.trust[result.fastest]}", soft_wrap=True)


def _cheaper(swept: Any) -> str:
    """What a race would cost, where that is less than the sweep did and can be said."""
    from jaxttp.forecast.racing import expected

    order, steps = swept.ranking(), {one.steps for one in swept.settings}
    sizes = {one.batch_size for one in swept.settings}
    goal = swept.ranked_by
    to_loss = isinstance(goal, Target) and goal.curve_name == "loss"
    if not order or len(steps) > 1 or len(sizes) > 1 or not to_loss:
        return ""
    cost = expected(len(swept.settings), steps.pop(), int(swept.times()[order[0]]))
    return f"; a race to the goal (--race) about {cost:.2g}" if cost < swept.trainings else ""
