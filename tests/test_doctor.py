"""`jaxttp doctor` and what it looks at."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from jaxttp._core import machine as _machine
from jaxttp._core.machine import Machine, faults, inspect_machine
from jaxttp.cli import app
from jaxttp.cli import known_answers as _known_answers
from jaxttp.cli.known_answers import KNOWN_ANSWERS

WELL = Machine(
    versions={"jax": "0.10.1", "jaxlib": "0.10.1"}, processor="any", cores=2, cores_there=2,
    memory=1.0, memory_there=2.0, devices=("cpu 0: cpu",), backend="cpu", accelerators=(),
    threads=(), programs="not kept", environment={},
)  # fmt: skip


def call(*arguments):
    environment = {"COLUMNS": "100", "FORCE_COLOR": None}
    return CliRunner().invoke(app, ["doctor", *arguments], env=environment)


@pytest.fixture
def quick(monkeypatch):
    """Two known answers: the others are in test_known_answers."""
    for name in list(KNOWN_ANSWERS):
        if not name.startswith("Cholesky"):
            monkeypatch.delitem(KNOWN_ANSWERS, name)


def test_all_is_well_here(quick):
    result = call()
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.splitlines()[-1] == "all is well"
    for words in ("jaxlib ", "devices: cpu 0", "cores: ", "memory: ", "threads: ", "XLA_FLAGS=",
                  "compiled programs: "):  # fmt: skip
        assert words in result.stdout
    assert result.stdout.count(" right ") == 2


def test_json_files_and_silence(quick, tmp_path):
    result = call("--json", "--output", str(tmp_path))
    assert result.exit_code == 0
    written = json.loads((tmp_path / "doctor.json").read_text())
    assert json.loads(result.stdout) == written
    assert set(written) == {
        *(field.name for field in dataclasses.fields(Machine)), "answers", "problems",
    }  # fmt: skip
    assert written["problems"] == []
    assert set(written["answers"]) == {"Cholesky, float32", "Cholesky, float64"}
    for answer in written["answers"].values():
        assert set(answer) == {"right", "error", "tolerance", "failure"}
        assert answer["right"] is True
        assert 0 <= answer["error"] <= answer["tolerance"]
    silent = call("--quiet")
    assert (silent.exit_code, silent.stdout, silent.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("factor", "how"), [(1.01, "off by 1.0e-02"), (float("nan"), "off by inf")]
)
def test_a_broken_answer_leaves_with_1_and_a_remedy(factor, how, quick, monkeypatch):
    cholesky = jnp.linalg.cholesky
    monkeypatch.setattr(jnp.linalg, "cholesky", lambda a: factor * cholesky(a))
    result = call("--json")
    assert result.exit_code == 1
    first, second = result.stderr.splitlines()
    assert first.startswith(f"jaxttp: Cholesky, float32: {how}, where rounding explains 1e-05. To")
    assert first.endswith(f"To mend it: {_known_answers.OTHER_LAPACK}.")
    assert second.startswith("jaxttp: Cholesky, float64: ")
    found = json.loads(result.stdout)
    assert [answer["right"] for answer in found["answers"].values()] == [False, False]
    assert len(found["problems"]) == 2


def test_a_broken_answer_breaks_silence_too(quick, monkeypatch):
    monkeypatch.delitem(KNOWN_ANSWERS, "Cholesky, float64")
    monkeypatch.setattr(jnp.linalg, "cholesky", jnp.ones_like)
    silent = call("--quiet")
    assert (silent.exit_code, silent.stdout) == (1, "")
    assert silent.stderr.startswith("jaxttp: Cholesky, float32: off by ")
    assert " WRONG " in call().stdout


def test_a_computation_that_fails_is_said(quick, monkeypatch):
    def refuse(a):
        raise RuntimeError("no LAPACK\nanywhere")

    monkeypatch.setattr(jnp.linalg, "cholesky", refuse)
    result = call()
    assert result.exit_code == 1
    assert "jaxttp: Cholesky, float32: RuntimeError: no LAPACK anywhere. To mend" in result.stderr


def test_no_backend_at_all_is_said_without_known_answers(monkeypatch):
    dead = dataclasses.replace(WELL, backend="none", devices=("Unknown backend: 'tpu'",))
    monkeypatch.setattr(_machine, "inspect_machine", lambda: dead)
    result = call()
    assert result.exit_code == 1
    assert result.stderr.startswith("jaxttp: JAX does not start: Unknown backend: 'tpu'. To mend")
    assert json.loads(call("--json", "--verbose").stdout)["answers"] == {}


# --- what does not fit together -------------------------------------------------------------------


def changed(versions=(), environment=(), **rest):
    return dataclasses.replace(
        WELL, versions={**WELL.versions, **dict(versions)}, environment=dict(environment), **rest
    )


GPU = {"accelerators": ("NVIDIA GPU",)}
CASES = {
    "no plugin": (changed(**GPU), "no plugin", "'jax[cuda13]' 'jaxlib!=0.10.2'"),
    "other version": (
        changed({"jax-cuda12-plugin": "0.10.0"}, **GPU),
        "jax-cuda12-plugin 0.10.0 does not match jaxlib 0.10.1", "'jax[cuda12]'",
    ),
    "other runtime": (
        changed({"jax-cuda13-plugin": "0.10.1", "jax-cuda13-pjrt": "0.10.2"}, **GPU),
        "jax-cuda13-pjrt 0.10.2 does not match jaxlib 0.10.1", "'jax[cuda13]'",
    ),
    "idle": (
        changed({"jax-cuda13-plugin": "0.10.1"}, **GPU), "JAX computes on the CPU", "nvidia-smi",
    ),
    "idle TPU": (changed(accelerators=("TPU",)), "there is a TPU", "'jax[tpu]'"),
    "TPU in use": (
        changed({"libtpu": "0.0.41"}, accelerators=("TPU",)), "there is a TPU", "one process",
    ),
    "jaxlib 0.10.2": (
        changed({"jaxlib": "0.10.2"}), "jaxlib 0.10.2 computes wrongly on CPUs",
        "pip install 'jaxlib!=0.10.2'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_said(case):
    machine, what, remedy = CASES[case]
    (problem,) = faults(machine)
    assert what in problem.what
    assert remedy in problem.remedy


@pytest.mark.parametrize(
    "machine",
    [
        WELL,
        changed({"jax-cuda13-plugin": "0.10.1", "jax-cuda13-pjrt": "0.10.1"}, backend="gpu", **GPU),
        changed(environment={"JAX_PLATFORMS": "cpu"}, **GPU),
        changed(environment={"CUDA_VISIBLE_DEVICES": ""}, **GPU),
        changed({"jax-rocm7-plugin": "0.10.0"}, backend="gpu"),
        changed({"jaxlib": "0.10.2"}, {"XLA_FLAGS": "--xla_cpu_experimental_ynn_fusion_type="}),
    ],
)
def test_what_fits_is_not(machine):
    """Who asks for the CPU gets it; ROCm's plugin has versions of its own."""
    assert faults(machine) == []


@pytest.mark.parametrize(
    ("script", "found"),
    [("echo 'GPU 0: any'", True), ("echo failed; exit 9", False), ("echo no devices", False)],
)
def test_the_driver_is_asked_for_a_gpu(script, found, monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _machine._nvidia_smi() is found
    tool.unlink()
    assert not _machine._nvidia_smi()


def test_this_machine():
    machine = inspect_machine()
    assert 1 <= machine.cores <= machine.cores_there
    assert machine.backend == "cpu"
    assert len(machine.devices) == 4  # the suite's
    assert "force_host_platform_device_count" in machine.environment["XLA_FLAGS"]
    assert machine.versions["jaxlib"]
    if machine.memory is not None:
        assert 0 < machine.memory <= machine.memory_there
    assert all(line.endswith("threads") for line in machine.threads)


def test_the_limit_of_a_control_group(tmp_path):
    """Of either version of the interface: files at the top hold for all groups."""
    folder = tmp_path / "memory"
    folder.mkdir()
    for where, names in (
        (tmp_path, ("max", "current")),
        (folder, ("limit_in_bytes", "usage_in_bytes")),
    ):
        for name, size in zip(names, (2 << 30, 1 << 30), strict=True):
            (where / f"memory.{name}").write_text(f"{size}\n")
    found = set(_machine._group_limits(tmp_path))
    assert found <= {(2.0, 1.0)}
    assert found or not Path("/proc/self/cgroup").exists()
    (tmp_path / "memory.max").write_text("max\n")
    (folder / "memory.limit_in_bytes").unlink()
    assert not list(_machine._group_limits(tmp_path))
