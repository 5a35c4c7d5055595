"""Every figure script is listed, runs small and draws; its preset of the paper can be cut."""

import dataclasses
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments import harness
from experiments.__main__ import app
from experiments.dry_run import dry_run, one_step
from experiments.gauss_newton import variant_scripts, variants
from experiments.harness import load_script, run_script
from experiments.scripts import SCRIPTS
from experiments.training_time import scatter
from jaxttp import pipeline
from jaxttp.plots import save

NAMES = list(SCRIPTS)
PAPER = [name for name in NAMES if "paper" in load_script(name).presets]
QUICK = ("ttp-datasets", "xgn-regression-mini")
DRY = (
    "ttp-datasets",
    "gnc-along-training",  # training, data sets that are not there
)
"""One of a family; every preset of the papers is cut to one step below."""


def slow(names, quick):
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


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


@pytest.mark.parametrize("name", slow(NAMES, QUICK))
def test_it_runs_draws_every_picture_and_draws_again_without_computing(name, tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "save", lambda figure, path, dpi: save(figure, path, dpi=30))
    outcome = run_script(name, "smoke", results=tmp_path)
    claim = load_script(name).claim
    assert {path.stem for path in outcome.pictures} == set(claim) == set(outcome.measured)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in outcome.pictures)
    assert all(outcome.measured.values())
    lines = (outcome.folder / "records.jsonl").read_text()
    monkeypatch.setattr(harness, "save", lambda figure, path, dpi: None)  # drawn, not written
    again = run_script(name, "smoke", results=tmp_path, only_plot=True)
    assert again.measured == outcome.measured
    assert (outcome.folder / "records.jsonl").read_text() == lines


@pytest.mark.parametrize("name", slow(DRY, QUICK))
def test_one_step_of_the_paper(name):
    found = dry_run(name, few=True, samples=420)
    assert type(found.settings) is type(load_script(name).presets["paper"])
    assert found.result


def parts(settings):
    """A dataclass and all that are in it."""
    yield settings
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        for part in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(part):
                yield from parts(part)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("name", PAPER)
def test_settings_of_the_paper_are_cut_to_one_step(name, few):
    paper = load_script(name).presets["paper"]
    cut = one_step(paper, few=few)
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


def test_an_epoch_of_mini_batches_is_one_step_of_the_whole_batch():
    paper = variant_scripts.LEARNING_RATES.presets["paper"]
    cut, few = one_step(paper), one_step(paper, few=True)
    assert (cut.samples, cut.batch_size, cut.blocks, cut.bottleneck) == (1024, 1024, (6,), 8000)
    assert {case.phases for case in cut.cases} == {(("gn", 1),), (("adam", 1),)}
    assert (few.samples, few.batch_size, len(few.cases)) == (4, 4, 1)


def test_the_papers_sizes():
    """TTP Table 1 and Figure 1; XGN Figures 1 and 2, Section 5."""
    paper = scatter.PRESETS["paper"]
    assert {(task.classes, task.samples_per_class) for task in paper.tasks} == {(5, 30)}
    assert {task.model for task in paper.tasks} == {"resnet18"}
    assert (paper.low, paper.high, paper.steps) == ((0.0001, 0.001), (0.005,), 150)
    for script in (variant_scripts.FULL_BATCH, variant_scripts.MINI_BATCH):
        paper = script.presets["paper"]
        assert (paper.data, paper.blocks) == (("mnist", "cifar10"), (2, 6))
        assert (paper.bottleneck, paper.loss, paper.seeds) == (8000, "cross_entropy", (0, 1, 2))


@pytest.mark.parametrize("name", ["ttp-accuracy", "ttp-larger", "ours-online"])
def test_runs_of_the_paper_need_data_and_say_so(name, tmp_path):
    """Data and weights of the paper are not in the repository: an error that says what to fetch."""
    with pytest.raises((ValueError, ImportError), match=r"datasets|fetched|Fetch|tfds"):
        run_script(name, "paper", results=tmp_path)
