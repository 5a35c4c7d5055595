"""A Hugging Face folder on disk as a network: config.json and safetensors. No download, ever."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxttp._core.checks import check_choice, check_finite, check_key
from jaxttp._core.files import parse_json
from jaxttp.models.combinators import Predicate
from jaxttp.models.language.architecture import Architecture, read_architecture
from jaxttp.models.language.network import HEADS, Decoder, Encoder
from jaxttp.models.layers import linear_head
from jaxttp.models.low_rank import matching_modules
from jaxttp.models.pretrained.checkpoint import arrays_of, fill, list_problems, misfits, opened


class Tensor(NamedTuple):
    """The tensor of a file that holds one of our arrays.

    Attributes:
        name: of the tensor.
        transposed: whether its axes are (out, in), as of PyTorch's linear layers.
        head: whether it belongs to the head, after the body, which may be drawn at random.
    """

    name: str
    transposed: bool = False
    head: bool = False


_LLAMA = {
    "embed": "embed_tokens",
    "blocks": "layers",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "attention": "self_attn",
    "norm": "norm",
}
_GPT2 = {
    "embed": "wte",
    "positions": "wpe.weight",
    "blocks": "h",
    "norm1": "ln_1",
    "norm2": "ln_2",
    "attention": "attn",
    "attention.qkv_proj": "attn.c_attn",
    "attention.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
    "norm": "ln_f",
}
_BERT = {
    "embed": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings.weight",
    "segments": "embeddings.token_type_embeddings.weight",
    "embed_norm": "embeddings.LayerNorm",
    "blocks": "encoder.layer",
    "norm1": "attention.output.LayerNorm",
    "norm2": "output.LayerNorm",
    "attention.q_proj": "attention.self.query",
    "attention.k_proj": "attention.self.key",
    "attention.v_proj": "attention.self.value",
    "attention.o_proj": "attention.output.dense",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
}
_BODIES = {"bert": _BERT, "roberta": _BERT, "gpt2": _GPT2}
PREFIXES = {"bert": "bert.", "roberta": "roberta.", "gpt2": "transformer."}
"""Prefixes of the names of a body with a head; "model." in Llama's family."""

_HEADS = {
    "bert": {"pooler": "bert.pooler.dense", "head": "classifier"},
    "roberta": {"pooler": "classifier.dense", "head": "classifier.out_proj"},
}
_DECODER_HEADS = {"classification": {"head": "score"}, "language_model": {"head": "lm_head"}}

UNUSED = (
    "pooler.", "cls.", "lm_head.", "classifier.", "score.", "qa_outputs.",
    "embeddings.position_ids", "attn.bias", "attn.masked_bias", "rotary_emb.inv_freq",
)  # fmt: skip
"""Parts of the names of tensors that are ignored: other heads, and constants."""


def tensor_of(name: str, shape: Architecture, head: str) -> Tensor:
    """The tensor of the file that holds one of our arrays.

    Args:
        name: ours, with dots.
        shape: the architecture.
        head: its kind of head.

    Returns:
        The tensor's name, and whether it is transposed.

    Example:
        >>> shape = Architecture("gpt2", 50, width=8, depth=1, heads=2, hidden=8, length=16)
        >>> tensor_of("blocks.0.mlp.up_proj.kernel", shape, "states").name
        'transformer.h.0.mlp.c_fc.weight'
    """
    family = shape.family
    heads = _HEADS[family] if family in _HEADS else _DECODER_HEADS.get(head, {})
    body = _BODIES.get(family, _LLAMA)
    prefix = PREFIXES.get(family, "model.")
    *path, leaf = name.split(".")
    ending = "bias" if leaf == "bias" else "weight"
    if not path:  # an array of its own, not of a layer
        return Tensor(prefix + body[leaf])
    first = path[0]
    if first in heads:
        return Tensor(f"{heads[first]}.{ending}", leaf == "kernel", head=True)
    if first != "blocks":
        return Tensor(f"{prefix}{body[first]}.{ending}")
    part = ".".join(path[2:])
    top = body.get(path[2], path[2])
    inner = body.get(part, ".".join([top, *path[3:]]))
    transposed = leaf == "kernel" and family != "gpt2"
    return Tensor(f"{prefix}{body['blocks']}.{path[1]}.{inner}.{ending}", transposed)


def adapter_targets(network: Encoder | Decoder, target_modules: str | Sequence[str]) -> Predicate:
    """Kernels by the names that Hugging Face gives their modules, for `jaxttp.models.lora`.

    Args:
        network: of `load_transformer`.
        target_modules: as in PEFT: ends of names, such as ``["query", "value"]`` of BERT or
            ``["c_attn"]`` of GPT-2, or "all-linear".

    Returns:
        A predicate on the paths of the network's parameters.

    Raises:
        ValueError: a name that fits no module.

    Example:
        >>> sizes = dict(width=8, depth=1, heads=2, hidden=12, length=16)
        >>> shape = Architecture("gpt2", 50, fused=True, **sizes)
        >>> network = nnx.eval_shape(lambda: Decoder(shape, rngs=nnx.Rngs(0)))
        >>> adapter_targets(network, ["c_attn"])("blocks/0/attention/qkv_proj/kernel")
        True
    """
    kernels = [name for name in arrays_of(network, nnx.Param) if name.endswith(".kernel")]
    modules = {
        tensor_of(name, network.shape, network.kind).name.removesuffix(".weight"): name
        for name in kernels
    }
    if target_modules == "all-linear":
        targets = [module for module, name in modules.items() if name.startswith("blocks.")]
    else:
        targets = matching_modules(list(modules), target_modules)
    paths = {modules[module].replace(".", "/") for module in targets}
    return lambda path: path in paths


INDEX, WEIGHTS, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"


def load_transformer(
    folder: str | os.PathLike[str],
    *,
    head: str | None = None,
    outputs: int | None = None,
    key: Array | None = None,
    architecture: str | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Encoder | Decoder:
    """A language model from a folder as ``save_pretrained`` of transformers writes it.

    BERT and RoBERTa, GPT-2, Llama (SmolLM too), Mistral and Qwen2, without PyTorch; weights of
    one or several safetensors files, half precision promoted. Its call takes ids and a mask
    (N, T), or a mapping of both, as `load_tokenizer` gives it.

    Args:
        folder: with ``config.json`` and ``model.safetensors``, or shards with their index.
        head: "classification" (N, C), "states" (N, T, D) or, of a decoder, "language_model"
            (N, T, V); None for "classification" where `outputs` is given, else for the head of the
            folder's network.
        outputs: C of a classification; that of the folder when None.
        key: a JAX random key, draws a fresh head, in place of the folder's own if there is one.
        architecture: "bert", "roberta", "gpt2", "llama", "mistral" or "qwen2", in place of the
            ``model_type`` of ``config.json``.
        dtype: of the parameters.

    Returns:
        An `Encoder` or a `Decoder`, with the attribute ``shape``, its `Architecture`.

    Raises:
        FileNotFoundError: no such folder, no ``config.json``, no weights, a missing shard.
        ValueError: an unknown architecture or a setting that is not supported; names or shapes of
            tensors that do not fit (all are listed by kind); values that are not finite; a head
            that the folder does not have, without a `key` to draw one.

    Example:
        >>> load_transformer("no-such-folder")
        Traceback (most recent call last):
        ...
        FileNotFoundError: folder='no-such-folder' has no config.json; it must be a folder as ...
    """
    folder, config = Path(folder), read_config(folder)
    shape = read_architecture(config, where=f"{folder.name}/{CONFIG}", architecture=architecture)
    check_key(key)
    if head is None:
        head = _own_head(config) if outputs is None else "classification"
    check_choice("head", head, HEADS)
    if outputs is not None and head != "classification":
        raise ValueError(f"outputs={outputs!r} counts classes; it needs head='classification'.")
    kind = Encoder if shape.encoder else Decoder
    options: dict[str, Any] = {"head": head, "outputs": outputs, "param_dtype": dtype}
    model = nnx.eval_shape(lambda: kind(shape, rngs=nnx.Rngs(0), **options))
    return _filled(model, _Tensors(folder, shape), key)


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The contents of a folder's ``config.json``.

    Args:
        folder: the folder.

    Returns:
        A dictionary.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no JSON object.
    """
    path = Path(folder, CONFIG)
    if not path.is_file():
        raise FileNotFoundError(
            f"folder={str(folder)!r} has no {CONFIG}; it must be a folder as save_pretrained of "
            "transformers writes it, on this machine: nothing is downloaded."
        )
    return read_json(path)


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds, else `ValueError`."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ValueError(f"{path} is no JSON: {problem}") from problem
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object; it holds a {type(content).__name__}.")
    return content


def _own_head(config: Mapping[str, Any]) -> str:
    """The kind of head of the folder's network."""
    names = " ".join(config.get("architectures") or ())
    if "ForSequenceClassification" in names:
        return "classification"
    if "ForCausalLM" in names or "LMHeadModel" in names:
        return "language_model"
    return "states"


class _Tensors:
    """The tensors of a folder by the names of `tensor_of`, in one file or several."""

    def __init__(self, folder: Path, shape: Architecture):
        self.folder = folder
        self.files: dict[str, tuple[Path, str]] = {}  # the file, and the name in it
        self.shapes: dict[str, tuple[int, ...]] = {}
        prefix = PREFIXES.get(shape.family, "model.")
        in_files: dict[str, tuple[Path, tuple[int, ...]]] = {}
        for path in _files(folder):
            with opened(path) as file:
                for name in file.keys():
                    in_files[name] = path, tuple(file.get_slice(name).get_shape())
        is_bare = not any(name.startswith(prefix) for name in in_files)
        heads = tuple(head for head in UNUSED if head != "pooler.")
        for file_name, (path, size) in in_files.items():
            name = file_name.replace("LayerNorm.gamma", "LayerNorm.weight")
            name = name.replace("LayerNorm.beta", "LayerNorm.bias")
            if is_bare and not name.startswith(heads):
                name = prefix + name
            self.files[name], self.shapes[name] = (path, file_name), size

    def read(self, name: str) -> np.ndarray:
        """The values."""
        path, file_name = self.files[name]
        with opened(path) as file:
            return file.get_tensor(file_name)


def _files(folder: Path) -> list[Path]:
    """The files that hold the weights."""
    if (folder / INDEX).is_file():
        listed = read_json(folder / INDEX).get("weight_map")
        if not isinstance(listed, dict):
            raise ValueError(f"{folder / INDEX} has no weight_map from tensors to files.")
        shards = sorted({Path(str(name)).name for name in listed.values()})  # of this folder alone
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing:
            raise FileNotFoundError(
                f"folder={str(folder)!r} lacks {', '.join(missing)}, of the {len(shards)} shards "
                f"that {INDEX} names; fetch what is missing."
            )
        return [folder / name for name in shards]
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    cause = f"; {pickles[0]} is a pickle, which is not read: " if pickles else "; "
    raise FileNotFoundError(
        f"folder={str(folder)!r} has no {WEIGHTS} and no {INDEX}{cause}write them with "
        "save_pretrained of transformers (safetensors is its default)."
    )


def _filled(model: Encoder | Decoder, tensors: _Tensors, key: Array | None) -> Encoder | Decoder:
    """The network with the folder's weights, a head drawn where there is none or a key is given."""
    arrays = arrays_of(model, nnx.Param)
    sources = {name: tensor_of(name, model.shape, model.kind) for name in arrays}
    drawn = _drawn(model, sources, tensors, key)
    shapes = {}
    for name, leaf in arrays.items():
        if name not in drawn:
            shape = tuple(leaf.shape)
            shapes[sources[name].name] = shape[::-1] if sources[name].transposed else shape
    problems = misfits(shapes, tensors.shapes, lambda name: any(part in name for part in UNUSED))
    if problems:
        raise ValueError(
            f"folder={str(tensors.folder)!r}: the weights do not fit {CONFIG}: "
            f"{list_problems(problems)}."
        )
    values = {}
    for name, leaf in arrays.items():
        source = sources[name]
        if name in drawn:
            values[name] = _fresh(name, leaf, key)
        else:
            value = tensors.read(source.name)
            values[name] = jnp.asarray(value.T if source.transposed else value, leaf.dtype)
            check_finite(f"{tensors.folder}: {source.name}", values[name])
    fill(model, values)
    return model


def _drawn(
    model: Encoder | Decoder, sources: Mapping[str, Tensor], tensors: _Tensors, key: Array | None
) -> set[str]:
    """The arrays of the head that are not read from the folder."""
    after = {name: source.name for name, source in sources.items() if source.head}
    missing = {name for name, source in after.items() if source not in tensors.shapes}
    if model.kind != "classification":
        return set()  # a missing tensor is an error
    if key is not None:
        return missing | {name for name in after if name.startswith("head.")}
    if missing:
        raise ValueError(
            f"folder={str(tensors.folder)!r} has no head for a classification "
            f"({', '.join(sorted(after[name] for name in missing))}); give a key to draw one, such "
            "as jax.random.key(0)."
        )
    classes, in_folder = model.head.out_features, tensors.shapes[after["head.kernel"]][0]
    if classes != in_folder:
        raise ValueError(
            f"outputs={classes}, but the head in {str(tensors.folder)!r} has {in_folder}; give a "
            "key to draw another, such as jax.random.key(0)."
        )
    return set()


def _fresh(name: str, leaf: Any, key: Array | None) -> Array:
    """An array of a fresh head or of the layer before it: kernels at random, biases 0."""
    layer, kind = name.split(".")
    if kind == "bias":
        return jnp.zeros(leaf.shape, leaf.dtype)
    assert key is not None
    rngs = nnx.Rngs(params=jax.random.fold_in(key, 0 if layer == "head" else 1))
    return linear_head(*leaf.shape, rngs=rngs, param_dtype=leaf.dtype).kernel[...]
