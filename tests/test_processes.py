"""A forecast on four devices of two processes."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from jaxttp import predict_training_time
from tests import meshes

SCRIPT = """
import json, sys
import jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from tests.test_processes import loss
mesh = jax.make_mesh((jax.device_count(),), ("rows",))
print(json.dumps([jax.device_count(), loss(mesh)]))
"""


def loss(mesh=None):
    """Of a forecast, of 7 samples, which 4 devices do not share evenly."""
    x = meshes.samples(7)
    found = predict_training_time(
        meshes.network, meshes.weights(), x, meshes.labels(x), learning_rate=0.1, steps=4,
        relinearize=0, mesh=mesh,
    )  # fmt: skip
    return found.loss.tolist()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_processes")
def test_two_processes_give_the_same_numbers():
    with socket.socket() as place:
        place.bind(("localhost", 0))
        port = place.getsockname()[1]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    environment["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, f"localhost:{port}", str(index)], env=environment,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for index in range(2)
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], printed
    for out, _ in printed:
        devices, found = json.loads(out.splitlines()[-1])
        assert devices == 4
        np.testing.assert_allclose(found, loss(), rtol=1e-10)  # float64, summed otherwise
