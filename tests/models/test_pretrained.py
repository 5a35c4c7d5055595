import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import pretrain_digits
from jaxttp.adapters import from_nnx
from jaxttp.data import load_dataset
from jaxttp.models import load_params, load_pretrained, pretrained_names
from jaxttp.models.pretrained import checkpoint_path, shipped

SMOKE = pretrain_digits.Settings(epochs=1, batch_size=180)


def test_the_shipped_network_classifies_what_it_was_not_trained_on():
    parts = pretrain_digits.load_split(pretrain_digits.Settings())
    assert len(parts.held_out) > 150
    model = load_pretrained("digits-resnet")
    assert pretrain_digits.accuracy(model, parts.held_out) > 0.97
    assert pretrain_digits.accuracy(model, parts.train) > 0.99


def test_the_shipped_network_is_the_documented_one():
    model = load_pretrained()
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert sum(leaf.size for leaf in leaves) == 77_093
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.float32)}
    assert model.activation == "gelu"
    assert model(load_dataset("digits").x[:3]).shape == (3, 5)
    assert checkpoint_path().stat().st_size < 320_000


def test_the_metadata_say_how_it_was_made():
    metadata = load_params(checkpoint_path()).metadata
    settings = dataclasses.asdict(pretrain_digits.Settings())
    # The file is that of the script as it stands.
    assert {name: metadata[name] for name in settings} == {
        name: str(value) for name, value in settings.items()
    }
    assert float(metadata["held_out_accuracy"]) > 0.97


def test_names():
    assert pretrained_names() == ("digits-resnet",)
    with pytest.raises(ValueError, match=r"name='resnet18' is not known.*'digits-resnet'"):
        load_pretrained("resnet18")


def test_a_file_that_is_missing_or_of_another_network(monkeypatch):
    monkeypatch.setitem(shipped._NETWORKS, "absent", shipped._NETWORKS["digits-resnet"])
    with pytest.raises(FileNotFoundError, match=r"absent\.safetensors"):
        load_pretrained("absent")
    monkeypatch.setitem(
        shipped._NETWORKS, "digits-resnet", lambda: shipped.digits_resnet(6, rngs=nnx.Rngs(0))
    )
    with pytest.raises(ValueError, match=r"head.bias \(5,\) instead of \(6,\)"):
        load_pretrained("digits-resnet")


@pytest.mark.slow
def test_a_short_run_of_the_script_learns_and_is_what_the_command_line_writes(
    tmp_path, monkeypatch, capsys
):
    # Once with JAX's x64 mode and once without: the same bits.
    result = pretrain_digits.run(SMOKE)
    assert len(result.losses) == 4
    assert result.losses[-1] < result.losses[0]
    monkeypatch.setattr(pretrain_digits, "Settings", lambda: SMOKE)
    with jax.enable_x64(False):
        pretrain_digits.main(["--output", str(tmp_path / "a.safetensors")])
    assert "4 steps in" in capsys.readouterr().out
    params, metadata = load_params(tmp_path / "a.safetensors")
    assert metadata["epochs"] == "1"
    jax.tree.map(np.testing.assert_array_equal, params, from_nnx(result.model).params)


def test_the_split_is_disjoint_and_covers_the_classes():
    parts = pretrain_digits.load_split(pretrain_digits.Settings())
    rows = [{image.tobytes() for image in part.x} for part in parts]
    assert not rows[0] & rows[1]
    digits = load_dataset("digits")
    assert len(parts.train) + len(parts.held_out) == np.sum(digits.y < 5)
    assert set(np.unique(parts.held_out.y)) == {0, 1, 2, 3, 4}
