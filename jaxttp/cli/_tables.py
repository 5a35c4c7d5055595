"""Tables of times, and the result of a race."""

from typing import Any

from rich.console import Console
from rich.table import Column, Table

from jaxttp.cli._shell import Shell, figure, say
from jaxttp.losses.rule import step_words


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


def print_task(console: Console, task: Any) -> None:
    """What was looked at, and what of a table was left out."""
    say(console, task.description, task.note)


def deliver_race(shell: Shell, task: Any, race: Any) -> None:
    """A `jaxttp.forecast.Race`: what came first, what it cost, and what to use."""

    def show(console: Console) -> None:
        print_task(console, task)
        say(console, str(race))

    shell.deliver(
        "race",
        {"task": task.description, "note": task.note} | race.to_json(),
        show,
        {"race.png": figure(lambda: race.plot(title=task.description))},
        problem=None if race.ranking() else f"{race.advice}.",
    )
