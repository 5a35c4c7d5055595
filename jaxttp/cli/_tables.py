"""Tables of times."""

from typing import Any

from rich.console import Console
from rich.table import Column, Table

from jaxttp.cli._shell import say
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
