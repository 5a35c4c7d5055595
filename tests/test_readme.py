"""What the README shows runs."""

import functools
import re
from pathlib import Path

import pytest

import jaxttp
from tests.models.texts import write_model, write_texts

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_python_snippets_run_one_after_the_other(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)
    assert len([line for line in snippets[0].splitlines() if line.strip()]) <= 10
    for name in ("predict_training_time", "sweep"):  # one kernel: the rest is compilation
        monkeypatch.setattr(jaxttp, name, functools.partial(getattr(jaxttp, name), relinearize=0))
    scope: dict = {}
    for code in snippets:
        exec(code, scope)
    out = capsys.readouterr().out
    assert "largest stable learning rate" in out
    assert "use rate" in out  # the sweep's advice
    assert "whole horizon: " in out  # in seconds, and what it costs
    forecast, run = scope["forecast"], scope["run"]
    assert forecast.stable
    assert forecast.horizon == 150
    assert float(forecast.loss[-1]) < float(forecast.loss[0])
    assert list(forecast.targets) == list(run.reach(forecast.targets))
    assert (tmp_path / "forecast.png").read_bytes().startswith(b"\x89PNG")


def test_every_picture_and_command_is_there():
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", TEXT):
        assert (ROOT / picture).stat().st_size > 10_000
    commands = re.findall(r"```bash\n(.*?)```", TEXT, flags=re.S)
    assert [len(command.strip().splitlines()) for command in commands] == [1, 1]
    assert "jaxttp predict --verify" in commands[0]
    assert "pytest" in commands[1]


@pytest.mark.slow
def test_the_snippets_on_language_models_run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FOLDER").mkdir()
    write_model(tmp_path / "FOLDER")
    write_texts(tmp_path / "text.csv")
    (short,) = re.findall(r"```py\n(.*?)```", TEXT, flags=re.S)
    monkeypatch.setattr("jaxttp.pipeline.forecast", lambda settings: settings)  # tests/pipeline
    exec(short, {})
    assert "FOLDER" in capsys.readouterr().out
    frozen = functools.partial(jaxttp.predict_training_time, relinearize=0)
    monkeypatch.setattr(jaxttp, "predict_training_time", frozen)
    page = (ROOT / "docs" / "transformers.md").read_text()
    (long,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    scope: dict = {}
    exec(long, scope)
    shown = capsys.readouterr().out
    assert "largest stable learning rate" in shown
