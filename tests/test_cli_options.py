"""One vocabulary: a setting has the same name, words and default in every command that has it."""

import inspect
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from jaxttp.cli import _vocabulary, app
from jaxttp.cli._options import Given, Instead, takes
from jaxttp.cli._table import flag, holes, settings_table, vocabularies
from jaxttp.cli._vocabulary import PANELS, SHARED
from jaxttp.pipeline import Settings

COMMANDS = typer.main.get_command(app).commands
TYPES = {one.name: one.callback.__annotations__ for one in app.registered_commands}
WITH_TASK = sorted(set(COMMANDS) - {"doctor"})
DOCS = Path(__file__).parents[1] / "docs" / "commands.md"


def options(command):
    """What the parser knows, by the parameter's name."""
    return {one.name: one for one in COMMANDS[command].params if one.name in SHARED}


def test_every_command_takes_the_vocabulary():
    assert set(vocabularies()) == set(COMMANDS)
    # the commands that answer a question about training have the task in common, all of it
    for command in ("predict", "sweep", "spectrum", "report"):
        assert set(_vocabulary.TASK) <= set(options(command)), command
    for name in ("data", "seed", "output", "as_json", "quiet", "verbose", "no_cache"):
        assert all(name in options(command) for command in WITH_TASK), name


def test_an_option_is_the_same_wherever_it_is():
    for name in SHARED:
        seen = {}
        for command in COMMANDS:
            one = options(command).get(name)
            if one is not None and name not in vocabularies()[command].instead:
                kind = str(TYPES[command][name].__origin__)
                seen[command] = (*one.opts, one.help, one.default, kind, one.rich_help_panel)
        assert len(set(seen.values())) == 1, seen


def test_holes_are_those_that_have_a_reason():
    missing = {
        (command, name) for command in COMMANDS for name in SHARED if name not in options(command)
    }
    assert missing == set(holes())
    for (command, name), reason in holes().items():
        assert len(reason.split()) > 2, (command, name)


def test_what_differs_has_a_reason_too():
    for command, taken in vocabularies().items():
        for name, other in taken.instead.items():
            assert name in options(command)
            assert len(other.reason.split()) > 2, (command, name)


def test_defaults_are_those_of_the_settings():
    """The command line and Python agree on what is not said."""
    given = Given({name: one.default for name, one in SHARED.items()})
    assert given.settings() == Settings()


def test_settings_have_one_name():
    """An option is a field of Settings, or is about how the result is told, or by whom."""
    told = {"verify", "seconds", "distributed", *_vocabulary.OUTPUT}
    fields = inspect.signature(Settings).parameters
    assert set(SHARED) - told <= set(fields)
    assert set(fields) - set(SHARED) == {"sketch_dim", "head_scale"}


def test_the_table_in_the_docs_is_up_to_date():
    text = settings_table()
    assert DOCS.read_text() == text, "python -c 'from jaxttp.cli._table import settings_table; " \
        "print(settings_table(), end=\"\")' > docs/commands.md"  # fmt: skip
    rows = [line for line in text.splitlines() if line.startswith("| `--")]
    assert len(rows) == len(SHARED)
    assert {len(line.split(" | ")) for line in rows} == {len(WITH_TASK) + 2}
    assert [flag(name) for name in ("as_json", "learning_rate")] == ["--json", "--learning-rate"]


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_groups_and_is_short(command, columns):
    environment = {"COLUMNS": str(columns), "FORCE_COLOR": None}
    shown = CliRunner().invoke(app, [command, "--help"], env=environment)
    assert (shown.exit_code, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    if columns == 100:
        assert len(lines) <= 66  # predict has the text of a language model, too
    groups = [match[1] for line in lines if (match := re.match(r"╭─ (\w+) ─", line))]
    wanted = {one.rich_help_panel for one in COMMANDS[command].params} - {None}
    assert set(groups) - {"Options"} == wanted
    assert [one for one in groups if one != "Options"] == [p for p in PANELS if p in wanted]
    text = " ".join(shown.stdout.split())
    for one in COMMANDS[command].params:
        assert one.opts[0] in text


def test_a_command_that_knows_no_such_option_is_no_command():
    with pytest.raises(ValueError, match=r"takes: colour are no shared options\."):
        takes(without={"colour": "there is none"})
    with pytest.raises(ValueError, match=r"takes: shade are no shared options\."):
        takes(instead={"shade": Instead("there is none")})
