"""`jaxttp sweep`: which learning rate, momentum, batch and schedule, from one kernel."""

import math
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from jaxttp.cli._options import Given, because, takes
from jaxttp.cli._race import FASTEST, print_race
from jaxttp.cli._shell import parse_numbers, print_task, seconds_text, write_json
from jaxttp.cli._vocabulary import flag, option
from jaxttp.losses.rule import Target


@takes(
    without={
        "learning_rate": "`--learning-rates` names several",
        "momentum": "`--momenta` names several",
        "batch_size": "`--batch-sizes` names several",
        "schedule": "`--schedules` names several",
        **because("`--algorithms` names several", "optimizer", "nesterov"),
        "weight_decay": "`--weight-decays` names several",
        "total_samples": "settings are compared on the samples drawn; `predict` knows it",
        "budget": "every setting that is followed has that of one forecast",
        "verify": "it forecasts several trainings: give one of them to `predict --verify`",
    }
)  # fmt: skip
def sweep(
    given: Given,
    *,
    learning_rates: Annotated[
        str | None, option("Training", "As 0.001,0.01 (default: 16 around the limit, 6 of Adam).")
    ] = None,
    algorithms: Annotated[
        str, option("Training", "Of sgd, nesterov, adam, adamw; the last two for a training each.")
    ] = "sgd",
    momenta: Annotated[
        str, option("Training", "Of sgd and nesterov, from 0 to below 1.")
    ] = "0,0.9",
    weight_decays: Annotated[
        str | None, option("Training", "As 0,0.01 (default: none, and 0.01 of adamw).")
    ] = None,
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
            algorithms=[name.strip() for name in algorithms.split(",")],
            weight_decays=_decays(weight_decays),
            threshold=threshold,
            time_steps=given["seconds"],
            race_them=race,
            progress=report,
        )
    shell.deliver(
        result.to_json(),
        lambda to: _print(to, result),
        lambda folder: _write(result, folder),
        problem=_problem(result),
    )


def _problem(result: Any) -> str | None:
    """What stands in the way of an advice."""
    if result.race is not None:
        return None if result.race.ranking() else f"{result.race.advice}."
    if result.fastest is not None:
        return None
    goal = result.sweep.goal(result.threshold)
    if result.sweep.nearest(result.threshold):
        return f"no setting gets to {goal}: {result.sweep.remedy(result.threshold)}."
    return f"no setting gets to {goal} stably; try {_lower(result)}, or more steps."


def _lower(result: Any) -> str:
    limit = result.max_learning_rate
    return f"rates below {limit:.4g}" if math.isfinite(limit) else "other rates"


def _decays(text: str | None) -> tuple[float, ...]:
    return () if text is None else tuple(parse_numbers("weight_decays", text, "0,0.01"))


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
    if result.race is not None and result.race.settings != swept.settings:
        console.print("forecasts of gradient descent alone, to choose the goal:")
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
                swept.named(i) + risk, swept.time_words(i, result.threshold), timed,
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
    if math.isfinite(result.max_learning_rate):
        limit = f"{result.max_learning_rate:.4g} (no momentum)"
        console.print(f"largest stable learning rate: {limit}")
    if result.race is not None:
        print_race(console, result.race)
    elif result.fastest is not None:
        _print_advice(console, result)


def _print_advice(console: Console, result: Any) -> None:
    swept = result.sweep
    if result.threshold == swept.ranked_by:
        console.print(swept.advice, soft_wrap=True)
        if swept.edge:
            console.print(swept.edge, soft_wrap=True)
        if swept.tie:
            console.print(swept.tie, soft_wrap=True)
    else:
        goal, best = swept.goal(result.threshold), swept.named(result.fastest)
        time = swept.time_words(result.fastest, result.threshold)
        console.print(f"fastest to {goal}: {best} ({time} steps)")
    if swept.trust.get(result.fastest) is not None:
        console.print(f"trust: {swept.trust[result.fastest]}", soft_wrap=True)


def _cheaper(swept: Any) -> str:
    """What a race would cost, where that is less than the sweep did and can be said."""
    from jaxttp.forecast.race import expected

    order, steps = swept.ranking(), {one.steps for one in swept.settings}
    sizes = {one.batch_size for one in swept.settings}
    goal = swept.ranked_by
    to_loss = isinstance(goal, Target) and goal.curve_name == "loss"
    if not order or len(steps) > 1 or len(sizes) > 1 or not to_loss:
        return ""
    cost = expected(len(swept.settings), steps.pop(), int(swept.times()[order[0]]))
    return f"; a race to the goal (--race) about {cost:.2g}" if cost < swept.trainings else ""
