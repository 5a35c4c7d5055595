"""`jaxttp._core.xla_cpu`: jaxlib 0.10.2's wrong fusions are switched off, and nothing else."""

import os
import pathlib
import subprocess
import sys

import pytest

import jaxttp
from jaxttp._core.xla_cpu import FLAG, protect_process


@pytest.mark.parametrize("version", ["0.10.1", "0.10.20", "0.10.3", "0.10.2.dev1", "0.11.0"])
def test_other_versions_are_left_alone(version, monkeypatch):
    """An unknown flag ends the process."""
    monkeypatch.setenv("XLA_FLAGS", "--a")
    protect_process(version)
    assert os.environ["XLA_FLAGS"] == "--a"


@pytest.mark.parametrize("flags", [f"{FLAG}=", f"--a {FLAG}=individual_dot --b"])
def test_a_user_who_names_the_flag_decides(flags, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    protect_process("0.10.2")
    assert os.environ["XLA_FLAGS"] == flags


@pytest.mark.parametrize("flags", ["", "flags.txt"])  # XLA reads this as a file's name
def test_too_late_is_a_warning_with_the_remedy(flags, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    with pytest.warns(RuntimeWarning, match=rf"jaxlib!=0\.10\.2.* or set XLA_FLAGS={FLAG}="):
        protect_process("0.10.2")
    assert os.environ["XLA_FLAGS"] == flags


def test_importing_is_enough_and_starts_no_backend():
    """In a process that takes the installed jaxlib for 0.10.2."""
    code = f"""if True:
        import jax, jaxlib.version  # newer ones of JAX refuse that jaxlib
        jaxlib.version.__version__ = "0.10.2"
        import jaxttp, os
        assert os.environ["XLA_FLAGS"].split() == ["--xla_cpu_max_isa=AVX2", "{FLAG}="]
        import jax._src.xla_bridge as bridge
        assert not bridge.backends_are_initialized()
    """
    root = str(pathlib.Path(jaxttp.__file__).parents[1])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([root, *sys.path]), "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
