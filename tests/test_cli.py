"""The command line: results for those who read and for programs, and one line for bad input."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

import jaxttp
from jaxttp.cli import app
from jaxttp.cli._shell import _json
from tests import tiny

SMALL = ["--data", "wine", "--samples-per-class", "4", "--steps", "15", "--learning-rate", "0.1"]


def call(*arguments, columns=80):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": str(columns), "FORCE_COLOR": None})


@pytest.fixture
def forecasts(monkeypatch):
    """Calls with the arguments of `SMALL` get a forecast made before; give it another to show."""

    def replace(result):
        monkeypatch.setattr("jaxttp.pipeline.forecast", lambda *_, **__: result)

    replace(tiny.verified())
    return replace


def table(text):
    """The cells of the printed table, row by row, without its frame."""
    rows = [re.split(r"[│┃]", line)[1:-1] for line in text.splitlines() if line[:1] in "│┃"]
    return [[cell.strip() for cell in row] for row in rows if row]


# --- results --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("quick_processes")
def test_a_real_process(tmp_path):
    """`python -m jaxttp predict`, in 32 bits as users run it, from another folder."""
    folder = tmp_path / "new" / "folder"
    path = os.pathsep.join([str(pathlib.Path(jaxttp.__file__).parents[1]), *sys.path])
    environment = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    environment |= {"PYTHONPATH": path, "PYTHONIOENCODING": "utf-8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "jaxttp", "predict", *SMALL, "--relinearize", "0"]
    done = subprocess.run(
        [*command, "--output", str(folder)], capture_output=True, text=True, timeout=300,
        cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    cells = table(done.stdout)
    assert cells[0] == ["loss", "steps", "seconds"]
    written = json.loads((folder / "prediction.json").read_text())
    assert [row[1] for row in cells[1:4]] == [str(t) for t in written["steps"].values()]
    assert cells[4][1] == "15"
    assert written["horizon"] == 15
    # The same seed as in this process, but float32 throughout: a step may tip over.
    for e, step in tiny.verified().prediction.steps.items():
        assert abs(written["steps"][str(e)] - step) <= 1
    assert (folder / "prediction.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in folder.iterdir()) == ["prediction.json", "prediction.png"]


def test_train_trains_as_verify_does(tmp_path):
    done = call("predict", *SMALL, "--train", "--output", str(tmp_path), columns=120)
    assert done.exit_code == 0, done.stderr
    written = json.loads((tmp_path / "training.json").read_text())
    real = tiny.verified().run
    assert list(written["steps"].values()) == [real.read(e)[e] for e in (0.01, 0.1, 0.4)]
    np.testing.assert_allclose(written["loss"], real.loss, rtol=1e-5)  # another compilation
    rows = table(done.stdout)
    assert rows[0] == ["loss", "real steps", "real seconds"]
    assert [row[1] for row in rows[1:4]] == [str(step) for step in written["steps"].values()]
    assert (tmp_path / "training.png").exists()
    refused = call("predict", *SMALL, "--train", "--verify")
    assert (refused.exit_code, "verify=True does nothing here" in refused.stderr) == (2, True)


def test_targets_are_rows_of_their_own(forecasts):
    prediction = tiny.verified().prediction
    prediction = dataclasses.replace(prediction, targets=prediction.reach([0.5]))
    result = dataclasses.replace(tiny.verified(), prediction=prediction)
    forecasts(result)
    row = table(call("predict", *SMALL, columns=120).stdout)[4]
    *_, one = result.arrivals.values()
    assert row[0] == "loss below 0.5"
    wanted = [str(t) if t >= 0 else "not reached" for t in (one.steps, one.real_steps)]
    assert [row[1], row[3]] == wanted


def test_any_name_of_a_folder(forecasts, tmp_path):
    """Brackets are no markup, and a long path stays on one line, to be copied."""
    folder = tmp_path / "[bold]" / ("long " * 30).strip()
    result = call("predict", *SMALL, "--output", str(folder))
    assert result.exit_code == 0
    expected = f"written: {folder / 'prediction.json'}, {folder / 'prediction.png'}"
    assert result.stdout.splitlines()[-1] == expected
    assert (folder / "prediction.json").exists()


# --- bad input ------------------------------------------------------------------------------------

WINE = ["--data", "wine", "--samples-per-class", "5"]
PREDICT, SWEEP, CONDITION = ["predict", *SMALL], ["sweep", *WINE], ["conditioning", *WINE[:2]]
BAD = [
    ([*PREDICT, "--learning-rate", "0"], "learning_rate must be greater than 0; got 0.0"),
    ([*PREDICT, "--thresholds", "soon"], "thresholds='soon' must be numbers separated by"),
    ([*PREDICT, "--data", "svhn"], "data='svhn' is not known; choose one of 'digits', 'wine'"),
    ([*PREDICT, "--relinearize", "always"],
     "relinearize must be an integer of at least 0; got 'always'. .*'auto' chooses"),
    ([*PREDICT, "--loss", "mse"], "loss='mse' .* Its name here is 'squared_error'"),
    ([*PREDICT, "--classes", "1.5"], "classes='1.5' must be whole numbers"),
    ([*PREDICT, "--mesh", "64"], r"mesh=64 asks for 64 devices, and JAX sees 4 \(cpu\); give at "),
    ([*SWEEP, "--learning-rates", "1000", "--momenta", "0", "--no-seconds"],
     "no setting gets to 10 % of the loss decrease left: none is stable"),
    ([*CONDITION, "--mesh", "2"], "mesh=2 does nothing here: network='linear' has none"),
    (["spectrum", "--data", "imagenet"], "data='imagenet'"),
    (["gauss-newton", *WINE, "--steps", "4", "--bottleneck", "32", "--learning-rate", "40"],
     "diverges at learning rate 40"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_line_and_code_2(arguments, message, tmp_path):
    result = call(*arguments, "--output", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert result.stderr.endswith("\n")
    assert len(result.stderr.splitlines()) == 1
    assert re.match("jaxttp: " + message, result.stderr)
    if not message.startswith(("diverges", "no setting")):  # these results are shown all the same
        assert result.stdout == ""
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments", [["--steps", "many"], ["--learning-rate", "fast"], ["--colour"], ["--verify=no"]]
)
def test_what_is_no_argument_at_all(arguments):
    """A parser's refusal is one line, too."""
    result = call("predict", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("jaxttp: ")
    assert arguments[0].split("=")[0] in line


def test_what_is_no_command_at_all():
    result = call("forecast")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert re.match("jaxttp: No such command 'forecast'", line)


# --- json, quiet, verbose -------------------------------------------------------------------------


def test_lists_of_numbers_are_one_line():
    values = {
        "loss": [1.0, 0.5, None, True], "none": [], "rows": [{"a": [1]}, {"a": [2, 3]}],
        "words": ["[\n 1,\n 2 ]", "b"], "a \"[": {"deep": [[1, 2], [3, 4]]},
    }  # fmt: skip
    text = _json(values)
    assert json.loads(text) == values
    for line in (
        ' "loss": [1.0, 0.5, null, true],', '   "a": [2, 3]', "   [1, 2],", '  "b"', ' "none": [],',
    ):  # fmt: skip
        assert line in text.splitlines()


def test_what_diverges_is_written_and_printed_before_the_problem(forecasts, tmp_path):
    prediction = dataclasses.replace(
        tiny.verified().prediction, stable=False, steps=dict.fromkeys((0.01, 0.1, 0.4), -1)
    )
    forecasts(dataclasses.replace(tiny.verified(), prediction=prediction, run=None))
    result = call("predict", *SMALL, "--json", "--output", str(tmp_path))
    assert result.exit_code == 2
    assert json.loads(result.stdout)["stable"] is False
    (line,) = result.stderr.splitlines()
    assert re.match(r"jaxttp: diverges.*; choose a smaller learning rate\.", line)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["prediction.json", "prediction.png"]


def test_quiet_leaves_files_and_errors(forecasts, tmp_path):
    result = call("predict", *SMALL, "--quiet", "--output", str(tmp_path))
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    assert (tmp_path / "prediction.json").exists()
    assert json.loads(call("predict", *SMALL, "-q", "--json").stdout)["horizon"] == 15


def test_verbose_shows_where_a_problem_comes_from():
    result = call("predict", *SMALL, "--steps", "0", "-v")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("jaxttp: steps must be an integer")


def test_version():
    result = call("--version")
    assert (result.exit_code, result.stdout) == (0, f"{jaxttp.__version__}\n")


# --- conditioning ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_conditioning_prints_and_writes(tmp_path):
    result = call(
        "conditioning", "--data", "wine", "--width", "20", "--sweep", "depth", "--values", "2,3",
        "--seeds", "2", "--output", str(tmp_path / "new"),
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    written = json.loads(
        (tmp_path / "new" / "conditioning.json").read_text(), parse_constant=pytest.fail
    )
    rows = dict(row for row in table(result.stdout) if len(row) == 2)
    assert rows["condition number"] == f"{written['condition_number']:.4g}"
    assert rows["bound, convex"] == f"{written['bounds']['convex']:.4g}"
    assert rows["rank"] == "39 (generic: 39)"
    assert written["sweep"]["values"] == [2, 3]
    for name in ("conditioning.png", "conditioning_sweep.png"):
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")
    assert result.stdout.splitlines()[-1].startswith("written: ")


# --- spectrum, gauss-newton ----------------------------------------------------------------------

SPECTRUM = ["spectrum", "--data", "wine", "--samples-per-class", "4"]
STEPS = ["gauss-newton", "--data", "wine", "--samples-per-class", "5", "--steps", "4",
         "--bottleneck", "32"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "name", "words"),
    [(SPECTRUM, "spectrum", "largest stable learning rate"),
     (STEPS, "gauss_newton", "forecast steps")],
)  # fmt: skip
def test_table_json_and_figure(arguments, name, words, tmp_path):
    out = call(*arguments, "--output", str(tmp_path))
    assert out.exit_code == 0, out.output
    assert words in out.output
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads((tmp_path / f"{name}.json").read_text())
    assert saved["task"]
