"""`--mesh`: the same command line with one device and with four, of two processes."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxttp.cli import app

TASK = ["--data", "wine", "--samples-per-class", "7"]
PREDICT = ["predict", *TASK, "--steps", "12", "--learning-rate", "0.1"]


def run(*arguments):
    """A command as users run it, in a process of its own."""
    command = [sys.executable, "-m", "jaxttp", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def together(*arguments):
    """What two processes with two devices each print, joined over loopback."""
    with socket.socket() as place:
        place.bind(("localhost", 0))
        port = place.getsockname()[1]
    given = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-m", "jaxttp", *arguments, "--mesh", "4", "--distributed"]
    running = [
        subprocess.Popen(
            [*command, f"localhost:{port},2,{index}"], env=given, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for index in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], said
    return [out for out, _ in said]


@pytest.mark.slow
def test_two_processes_give_the_same_numbers_and_the_first_one_tells_and_writes(tmp_path):
    one = run(*PREDICT)
    first, second = together(*PREDICT, "--json", "--output", str(tmp_path))
    assert second == ""
    spread = json.loads(first)
    assert spread["hyperparameters"].pop("mesh") == 4
    assert one["hyperparameters"].pop("mesh") is None
    # Not trust and plan, words with rounded numbers: sums in another order may round otherwise.
    for name in ("steps", "hyperparameters", "stable", "task"):
        assert spread[name] == one[name]
    np.testing.assert_allclose(spread["loss"], one["loss"], rtol=2e-5)  # float32, summed otherwise
    assert sorted(file.name for file in tmp_path.iterdir()) == ["prediction.json", "prediction.png"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            [*PREDICT, "--mesh", "some"],
            "mesh must be an integer of at least 1; got 'some'. Or 'all'",
        ),
        ([*PREDICT, "--mesh", "64"], "mesh=64 asks for 64 devices, and JAX sees 4 (cpu); give at "),
        ([*PREDICT, "--mesh", "2", "--optimizer", "adam"], "mesh=2 does nothing here: optimizer="),
        (["spectrum", *TASK, "--mesh", "0"], "mesh must be an integer of at least 1; got 0."),
        ([*PREDICT, "--distributed", "auto"], "distributed joins the devices of several processes"),
        (
            [*PREDICT, "--mesh", "all", "--distributed", "here,2,0"],
            "distributed='here,2,0' must be auto, or HOST:PORT,COUNT,INDEX",
        ),
        (["conditioning", "--mesh", "2"], "mesh=2 does nothing here: network='linear' has none"),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments, words):
    out = CliRunner().invoke(app, arguments)
    assert out.exit_code == 2
    assert words in out.stderr
    assert len(out.stderr.strip().splitlines()) == 1
