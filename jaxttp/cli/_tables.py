"""Tables of times."""

from rich.table import Column, Table

from jaxttp.losses.rule import step_words


def table(first: str, *columns: str) -> Table:
    """A table whose first column is text, the others numbers."""
    return Table(Column(first, no_wrap=True), *(Column(name, justify="right") for name in columns))


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
