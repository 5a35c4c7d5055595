"""`--mesh`: the same command line, with four virtual devices and with one."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxttp.cli import app
from jaxttp.cli._vocabulary import parse_mesh

TASK = ["--data", "wine", "--samples-per-class", "7"]
PREDICT = ["predict", *TASK, "--steps", "12", "--learning-rate", "0.1"]


def run(*arguments):
    """A command as users run it, in a process with four virtual devices."""
    given = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, "-m", "jaxttp", *arguments, "--json"]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_same_command_line_gives_the_same_numbers():
    one, spread = (run(*PREDICT, *mesh) for mesh in ((), ("--mesh", "4")))
    assert spread["hyperparameters"].pop("mesh") == 4
    assert one["hyperparameters"].pop("mesh") is None
    for name in ("steps", "hyperparameters", "trust", "plan", "stable", "task"):
        assert spread[name] == one[name]
    np.testing.assert_allclose(spread["loss"], one["loss"], rtol=2e-5)  # float32, summed otherwise


def test_a_number_or_all():
    assert [parse_mesh(text) for text in (None, "all", "3")] == [None, "all", 3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*PREDICT, "--mesh", "some"], "mesh='some' must be a number of devices, or all."),
        ([*PREDICT, "--mesh", "64"], "mesh=64 asks for 64 devices, and JAX sees 4 (cpu); give at "),
        ([*PREDICT, "--mesh", "2", "--optimizer", "adam"], "mesh=2 does nothing here: optimizer="),
        (["spectrum", *TASK, "--mesh", "0"], "mesh must be an integer of at least 1; got 0."),
        (["sweep", *TASK, "--mesh", "9"], "mesh=9 asks for 9 devices"),
        (["report", *TASK, "--mesh", "9"], "mesh=9 asks for 9 devices"),
        (["conditioning", "--mesh", "2"], "mesh=2 does nothing here: the matrix of network="),
        (["conditioning", "--network", "mlp", "--mesh", "9"], "mesh=9 asks for 9 devices"),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments, words):
    out = CliRunner().invoke(app, arguments)
    assert out.exit_code == 2
    assert words in out.stderr
    assert len(out.stderr.strip().splitlines()) == 1
