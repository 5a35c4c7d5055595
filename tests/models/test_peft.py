"""Adapters of PEFT, read and written: outputs against those of PEFT."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxttp import from_nnx
from jaxttp.models import (
    adapter_targets,
    head_only,
    load_adapter,
    load_transformer,
    lora,
    save_adapter,
)
from tests.models.test_language import GOLDENS, OUTPUTS, TOKENS

X = dict(zip(("ids", "mask"), TOKENS["right"], strict=True))
# What the script that made the goldens gave to PEFT.
GIVEN = {
    "bert-classifier": (["query", "value"], {"alpha": 6}),
    "gpt2-classifier": (["c_attn"], {"alpha": 4}),
    "llama-classifier": (r".*\.(q_proj|down_proj)", {"alpha": 6, "rslora": True}),
}


@pytest.mark.parametrize("name", GIVEN)
def test_an_adapter_of_peft_gives_its_outputs_and_goes_back(name, tmp_path, key):
    network = load_transformer(GOLDENS / name, dtype=jnp.float64)
    model = load_adapter(network, GOLDENS / name / "adapter")
    found = jax.jit(model.apply_fn)(model.params, X)
    np.testing.assert_allclose(found, OUTPUTS[f"{name}.adapter"], rtol=0, atol=1e-10)
    targets, scale = GIVEN[name]
    chosen = adapter_targets(network, targets)
    own = lora(from_nnx(network), rank=1, key=key, targets=chosen, also=head_only)
    assert sorted(own.params) == sorted(model.params)
    save_adapter(tmp_path / "new", network, model.params, **scale, base="base")
    again = load_adapter(network, tmp_path / "new")
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    old, new = (
        json.loads((folder / "adapter_config.json").read_text())
        for folder in (GOLDENS / name / "adapter", tmp_path / "new")
    )
    same = ("peft_type", "task_type", "r", "lora_alpha", "use_rslora", "bias")
    assert {key: old[key] for key in same} == {key: new[key] for key in same}
    assert {*new["modules_to_save"]} < {*old["modules_to_save"]}
    files = [safetensors.numpy.load_file(folder / "adapter_model.safetensors")
             for folder in (GOLDENS / name / "adapter", tmp_path / "new")]  # fmt: skip
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7), *files)


def test_adapters_that_cannot_be_written(tmp_path):
    network = load_transformer(GOLDENS / "bert-classifier")
    pair = {"a": jnp.ones((16, 2)), "b": jnp.ones((2, 16))}
    wide = {"a": jnp.ones((16, 3)), "b": jnp.ones((3, 16))}
    path = "blocks/{}/attention/q_proj/kernel"
    for adapters, message in (
        ({"body/kernel": pair}, "the network has no body/kernel"),
        ({path.format(0): pair, path.format(1): wide}, r"must have one rank; got \[2, 3\]"),
        ({}, r"must have one rank; got \[\]"),
    ):
        with pytest.raises(ValueError, match=message):
            save_adapter(tmp_path, network, adapters)


@pytest.fixture
def copied(tmp_path):
    shutil.copytree(GOLDENS / "llama-classifier" / "adapter", tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture(scope="module")
def llama():
    return load_transformer(GOLDENS / "llama-classifier")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported; 'LORA' is"),
        ({"use_dora": True}, "use_dora=True is not supported; plain LoRA and rsLoRA are"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern={'q_proj': 2} is not supported"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"of_tomorrow": 3}, "of_tomorrow=3 is not supported"),
        ({"init_lora_weights": "pissa"}, "'pissa' changes the weights of the base model, too"),
        ({"r": 0}, "r must be an integer of at least 1"),
        ({"r": 2}, r"does not fit.*of another shape: .*lora_A.weight \(3, 20\) instead of \(2, 20"),
    ],
)
def test_options_that_are_refused(changes, message, copied, llama):
    path = copied / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        load_adapter(llama, copied)


def test_folders_that_do_not_fit(copied, llama):
    path = copied / "adapter_model.safetensors"
    whole = safetensors.numpy.load_file(path)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    part = {key: value for key, value in whole.items() if key != name}
    safetensors.numpy.save_file(part | {"base_model.model.x.lora_A.weight": whole[name]}, path)
    with pytest.raises(ValueError, match=r"missing: .*layers.0.self_attn.q_proj.lora_A.weight; "
                       "unexpected: base_model.model.x.lora_A.weight"):  # fmt: skip
        load_adapter(llama, copied)
    path.write_bytes(b"nonsense" * 4)
    with pytest.raises(ValueError, match="is not a safetensors file"):
        load_adapter(llama, copied)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.safetensors.* is not a file"):
        load_adapter(llama, copied)
    (copied / "adapter_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no adapter_config\.json"):
        load_adapter(llama, copied)
