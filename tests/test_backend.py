"""`xla_cpu.backend`: jaxlib 0.10.2's wrong fusions are switched off, and nothing else."""

import os
import pathlib
import subprocess
import sys
import types

import pytest

import jaxttp
from jaxttp._core.xla_cpu import backend as _backend
from jaxttp._core.xla_cpu.backend import FLAG, Protection, protect


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", f"{FLAG}="),
        ("--xla_cpu_max_isa=AVX2", f"--xla_cpu_max_isa=AVX2 {FLAG}="),
        (" --a=1  --b ", f"--a=1  --b  {FLAG}="),
        (f"{FLAG}_of_another_name=1", f"{FLAG}_of_another_name=1 {FLAG}="),
    ],
)
def test_the_flag_is_added(flags, expected):
    assert protect("0.10.2", flags, started=False) == Protection(flags=expected)


@pytest.mark.parametrize("version", ["0.10.1", "0.10.20", "0.10.3", "0.10.2.dev1", "0.11.0", ""])
@pytest.mark.parametrize("started", [False, True])
def test_other_versions_are_left_alone(version, started):
    """An unknown flag ends the process."""
    assert protect(version, "--a", started=started) == Protection()


@pytest.mark.parametrize("flags", [f"{FLAG}=", f"--a {FLAG}=individual_dot --b", FLAG])
@pytest.mark.parametrize("started", [False, True])
def test_a_user_who_names_the_flag_decides(flags, started):
    assert protect("0.10.2", flags, started=started) == Protection()


def test_too_late_is_one_line_with_the_remedy():
    flags, warning = protect("0.10.2", "", started=True)
    assert flags is None
    assert "\n" not in warning
    for words in ("pip install 'jaxlib!=0.10.2'", "import jaxttp before", f"XLA_FLAGS={FLAG}="):
        assert words in warning


def test_a_file_of_flags_is_not_turned_into_flags():
    """XLA reads the variable as a file's name if it does not begin with a dash."""
    flags, warning = protect("0.10.2", "flags.txt", started=False)
    assert flags is None
    assert f"add {FLAG}= to flags.txt" in warning
    assert protect("0.10.2", "flags.txt", started=False, listed=f"--a\n{FLAG}=") == Protection()


def test_the_environment_is_changed_once(monkeypatch, tmp_path):
    monkeypatch.setattr(_backend, "backend_started", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", "--a")
    _backend.protect_process("0.10.1")
    assert os.environ["XLA_FLAGS"] == "--a"
    for _ in range(2):
        _backend.protect_process("0.10.2")
        assert os.environ["XLA_FLAGS"] == f"--a {FLAG}="
    monkeypatch.delenv("XLA_FLAGS")
    _backend.protect_process("0.10.2")
    assert os.environ["XLA_FLAGS"] == f"{FLAG}="
    listed = tmp_path / "flags.txt"
    monkeypatch.setenv("XLA_FLAGS", str(listed))
    with pytest.warns(RuntimeWarning, match="names a file"):
        _backend.protect_process("0.10.2")
    listed.write_text(f"{FLAG}=")
    _backend.protect_process("0.10.2")
    assert os.environ["XLA_FLAGS"] == str(listed)


def test_whether_a_backend_runs(monkeypatch):
    name = "jax._src.xla_bridge"
    for there in (True, False):
        bridge = types.SimpleNamespace(backends_are_initialized=lambda there=there: there)
        monkeypatch.setitem(sys.modules, name, bridge)
        assert _backend.backend_started() is there
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(_backends={"cpu": 1}))
    assert _backend.backend_started()
    monkeypatch.delitem(sys.modules, name)
    assert not _backend.backend_started()


def test_importing_is_enough_and_starts_no_backend():
    """In a process that takes the installed jaxlib for 0.10.2, before and after JAX starts."""
    code = f"""if True:
        import sys, warnings, jax, jaxlib.version  # newer ones of JAX refuse that jaxlib
        true, jaxlib.version.__version__ = jaxlib.version.__version__, "0.10.2"
        import jaxttp, os
        assert os.environ["XLA_FLAGS"].split() == ["--xla_cpu_max_isa=AVX2", "{FLAG}="]
        import jax._src.xla_bridge as bridge
        assert not bridge.backends_are_initialized()
        os.environ["XLA_FLAGS"] = ""
        jaxlib.version.__version__ = true
        import jax.numpy as jnp
        jnp.zeros(1)
        jaxlib.version.__version__ = "0.10.2"
        for name in ("jaxttp", "jaxttp._core.xla_cpu.backend"):
            sys.modules.pop(name)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("default")
            import jaxttp
        assert os.environ["XLA_FLAGS"] == ""
        print(*[f"{{w.category.__name__}} {{w.filename}} {{w.message}}" for w in seen], sep="\\n")
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
    (line,) = done.stdout.splitlines()
    assert line.startswith("RuntimeWarning <string> jaxlib 0.10.2 computes wrongly on CPUs")


@pytest.mark.slow
def test_known_answers_in_processes_of_their_own():
    """What jaxlib 0.10.2 does wrong, a later version may do again: it depends on the compilation.

    Two processes that import the library and compile a network of 784 features five times each:
    no smaller one shows the fault.
    """
    code = (
        "from jaxttp.cli.known_answers import cross_entropy, softmax_behind_layers\n"
        "print(all(case(5).right for case in (cross_entropy, softmax_behind_layers)))"
    )
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout == "True\n", done.stderr
