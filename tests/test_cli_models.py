"""`jaxttp predict` with a network, weights and image files by name."""

import json

import pytest
from flax import nnx

import jaxttp.models.catalog as catalog
from jaxttp.models import save_params
from tests.models.filled import filled
from tests.models.texts import write_model, write_texts
from tests.pipeline.test_tasks import pictures, small_resnet
from tests.test_cli import call


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A small network under the name of a large one, its weights, and pictures."""
    monkeypatch.setitem(catalog.MODELS, "resnet18", catalog.Entry(small_resnet, 16, "resnet"))
    network = filled(lambda: small_resnet(7, rngs=nnx.Rngs(0)))
    save_params(tmp_path / "trained.safetensors", nnx.state(network))
    pictures(tmp_path / "images")
    return tmp_path


def arguments(small, **options):
    given = {
        "model": "resnet18", "weights": small / "trained.safetensors", "data": "image_folder",
        "folder": small / "images", "classes": "0,2", "samples-per-class": 3, "steps": 8,
        "learning-rate": 0.01, "trainable": "lora", "rank": 2,
        "output": small / "out",
    }  # fmt: skip
    pairs = (given | options).items()
    return [str(word) for name, value in pairs for word in (f"--{name}", value)]


@pytest.mark.slow
def test_a_forecast_of_a_language_model(tmp_path):
    write_model(tmp_path)
    write_texts(tmp_path / "text.csv")
    common = ["--model", str(tmp_path), "--data", str(tmp_path / "text.csv"), "--relinearize", "0",
              "--learning-rate", "0.02", "--trainable", "head"]  # fmt: skip
    result = call("predict", *common, "--steps", "8", "--max-length", "6", "--json")
    assert result.exit_code == 0, result.stderr
    written = json.loads(result.stdout)
    assert "(bert) with a fresh head on text.csv, up to 6 tokens" in written["task"]
    assert written["loss"][-1] < written["loss"][0]
    for path in ("config.json", "tokenizer.json"):
        (tmp_path / path).unlink()
    result = call("predict", *common)
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert "has no tokenizer.json" in result.stderr


@pytest.mark.slow
def test_checkpoints_side_by_side(small):
    """One network with two sets of weights on the digits as pictures."""
    common = ["compare", "--samples-per-class", "1", "--steps", "8", "--no-seconds", "--json",
              "--relinearize", "0"]  # fmt: skip
    weights = small / "trained.safetensors"
    one = call(*common, "--model", "resnet18", "--weights", "random", "--weights", str(weights),
               "--image-size", "8")  # fmt: skip
    assert one.exit_code == 0, one.stderr
    found = json.loads(one.stdout)
    assert sorted(row["name"] for row in found["rows"]) == ["resnet18", "resnet18, trained"]
    assert found["task"].startswith("2 networks on digits, 10 samples")
    first, second = (row["final_loss"] for row in found["rows"])
    assert first != second


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "nowhere"}, "path='nowhere' is not a file"),
        ({"folder": "nowhere"}, "folder='nowhere' does not exist"),
        ({"classes": "1.5"}, "classes='1.5' must be whole numbers"),
        ({"classes": "many"}, "classes='many' must be numbers"),
    ],
)
def test_bad_input_is_one_line(options, message, small):
    result = call("predict", *arguments(small, **options))
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
