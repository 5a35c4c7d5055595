"""How other libraries name and lay out the weights of the networks here.

A naming maps each of our names to the file's tensors that it is made of. Kernels are (height,
width, in, out) and (in, out) here, (out, in, height, width) and (out, in) in PyTorch.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from jaxttp.models.resnet import ResNet
from jaxttp.models.vit import ViT

Lengths = tuple[int, ...]


class Source(NamedTuple):
    """Where one of our arrays comes from.

    Attributes:
        names: tensors of the file, to be concatenated along the outputs.
        kind: "conv", "linear", "positions" (a ViT's, of images of any size) or "same".
    """

    names: tuple[str, ...]
    kind: str

    def file_shape(self, own: Lengths) -> Lengths:
        """The shape that each tensor of the file must have."""
        if self.kind == "conv":
            height, width, inputs, outputs = own
            return (outputs, inputs, height, width)
        if self.kind == "linear":
            return (own[1] // len(self.names), own[0])
        return (own[0] // len(self.names), *own[1:])

    def convert(self, tensors: Iterable[np.ndarray]) -> np.ndarray:
        """Our array."""
        joined = np.concatenate(list(tensors), axis=0)
        axes = {"conv": (2, 3, 1, 0), "linear": (1, 0)}.get(self.kind)
        return joined if axes is None else joined.transpose(axes)


class Naming(NamedTuple):
    """One library's names for one kind of network.

    Attributes:
        library: who writes such files.
        mark: the end of a tensor's name that only such files have.
        source: (our name, the network, prefix) -> `Source`.
        head: beginnings of the names of the last layer.
        ignored: ends of names that play no part in evaluation.
        prefix: what whole networks put before the names of their body, "" if nothing.
        norm_epsilon: of the layer norms in that library; None where there are none.
    """

    library: str
    mark: str
    source: Callable[[str, Any, str], Source]
    head: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    prefix: str = ""
    norm_epsilon: float | None = None


_NORM = {"scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}


def _stage(model: ResNet, block: int) -> tuple[int, int]:
    """The stage of a block and its place there, both from 0."""
    for stage, size in enumerate(model.stage_sizes):
        if block < size:
            return stage, block
        block -= size
    raise IndexError(block)


def _torch_resnet(name: str, model: ResNet, prefix: str) -> Source:
    *path, leaf = name.split(".")
    if path[0] == "head":
        return _dense("fc", leaf)
    if path[0] != "blocks":
        return _norm("bn1", leaf) if path[0] == "stem_norm" else Source(("conv1.weight",), "conv")
    stage, index = _stage(model, int(path[1]))
    place = f"layer{stage + 1}.{index}"
    part = path[2]
    if part == "shortcut":
        return Source((f"{place}.downsample.0.weight",), "conv")
    if part == "shortcut_norm":
        return _norm(f"{place}.downsample.1", leaf)
    if part.startswith("conv"):
        return Source((f"{place}.{part}.weight",), "conv")
    return _norm(f"{place}.bn{part.removeprefix('norm')}", leaf)


def _hugging_face_resnet(name: str, model: ResNet, prefix: str) -> Source:
    *path, leaf = name.split(".")
    if path[0] == "head":
        return _dense("classifier.1", leaf)
    if path[0] == "blocks":
        stage, index = _stage(model, int(path[1]))
        place = f"{prefix}encoder.stages.{stage}.layers.{index}"
        part = path[2].removesuffix("_norm")
        number = part.removeprefix("conv").removeprefix("norm")
        place += ".shortcut" if part == "shortcut" else f".layer.{int(number) - 1}"
    else:
        place = f"{prefix}embedder.embedder"
    if leaf == "kernel":
        return Source((f"{place}.convolution.weight",), "conv")
    return _norm(f"{place}.normalization", leaf)


def _timm_vit(name: str, model: ViT, prefix: str) -> Source:
    *path, leaf = name.split(".")
    if not path:
        return _token(leaf, {"cls_token": "cls_token", "positions": "pos_embed"}[leaf])
    if path[0] == "patch_embed":
        return _patches("patch_embed.proj", leaf)
    if path[0] in ("norm", "head"):
        return _norm("norm", leaf) if path[0] == "norm" else _dense("head", leaf)
    place = f"blocks.{path[1]}"
    if path[2].startswith("norm"):
        return _norm(f"{place}.{path[2]}", leaf)
    part = f"attn.{path[3]}" if path[2] == "attention" else f"mlp.{path[2]}"
    return _dense(f"{place}.{part}", leaf)


def _hugging_face_vit(name: str, model: ViT, prefix: str) -> Source:
    *path, leaf = name.split(".")
    if not path:
        part = {"cls_token": "cls_token", "positions": "position_embeddings"}[leaf]
        return _token(leaf, f"{prefix}embeddings.{part}")
    if path[0] == "patch_embed":
        return _patches(f"{prefix}embeddings.patch_embeddings.projection", leaf)
    if path[0] == "head":
        return _dense("classifier", leaf)
    if path[0] == "norm":
        return _norm(f"{prefix}layernorm", leaf)
    place = f"{prefix}encoder.layer.{path[1]}."
    if path[2] in ("norm1", "norm2"):
        return _norm(place + {"1": "layernorm_before", "2": "layernorm_after"}[path[2][-1]], leaf)
    if path[-1] == "qkv":
        names = (f"{place}attention.attention.{part}" for part in ("query", "key", "value"))
        return _dense(tuple(names), leaf)
    parts = {"proj": "attention.output", "fc1": "intermediate", "fc2": "output"}
    return _dense(f"{place}{parts[path[-1]]}.dense", leaf)


def _dense(names: str | tuple[str, ...], leaf: str) -> Source:
    names = (names,) if isinstance(names, str) else names
    ending, kind = ("weight", "linear") if leaf == "kernel" else ("bias", "same")
    return Source(tuple(f"{name}.{ending}" for name in names), kind)


def _patches(name: str, leaf: str) -> Source:
    return (
        Source((f"{name}.weight",), "conv")
        if leaf == "kernel"
        else Source((f"{name}.bias",), "same")
    )


def _norm(name: str, leaf: str) -> Source:
    return Source((f"{name}.{_NORM[leaf]}",), "same")


def _token(leaf: str, name: str) -> Source:
    return Source((name,), "positions" if leaf == "positions" else "same")


def _own(name: str, model: Any, prefix: str) -> Source:
    return _token(name, name) if isinstance(model, ViT) else Source((name,), "same")


_COUNTERS = ("num_batches_tracked",)
_POOLER = ("pooler.dense.weight", "pooler.dense.bias")


def known_namings(model: Any) -> tuple[Naming, ...]:
    """The namings that files for this network may have; our own comes last."""
    if isinstance(model, ResNet):
        stem, found = "stem.kernel", (
            Naming(
                "torchvision or timm", "layer1.0.conv1.weight", _torch_resnet, ("fc.",), _COUNTERS
            ),
            Naming(
                "Hugging Face transformers", "embedder.embedder.convolution.weight",
                _hugging_face_resnet, ("classifier.",), _COUNTERS, "resnet.",
            ),
        )  # fmt: skip
    elif isinstance(model, ViT):
        stem, found = "patch_embed.kernel", (
            Naming("timm", "patch_embed.proj.weight", _timm_vit, ("head.",), norm_epsilon=1e-6),
            Naming(
                "Hugging Face transformers", "embeddings.patch_embeddings.projection.weight",
                _hugging_face_vit, ("classifier.",), _POOLER, "vit.", 1e-12,
            ),
        )  # fmt: skip
    else:
        stem, found = "kernel", ()
    return (*found, Naming("jaxttp", stem, _own, ("head.",)))
