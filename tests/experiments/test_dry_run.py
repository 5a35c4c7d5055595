"""One step of the presets `paper` on made-up data of the right shapes."""

import dataclasses

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from experiments import dry_run as dry
from experiments.__main__ import app
from experiments.dry_run import dry_run, made_up_data, one_step
from experiments.gauss_newton import variant_scripts, variants
from experiments.harness import load_script, quick_compilation
from experiments.scripts import SCRIPTS
from experiments.training_time import datasets
from jaxttp import pipeline
from jaxttp.data import dataset_names, load_dataset
from jaxttp.data.sources import SPLITS, TRAIN_SIZES

# One of a family: every script runs with its preset `smoke` elsewhere, and every preset `paper` is
# cut to one step below; what only a dry run shows is that a family takes such a preset.
QUICK = ("ttp-datasets",)
SLOW = (
    "gnc-along-training",  # training, data sets that are not there
    "gnc-batch-norm",  # statistics of batches
    "gnc-pruning-mlp",  # phases of training
    "ours-counterexamples",  # no data
    "ours-fine-tuning",  # a ResNet of 11 million weights, from its start
    "xgn-full-batch",  # exact steps, a batch size that is the data's
    "ttp-accuracy",  # photographs
)


WITH_A_SMALL_NETWORK = (
    "ttp-curves",  # what all of them share: a task, forecasts, real runs
    "ttp-larger",  # a pair of sizes
    "ours-dynamics",  # paths, batches and rates, cut to their first
    "ours-adapters",  # adapters and shares
)
"""As above, but an MLP stands for the ResNet, which takes a minute or more to compile and run."""


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_A_SMALL_NETWORK)
def test_one_step_of_the_paper_with_a_small_network(name, monkeypatch):
    def smaller(settings, **options):
        cut = one_step(settings, **options)
        if isinstance(cut, pipeline.Settings):
            assert cut.model == "resnet18"
            return dataclasses.replace(cut, data="cifar10", folder=None, model=None)
        return cut

    monkeypatch.setattr(dry, "one_step", smaller)
    with quick_compilation():
        found = dry_run(name, few=True, samples=420)
    assert "cifar10" in str(found.settings)
    assert "resnet18" not in str(found.settings)
    assert type(found.settings) is type(load_script(name).presets["paper"])
    assert found.result


def _mark(name):
    return name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [_mark(name) for name in (*QUICK, *SLOW)])
def test_one_step_of_the_paper(name):
    photographs = {"image_size": 32} if name == "ttp-accuracy" else {}
    found = dry_run(name, few=True, samples=420, **photographs)
    assert type(found.settings) is type(load_script(name).presets["paper"])
    assert found.result


def _scripts_of_the_paper():
    scripts = {name: load_script(name) for name in SCRIPTS}
    return {name: s.presets["paper"] for name, s in scripts.items() if "paper" in s.presets}


def _all_settings(settings):
    """A dataclass and all that are in it."""
    yield settings
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        for part in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(part):
                yield from _all_settings(part)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("name", _scripts_of_the_paper())
def test_settings_are_cut_to_one_step(name, few):
    paper = _scripts_of_the_paper()[name]
    cut = one_step(paper, few=few)
    for part in _all_settings(cut):
        for field in ("steps", "horizon", "epochs"):
            value = getattr(part, field, 1)
            if not isinstance(part, pipeline.Settings):
                assert set(value.values() if isinstance(value, dict) else np.ravel(value)) == {1}
        seeds = getattr(part, "seeds", 1)
        assert seeds == 1 or len(seeds) == 1
        assert getattr(part, "weights", None) is None
        for phases in (getattr(part, "phases", ()),):
            assert all(epochs == 1 for _, epochs in phases)
    # Networks stay what they are.
    for field in ("bottleneck", "half", "width", "network", "depth", "inputs"):
        assert getattr(cut, field, None) == getattr(paper, field, None)


def test_an_epoch_of_mini_batches_is_one_step_of_the_whole_batch():
    cut = one_step(variant_scripts.LEARNING_RATES.presets["paper"])
    assert (cut.samples, cut.batch_size, cut.blocks, cut.bottleneck) == (1024, 1024, 6, 8000)
    assert {case.phases for case in cut.cases} == {(("gn", 1),), (("adam", 1),)}
    few = one_step(variant_scripts.LEARNING_RATES.presets["paper"], few=True)
    assert (few.samples, few.batch_size, len(few.cases)) == (4, 4, 1)


def test_pairs_of_sizes_are_no_grids():
    cut = one_step(load_script("ttp-larger").presets["paper"])
    assert (cut.sizes, cut.small_sizes) == ((1000, 4000), (100, 1000))
    few = one_step(load_script("ttp-larger").presets["paper"], few=True)
    assert few.sizes == few.small_sizes == (4, 8)
    assert one_step(load_script("ttp-kernels").presets["paper"], few=True).sizes == (8,)


def test_photographs_can_be_small():
    cut = one_step(load_script("ttp-accuracy").presets["paper"], few=True, image_size=64)
    assert [task.image_size for task in cut.tasks] == [64]
    gpu = load_script("ttp-costs").presets["gpu"]
    assert [task.image_size for task in one_step(gpu).tasks] == [224]


def test_made_up_images_have_the_shapes_of_the_real_ones(stub_tfds):
    real = load_dataset("cifar10")
    with made_up_data(samples=70):
        noise = load_dataset("cifar10")
        assert noise.x.shape == (70, 32, 32, 3)
        assert TRAIN_SIZES["cifar10"] == 60
        photographs = load_dataset("mit67", classes=(0, 3), per_class=1, key=jax.random.key(0))
        assert photographs.x.shape == (2, 256, 256, 3)
        with pytest.raises(ValueError, match="name='dtd'"):
            load_dataset("dtd")
    assert TRAIN_SIZES["cifar10"] == 50_000
    assert noise.x.shape[1:] == real.x.shape[1:]
    assert noise.x.dtype == real.x.dtype
    assert noise.num_classes == 10
    assert (noise.x.min(), noise.x.max()) == (0, 1)
    assert set(dry.SHAPES) <= set(dataset_names())
    assert {name for name in SPLITS if name in TRAIN_SIZES} <= set(dry.SHAPES)


def test_counts_of_the_papers_data_sets():
    rows = dry_run("ttp-datasets").result  # the last of them only, with its own size
    assert [row.name for row in rows] == [datasets.PRESETS["paper"].data[-1][0]] == ["cars196"]
    assert rows[0].counts.sum() == 16_185
    assert len(rows[0].counts) == 196


def test_the_command_line(tmp_path):
    runner = CliRunner()
    arguments = ["--preset", "paper", "--dry-run", "--few", "--output", str(tmp_path)]
    found = runner.invoke(app, ["run", "ttp-table-2", *arguments])
    assert found.exit_code == 0
    assert "one step:" in found.output
    assert not list(tmp_path.iterdir())
    missing = runner.invoke(app, ["run", "two-factor-theorems", *arguments])
    assert missing.exit_code == 1
    assert "preset='paper'" in missing.output
    alone = runner.invoke(app, ["run", "ttp-table-2", "--few"])
    assert alone.exit_code == 2


@pytest.mark.slow
def test_one_step_of_bottlenecks_of_8000(monkeypatch):
    """Two of the six blocks of the paper: 49 million weights, a batch of 1,024."""
    paper = variant_scripts.LEARNING_RATES.presets["paper"]
    settings = one_step(dataclasses.replace(paper, cases=paper.cases[:1], blocks=2))
    with made_up_data(samples=1200):  # 1,028 to train on
        (curve,) = variants.run(settings)
    assert settings.samples == settings.batch_size == 1024
    assert curve.time.tolist() == [0, 1]
    assert curve.train_loss.shape == (2, 1)
    assert np.all(np.isfinite(curve.test_loss))
    assert curve.train_loss[1] < curve.train_loss[0]
