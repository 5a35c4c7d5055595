"""Tables of times, and what of a race is told."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from jaxttp.cli._shell import say
from jaxttp.losses.rule import step_words

FASTEST = 5
"""Settings in the first table of a sweep or a race."""


def table(first: str, *others: str) -> Table:
    """A table whose first column is words, the others numbers."""
    return Table(Column(first, no_wrap=True), *(Column(name, justify="right") for name in others))


def seconds_text(seconds: float | None) -> str:
    """Seconds to hundredths; below one second to two digits."""
    if seconds is None:
        return "-"
    return f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.2g}"


def cells(
    step: int,
    seconds: float | None,
    unsure: int | None = None,
    *,
    stable: bool = True,
    horizon: int | None = None,
) -> list[str]:
    """Steps and seconds; of a run that is not stable nothing is reached."""
    if step < 0:
        return ["not reached" if stable else "diverges", "-"]
    return [step_words(step, unsure, horizon), seconds_text(seconds)]


def add_targets(
    rows: Table,
    targets: Iterable[Any],
    *,
    stable: bool,
    between: int = 0,
    horizon: int | None = None,
) -> None:
    """A row for every `jaxttp.pipeline.Arrival`.

    Args:
        rows: with columns for the goal, steps, seconds, and those of a real run if there is one.
        targets: the arrivals.
        stable: whether the real run was.
        between: columns of the table that say nothing of targets, before those of the real run.
        horizon: of the forecast.
    """
    for one in targets:
        ahead = cells(one.steps, one.seconds, one.unsure, horizon=horizon)
        row = [one.words, *ahead, *["-"] * between]
        if one.real_steps is not None:
            row += cells(one.real_steps, one.real_seconds, stable=stable)
        rows.add_row(*row)


def print_task(console: Console, task: Any) -> None:
    """What was looked at, and what of a table was left out."""
    say(console, task.description, task.note)


def print_race(console: Console, race: Any) -> None:
    """Who came first, what it cost, and what to use, of a `jaxttp.forecast.Race`."""
    goal = "the lowest loss" if race.goal is None else race.goal.words()
    rows = Table("setting", "steps", "loss", title=f"first to {goal} in the race")
    for i in race.ranking()[:FASTEST]:
        steps = race.times[i] if race.goal is not None else race.trained[i]
        rows.add_row(race.named(i), str(steps), f"{race.losses[i][-1]:.4g}")
    console.print(rows)
    starts = f"starting points, first to last: {', '.join(race.order)}" if race.starts else None
    say(console, starts, f"race, trained for real: {race.price}", race.advice)
