"""One vocabulary: a setting has the same name, words and default in every command that has it."""

import inspect
import re

import pytest
import typer
from typer.testing import CliRunner

from jaxttp.cli import _options, app
from jaxttp.cli._options import PANELS, SHARED, Options
from jaxttp.pipeline import Settings

COMMANDS = typer.main.get_command(app).commands
PARSERS = {name: one.parse for name, one in SHARED.items()}


def options(command):
    """What the parser knows, by the parameter's name."""
    return {one.name: one for one in COMMANDS[command].params if one.name in SHARED}


def test_every_command_about_training_has_the_whole_task():
    for command in ("predict", "sweep", "spectrum", "report"):
        assert set(_options.TASK) <= set(options(command)), command
    for name in _options.OUTPUT:
        assert all(name in options(one) for one in COMMANDS if one != "doctor"), name


def test_defaults_are_those_of_the_settings():
    """The command line and Python agree on what is not said."""
    assert (
        Options({name: one.default for name, one in SHARED.items()}, SHARED).settings()
        == Settings()
    )


def test_settings_have_one_name():
    """An option is a field of Settings, or is about how the result is told, or by whom."""
    told = {"verify", "seconds", *_options.OUTPUT}
    fields = inspect.signature(Settings).parameters
    assert set(SHARED) - told <= set(fields)
    assert set(fields) - set(SHARED) == {"sketch_dim"}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_option_in_its_group(command):
    environment = {"COLUMNS": "100", "FORCE_COLOR": None}
    shown = CliRunner().invoke(app, [command, "--help"], env=environment)
    assert (shown.exit_code, shown.stderr) == (0, "")
    groups = re.findall(r"╭─ (\w+) ─", shown.stdout)
    wanted = {one.rich_help_panel for one in COMMANDS[command].params}
    assert [one for one in groups if one != "Options"] == [p for p in PANELS if p in wanted]
    for one in COMMANDS[command].params:
        assert one.opts[0] in shown.stdout


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("hidden", {None: None, "64,32": (64, 32)}),
        ("classes", {None: None, "5": 5, "0,3": (0, 3)}),
        ("samples_per_class", {"all": None, "30": 30, "few": "few"}),
        ("mesh", {None: None, "all": "all", "4": 4}),
        ("relinearize", {"3": 3, "auto": "auto"}),
        ("budget", {"0.1": 0.1, "auto": "auto"}),
    ],
)
def test_numbers_out_of_words(name, good):
    """What is no number is left to the pipeline, which refuses it by name."""
    assert {text: PARSERS[name](text) for text in good} == good


def test_targets_are_lists_or_given_several_times():
    assert PARSERS["target_loss"](["0.3,0.1", "0.05"]) == (0.3, 0.1, 0.05)
    assert PARSERS["target_loss"](None) == ()
