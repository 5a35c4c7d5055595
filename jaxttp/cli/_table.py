"""Which command has which of the shared options, and why not: the text of docs/commands.md."""

import dataclasses
from collections.abc import Mapping

from jaxttp.cli._options import Taken
from jaxttp.cli._vocabulary import (
    DEVICES,
    FORECAST,
    GOALS,
    OUTPUT,
    SHARED,
    TASK,
    TRAINING,
    Declared,
)

GROUPS: Mapping[str, Mapping[str, Declared]] = {
    "Task": TASK, "Training": TRAINING, "Goals": GOALS, "Forecast": {**FORECAST, **DEVICES},
    "Output": OUTPUT,
}  # fmt: skip
LEFT_OUT = ("doctor",)
"""Commands without a task."""


def vocabularies() -> dict[str, Taken]:
    """What every command takes of the vocabulary, by the command's name.

    Example:
        >>> vocabularies()["sweep"].without["momentum"]
        '`--momenta` names several'
    """
    from jaxttp.cli import app

    found = {}
    for command in app.registered_commands:
        taken = getattr(command.callback, "taken", None)
        if isinstance(taken, Taken) and command.name is not None:
            found[command.name] = taken
    return found


def flag(name: str) -> str:
    """How an option is written.

    Example:
        >>> flag("batch_size"), flag("as_json")
        ('--batch-size', '--json')
    """
    return "--" + name.removeprefix("as_").replace("_", "-")


def settings_table() -> str:
    """Commands and settings as a table in Markdown, with a reason for every hole."""
    from jaxttp.pipeline import Settings

    several = {name: one for name, one in vocabularies().items() if name not in LEFT_OUT}
    notes: dict[str, int] = {}

    def note(reason: str) -> int:
        return notes.setdefault(reason, len(notes) + 1)

    def cell(taken: Taken, name: str) -> str:
        if name in taken.without:
            return f"– <sup>{note(taken.without[name])}</sup>"
        other = taken.instead.get(name)
        return "yes" if other is None else f"yes <sup>{note(other.reason)}</sup>"

    fields = {field.name for field in dataclasses.fields(Settings)}
    lines = [
        "# Commands and their settings",
        "",
        "Made by `jaxttp.cli._table.settings_table()`; a test holds this file against it. An",
        "option means the same in every command that has it, and is a field of the same name of",
        "`jaxttp.pipeline.Settings` where the last column says so. `jaxttp COMMAND --help` tells",
        "the rest; `jaxttp doctor` examines the machine and has options for its output alone.",
        "",
        "| option | " + " | ".join(f"`{name}`" for name in several) + " | in `Settings` |",
        "|---|" + "---|" * (len(several) + 1),
    ]
    for group, options in GROUPS.items():
        lines.append(f"| **{group}** |" + " |" * (len(several) + 1))
        for name in options:
            row = [cell(taken, name) for taken in several.values()]
            row.append("yes" if name in fields else "")
            lines.append(f"| `{flag(name)}` | " + " | ".join(row) + " |")
    lines += ["", "Why not, or why otherwise:", ""]
    lines += [f"{number}. {reason}" for reason, number in notes.items()]
    return "\n".join(lines) + "\n"


def holes() -> dict[tuple[str, str], str]:
    """(command, option) -> why the command does not have it.

    Example:
        >>> holes()["spectrum", "steps"]
        'a kernel before training depends on no training'
    """
    return {
        (command, name): taken.without[name]
        for command, taken in vocabularies().items()
        for name in SHARED
        if name in taken.without
    }
