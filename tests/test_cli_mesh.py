"""Four devices of two processes, and `--mesh` on the command line."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxttp.cli import app
from jaxttp.pipeline import Settings, forecast

TASK = ["--data", "wine", "--samples-per-class", "7"]
PREDICT = ["predict", *TASK, "--steps", "12", "--learning-rate", "0.1"]
SMALL = {"data": "wine", "samples_per_class": 7, "steps": 12, "learning_rate": 0.1,
         "relinearize": 0}  # fmt: skip

SCRIPT = f"""
import json, sys
import jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from jaxttp.forecast import predict_training_time
from jaxttp.pipeline import Settings, build_task
task = build_task(Settings(**{SMALL}))
mesh = jax.make_mesh((jax.device_count(),), ("rows",))
found = predict_training_time(*task.model, task.x, task.y, learning_rate=0.1, steps=12,
                              relinearize=0, mesh=mesh)
print(json.dumps([jax.device_count(), found.loss.tolist()]))
"""


def test_two_processes_give_the_same_numbers():
    with socket.socket() as place:
        place.bind(("localhost", 0))
        port = place.getsockname()[1]
    given = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, f"localhost:{port}", str(index)], env=given, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for index in range(2)
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], printed
    one = forecast(Settings(**SMALL)).prediction.loss
    for out, _ in printed:
        devices, loss = json.loads(out.splitlines()[-1])
        assert devices == 4
        np.testing.assert_allclose(loss, one, rtol=2e-5)  # float32, summed otherwise


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            [*PREDICT, "--mesh", "some"],
            "mesh must be an integer of at least 1; got 'some'. Or 'all'",
        ),
        ([*PREDICT, "--mesh", "64"], "mesh=64 asks for 64 devices, and JAX sees 4 (cpu); give at "),
        ([*PREDICT, "--mesh", "2", "--optimizer", "adam"], "mesh=2 does nothing here: optimizer="),
        (["conditioning", "--mesh", "2"], "mesh=2 does nothing here: network='linear' has none"),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments, words):
    out = CliRunner().invoke(app, arguments)
    assert out.exit_code == 2
    assert words in out.stderr
    assert len(out.stderr.strip().splitlines()) == 1
