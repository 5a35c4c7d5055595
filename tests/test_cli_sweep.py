"""`jaxttp sweep` and `compare`: tables, files, JSON, and one line for bad input."""

import csv
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxttp.cli import app
from jaxttp.forecast.compare import Comparison, Explanation
from jaxttp.forecast.swept import Sweep
from jaxttp.forecast.training_setup import Hyperparameters
from jaxttp.losses.rule import Rule
from jaxttp.pipeline import Settings, build_task

WINE = ["--data", "wine", "--samples-per-class", "5", "--steps", "25"]


def call(*arguments):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "100", "FORCE_COLOR": None})


@pytest.mark.slow
def test_sweep_writes_and_prints(tmp_path):
    done = call(
        "sweep", *WINE, "--momenta", "0", "--schedules", "constant,cosine", "--no-seconds",
        "--relinearize", "0", "--output", str(tmp_path),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "largest stable learning rate" in done.stdout
    written = json.loads((tmp_path / "sweep.json").read_text())
    goal = written["goal"]
    assert goal.startswith("loss below ")
    assert f"{goal} is a goal that the sweep chose for all" in done.stdout
    assert f"fewest steps to {goal}" in done.stdout
    first = done.stdout[: done.stdout.index(f"cheapest to {goal}")]
    assert first.count("│ rate") == 5
    assert len(written["rows"]) == 32
    best = written["rows"][written["fastest"]]
    time = best[f"steps_loss_{goal.split()[-1]}"]
    assert f": {goal} at step {time}; next best rate" in done.stdout
    assert "use rate" in done.stdout
    rows = list(csv.DictReader((tmp_path / "sweep.csv").open()))
    assert len(rows) == 32
    assert rows[0]["schedule"] == "constant"
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_sweep_races(tmp_path):
    arguments = ["--learning-rates", "0.01,0.1", "--momenta", "0.9"]
    done = call(
        "sweep", *WINE, *arguments, "--target-loss", "0.9", "--race", "--output", str(tmp_path)
    )
    assert done.exit_code == 0, done.output
    assert "race, trained for real: by count this cost" in done.stdout
    assert "use rate 0.1, momentum 0.9: loss below 0.9 at step" in done.stdout
    assert sorted(file.name for file in tmp_path.iterdir()) == ["race.json", "race.png"]
    refused = call("sweep", *WINE, *arguments, "--batch-sizes", "0,5", "--race")
    assert refused.exit_code != 0
    assert "settings must share loss, batch_size and steps" in refused.output


def test_compare_writes_and_prints(tmp_path):
    done = call(
        "compare", *WINE, "--train", "all,head", "--no-seconds", "--relinearize", "0", "--output",
        str(tmp_path),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "condition number: eigenvalues below" in done.stdout
    assert "all weights" not in done.stdout
    written = json.loads((tmp_path / "comparison.json").read_text())
    assert sorted(row["name"] for row in written["rows"]) == ["all", "head"]
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_compare_races(tmp_path):
    asked = ["compare", *WINE, "--train", "all,head", "--race"]
    done = call(*asked, "--target-loss", "0.9", "--output", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "first to loss below 0.9 in the race" in done.stdout
    assert "starting points, first to last: " in done.stdout
    written = json.loads((tmp_path / "race.json").read_text())
    assert sorted(written["order"]) == ["all", "head"]
    assert f"use {written['order'][0]}, rate " in done.stdout
    assert len(written["rows"]) == 2 * 13
    assert (tmp_path / "race.png").read_bytes().startswith(b"\x89PNG")
    never = call(*asked, "--target-loss", "1e-9")
    assert never.exit_code != 0
    assert "no setting got to loss below 1e-09" in never.output


def test_compare_shows_the_seconds_to_one_target(monkeypatch):
    """A goal that one start alone reaches; one that nobody reaches has no seconds."""
    why = Explanation(0.5, 0.5, 10.0, 3)
    loss = np.ones((3, 10))  # below 0.5 from step 2 and 4 on, below 0.1 from step 8 on
    loss[0, 2:], loss[0, 8:], loss[1, 4:] = 0.3, 0.05, 0.2
    swept = Sweep(
        (Hyperparameters(0.1, steps=9),) * 3, 3, Rule((0.01, 0.1, 0.5), "absolute"), loss,
        0 * loss, np.ones(3, bool), np.ones(3), np.ones(3),
        step_seconds=np.array([3.0, 5.0, 7.0]), trainings=1.0,
    )  # fmt: skip
    reasons = (why, why, why._replace(condition_number=3e6))
    found = Comparison(("quick", "slow", "rounded"), swept, reasons)
    task = build_task(Settings(data="wine", samples_per_class=1))  # 3 samples, 3 outputs
    monkeypatch.setattr("jaxttp.pipeline.compare_task", lambda *_, **__: (task, found))
    done = CliRunner().invoke(app, ["compare"], env={"COLUMNS": "200", "FORCE_COLOR": None})
    lines = done.stdout.splitlines()
    assert "┃ seconds to loss below 0.1 ┃" in lines[2]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line[:1] == "│"]
    quick, slow, rounded, *reasons = rows
    assert quick[1:5] == ["-", "8", "2", "24.00"]
    assert slow[1:5] == ["-", "-", "4", "-"]
    assert rounded[1:5] == ["-", "-", "-", "-"]
    # 9 outputs times 2^-23 is 1.1e-6: a condition number of 3e6 has rounding as its smallest.
    assert [row[3] for row in reasons] == ["10", "10", "≥ 3e+06"]
    assert "eigenvalues below 1e-06 of the largest" in lines[-1]


BAD = {
    "rates": (
        ["sweep", *WINE, "--learning-rates", "fast"],
        "learning_rates='fast' must be numbers",
    ),
    "batches": (["sweep", *WINE, "--batch-sizes", "2.5"], "must be whole numbers"),
    "schedule": (["sweep", *WINE, "--schedules", "step", "--no-seconds"], "schedule='step'"),
    "nothing stable": (
        ["sweep", *WINE, "--learning-rates", "1000", "--momenta", "0", "--no-seconds"],
        "no setting gets to 10 % of the loss's drop: none is stable",
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
