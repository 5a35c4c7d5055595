"""Adapters as PEFT keeps them: a folder with a configuration and a safetensors file."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx

from jaxttp._core.checks import check_finite, check_integer
from jaxttp._core.files import replaced
from jaxttp._core.types import Model, Params, leaf_paths, noted, notes_of
from jaxttp.adapters import from_nnx
from jaxttp.models.combinators import Predicate
from jaxttp.models.language.folder import PREFIXES, Tensor, read_json, tensor_of
from jaxttp.models.language.network import Decoder, Encoder
from jaxttp.models.low_rank import chosen_modules, lora_scale, merge_lora
from jaxttp.models.pretrained.checkpoint import arrays_of, list_problems, misfits, read_tensors

CONFIG, WEIGHTS, START = "adapter_config.json", "adapter_model.safetensors", "base_model.model."

_KNOWN = {
    "peft_type", "peft_version", "base_model_name_or_path", "revision", "task_type", "auto_mapping",
    "inference_mode", "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules",
    "modules_to_save", "fan_in_fan_out", "lora_dropout", "init_lora_weights", "bias",
    "layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size",
    "ensure_weight_tying",
}  # fmt: skip
"""Settings of PEFT that are read, or that say nothing about trained weights."""
_TASKS = {"classification": "SEQ_CLS", "language_model": "CAUSAL_LM", "states": None}


def adapter_targets(network: Encoder | Decoder, target_modules: str | Sequence[str]) -> Predicate:
    """Kernels by the names that Hugging Face gives their modules, for `jaxttp.models.lora`.

    Args:
        network: of `load_transformer`.
        target_modules: as in PEFT: ends of names, such as ``["query", "value"]`` of BERT or
            ``["c_attn"]`` of GPT-2, a regular expression for whole names, or "all-linear".

    Returns:
        A predicate on the paths of the network's parameters.

    Raises:
        ValueError: a name that fits no module.

    Example:
        >>> from flax import nnx
        >>> from jaxttp.models.language import Architecture
        >>> sizes = dict(width=8, depth=1, heads=2, hidden=12, length=16)
        >>> shape = Architecture("gpt2", 50, fused=True, **sizes)
        >>> network = nnx.eval_shape(lambda: Decoder(shape, rngs=nnx.Rngs(0)))
        >>> adapter_targets(network, ["c_attn"])("blocks/0/attention/qkv_proj/kernel")
        True
    """
    modules = _modules(network)
    if target_modules == "all-linear":
        chosen = [name for name, path in modules.items() if path.startswith("blocks/")]
    else:
        chosen = chosen_modules(list(modules), target_modules)
    paths = {modules[name] for name in chosen}
    return lambda path: path in paths


def load_adapter(network: Encoder | Decoder, folder: str | os.PathLike[str]) -> Model:
    """A language model with an adapter from a folder of PEFT, which alone is its parameters.

    Args:
        network: the base model, of `load_transformer`, with the head that the adapter is for.
        folder: with ``adapter_config.json`` and ``adapter_model.safetensors``.

    Returns:
        A model as `jaxttp.models.lora` makes it: ``{path: {"a": A, "b": B}}`` are its parameters,
        and what PEFT saved in full (``modules_to_save``, such as the head) by its path.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: a method that is not LoRA, an option of it that is not supported, by its name;
            tensors that the network has no place for, or of another shape (all are listed).
    """
    folder = Path(folder)
    config = _read_config(folder)
    scale = lora_scale(config["r"], alpha=config.get("lora_alpha", 8),
                       rslora=bool(config.get("use_rslora")))  # fmt: skip
    apply_fn, params = from_nnx(network)
    adapters = _read_weights(folder, network, params, config["r"])

    def apply(adapters: Params, x: Any) -> Any:
        return apply_fn(merge_lora(params, adapters, scale=scale), x)

    return Model(noted(apply, lambda: notes_of(apply_fn)), adapters)


def save_adapter(
    folder: str | os.PathLike[str],
    network: Encoder | Decoder,
    adapters: Mapping[str, Any],
    *,
    alpha: float | None = None,
    rslora: bool = False,
    base: str = "",
) -> None:
    """Write the parameters of `jaxttp.models.lora` as a folder that PEFT reads.

    Args:
        folder: made if it is not there; its two files are replaced.
        network: the base model, of `load_transformer`.
        adapters: ``{path: {"a": A, "b": B}}``, and ``{path: array}`` of what trained in full.
        alpha: as it was in `lora`.
        rslora: likewise.
        base: where PEFT finds the base model, a folder or a name.

    Raises:
        ValueError: no adapters, ranks that differ, paths that the network does not have.
    """
    modules = {path: name for name, path in _modules(network).items()}
    tensors: dict[str, np.ndarray] = {}
    ranks, saved = {}, set()
    places = _places(network)
    for path, found in adapters.items():
        if path not in places:
            raise ValueError(f"adapters: the network has no {path}.")
        if isinstance(found, Mapping):
            name = START + modules[path]
            ranks[path] = found["a"].shape[1]
            tensors[f"{name}.lora_A.weight"] = np.ascontiguousarray(np.asarray(found["a"]).T)
            tensors[f"{name}.lora_B.weight"] = np.ascontiguousarray(np.asarray(found["b"]).T)
        else:
            place = places[path]
            value = np.asarray(found)
            tensors[START + place.name] = np.ascontiguousarray(
                value.T if place.transposed else value
            )
            inner = place.name.removeprefix(PREFIXES.get(network.shape.family, "model."))
            saved.add(inner.split(".")[0] if place.head else place.name.rpartition(".")[0])
    if len({*ranks.values()}) != 1:
        raise ValueError(f"adapters must have one rank; got {sorted({*ranks.values()})}.")
    rank = next(iter(ranks.values()))
    lora_scale(rank, alpha=alpha, rslora=rslora)
    config = {
        "peft_type": "LORA",
        "task_type": _TASKS[network.kind],
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank if alpha is None else alpha,
        "use_rslora": rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": network.shape.family == "gpt2",
        "target_modules": sorted(modules[path] for path in ranks),
        "modules_to_save": sorted(saved) or None,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with replaced(folder / WEIGHTS) as weights, replaced(folder / CONFIG) as place:
        safetensors.numpy.save_file(tensors, weights, metadata={"format": "pt"})
        place.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _places(network: Encoder | Decoder) -> dict[str, Tensor]:
    """Where a file has each of the network's parameters, by path."""
    names = arrays_of(network, nnx.Param)
    return {name.replace(".", "/"): tensor_of(name, network.shape, network.kind) for name in names}


def _modules(network: Encoder | Decoder) -> dict[str, str]:
    """The paths of the kernels by the names of their modules in PyTorch."""
    places = _places(network).items()
    return {
        place.name.removesuffix(".weight"): path for path, place in places
        if path.endswith("/kernel")
    }  # fmt: skip


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"folder={str(folder)!r} has no {CONFIG}; it must be one that save_pretrained of PEFT "
            "wrote."
        )
    config = read_json(path)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"{path}: peft_type={kind!r} is not supported; 'LORA' is.")
    check_integer("r", config.get("r"), at_least=1)
    for name, value in config.items():
        neutral = value is None or value is False or value == {} or value == []
        if (name not in _KNOWN and not neutral) or (name == "bias" and value != "none"):
            raise ValueError(
                f"{path}: {name}={value!r} is not supported; plain LoRA and rsLoRA are."
            )
    start = config.get("init_lora_weights", True)
    if not isinstance(start, bool) and start not in ("gaussian", "orthogonal"):
        raise ValueError(
            f"{path}: init_lora_weights={start!r} changes the weights of the base model, too; "
            "convert the adapter to plain LoRA with PEFT."
        )
    return config


def _read_weights(
    folder: Path, network: Encoder | Decoder, params: Params, rank: int
) -> dict[str, Any]:
    """The adapters, by the paths of the network's parameters."""
    path = folder / WEIGHTS
    tensors = read_tensors(path)
    leaves = dict(zip(leaf_paths(params), jax.tree.leaves(params), strict=True))
    places, prefix = _places(network), PREFIXES.get(network.shape.family, "model.")
    parts = {name: _part(name, prefix, places) for name in tensors}
    wanted: dict[str, tuple[int, ...]] = {}
    for name, part in parts.items():
        if part is not None:
            halves = "ab" if part.half else [""]
            for half in halves:  # both of a pair, whichever is there
                own = name.replace(f".lora_{part.half.upper()}.", f".lora_{half.upper()}.")
                wanted[own] = part._replace(half=half).file_shape(leaves, rank)
    problems = misfits(wanted, {name: value.shape for name, value in tensors.items()})
    if problems or not tensors:
        found = list_problems(problems) if tensors else "it holds no adapter"
        raise ValueError(f"{path} does not fit this network: {found}.")
    adapters: dict[str, Any] = {}
    for name, part in parts.items():
        assert part is not None
        value = tensors[name].T if part.transposed else tensors[name]
        array = jnp.asarray(value, leaves[part.path].dtype)
        check_finite(f"{path}: {name}", array)
        if part.half:
            adapters.setdefault(part.path, {})[part.half] = array
        else:
            adapters[part.path] = array
    return adapters


class _Part(NamedTuple):
    """What a tensor of an adapter's file is of a network: "a" or "b" of a kernel, or all of it."""

    path: str
    half: str
    transposed: bool

    def file_shape(self, leaves: Mapping[str, Any], rank: int) -> tuple[int, ...]:
        """The shape that the file's tensor must have."""
        own = leaves[self.path].shape
        if self.half:
            return (rank, own[0]) if self.half == "a" else (own[1], rank)
        return own[::-1] if self.transposed else own


def _part(name: str, prefix: str, places: Mapping[str, Tensor]) -> _Part | None:
    """The part that a tensor's name stands for; None for none."""
    own = name.removeprefix(START)
    module, _, half = own.removesuffix(".weight").rpartition(".lora_")
    wanted = f"{module}.weight" if module else own
    paths = {place.name: path for path, place in places.items()}
    path = paths.get(wanted, paths.get(prefix + wanted))
    if path is None:
        return None
    if not module:
        return _Part(path, "", places[path].transposed)
    kernel = path.endswith("/kernel") and half in ("A", "B")
    return _Part(path, half.lower(), True) if kernel else None
