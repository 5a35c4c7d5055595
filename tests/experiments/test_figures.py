"""Every figure script is listed, runs small and draws; its preset of the paper can be cut."""

import dataclasses
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments import harness
from experiments.__main__ import app
from experiments.dry_run import one_step
from experiments.gauss_newton import variants
from experiments.harness import load_script, run_script
from experiments.scripts import SCRIPTS
from jaxttp import pipeline
from jaxttp.plots import save

NAMES = list(SCRIPTS)
ELSEWHERE = {  # the same code with other presets, or run by another test
    "gnc-pruning-resnet20", "gnc-pruning-resnet32", "gnc-pruning-vgg5", "gnc-pruning-vit",
    "xgn-mini-batch", "xgn-no-bottleneck-full", "xgn-no-bottleneck-mini", "xgn-regression-full",
    "xgn-weight-decay", "two-factor-theorems", "two-factor-language-model",
}  # fmt: skip
PAPER = [name for name in NAMES if "paper" in load_script(name).presets]
QUICK = ("ttp-datasets", "xgn-regression-mini")
EVERY = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in NAMES
    if name not in ELSEWHERE
]


def test_all_are_listed():
    listed = CliRunner().invoke(app, ["list"], env={"COLUMNS": "200"})
    assert listed.exit_code == 0
    assert all(name in listed.output for name in SCRIPTS)


def test_every_script_offers_what_the_runner_needs():
    pictures = []
    for name in SCRIPTS:
        script = load_script(name)
        assert {"smoke", "cpu"} <= set(script.presets)
        assert all(dataclasses.is_dataclass(preset) for preset in script.presets.values())
        assert all(re.search(r"\(.+\)$", claim) for claim in script.claim.values())  # its source
        pictures += list(script.claim)
        for preset in script.presets.values():
            if isinstance(preset, variants.Settings):
                labels = [case.label for case in preset.cases]
                assert len(labels) == len(set(labels)) <= len(variants.COLORS)
    assert len(pictures) == len(set(pictures))


@pytest.mark.parametrize("name", EVERY)
def test_it_runs_and_draws_every_picture(name, tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "save", lambda figure, path, dpi: save(figure, path, dpi=30))
    outcome = run_script(name, "smoke", results=tmp_path)
    claim = load_script(name).claim
    assert {path.stem for path in outcome.pictures} == set(claim) == set(outcome.measured)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in outcome.pictures)
    assert all(outcome.measured.values())


def parts(settings):
    """A dataclass and all that are in it."""
    yield settings
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        for part in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(part):
                yield from parts(part)


@pytest.mark.parametrize("name", PAPER)
def test_settings_of_the_paper_are_cut_to_one_step(name):
    paper = load_script(name).presets["paper"]
    cut = one_step(paper, few=True)
    for part in parts(cut):
        for field in ("steps", "horizon", "epochs"):
            value = getattr(part, field, 1)
            if not isinstance(part, pipeline.Settings):
                assert set(value.values() if isinstance(value, dict) else np.ravel(value)) == {1}
        seeds = getattr(part, "seeds", 1)
        assert seeds == 1 or len(seeds) == 1
        assert getattr(part, "weights", None) is None
        assert all(epochs == 1 for _, epochs in getattr(part, "phases", ()))
    # Networks stay what they are.
    for field in ("bottleneck", "half", "width", "network", "depth", "inputs"):
        assert getattr(cut, field, None) == getattr(paper, field, None)


@pytest.mark.parametrize("name", ["ttp-accuracy", "ttp-larger", "ours-online"])
def test_runs_of_the_paper_need_data_and_say_so(name, tmp_path):
    """Data and weights of the paper are not in the repository: an error that says what to fetch."""
    with pytest.raises((ValueError, ImportError), match=r"datasets|fetched|Fetch|tfds"):
        run_script(name, "paper", results=tmp_path)
