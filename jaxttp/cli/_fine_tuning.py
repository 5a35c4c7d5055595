"""What `jaxttp predict --text` prints and writes: the fine-tuning of a language model."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from jaxttp.cli._shell import seconds_text, write_json


def write(result: Any, folder: Path) -> list[Path]:
    """Numbers and picture, under the names that `predict` always has."""
    from jaxttp.plots import save

    paths = [folder / "prediction.json", folder / "prediction.png"]
    write_json(paths[0], result.to_json())
    save(result.plot(), paths[1])
    return paths


def show(console: Console, result: Any) -> None:
    """The table, and what to make of it."""
    console.print(str(result.task), soft_wrap=True)
    console.print(result.scale_words(), soft_wrap=True)
    table = Table(Column("held-out loss within", no_wrap=True))
    priced, real = result.price_per_hour is not None, result.run is not None
    titles = ["step", "between", "tokens", "seconds", *["price"] * priced, *["real"] * real]
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for one in result.goals:
        table.add_row(*_cells(one, priced=priced, real=real))
    clock = result.clock
    row = [
        "all steps",
        f"{result.settings.steps:,}",
        "",
        f"{result.settings.steps * result.tokens_a_step:,}",
        seconds_text(clock.total_seconds),
    ]
    row += [f"{clock.cost:.2f}"] if priced else []
    row += [f"{result.settings.steps:,}"] * real
    table.add_row(*row)
    console.print(table)
    for tokens, loss, off in result.tokens_and_loss():
        after = f"{loss:.4g} ± {off:.2g}" if off else f"{loss:.4g}"
        line = f"after {tokens:,} tokens: loss {after}"
        if real:
            line += f", real {float(result.run.loss[tokens // result.tokens_a_step]):.4g}"
        console.print(line)
    if real:
        console.print(f"the real training took {seconds_text(result.run.seconds)} s")
    for line in result.trust:
        console.print(f"trust: {line}", soft_wrap=True)
    console.print(result.cost_words(), soft_wrap=True)


def short(count: int) -> str:
    """A large number to three digits.

    Example:
        >>> [short(n) for n in (950, 46_848, 1_250_000, 3_000_000_000)]
        ['950', '46.8k', '1.25M', '3G']
    """
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 1000)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def _cells(one: Any, *, priced: bool, real: bool) -> list[str]:
    """A row of the table."""
    bounded = one.earliest is not None
    ends = [str(end) if end >= 0 else "never" for end in (one.earliest, one.latest) if bounded]
    words = one.words.removeprefix("within ").removeprefix("loss ")
    if one.step < 0:
        row = [words, "never" if bounded else "see trust", "-", "-", "-", *["-"] * priced]
    else:
        row = [words, str(one.step), " - ".join(ends) or "-", short(one.tokens),
               seconds_text(one.seconds), *[f"{one.cost or 0:.2f}"] * priced]  # fmt: skip
    if real:
        row.append(str(one.real_step) if one.real_step >= 0 else "never")
    return row
