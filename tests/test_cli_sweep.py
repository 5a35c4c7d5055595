"""`jaxttp sweep` and `compare`: tables, files, JSON, and one line for bad input."""

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
        "sweep", *WINE, "--momenta", "0", "--schedules", "constant,cosine", "--no-seconds",
        "--relinearize", "0", "--output", str(tmp_path),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "largest stable learning rate" in done.stdout
    written = json.loads((tmp_path / "sweep.json").read_text())
    target = written["target"]
    assert target.startswith("loss below ")
    words = " ".join(done.stdout.split())
    assert f"the first to {target} (a target that the sweep chose for all)" in words
    assert done.stdout.count("\n  rate ") == 5
    assert len(written["rows"]) == 32
    best = written["rows"][written["fastest"]]
    time = best[f"steps_loss_{target.split()[-1]}"]
    assert f": {target} at step {time}; next best rate" in words
    assert "use rate" in words
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
    assert "Race of 2 settings to loss below 0.9, trained for real" in done.stdout
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
    assert "leading, condition" in done.stdout
    written = json.loads((tmp_path / "comparison.json").read_text())
    assert sorted(row["name"] for row in written["rows"]) == ["all", "head"]
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_checkpoints_side_by_side(monkeypatch):
    """One network with two sets of weights; the comparison itself is tested in tests/pipeline."""
    networks = []

    def refuse(*arguments, **options):
        networks.extend(options["networks"])
        raise ValueError("no comparison")

    monkeypatch.setattr("jaxttp.pipeline.compare_task", refuse)
    result = call("compare", "--model", "resnet18", "--weights", "random", "--weights", "file")
    assert result.stderr == "jaxttp: no comparison\n"
    assert networks == [("resnet18", None), ("resnet18", "file")]
