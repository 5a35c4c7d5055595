"""`jaxttp doctor`: right here, and able to tell when something is wrong."""

import importlib
import json
import re

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from jaxttp.cli import app

doctor = importlib.import_module("jaxttp.cli.doctor")  # the package shows the command
NAMES = list(doctor.KNOWN_ANSWERS)


def call(*arguments):
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "100"})


@pytest.fixture(autouse=True)
def as_users_run():
    """32 bits, as `jaxttp doctor` runs."""
    with jax.enable_x64(False):
        yield


@pytest.fixture
def only_cholesky(monkeypatch):
    for name in NAMES:
        if not name.startswith("Cholesky"):
            monkeypatch.delitem(doctor.KNOWN_ANSWERS, name)


def test_all_is_well_here(tmp_path):
    result = call("--json", "--output", str(tmp_path))
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert found == json.loads((tmp_path / "doctor.json").read_text())
    assert [one["answer"] for one in found["answers"]] == NAMES
    assert all(one["error"] <= one["allowed"] for one in found["answers"])
    assert found["versions"]["jax"] == jax.__version__
    assert found["devices"][0].startswith("cpu 0: ")


def off(function, factor):
    """The same, a little too large."""
    return lambda *args, **kwargs: jax.tree.map(
        lambda part: part * factor, function(*args, **kwargs)
    )


BROKEN = {
    "cross-entropy": (jax.nn, "logsumexp", 1 + 1e-4),
    "softmax": (jax.nn, "softmax", float("nan")),
    "Cholesky, float32": (jnp.linalg, "cholesky", 1 + 1e-4),
    "Cholesky, float64": (jnp.linalg, "cholesky", 1 + 1e-9),
    "eigenvectors, float32": (jnp.linalg, "eigh", 1 + 1e-4),
    "eigenvectors, float64": (jnp.linalg, "eigh", 1 + 1e-9),
    "matrix product": (jnp, "matmul", 1 + 1e-4),
    "kernel": (doctor, "empirical_ntk", 1 + 1e-4),
}


@pytest.mark.parametrize(("start", "broken"), BROKEN.items())
def test_a_wrong_backend_is_found_out(start, broken, monkeypatch):
    module, function, factor = broken
    (name,) = (one for one in NAMES if one.startswith(start))
    monkeypatch.setattr(module, function, off(getattr(module, function), factor))
    assert doctor.KNOWN_ANSWERS[name]() > doctor.TOLERANCES[name.rpartition(", ")[2]]


def test_what_is_wrong_is_status_1_and_a_remedy(only_cholesky, monkeypatch):
    monkeypatch.setattr(jnp.linalg, "cholesky", off(jnp.linalg.cholesky, float("nan")))
    result = call()
    assert result.exit_code == 1
    assert re.search(r"Cholesky, float64 +│ not finite │ +1e-12 │ WRONG", result.stdout)
    (line,) = result.stderr.splitlines()
    assert line.startswith("jaxttp: wrong: Cholesky, float32; Cholesky, float64. To mend it: ")
