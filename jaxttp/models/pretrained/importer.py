"""Weights that other libraries trained, from a safetensors file on disk. Nothing is unpickled."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
import safetensors
from flax import nnx

from jaxttp._core.checks import check_finite, check_instance
from jaxttp.models.pretrained._namings import Naming, Source, known_namings
from jaxttp.models.pretrained._positions import resample_positions

M = TypeVar("M", bound=nnx.Module)

_SHOWN = 6


def load_weights(
    model: M, path: str | os.PathLike[str], *, head: bool = True, sha256: str | None = None
) -> M:
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
        sha256: the file's checksum in hexadecimal, verified if given.

    Returns:
        A new network of the same type.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a safetensors file, has another checksum, names that no library
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
    tensors = _read_tensors(path, sha256)
    check_instance("model", model, nnx.Module, "flax.nnx")
    copy = nnx.clone(model)
    state = nnx.to_flat_state(nnx.state(copy, (nnx.Param, nnx.BatchStat)))
    own = {".".join(map(str, keys)): (keys, leaf) for keys, leaf in state}
    naming, prefix = _recognise(model, path, tensors)
    sources = {
        name: naming.source(name, model, prefix)
        for name in own
        if head or not name.startswith("head.")
    }
    shapes = {name: tuple(leaf.shape) for name, (_, leaf) in own.items()}
    for name, source in sources.items():
        part = source.names[0]
        if source.kind == "positions" and part in tensors:
            tensors[part] = resample_positions(tensors[part], shapes[name])
    _check_fit(type(model).__name__, path, naming, sources, shapes, tensors, head)
    new = []
    for name, source in sources.items():
        keys, leaf = own[name]
        value = source.convert(tensors[part] for part in source.names)
        new.append((keys, leaf.replace(jnp.asarray(value, leaf.dtype))))
    nnx.update(copy, nnx.from_flat_state(new))
    if naming.norm_epsilon is not None:
        for _, part in nnx.iter_modules(copy):
            if isinstance(part, nnx.LayerNorm):
                part.epsilon = naming.norm_epsilon
    return copy


def _read_tensors(path: Path, sha256: str | None) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise FileNotFoundError(f"path={str(path)!r} is not a file; there are no weights there.")
    if sha256 is not None:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256.lower():
            raise ValueError(
                f"path={str(path)!r} has the SHA-256 {found}, not {sha256}: the file is another "
                "one or damaged; fetch it again."
            )
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (safetensors.SafetensorError, TypeError) as error:
        raise ValueError(
            f"path={str(path)!r} is not a safetensors file with NumPy's dtypes ({error}). Pickles "
            "(.bin, .pt, .pth) are not read: write one with safetensors.torch.save_file."
        ) from error
    check_finite(f"path={str(path)!r}: ", tensors)
    return tensors


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
        f"It has {_list(sorted(tensors))}."
    )


def _check_fit(
    kind: str,
    path: Path,
    naming: Naming,
    sources: Mapping[str, Source],
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, np.ndarray],
    head: bool,
) -> None:
    """Raise `ValueError` with everything that is missing, unexpected or of another shape."""
    wanted = {
        part: source.file_shape(shapes[name])
        for name, source in sources.items()
        for part in source.names
    }
    problems = {
        "missing": [name for name in wanted if name not in tensors],
        "unexpected": [
            name
            for name in tensors
            if name not in wanted
            and not name.endswith(naming.ignored or ("\0",))
            and (head or not name.startswith(naming.head))
        ],
        "of another shape": [
            f"{name} {tensors[name].shape} instead of {shape}"
            for name, shape in wanted.items()
            if name in tensors and tensors[name].shape != shape
        ],
    }
    if any(problems.values()):
        text, hint = list_problems(problems), ""
        if head and all(name.startswith(naming.head) for name in _flat_names(problems)):
            hint = " head=False keeps the model's own last layer."
        raise ValueError(
            f"path={str(path)!r} (naming of {naming.library}) does not fit this {kind}: {text}."
            + hint
        )


def list_problems(problems: Mapping[str, list[str]]) -> str:
    """Names by kind of problem, a few of each.

    Example:
        >>> list_problems({"missing": ["a", "b"], "unexpected": []})
        'missing: a, b'
    """
    return "; ".join(f"{what}: {_list(names)}" for what, names in problems.items() if names)


def _flat_names(problems: Mapping[str, list[str]]) -> list[str]:
    return [name for names in problems.values() for name in names]


def _list(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
