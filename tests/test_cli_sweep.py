"""`jaxttp sweep`, `compare` and `extrapolate`: tables, files, JSON, and one line for bad input."""

import csv
import json

import pytest
from typer.testing import CliRunner

from jaxttp.cli import app

WINE = ["--data", "wine", "--samples-per-class", "5", "--steps", "25"]


def call(*arguments):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "100", "FORCE_COLOR": None})


@pytest.mark.slow
def test_sweep_writes_and_prints(tmp_path):
    done = call(
        "sweep", *WINE, "--momenta", "0", "--batch-sizes", "0,5", "--schedules", "constant,cosine",
        "--no-seconds", "--output", str(tmp_path),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "largest stable learning rate" in done.stdout
    assert "fastest to 10 %: rate" in done.stdout
    written = json.loads((tmp_path / "sweep.json").read_text())
    assert len(written["rows"]) == 64
    best = written["rows"][written["fastest"]]
    assert f"({best['steps_0.1']} steps)" in done.stdout
    rows = list(csv.DictReader((tmp_path / "sweep.csv").open()))
    assert len(rows) == 64
    assert rows[0]["schedule"] == "constant"
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_sweep_as_json():
    done = call(
        "sweep", *WINE, "--learning-rates", "0.01,0.05", "--momenta", "0,0.5", "--no-seconds",
        "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    plain = json.loads(done.stdout)
    assert [row["learning_rate"] for row in plain["rows"]] == [0.01, 0.01, 0.05, 0.05]


def test_compare_writes_and_prints(tmp_path):
    done = call(
        "compare", *WINE, "--train", "all,head", "--no-seconds", "--output", str(tmp_path)
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "condition number" in done.stdout
    written = json.loads((tmp_path / "comparison.json").read_text())
    assert sorted(row["name"] for row in written["rows"]) == ["all", "head"]
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_extrapolate_writes_and_prints(tmp_path):
    done = call(
        "extrapolate", "--data", "wine", "--samples-per-class", "20", "--steps", "25", "--subset",
        "24", "--learning-rate", "0.05", "--verify", "--output", str(tmp_path),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "from 24 to 60 samples" in done.stdout
    assert "real steps" in done.stdout
    written = json.loads((tmp_path / "extrapolation.json").read_text())
    assert written["verified"] is not None
    assert (tmp_path / "extrapolation.png").read_bytes().startswith(b"\x89PNG")


BAD = {
    "rates": (
        ["sweep", *WINE, "--learning-rates", "fast"],
        "learning_rates='fast' must be numbers",
    ),
    "batches": (["sweep", *WINE, "--batch-sizes", "2.5"], "must be whole numbers"),
    "infinite": (["sweep", *WINE, "--batch-sizes", "inf"], "batch_sizes='inf' must be whole"),
    "schedule": (["sweep", *WINE, "--schedules", "step", "--no-seconds"], "schedule='step'"),
    "nothing stable": (
        ["sweep", *WINE, "--learning-rates", "1000", "--momenta", "0", "--no-seconds"],
        "no setting reaches 0.1 stably",
    ),
    "choice": (["compare", *WINE, "--train", "tail"], "start='tail' is not known"),
    "subset": (["extrapolate", *WINE, "--subset", "90"], "subset must be"),
    "diverges": (
        ["extrapolate", "--data", "wine", "--steps", "20", "--learning-rate", "1000"],
        "diverges at learning rate 1000",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case):
    arguments, message = BAD[case]
    done = call(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
