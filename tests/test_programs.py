"""Compiled programs that outlive the process: where, for whom, how many, and what goes wrong."""

import json
import os
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from typer.testing import CliRunner

from jaxttp._core import programs as _programs
from jaxttp._core.programs import LIMIT, VARIABLE, bound, cache_folder, cpu_mark, keep, place
from jaxttp.cli import _shell, app

SETTINGS = (
    "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
    "jax_enable_compilation_cache",
)  # fmt: skip
EVENTS = Counter()
jax.monitoring.register_event_listener(lambda name, **_: EVENTS.update([name.split("/")[-1]]))


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A folder for programs, in a process whose JAX keeps none; afterwards it is as it was."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    EVENTS.clear()
    with warnings.catch_warnings():  # which restores what shows them
        yield tmp_path / "cache"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def compiled():
    """A program of its own, compiled or read anew at every call; its value is 30.25."""
    return float(jax.jit(lambda x: jnp.sum((x + 0.5) ** 2))(np.array([4.0, 2.5, 0.5])))


# --- where ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "environment", "expected"),
    [
        ("linux", {}, "~/.cache/jaxttp"),
        ("linux", {"XDG_CACHE_HOME": "/caches"}, "/caches/jaxttp"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "~/.cache/jaxttp"),
        ("freebsd14", {}, "~/.cache/jaxttp"),
        ("darwin", {"XDG_CACHE_HOME": "/caches"}, "~/Library/Caches/jaxttp"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/jaxttp/Cache"),
        ("win32", {}, None),
    ],
)
def test_the_folder_is_that_of_the_system(system, environment, expected):
    found = cache_folder(environment, system)
    assert found == (None if expected is None else Path(expected).expanduser())


def test_without_a_home_there_is_no_folder(monkeypatch, folder):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert cache_folder({}, "linux") is None
    assert cache_folder({}, "darwin") is None
    monkeypatch.delenv(VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert keep().folder is None


CPU = "processor : 0\nmodel name : A\nflags : sse avx\ncpu MHz : 1000\n\nprocessor : 1\n"


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (CPU.replace("1000", "900"), True),
        (CPU + "model name : B", True),  # a second core; the first one speaks for all
        (CPU.replace("avx", "avx avx2"), False),
        (CPU.replace(": A", ": B"), False),
        ("", False),
    ],
)
def test_a_program_for_another_cpu_is_never_found(other, same):
    assert (cpu_mark(CPU, "") == cpu_mark(other, "")) is same
    assert cpu_mark(CPU, "2 cores") != cpu_mark(CPU, "4 cores")


def test_versions_and_cpu_are_in_the_folders_name(monkeypatch, folder):
    name = place().folder.name
    for version in ("0.1.0", f"jax{jax.__version__}-", "jaxlib"):
        assert version in name
    monkeypatch.setattr(jax, "__version__", "1.2.3")
    assert place().folder.name == name.replace(name.split("-")[2], "jax1.2.3")
    monkeypatch.setattr(_programs, "cpu_mark", lambda *_: "another")
    assert place().folder.name.endswith("-another")


# --- kept, and found again ------------------------------------------------------------------------


def test_programs_are_kept_and_read(folder):
    found = keep()
    assert found.folder.parent == folder
    assert found.folder.stat().st_mode & 0o077 == 0  # ours alone
    first = compiled()
    assert EVENTS["cache_misses"] > 0
    assert EVENTS["cache_hits"] == 0
    kept = sorted(found.folder.glob("*-cache"))
    EVENTS.clear()
    assert compiled() == first == 30.25
    assert EVENTS["cache_misses"] == 0
    assert EVENTS["cache_hits"] > 0
    assert sorted(found.folder.glob("*-cache")) == kept
    words = str(keep())
    assert f"kept in {found.folder}: {len(kept)} of 0.0 MiB" in words
    assert f"at most {LIMIT / 2**20:.1f} MiB" in words


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "strange"])
def test_a_damaged_program_is_made_anew(damage, folder):
    found = keep()
    first = compiled()
    kept = sorted(found.folder.glob("*-cache"))
    sizes = [path.stat().st_size for path in kept]
    for path in kept:
        good = path.read_bytes()
        flipped = bytes(255 - byte for byte in good[50:60])
        path.write_bytes({
            "cut": good[: len(good) // 2], "empty": b"", "strange": b"no program at all",
            "flipped": good[:50] + flipped + good[60:],
        }[damage])  # fmt: skip
    EVENTS.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        # `catch_warnings` replaced what shows them: the process's own is put back
        jax.config.update("jax_compilation_cache_dir", None)
        keep()
        assert compiled() == first
    assert [str(one.message) for one in said] == []
    assert EVENTS["cache_misses"] == len(kept)
    assert sorted(found.folder.glob("*-cache")) == kept
    for path, size in zip(kept, sizes, strict=True):
        assert abs(path.stat().st_size - size) < 0.2 * size  # the time of compilation is in it
    EVENTS.clear()
    assert compiled() == first
    assert EVENTS["cache_misses"] == 0


def test_other_warnings_are_shown(folder):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        keep()
        warnings.warn("something else", stacklevel=1)
    assert [str(one.message) for one in said] == ["something else"]


# --- who says otherwise ---------------------------------------------------------------------------


def nothing_changed():
    return jax.config.jax_compilation_cache_dir is None


@pytest.mark.parametrize("word", ["off", "OFF", "0", "no", "false"])
def test_the_variable_turns_it_off(word, folder, monkeypatch):
    monkeypatch.setenv(VARIABLE, word)
    assert str(keep()) == f"not kept: {VARIABLE}={word}"
    assert nothing_changed()


def test_the_flag_turns_it_off(folder):
    assert str(keep(False)) == "not kept: --no-cache"
    assert nothing_changed()
    assert not folder.exists()


def test_jaxs_own_folder_wins(folder, tmp_path):
    theirs = str(tmp_path / "theirs")
    jax.config.update("jax_compilation_cache_dir", theirs)
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    assert str(keep()) == f"kept in {theirs}: JAX_COMPILATION_CACHE_DIR"
    assert jax.config.jax_compilation_cache_dir == theirs
    assert jax.config.jax_persistent_cache_min_compile_time_secs == least
    assert not folder.exists()


def test_jaxs_own_variables_win(folder, monkeypatch):
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "7")
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    assert keep().folder is not None
    assert jax.config.jax_persistent_cache_min_compile_time_secs == least
    jax.config.update("jax_enable_compilation_cache", False)
    assert str(keep()) == "not kept: JAX_ENABLE_COMPILATION_CACHE is false"


# --- folders that cannot be used ------------------------------------------------------------------


def test_a_file_in_the_folders_place(folder):
    folder.write_text("a file")
    assert str(keep()).startswith("not kept: ")
    assert nothing_changed()
    assert compiled() == 30.25


def test_a_relative_folder_is_none(folder, monkeypatch):
    monkeypatch.setenv(VARIABLE, "here")
    assert "must name a folder by its whole path" in str(keep())
    assert nothing_changed()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="the system has no such owners")
def test_a_folder_that_others_may_write_to_is_left_alone(folder, monkeypatch):
    ours = place().folder
    ours.mkdir(parents=True)
    ours.chmod(0o770)
    assert "others" in str(keep())
    assert nothing_changed()
    ours.chmod(0o700)
    assert place().folder == ours
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert "others" in str(keep())
    assert nothing_changed()


def test_a_folder_that_cannot_be_written_is_left_alone(folder, monkeypatch):
    place().folder.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(os, "access", lambda *_: False)  # who runs the tests may write anywhere
    assert "cannot be read and written" in str(keep())
    assert nothing_changed()


# --- how many -------------------------------------------------------------------------------------


def test_what_was_used_longest_ago_goes_first(tmp_path):
    here, old = tmp_path / "programs-2-b", tmp_path / "programs-1-a"
    other = tmp_path / "data"
    for one in (here, old, other):
        one.mkdir()
    for age, path in enumerate((here / "f-1-cache", here / "g-1-cache", old / "f-1-cache")):
        path.write_bytes(bytes(100))
        os.utime(path, (2e9 - age, 1e9))
    strangers = [other / "mine-cache", tmp_path / "notes", here / "note"]
    for path in strangers:
        path.write_bytes(bytes(1000))
    bound(tmp_path, 300)
    assert old.exists()
    bound(tmp_path, 299)
    assert not old.exists()
    assert sorted(path.name for path in here.iterdir()) == ["f-1-cache", "g-1-cache", "note"]
    bound(tmp_path, 199)
    assert sorted(path.name for path in here.iterdir()) == ["f-1-cache", "note"]
    assert all(path.exists() for path in strangers)
    bound(tmp_path / "nowhere", 0)


def test_every_start_bounds(folder, monkeypatch):
    old = folder / "programs-of-last-year" / "f-1-cache"
    old.parent.mkdir(parents=True)
    old.write_bytes(bytes(1000))
    monkeypatch.setattr(_programs, "LIMIT", 999)
    place()
    assert old.exists()
    keep()
    assert not old.exists()


# --- whole commands -------------------------------------------------------------------------------

COMMAND = """
import json, sys
from collections import Counter
import jax, jaxttp
alone = jax.config.jax_compilation_cache_dir
events = Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.split("/")[-1]]))
from jaxttp.cli import app
try:
    app(sys.argv[1:])
finally:
    counts = {name: events[name] for name in ("cache_hits", "cache_misses")}
    print(json.dumps({"alone": alone, **counts}), file=sys.stderr)
"""


@pytest.mark.slow  # two processes, each of which imports jaxttp: 2 seconds and more
def test_the_second_process_compiles_nothing(tmp_path):
    environment = {name: value for name, value in os.environ.items() if "JAX_" not in name}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": "3", VARIABLE: str(tmp_path)}
    words = ["spectrum", "--data", "wine", "--samples-per-class", "4", "--json"]
    told = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, *words],
            env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        (line,) = done.stderr.splitlines()  # the counts, and no alarm or warning
        told.append((done.stdout, json.loads(line)))
    (first, cold), (again, warm) = told
    assert again == first
    assert cold["alone"] is None  # the import has switched nothing on
    assert cold["cache_misses"] == len(list(tmp_path.glob("*/*-cache"))) > 10
    assert warm["cache_misses"] == 0
    assert warm["cache_hits"] > 10


@pytest.mark.parametrize("flag", [[], ["--no-cache"]])
@pytest.mark.parametrize("command", [
    "predict", "sweep", "compare", "spectrum", "conditioning", "gauss-newton",
    "report",
])  # fmt: skip
def test_every_command_keeps_programs_unless_it_is_told_not_to(command, flag, monkeypatch):
    asked = []

    def refuse(wanted):
        asked.append(wanted)
        raise ValueError("enough")

    monkeypatch.setattr(_shell, "keep", refuse)
    result = CliRunner().invoke(app, [command, *flag])
    assert (result.exit_code, result.stderr) == (2, "jaxttp: enough\n")
    assert asked == [not flag]


@pytest.mark.parametrize(
    ("given", "level"),
    [({}, "3"), ({"TF_CPP_MIN_LOG_LEVEL": "0"}, "0"), ({"JAX_COMPILATION_CACHE_DIR": "/x"}, None)],
)
def test_false_alarms_are_not_shown(given, level, monkeypatch):
    for name in ("TF_CPP_MIN_LOG_LEVEL", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(_programs.importlib.util, "find_spec", lambda name: None)
    _programs.hush()
    assert os.environ.get("TF_CPP_MIN_LOG_LEVEL") == level


def test_an_accelerators_words_are_heard(monkeypatch):
    monkeypatch.setattr(_programs.importlib.util, "find_spec", lambda name: name == "libtpu")
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    _programs.hush()
    assert "TF_CPP_MIN_LOG_LEVEL" not in os.environ


@pytest.mark.parametrize("flag", [[], ["--no-cache"]])
def test_the_experiments_keep_programs_unless_they_are_told_not_to(flag, monkeypatch):
    from experiments import __main__ as experiments

    asked = []
    monkeypatch.setattr(experiments, "keep", asked.append)
    result = CliRunner().invoke(experiments.app, ["run", "no such script", *flag])
    assert result.exit_code == 1
    assert asked == [not flag]
