"""Weights that other libraries trained, from a safetensors file on disk. Nothing is unpickled.

A naming maps each of our names to the file's tensors that it is made of. Kernels are (height,
width, in, out) and (in, out) here, (out, in, height, width) and (out, in) in PyTorch.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxttp._core.checks import check_finite, check_instance
from jaxttp.models.convolutional import ResNet
from jaxttp.models.pretrained.checkpoint import (
    arrays_of,
    fill,
    list_names,
    list_problems,
    misfits,
    read_tensors,
)
from jaxttp.models.transformers import ViT


class Source(NamedTuple):
    """Where one of our arrays comes from.

    Attributes:
        names: tensors of the file, to be concatenated along the outputs.
        kind: "kernel" (with the outputs first in the file), "positions" (a ViT's, of images of any
            size) or "same".
    """

    names: tuple[str, ...]
    kind: str = "same"

    def file_shape(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that each tensor of the file must have."""
        axes = self._axes(len(own))
        shape = own if axes is None else tuple(own[axes.index(axis)] for axis in range(len(own)))
        return (shape[0] // len(self.names), *shape[1:])

    def convert(self, tensors: Iterable[np.ndarray]) -> np.ndarray:
        """Our array."""
        joined = np.concatenate(list(tensors), axis=0)
        axes = self._axes(joined.ndim)
        return joined if axes is None else joined.transpose(axes)

    def _axes(self, ndim: int) -> tuple[int, ...] | None:
        """The file's axes in our order: (height, width, in, out) and (in, out)."""
        if self.kind != "kernel":
            return None
        return (2, 3, 1, 0) if ndim == 4 else (1, 0)


class Naming(NamedTuple):
    """One library's names for one kind of network.

    Attributes:
        library: who writes such files.
        mark: the end of a tensor's name that only such files have.
        block: (the network, block's number) -> the name of a block.
        modules: our names of modules, those of blocks without the block's own, to the file's; one
            that is not there has our name.
        head: beginnings of the names of the last layer.
        ignored: ends of names that play no part in evaluation.
        prefix: what whole networks put before the names of their body, "" if nothing.
        norm_epsilon: of the layer norms in that library; None where there are none.
    """

    library: str
    mark: str
    block: Callable[[Any, int], str] | None
    modules: Mapping[str, str | tuple[str, ...]]
    head: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    prefix: str = ""
    norm_epsilon: float | None = None

    def source(self, name: str, model: Any, prefix: str) -> Source:
        """Where the file has the array of this name.

        Args:
            name: ours, with dots.
            model: the network.
            prefix: what the file puts before the names of its body.
        """
        *path, leaf = name.split(".")
        kind = "positions" if leaf == "positions" else "same"
        if self.block is None:
            return Source((name,), kind)
        if not path:  # an array of its own, not of a layer
            return Source((f"{prefix}{self.modules[leaf]}",), kind)
        place = "" if path[0] == "head" else prefix
        if path[0] == "blocks":
            place += f"{self.block(model, int(path[1]))}."
            path = path[2:]
        own = ".".join(path)
        found = self.modules.get(own, own)
        ending = _ENDINGS[leaf]
        several = (found,) if isinstance(found, str) else found
        names = tuple(f"{place}{module}.{ending}" for module in several)
        return Source(names, "kernel" if leaf == "kernel" else "same")


_ENDINGS = {
    "kernel": "weight", "scale": "weight", "bias": "bias", "mean": "running_mean",
    "var": "running_var",
}  # fmt: skip


def _in_stages(name: str, first: int) -> Callable[[ResNet, int], str]:
    """The names of blocks by their stages, numbered from `first`, and their places there."""

    def name_of(model: ResNet, block: int) -> str:
        stages = enumerate(model.stage_sizes, start=first)
        return [name.format(stage, i) for stage, size in stages for i in range(size)][block]

    return name_of


_TORCH_RESNET = {
    "stem": "conv1",
    "stem_norm": "bn1",
    "norm1": "bn1",
    "norm2": "bn2",
    "norm3": "bn3",
    "shortcut": "downsample.0",
    "shortcut_norm": "downsample.1",
    "head": "fc",
}
_HUGGING_FACE_RESNET = {
    "stem": "embedder.embedder.convolution",
    "stem_norm": "embedder.embedder.normalization",
    "conv1": "layer.0.convolution",
    "conv2": "layer.1.convolution",
    "conv3": "layer.2.convolution",
    "norm1": "layer.0.normalization",
    "norm2": "layer.1.normalization",
    "norm3": "layer.2.normalization",
    "shortcut": "shortcut.convolution",
    "shortcut_norm": "shortcut.normalization",
    "head": "classifier.1",
}
_TIMM_VIT = {
    "cls_token": "cls_token",
    "positions": "pos_embed",
    "patch_embed": "patch_embed.proj",
    "attention.qkv": "attn.qkv",
    "attention.proj": "attn.proj",
    "fc1": "mlp.fc1",
    "fc2": "mlp.fc2",
}
_HUGGING_FACE_VIT = {
    "cls_token": "embeddings.cls_token",
    "positions": "embeddings.position_embeddings",
    "patch_embed": "embeddings.patch_embeddings.projection",
    "norm": "layernorm",
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "attention.qkv": tuple(f"attention.attention.{part}" for part in ("query", "key", "value")),
    "attention.proj": "attention.output.dense",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
    "head": "classifier",
}
_COUNTERS = ("num_batches_tracked",)
_RESNETS = (
    Naming("torchvision or timm", "layer1.0.conv1.weight", _in_stages("layer{}.{}", 1),
           _TORCH_RESNET, ("fc.",), _COUNTERS),
    Naming("Hugging Face transformers", "embedder.embedder.convolution.weight",
           _in_stages("encoder.stages.{}.layers.{}", 0), _HUGGING_FACE_RESNET, ("classifier.",),
           _COUNTERS, "resnet."),
)  # fmt: skip
_VITS = (
    Naming("timm", "patch_embed.proj.weight", lambda _, block: f"blocks.{block}", _TIMM_VIT,
           ("head.",), norm_epsilon=1e-6),
    Naming("Hugging Face transformers", "embeddings.patch_embeddings.projection.weight",
           lambda _, block: f"encoder.layer.{block}", _HUGGING_FACE_VIT, ("classifier.",),
           ("pooler.dense.weight", "pooler.dense.bias"), "vit.", 1e-12),
)  # fmt: skip


def known_namings(model: Any) -> tuple[Naming, ...]:
    """The namings that files for this network may have; our own comes last."""
    stem, found = "kernel", ()
    if isinstance(model, ResNet):
        stem, found = "stem.kernel", _RESNETS
    elif isinstance(model, ViT):
        stem, found = "patch_embed.kernel", _VITS
    return (*found, Naming("jaxttp", stem, None, {}, ("head.",)))


def resample_positions(positions: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Positions (1, 1 + g², D) on a grid of another side; the class token's stays as it is.

    Args:
        positions: (1, 1 + g², D), of a file.
        shape: the model's, (1, 1 + h², D).

    Returns:
        Positions of the model's shape, by bicubic interpolation with antialiasing; those of the
        file where that is no square grid of the same width (the caller lists the shapes then).
    """
    if positions.ndim != 3 or positions.shape == shape or positions.shape[::2] != shape[::2]:
        return positions
    old, new = (math.isqrt(max(tokens - 1, 0)) for tokens in (positions.shape[1], shape[1]))
    if old < 1 or old**2 != positions.shape[1] - 1:
        return positions
    width = shape[2]
    positions = positions.astype(np.promote_types(positions.dtype, np.float32), copy=False)
    token, grid = positions[:, :1], positions[0, 1:].reshape(old, old, width)
    grid = np.asarray(jax.image.resize(grid, (new, new, width), "cubic", antialias=True))
    return np.concatenate([token, grid.reshape(1, new * new, width)], axis=1)


M = TypeVar("M", bound=nnx.Module)


def load_weights(model: M, path: str | os.PathLike[str], *, head: bool = True) -> M:
    """A copy of the network with the weights of a safetensors file, whoever wrote it.

    The naming is recognised from the names in the file:

    =========  ==========================================  ====================================
    network    libraries                                   their files
    =========  ==========================================  ====================================
    `ResNet`   torchvision and timm; Hugging Face          ``resnet18`` ..., ``microsoft/resnet``
    `ViT`      timm; Hugging Face                          ``vit_small_patch16_224`` ...
    any        jaxttp                                      what `save_params` wrote of
                                                           ``nnx.state(model)``
    =========  ==========================================  ====================================

    Running averages of batch norm are loaded too. The layer norms of a `ViT` get the ε of the
    library that wrote the file (timm 1e-6, Hugging Face 1e-12). Its positions are resampled where
    the file was trained on images of another size: bicubic with antialiasing, as timm does.
    Arrays take the model's dtypes.

    Args:
        model: a network of the same architecture; it stays as it is.
        path: the file.
        head: whether to load the last layer. False keeps the model's own, with any number of
            outputs: the start of fine-tuning.

    Returns:
        A new network of the same type.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a safetensors file, has names that no library
            known here uses, names or shapes that do not fit the model (all are listed by kind), or
            values that are not finite.

    Example:
        >>> import tempfile, jax
        >>> from jaxttp.models import MLP, save_params
        >>> trained = MLP((4, 8, 3), rngs=nnx.Rngs(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_params(f"{folder}/a.safetensors", nnx.state(trained))
        ...     model = load_weights(
        ...         MLP((4, 8, 2), rngs=nnx.Rngs(1)), f"{folder}/a.safetensors", head=False
        ...     )
        >>> bool((model.hidden[0].kernel[...] == trained.hidden[0].kernel[...]).all())
        True
    """
    path = Path(path)
    tensors = read_tensors(path)
    check_finite(f"path={str(path)!r}: ", tensors)
    check_instance("model", model, nnx.Module, "flax.nnx")
    copy = nnx.clone(model)
    own = arrays_of(copy, nnx.Param, nnx.BatchStat)
    shapes = {name: tuple(leaf.shape) for name, leaf in own.items()}
    naming, prefix = _recognise(model, path, tensors)
    sources = {
        name: naming.source(name, model, prefix)
        for name in own
        if head or not name.startswith("head.")
    }
    for name, source in sources.items():
        part = source.names[0]
        if source.kind == "positions" and part in tensors:
            tensors[part] = resample_positions(tensors[part], shapes[name])
    wanted = {
        part: source.file_shape(shapes[name])
        for name, source in sources.items()
        for part in source.names
    }
    problems = misfits(
        wanted,
        {name: array.shape for name, array in tensors.items()},
        lambda name: name.endswith(naming.ignored) or (not head and name.startswith(naming.head)),
    )
    if problems:
        misfit = [name for names in problems.values() for name in names]
        of_head = head and all(name.startswith(naming.head) for name in misfit)
        raise ValueError(
            f"path={str(path)!r} (naming of {naming.library}) does not fit this "
            f"{type(model).__name__}: {list_problems(problems)}."
            + (" head=False keeps the model's own last layer." if of_head else "")
        )
    fill(
        copy,
        {
            name: jnp.asarray(
                source.convert(tensors[part] for part in source.names), own[name].dtype
            )
            for name, source in sources.items()
        },
    )
    if naming.norm_epsilon is not None:
        for _, part in nnx.iter_modules(copy):
            if isinstance(part, nnx.LayerNorm):
                part.epsilon = naming.norm_epsilon
    return copy


def _recognise(
    model: nnx.Module, path: Path, tensors: Mapping[str, np.ndarray]
) -> tuple[Naming, str]:
    """The naming of the file, and the prefix before the names of its body."""
    namings = known_namings(model)
    for naming in namings:
        for name in tensors:
            prefix = name.removesuffix(naming.mark)
            if name.endswith(naming.mark) and (
                prefix in ("", naming.prefix) or naming.library == "jaxttp"
            ):
                return naming, prefix
    known = "; ".join(f"{naming.library} (has ...{naming.mark})" for naming in namings)
    raise ValueError(
        f"path={str(path)!r} has no naming that is known for a {type(model).__name__}: {known}. "
        f"It has {list_names(sorted(tensors))}."
    )
