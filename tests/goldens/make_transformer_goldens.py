"""Golden outputs of language models by transformers and PEFT, on tiny random networks.

The test suite needs no PyTorch: it reads the folders that this script wrote. To write them again:

    python -m venv torch-environment
    torch-environment/bin/pip install torch transformers peft safetensors
    torch-environment/bin/python tests/goldens/make_transformer_goldens.py

Written with torch 2.14.1, transformers 5.24.0, peft 0.21.2 on a CPU. Each network is a folder below
``transformers/`` as ``save_pretrained`` writes it; ``outputs.safetensors`` holds ids and masks
(N, T), padded on the right and on the left, and for every network its outputs in float64. All
parameters are random, so that none can be left out unnoticed; most are kept in half precision.

transformers computes RMSNorm and rotary angles in float32 whatever the dtype of the weights. For
the float64 outputs its float32 is float64 while a network is built and called.
"""

import contextlib
import json
import pathlib
import shutil
from unittest import mock

import numpy as np
import peft
import torch
import transformers
from safetensors.numpy import load_file, save_file

FOLDER = pathlib.Path(__file__).parent / "transformers"
VOCABULARY, LENGTH, CLASSES, PAD = 24, 16, 3, 1
LENGTHS, LONGEST = (7, 4, 1), 7
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 20, "max_position_embeddings": LENGTH, "pad_token_id": PAD,
    "num_labels": CLASSES,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2, "initializer_range": 0.02}
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": LENGTH,
    "pad_token_id": PAD, "num_labels": CLASSES, "n_inner": 20,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8,
}  # fmt: skip


def networks():
    """What makes each network, by the name of its folder."""
    t = transformers
    bert = t.BertConfig(**SIZES, type_vocab_size=2)
    roberta = t.RobertaConfig(
        **(SIZES | {"max_position_embeddings": LENGTH + PAD + 1}), type_vocab_size=1
    )
    return {
        "bert-classifier": lambda: t.BertForSequenceClassification(bert),
        "bert-mlm": lambda: t.BertForMaskedLM(bert),
        "roberta-classifier": lambda: t.RobertaForSequenceClassification(roberta),
        "gpt2-lm": lambda: t.GPT2LMHeadModel(t.GPT2Config(**GPT2)),
        "gpt2-classifier": lambda: t.GPT2ForSequenceClassification(t.GPT2Config(**GPT2)),
        "llama-lm": lambda: t.LlamaForCausalLM(
            t.LlamaConfig(**GROUPED, head_dim=6, rope_parameters=dict(LLAMA3))
        ),
        "llama-classifier": lambda: t.LlamaForSequenceClassification(
            t.LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True)
        ),
        "smollm-tied": lambda: t.LlamaForCausalLM(
            t.LlamaConfig(**GROUPED, tie_word_embeddings=True)
        ),
        "qwen2-lm": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**GROUPED, tie_word_embeddings=True)),
        "mistral-lm": lambda: t.MistralForCausalLM(
            t.MistralConfig(**GROUPED, sliding_window=3, rms_norm_eps=1e-5)
        ),
    }


ADAPTERS = {
    "bert-classifier": {"target_modules": ["query", "value"], "r": 3, "lora_alpha": 6},
    "gpt2-classifier": {"target_modules": ["c_attn"], "r": 2, "lora_alpha": 4},
    "llama-classifier": {
        "target_modules": r".*\.(q_proj|down_proj)", "r": 3, "lora_alpha": 6, "use_rslora": True,
    },
}  # fmt: skip


@contextlib.contextmanager
def double_precision():
    """What transformers writes as float32 is float64."""
    single, double = torch.float32, torch.float64
    tensors = mock.patch.object(torch.Tensor, "float", torch.Tensor.double)
    with mock.patch.multiple(torch, float32=double, float=double), tensors:
        torch.set_default_dtype(double)
        try:
            yield
        finally:
            torch.set_default_dtype(single)


def randomise(model, seed):
    """Every parameter at random, of a size that keeps outputs of order one."""
    draw = torch.Generator().manual_seed(seed)
    for name, value in model.named_parameters():
        with torch.no_grad():
            if value.ndim > 1:
                value.copy_(
                    torch.randn(value.shape, generator=draw) * 1.2 * value.shape[-1] ** -0.5
                )
            elif name.endswith("weight"):
                value.copy_(torch.rand(value.shape, generator=draw) * 0.6 + 0.7)
            else:
                value.copy_(torch.randn(value.shape, generator=draw) * 0.2)


def samples():
    """Ids and masks, the same tokens with the padding on the right and on the left."""
    draw, shape, out = np.random.default_rng(0), (len(LENGTHS), LONGEST), {}
    for side in ("right", "left"):
        out[f"{side}.ids"] = np.full(shape, PAD, np.int32)
        out[f"{side}.mask"] = np.zeros(shape, np.int32)
    for row, length in enumerate(LENGTHS):
        tokens, end = draw.integers(2, VOCABULARY, length), LONGEST - length
        for side, part in (("right", slice(length)), ("left", slice(end, None))):
            out[f"{side}.ids"][row, part], out[f"{side}.mask"][row, part] = tokens, 1
    return out


def call(model, arrays, side):
    """Logits; of a padding on the left by the positions that the tokens have without it."""
    ids, mask = (torch.tensor(arrays[f"{side}.{what}"]).long() for what in ("ids", "mask"))
    given = {"input_ids": ids, "attention_mask": mask}
    if "Bert" not in type(model).__name__ and "Roberta" not in type(model).__name__:
        given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        return model(**given).logits.numpy()


def main():
    """Write all folders."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    arrays = samples()
    for seed, (name, make) in enumerate(networks().items()):
        folder, model = FOLDER / name, make()
        randomise(model, seed)
        model.eval()
        if name != "llama-classifier":
            model = model.bfloat16() if name == "mistral-lm" else model.half()
        more = {"max_shard_size": "4KB"} if name == "qwen2-lm" else {}
        model.save_pretrained(folder, **more)
        (folder / "generation_config.json").unlink(missing_ok=True)
        single = type(model).from_pretrained(folder, dtype=torch.float32).eval()
        if name in ADAPTERS:
            write_adapter(name, single)
            single = type(model).from_pretrained(folder, dtype=torch.float32).eval()
        with double_precision():
            loaded = type(model)(single.config).double().eval()
            loaded.load_state_dict(single.state_dict())
            encoder = name.split("-")[0] in ("bert", "roberta")
            for side in ("right",) if encoder else ("right", "left"):
                arrays[f"{name}.{side}"] = call(loaded, arrays, side)
            if name in ADAPTERS:
                arrays[f"{name}.adapter"] = call(with_adapter(name, loaded), arrays, "right")
        print(name, arrays[f"{name}.right"].std())
    save_file(arrays, FOLDER / "outputs.safetensors")


def write_adapter(name, model):
    """A PEFT adapter of the network as a folder inside its own."""
    folder = FOLDER / name / "adapter"
    config = peft.LoraConfig(task_type="SEQ_CLS", lora_dropout=0.1, **ADAPTERS[name])
    found = peft.get_peft_model(model, config)
    randomise_adapters(found)
    found.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    path = folder / "adapter_config.json"
    kept = json.loads(path.read_text()) | {"base_model_name_or_path": name}
    kept = {key: sorted(one) if isinstance(one, list) else one for key, one in kept.items()}
    path.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def with_adapter(name, model):
    """The network with the adapter of its folder."""
    folder = FOLDER / name / "adapter"
    found = peft.get_peft_model(model, peft.LoraConfig.from_pretrained(folder)).double()
    weights = load_file(folder / "adapter_model.safetensors")
    peft.set_peft_model_state_dict(
        found, {key: torch.tensor(value) for key, value in weights.items()}
    )
    return found.eval()


def randomise_adapters(model):
    """B is zero in a new adapter; here nothing is."""
    draw = torch.Generator().manual_seed(7)
    for name, value in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            with torch.no_grad():
                value.copy_(torch.randn(value.shape, generator=draw) * 0.4)


if __name__ == "__main__":
    main()
