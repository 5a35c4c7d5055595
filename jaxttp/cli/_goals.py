"""Cells of tables that say when a goal is reached."""

from collections.abc import Iterable
from typing import Any

from rich.table import Table

from jaxttp.cli._shell import seconds_text
from jaxttp.losses.rule import step_words


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
    return [step_words(step, unsure, horizon), "-" if seconds is None else seconds_text(seconds)]


def add_targets(
    table: Table,
    targets: Iterable[Any],
    *,
    stable: bool,
    between: int = 0,
    horizon: int | None = None,
) -> None:
    """A row for every `jaxttp.pipeline.Arrival`.

    Args:
        table: with columns for the goal, steps, seconds, and those of a real run if there is one.
        targets: the arrivals.
        stable: whether the real run was.
        between: columns of the table that say nothing of targets, before those of the real run.
        horizon: of the forecast.
    """
    for one in targets:
        row = [
            one.words,
            *cells(one.steps, one.seconds, one.unsure, horizon=horizon),
            *["-"] * between,
        ]
        if one.real_steps is not None:
            row += cells(one.real_steps, one.real_seconds, stable=stable)
        table.add_row(*row)
