"""`jaxttp spectrum` and `jaxttp gauss-newton`."""

import json

import pytest
from typer.testing import CliRunner

from jaxttp.cli import app

RUN = CliRunner()
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
    out = RUN.invoke(app, [*arguments, "--output", str(tmp_path)])
    assert out.exit_code == 0, out.output
    assert words in out.output
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads((tmp_path / f"{name}.json").read_text())
    assert saved["task"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["spectrum", "--data", "imagenet"], "data='imagenet'"),
        (["gauss-newton", "--steps", "0"], "steps must be"),
        ([*STEPS, "--learning-rate", "40"], "diverges at learning rate 40"),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments, message):
    out = RUN.invoke(app, arguments)
    assert out.exit_code == 2
    assert message in out.stderr
    assert len(out.stderr.strip().splitlines()) == 1
