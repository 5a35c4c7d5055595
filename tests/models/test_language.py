"""Language models from Hugging Face folders: outputs against those of transformers."""

import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from jaxttp import from_nnx, predict_training_time
from jaxttp.models import adapter_targets, head_only, load_transformer, lora
from jaxttp.models.language.architecture import (
    read_architecture,
    read_rotary,
    rotary_tables,
    rotate,
)
from jaxttp.models.language.folder import tensor_of

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens" / "transformers"
NAMES = sorted(
    path.name
    for path in GOLDENS.iterdir()
    if path.is_dir() and path.name not in ("mistral-lm", "bert-mlm")
)
OUTPUTS = safetensors.numpy.load_file(GOLDENS / "outputs.safetensors")
TOKENS = {side: [OUTPUTS[f"{side}.{what}"] for what in ("ids", "mask")]
          for side in ("right", "left")}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 9, "hidden_size": 4, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 4, "max_position_embeddings": 8,
}  # fmt: skip

run = nnx.jit(lambda model, ids, mask: model(ids, mask))


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [(name, "float64", 1e-10) for name in NAMES] + [("gpt2-lm", "float32", 1e-4)],
)
@pytest.mark.usefixtures("full_precision")
def test_outputs_are_those_of_transformers_whatever_the_side_of_the_padding(name, dtype, tolerance):
    model = load_transformer(GOLDENS / name, dtype=jnp.dtype(dtype))
    both = [np.concatenate(arrays) for arrays in zip(*TOKENS.values(), strict=True)]
    found = np.asarray(run(model, *both))
    expected = OUTPUTS[f"{name}.right"]
    left = OUTPUTS.get(f"{name}.left", expected)
    assert found.dtype == dtype
    seen = both[1] != 0
    expected = np.concatenate([expected, left])
    if found.ndim == 3:  # at padded positions nothing is promised
        found, expected = found[seen], expected[seen]
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)  # they are of order one


def test_tokens_that_are_not_known_are_named_before_anything_is_computed():
    model = from_nnx(load_transformer(GOLDENS / "gpt2-classifier"))
    ids, mask = TOKENS["right"]
    far, empty = np.where(ids == ids[0, 0], 24, ids), mask * (np.arange(3) != 1)[:, None]
    with pytest.raises(ValueError, match=r"^ids\[0, 0\]=24 is out of range: the vocabulary has 24"):
        predict_training_time(*model, {"ids": far, "mask": mask}, [0, 1, 2], learning_rate=0.1)
    with pytest.raises(ValueError, match=r"all tokens of sample 1 are masked, 1 of 3"):
        predict_training_time(*model, {"ids": ids, "mask": empty}, [0, 1, 2], learning_rate=0.1)
    found = jax.jit(model.apply_fn)(
        model.params, {"ids": np.concatenate([far, -ids]), "mask": np.concatenate([empty, mask])}
    )
    assert np.isnan(found).any(axis=1).tolist() == [True, True, False, True, True, True]


@pytest.mark.parametrize(
    ("arguments", "problem", "message"),
    [
        (([1, 2],), ValueError, r"tokens \(N, T\); got shape \(2,\)"),
        (
            (np.ones((1, 17), int),),
            ValueError,
            "17 tokens are longer than the 16 positions.*max_le",
        ),
        (([[1.0]],), ValueError, "must be integers; got float64"),
        (([[1, -1]],), ValueError, r"ids\[0, 1\]=-1 is out of range"),
        (([[1, 2]], [[1]]), ValueError, r"mask of shape \(1, 1\) must have the ids' \(1, 2\)"),
        (([[1]], [[1]], [[2]]), ValueError, r"types\[0, 0\]=2 is out of range: the network has 2"),
        (([[1]], None, [[1, 1]]), ValueError, r"types of shape \(1, 2\) must"),
        (({"ids": [[1]], "labels": [1]},), TypeError, "takes ids, mask and types"),
    ],
)
def test_bad_tokens(arguments, problem, message):
    model = load_transformer(GOLDENS / "bert-classifier")
    with pytest.raises(problem, match=message):
        jax.eval_shape(lambda: model(*arguments))


# --- heads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert-mlm", "llama-lm"])
def test_a_head_that_is_not_there_is_drawn(name, key):
    model = load_transformer(GOLDENS / name, outputs=5, key=key)
    assert model.head.kernel.shape == (16, 5)
    assert np.std(model.head.kernel[...]) == pytest.approx(16**-0.5, rel=0.4)  # of 80 numbers
    with pytest.raises(ValueError, match=r"has no head for a classification \(.*give a key"):
        load_transformer(GOLDENS / name, head="classification")


def test_a_key_draws_a_fresh_head_in_place_of_the_folders_own(key):
    old = load_transformer(GOLDENS / "bert-classifier")
    new = load_transformer(GOLDENS / "bert-classifier", outputs=3, key=key)
    assert np.all(old.head.kernel[...] != new.head.kernel[...])
    np.testing.assert_array_equal(old.pooler.kernel, new.pooler.kernel)
    with pytest.raises(ValueError, match=r"outputs=5, but the head in .* has 3; give a key"):
        load_transformer(GOLDENS / "bert-classifier", outputs=5)
    with pytest.raises(ValueError, match=r"outputs=5 counts classes"):
        load_transformer(GOLDENS / "bert-classifier", outputs=5, head="states")
    with pytest.raises(ValueError, match=r"head='tokens' is not known; choose one of 'classific"):
        load_transformer(GOLDENS / "bert-classifier", head="tokens")


# --- adapters -------------------------------------------------------------------------------------

ADAPTERS = {
    "bert-classifier": (["query", "value"], {"rank": 3, "alpha": 6}),
    "gpt2-classifier": (["c_attn"], {"rank": 2, "alpha": 4}),
    "llama-classifier": (["q_proj", "down_proj"], {"rank": 3, "alpha": 6, "rslora": True}),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_give_the_outputs_of_peft(name, key):
    """The values of PEFT's file, in its order, take the places of those that `lora` draws."""
    targets, options = ADAPTERS[name]
    network = load_transformer(GOLDENS / name, dtype=jnp.float64)
    chosen = adapter_targets(network, targets)
    model = lora(from_nnx(network), key=key, targets=chosen, also=head_only, **options)
    found = safetensors.numpy.load_file(GOLDENS / name / "adapter" / "adapter_model.safetensors")
    places = {"base_model.model." + tensor_of(path.replace("/", "."), network.shape, network.kind)
              .name.removesuffix(".weight"): path for path in model.params}  # fmt: skip
    params = dict(model.params)
    for module, path in places.items():
        if isinstance(params[path], dict):
            halves = (found.pop(f"{module}.lora_{half}.weight").T for half in "AB")
            params[path] = dict(zip("ab", halves, strict=True))
        elif path.endswith("kernel"):
            params[path] = found.pop(f"{module}.weight").T
        else:
            params[path] = found.pop(module)
    assert not found
    params = jax.tree.map(lambda old, new: jnp.asarray(new, old.dtype), model.params, params)
    ids, mask = TOKENS["right"]
    outputs = jax.jit(model.apply_fn)(params, {"ids": ids, "mask": mask})
    np.testing.assert_allclose(outputs, OUTPUTS[f"{name}.adapter"], rtol=0, atol=1e-10)


# --- folders --------------------------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path):
    def copy(name):
        shutil.copytree(GOLDENS / name, tmp_path / name)
        return tmp_path / name

    return copy


def rewrite(folder, change, name="model.safetensors"):
    found = safetensors.numpy.load_file(folder / name)
    safetensors.numpy.save_file(change(found), folder / name)


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, nnx.state(one), nnx.state(other))


@pytest.mark.parametrize("name", ["bert-classifier", "llama-lm", "gpt2-lm"])
def test_a_body_saved_alone_and_old_names_are_known(name, copied):
    folder = copied(name)
    prefix = {"bert": "bert.", "llam": "model.", "gpt2": "transformer."}[name[:4]]

    def body(tensors):
        old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        out = {}
        for key, value in tensors.items():
            for new, before in old.items():
                key = key.replace(new, before)
            if key.startswith(prefix):
                out[key.removeprefix(prefix)] = value
        return out | {"h.0.attn.bias": np.ones(2), "embeddings.position_ids": np.ones(2)}

    rewrite(folder, body)
    same(load_transformer(folder, head="states"), load_transformer(GOLDENS / name, head="states"))


def test_weights_that_do_not_fit_are_listed_by_kind(copied):
    folder = copied("llama-lm")

    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_proj.weight"] = np.ones((3, 2), np.float32)
        return tensors | {"model.layers.9.x": np.ones(2, np.float32)}

    rewrite(folder, change)
    with pytest.raises(ValueError, match=r"do not fit config.json: missing: model.norm.weight; "
                       "unexpected: model.layers.9.x; of another shape: .*q_proj.weight "
                       r"\(3, 2\) instead of \(24, 16\)"):  # fmt: skip
        load_transformer(folder)


def test_shards(copied):
    folder = copied("qwen2-lm")
    index = folder / "model.safetensors.index.json"
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks model-00002-of-00003.* of the 3 shards"):
        load_transformer(folder)
    index.write_text("[]")
    with pytest.raises(ValueError, match=r"must hold a JSON object; it holds a list"):
        load_transformer(folder)
    index.write_text("{}")
    with pytest.raises(ValueError, match=r"has no weight_map"):
        load_transformer(folder)


def test_a_folder_without_weights(copied):
    folder = copied("llama-lm")
    path = folder / "model.safetensors"
    path.write_bytes(b"nonsense" * 4)
    with pytest.raises(ValueError, match=r"is not a safetensors file"):
        load_transformer(folder)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"has no model.safetensors and no model.safetens"):
        load_transformer(folder)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"pytorch_model.bin is a pickle"):
        load_transformer(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config.json; .*nothing is downloaded"):
        load_transformer(folder)


# --- config.json ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3"}, "not known here, but bert.*architecture='llama'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.* is not supported"),
        ({"num_key_value_heads": 3}, "kv_heads=3 must divide heads=2"),
        ({"hidden_act": "tanh"}, "activation='tanh' is not known; choose one of 'gelu'"),
        ({"vocab_size": None}, "has no 'vocab_size', which a llama needs"),
        ({"hidden_size": 0}, "width must be an integer of at least 1; got 0"),
        ({"head_dim": 3}, "head_dim=3 must be even"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_type='yarn' is not known"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_type='llama3' needs factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_theta": -1.0}, "rope_theta must be greater than 0"),
    ],
)
def test_configurations_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=rf"^config.*{message}"):
        read_architecture(LLAMA | changes)


@pytest.mark.usefixtures("full_precision")
def test_outputs_of_mistral_are_those_of_transformers_within_its_window():
    model = load_transformer(GOLDENS / "mistral-lm", dtype=jnp.float64)
    assert model.shape.length == 3
    ids, mask = (array[:, :3] for array in TOKENS["right"])
    found, expected = run(model, ids, mask), OUTPUTS["mistral-lm.right"][:, :3]
    np.testing.assert_allclose(found[mask != 0], expected[mask != 0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("model_type", ["mistral", "qwen2"])
def test_sequences_are_as_long_as_the_window_that_positions_see(model_type):
    window = {"model_type": model_type, "sliding_window": 3, "use_sliding_window": True,
              "num_key_value_heads": 2}  # fmt: skip
    found = read_architecture(LLAMA | window)
    assert found.length == 3
    off = window | {"use_sliding_window": False, "sliding_window": None}
    assert read_architecture(LLAMA | off).length == 8


# --- rotary positions -----------------------------------------------------------------------------


def test_rotary_positions_are_turns(key):
    """Complex numbers as an oracle: (x_j + i x_{j + d/2}) exp(i ω_j position)."""
    frequencies = read_rotary({"rope_theta": 50.0}, 6, 16)
    queries = np.asarray(jax.random.normal(key, (1, 5, 1, 6)))
    cosines, sines = (table[None] for table in rotary_tables(frequencies, 5, jnp.float64))
    turned = np.asarray(rotate(jnp.asarray(queries), cosines, sines))
    complexes = queries[..., :3] + 1j * queries[..., 3:]
    angles = np.arange(5)[:, None] * 50.0 ** (-np.arange(3) / 3)
    expected = complexes * np.exp(1j * angles)[None, :, None]
    np.testing.assert_allclose(turned[..., :3] + 1j * turned[..., 3:], expected, atol=1e-13)


def test_the_frequencies_of_llama_3_are_those_of_its_reference_code():
    """`apply_scaling` of meta-llama, one frequency at a time and by wavelengths."""
    factor, low, high, original = 8.0, 1.0, 4.0, 8192
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low,
               "high_freq_factor": high, "original_max_position_embeddings": original}  # fmt: skip
    config = {"rope_theta": 500000.0, "rope_scaling": scaling}
    expected, kinds = [], set()
    for j in range(64):
        frequency = 500000.0 ** (-2 * j / 128)
        wavelength = 2 * np.pi / frequency
        if wavelength < original / high:
            kinds.add("kept")
        elif wavelength > original / low:
            kinds.add("divided")
            frequency /= factor
        else:
            kinds.add("between")
            smooth = (original / wavelength - low) / (high - low)
            frequency = (1 - smooth) * frequency / factor + smooth * frequency
        expected.append(frequency)
    assert kinds == {"kept", "divided", "between"}
    found = read_rotary(config, 128, 131072)
    np.testing.assert_allclose(found, expected, rtol=1e-13)
