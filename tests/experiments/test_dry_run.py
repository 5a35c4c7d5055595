"""What a dry run makes of settings and of data sets that are not on the machine."""

import jax
import pytest
from typer.testing import CliRunner

from experiments import dry_run as dry
from experiments.__main__ import app
from experiments.dry_run import made_up_data, one_step
from experiments.harness import load_script
from jaxttp.data import dataset_names, load_dataset
from jaxttp.data.sources import SPLITS, TRAIN_SIZES


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
    assert noise.num_classes == 10
    assert set(dry.SHAPES) <= set(dataset_names())
    assert {name for name in SPLITS if name in TRAIN_SIZES} <= set(dry.SHAPES)


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
