"""A race on the console."""

from typing import Any

from rich.console import Console
from rich.table import Table

FASTEST = 5
"""Settings in the first table."""


def print_race(console: Console, race: Any) -> None:
    """Who came first, what it cost, and what to use.

    Args:
        console: where to.
        race: a `jaxttp.forecast.Race`.
    """
    goal = "the lowest loss" if race.goal is None else race.goal.words()
    table = Table("setting", "steps", "loss", title=f"first to {goal} in the race")
    for i in race.ranking()[:FASTEST]:
        steps = race.times[i] if race.goal is not None else race.trained[i]
        table.add_row(race.named(i), str(steps), f"{race.losses[i][-1]:.4g}")
    console.print(table)
    if race.starts:
        console.print(f"starting points, first to last: {', '.join(race.order)}", soft_wrap=True)
    console.print(f"race, trained for real: {race.price}", soft_wrap=True)
    console.print(race.advice, soft_wrap=True)
    if race.edge:
        console.print(race.edge, soft_wrap=True)
