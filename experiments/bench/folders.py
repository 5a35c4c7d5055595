"""A small language model of bytes as the folder that Hugging Face would write of it."""

import json
from pathlib import Path

import numpy as np
import safetensors.numpy
import tokenizers
from flax import nnx
from tokenizers import models, pre_tokenizers

from jaxttp.models import Decoder
from jaxttp.models.language.folder import tensor_of


def write_folder(network: Decoder, folder: Path) -> None:
    """Weights, config.json and tokenizer.json of a Llama of bytes below 128.

    Args:
        network: of the family "llama", with the head "language_model".
        folder: made if need be.
    """
    shape = network.shape
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for keys, leaf in nnx.to_flat_state(nnx.state(network, nnx.Param)):
        place = tensor_of(".".join(map(str, keys)), shape, network.kind)
        value = np.asarray(leaf[...])
        tensors[place.name] = np.ascontiguousarray(value.T if place.transposed else value)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": shape.width, "intermediate_size": shape.hidden,
        "max_position_embeddings": shape.length, "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.depth, "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.norm_epsilon, "rope_theta": 10000.0,
        "tie_word_embeddings": shape.tied, "vocab_size": shape.vocabulary,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    letters = {chr(i): i for i in range(shape.vocabulary)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
