"""Weights that other libraries trained, from a safetensors file on disk. Nothing is unpickled.

A naming maps each of our names to the file's. Kernels are (height, width, in, out) and (in, out)
here, (out, in, height, width) and (out, in) in PyTorch.
"""

import math
import os
from collections.abc import Callable, Mapping
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
    opened,
)
from jaxttp.models.transformers import ViT


class Naming(NamedTuple):
    """One library's names for one kind of network.

    Attributes:
        library: its name.
        mark: the end of a tensor's name that only its files have.
        head: the beginning of the names of the last layer.
        block: (the network, block's number) -> the name of a block; None for our own names.
        modules: our names of modules, without the names of blocks, to the file's; other modules
            have our names.
    """

    library: str
    mark: str
    head: str
    block: Callable[[Any, int], str] | None = None
    modules: Mapping[str, str] = {}

    def tensor(self, name: str, model: Any) -> str:
        """The file's name of an array of this network, by our name with dots."""
        if self.block is None:
            return name
        *path, leaf = name.split(".")
        if not path:  # an array of its own, not of a layer
            return self.modules[leaf]
        prefix = ""
        if path[0] == "blocks":
            prefix = f"{self.block(model, int(path[1]))}."
            path = path[2:]
        own = ".".join(path)
        return f"{prefix}{self.modules.get(own, own)}.{_ENDINGS[leaf]}"

    def is_transposed(self, name: str) -> bool:
        """Whether outputs are the first axis of an array in the file, by our name."""
        return self.block is not None and name.endswith("kernel")


_ENDINGS = {
    "kernel": "weight", "scale": "weight", "bias": "bias", "mean": "running_mean",
    "var": "running_var",
}  # fmt: skip
_COUNTER = "num_batches_tracked"
"""A counter of PyTorch's batch norms, not used in evaluation."""


def _in_stages(model: ResNet, block: int) -> str:
    """The name of a block by its stage and its index there."""
    stages = enumerate(model.stage_sizes, start=1)
    return [f"layer{stage}.{i}" for stage, size in stages for i in range(size)][block]


_RESNET = Naming(
    "torchvision or timm", "layer1.0.conv1.weight", "fc.", _in_stages,
    {
        "stem": "conv1",
        "stem_norm": "bn1",
        "norm1": "bn1",
        "norm2": "bn2",
        "norm3": "bn3",
        "shortcut": "downsample.0",
        "shortcut_norm": "downsample.1",
        "head": "fc",
    },
)  # fmt: skip
_VIT = Naming(
    "timm", "patch_embed.proj.weight", "head.", lambda _, block: f"blocks.{block}",
    {
        "cls_token": "cls_token",
        "positions": "pos_embed",
        "patch_embed": "patch_embed.proj",
        "attention.qkv": "attn.qkv",
        "attention.proj": "attn.proj",
        "fc1": "mlp.fc1",
        "fc2": "mlp.fc2",
    },
)  # fmt: skip
_OWN = Naming("jaxttp", "kernel", "head.")


def _recognised(model: nnx.Module, path: Path, tensors: Mapping[str, np.ndarray]) -> Naming:
    """The naming of the file."""
    namings = [_OWN]
    if isinstance(model, ResNet | ViT):
        namings.insert(0, _RESNET if isinstance(model, ResNet) else _VIT)
    for naming in namings:
        if any(name.endswith(naming.mark) for name in tensors):
            return naming
    listed = "; ".join(f"{naming.library} (has ...{naming.mark})" for naming in namings)
    raise ValueError(
        f"path={str(path)!r} has no naming that is known for a {type(model).__name__}: {listed}. "
        f"It has {list_names(sorted(tensors))}."
    )


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
    """A copy of the network with the weights of a safetensors file of one of several libraries.

    The naming is recognised from the names in the file:

    =========  ==========================================  ====================================
    network    libraries                                   their files
    =========  ==========================================  ====================================
    `ResNet`   torchvision and timm                        ``resnet18`` ...
    `ViT`      timm                                        ``vit_small_patch16_224`` ...
    any        jaxttp                                      what `save_params` wrote of
                                                           ``nnx.state(model)``
    =========  ==========================================  ====================================

    Running averages of batch norm are loaded too. The positions of a `ViT` are resampled where the
    file was trained on images of another size: bicubic with antialiasing, as timm does. (Other
    networks of PyTorch, those of transformers too, are for `jaxttp.from_torch`.)
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
    with opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    check_finite(f"path={str(path)!r}: ", tensors)
    check_instance("model", model, nnx.Module, "flax.nnx")
    copy = nnx.clone(model)
    naming = _recognised(model, path, tensors)
    own = arrays_of(copy, nnx.Param, nnx.BatchStat)
    own = {name: leaf for name, leaf in own.items() if head or not name.startswith("head.")}
    sources = {name: naming.tensor(name, model) for name in own}
    if (source := sources.get("positions")) in tensors:
        tensors[source] = resample_positions(tensors[source], own["positions"].shape)
    shapes = {}
    for name, leaf in own.items():
        shape = tuple(leaf.shape)
        if naming.is_transposed(name):
            *window, inputs, outputs = shape
            shape = (outputs, inputs, *window)
        shapes[sources[name]] = shape
    problems = misfits(
        shapes,
        {name: array.shape for name, array in tensors.items()},
        lambda name: name.endswith(_COUNTER) or (not head and name.startswith(naming.head)),
    )
    if problems:
        misfit = [name for names in problems.values() for name in names]
        of_head = head and all(name.startswith(naming.head) for name in misfit)
        raise ValueError(
            f"path={str(path)!r} (naming of {naming.library}) does not fit this "
            f"{type(model).__name__}: {list_problems(problems)}."
            + (" head=False keeps the model's own last layer." if of_head else "")
        )
    values = {}
    for name, leaf in own.items():
        array = tensors[sources[name]]
        if naming.is_transposed(name):
            array = array.transpose(*range(2, array.ndim), 1, 0)
        values[name] = jnp.asarray(array, leaf.dtype)
    fill(copy, values)
    return copy
