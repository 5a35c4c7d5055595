"""`jaxttp sweep`: which learning rate, momentum, batch and schedule, from one kernel."""

import math
from typing import Annotated, Any

from rich.console import Console

from jaxttp.cli._options import Given, option, takes, whole_numbers
from jaxttp.cli._shell import figure, parse_numbers, say
from jaxttp.cli._tables import FASTEST, print_race, print_task, seconds_text, table
from jaxttp.losses.rule import Target


@takes(
    ("learning_rate", "momentum", "batch_size", "schedule", "weight_decay"),
    ("optimizer", "nesterov", "total_samples", "budget", "verify"),
)
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
        bool,
        option("Training", "Train all in heats to that loss, not forecast the leading again."),
    ] = False,
) -> None:
    """Forecast a grid of settings from one kernel, the leading ones again, and advise a rate."""
    from jaxttp.pipeline import sweep_task

    def numbers(name: str, text: str | None) -> tuple[float, ...]:
        return () if text is None else parse_numbers(name, text, "0.001,0.01")

    shell = given.shell
    with shell.work() as report:
        sizes: tuple[int, ...] = (0,)
        if batch_sizes is not None:
            sizes = whole_numbers("batch_sizes", batch_sizes, "16,64")
        result = sweep_task(
            given.settings(),
            learning_rates=numbers("learning_rates", learning_rates) or None,
            momenta=numbers("momenta", momenta),
            batch_sizes=[size or None for size in sizes],
            schedules=[name.strip() for name in schedules.split(",")],
            algorithms=[name.strip() for name in algorithms.split(",")],
            weight_decays=numbers("weight_decays", weight_decays),
            threshold=threshold,
            time_steps=given["seconds"],
            race_them=race,
            progress=report,
        )
    shell.deliver(
        "sweep",
        result.to_json(),
        lambda to: _print(to, result),
        {"sweep.csv": result.sweep.to_csv, "sweep.png": figure(result.plot)},
        problem=_problem(result),
    )


def _problem(result: Any) -> str | None:
    """What stands in the way of an advice."""
    if result.race is not None:
        return None if result.race.ranking() else f"{result.race.advice}."
    if result.fastest is not None:
        return None
    return f"{result.sweep.hint(result.threshold)}."


def _print(console: Console, result: Any) -> None:
    from jaxttp.forecast.swept import SHARED

    swept, threshold, race = result.sweep, result.threshold, result.race
    print_task(console, result.task)
    if race is not None and race.settings != swept.settings:
        console.print("forecasts of gradient descent alone, to choose the goal:")
    goal, cost = swept.goal(threshold), swept.cost(threshold)
    for heading, rows in (
        (f"fewest steps to {goal}", swept.ranking(threshold)[:FASTEST]),
        (f"cheapest to {goal}", swept.pareto(threshold)),
    ):
        settings = table("setting", "steps", "seconds", "loss at the end", "error")
        settings.title = heading
        for i in rows:
            settings.add_row(
                swept.named(i),
                swept.time_words(i, threshold),
                seconds_text(None if swept.step_seconds is None else cost[i]),
                f"{swept.final_loss[i]:.4g}",
                f"{swept.final_error[i]:.4g}",
            )
        console.print(settings)
    limit = result.max_learning_rate
    is_shared = swept.shared and threshold == swept.ranked_by
    is_own_drop = swept.rule.kind == "relative" and not isinstance(threshold, Target)
    say(
        console,
        f"{goal} is {SHARED}; --target-loss names another" if is_shared else None,
        f"steps to {goal}: each setting is measured by its own drop, so look at the loss at the "
        "end, too (--target-loss measures all by the same loss)"
        if is_own_drop
        else None,
        "cheapest: those that no other setting beats in both cost and loss at the end",
        f"{len(swept.settings)} settings, {int(swept.stable.sum())} of them stable; {swept.depth}",
        swept.warning,
        f"largest stable learning rate: {limit:.4g} (no momentum)" if limit < math.inf else None,
    )
    if race is not None:
        print_race(console, race)
        return
    if threshold == swept.ranked_by:
        say(console, swept.advice)
    else:
        best, time = swept.named(result.fastest), swept.time_words(result.fastest, threshold)
        console.print(f"fastest to {goal}: {best} ({time} steps)")
    trust = swept.trust.get(result.fastest)
    say(console, trust and f"trust: {trust}")
