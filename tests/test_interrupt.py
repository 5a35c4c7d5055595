"""Ctrl-C on a command: status 130, one line, and no half of a file."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxttp._core import files as _files
from jaxttp._core import process as _process
from jaxttp._core.files import replaced
from jaxttp.cli._shell import write_json

# The module imports the standard library alone, so that it runs by itself in no time.
ALONE = f"""
import importlib.util, os, signal, sys
spec = importlib.util.spec_from_file_location("alone", {_process.__file__!r})
interrupt = importlib.util.module_from_spec(spec)
spec.loader.exec_module(interrupt)
interrupt.watch()
press = lambda: signal.raise_signal(signal.SIGINT)
"""


def heard():
    """A test runner in the background ignores the signal, and so would what it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run(code, **options):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
        preexec_fn=heard, check=False, **options,
    )  # fmt: skip


def test_one_line_and_130():
    ended = run(ALONE + "press()\nprint('not here')")
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr == "jaxttp: interrupted\n"


def test_what_has_begun_is_finished_unless_asked_twice():
    begun = "with interrupt.whole():\n    press()\n    print('whole', flush=True)\n"
    once = run(ALONE + begun + "print('not here')")
    assert (once.returncode, once.stdout) == (130, "whole\n")
    twice = run(ALONE + begun.replace("press()", "press(); press()"))
    assert (twice.returncode, twice.stdout) == (130, "")
    never = run(ALONE + begun.replace("press()", "pass") + "print('done')")
    assert (never.returncode, never.stdout) == (0, "whole\ndone\n")


def test_half_a_file_does_not_stay(tmp_path):
    half = tmp_path / ".half.json"
    code = f"from pathlib import Path\nhalf = Path({str(half)!r})\ninterrupt.unfinished.add(half)\n"
    ended = run(ALONE + code + "half.write_text('[1, ')\npress()")
    assert ended.returncode == 130
    assert list(tmp_path.iterdir()) == []


def test_while_the_library_is_imported(tmp_path):
    """Its first line begins to watch, before JAX and all else; started by name or by module."""
    (tmp_path / "jax.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    root = str(Path(_process.__file__).parents[1])
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), root]))
    for command in (
        [sys.executable, "-m", "jaxttp", "--version"],
        [sys.executable, "-c", "import sys; sys.argv = ['/bin/jaxttp']; import jaxttp"],
    ):
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=environment,
            preexec_fn=heard, check=False,
        )  # fmt: skip
        assert (ended.returncode, ended.stderr) == (130, "jaxttp: interrupted\n")


def test_importing_the_library_leaves_the_signal_alone(monkeypatch):
    for argv, orig, expected in (
        (["pytest"], ["python", "-m", "pytest"], False),
        (["-m", "predict"], ["python", "-W", "ignore", "-m", "jaxttp", "predict"], True),
        (["-m"], ["python", "-m", "pytest", "jaxttp"], False),
        (["/usr/bin/jaxttp", "predict"], ["python", "/usr/bin/jaxttp", "predict"], True),
        ([""], ["python"], False),
    ):
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.setattr(sys, "orig_argv", orig)
        assert _process.is_command() is expected
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _process.watch()  # started with nohup, say
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow  # a whole process of the command, with JAX and its compiler at work
def test_a_real_command_with_its_output_piped(tmp_path):
    """The kernel is being compiled when the signal comes: before, most ended in a crash."""
    folder = tmp_path / "out"
    command = [sys.executable, "-m", "jaxttp", "predict", "--verbose", "--output", str(folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard
    ) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert any(line.startswith(("kernel", "dynamics")) for line in lines)
        process.send_signal(signal.SIGINT)
        out, rest = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "")
    assert rest.splitlines()[-1] == "jaxttp: interrupted"
    assert not folder.exists()


# --- files that are whole -------------------------------------------------------------------------


def test_a_file_keeps_its_old_words_until_the_new_ones_are_whole(tmp_path):
    path = tmp_path / "numbers.json"
    write_json(path, [1, 2])
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, [float("nan")])
    assert json.loads(path.read_text()) == [1, 2]

    def interrupted():
        with replaced(path) as place:
            place.write_text("[3, ")
            assert place.suffix == ".json"
            assert place in _process.unfinished
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert json.loads(path.read_text()) == [1, 2]
    assert [each.name for each in tmp_path.iterdir()] == ["numbers.json"]
    assert not _process.unfinished


def test_links_and_devices_stay_what_they_are(tmp_path):
    (tmp_path / "real.txt").write_text("old")
    link = tmp_path / "link.txt"
    link.symlink_to("real.txt")
    with _files.replaced(link) as place:
        place.write_text("new")
    assert link.is_symlink()
    assert (tmp_path / "real.txt").read_text() == "new"
    with _files.replaced(os.devnull) as place:
        assert str(place) == os.devnull
