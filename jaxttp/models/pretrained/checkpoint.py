"""Parameters on disk: a nested dictionary of arrays as a safetensors file, and back.

A leaf's name in the file is its path joined by dots, ``blocks.0.conv1.kernel``. Loaded dictionaries
have strings as keys, like those of `jaxttp.from_nnx`: the third item of a list is ``"2"``. One
checkpoint is part of the package; nothing is downloaded.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx, traverse_util

from jaxttp._core.checks import check_choice, check_instance, is_concrete
from jaxttp._core.files import replaced
from jaxttp.models.convolutional import ResNet, digits_resnet

M = TypeVar("M", bound=nnx.Module)


class Checkpoint(NamedTuple):
    """The contents of a file.

    Attributes:
        params: a nested dictionary of JAX arrays; its keys are strings.
        metadata: strings by name.
    """

    params: dict[str, Any]
    metadata: dict[str, str]


def save_params(
    path: str | os.PathLike[str],
    params: Mapping[Any, Any],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a nested dictionary of arrays to a safetensors file.

    Keys that are ints become strings, empty dictionaries are not kept.

    Args:
        path: the file, replaced as a whole if it exists; its folder is made if need be.
        params: nested mappings (dictionaries, an `nnx.State`) of arrays with strings or ints as
            keys.
        metadata: strings by name.

    Raises:
        TypeError: a leaf is not an array, a key neither a string nor an int, or metadata are not
            strings.
        ValueError: there is no array, a key is empty or has a dot, or two arrays have the same
            name.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_params(f"{folder}/a.safetensors", {"layers": {0: jnp.arange(3.0)}})
        ...     load_params(f"{folder}/a.safetensors").params["layers"]["0"].tolist()
        [0.0, 1.0, 2.0]
    """
    for name, value in (metadata or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"metadata holds strings by name; got {name!r}: {value!r}.")
    flat = _leaves_by_name(params)
    if not flat:
        raise ValueError("params holds no array; there is nothing to save.")
    for name, leaf in flat.items():
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise TypeError(f"params: {name} is a {type(leaf).__name__}, not an array.")
        if not is_concrete(leaf):
            raise TypeError(f"params: {name} is traced; save what a function returned.")
    # safetensors writes the memory of a buffer, so arrays must be contiguous.
    arrays = {name: np.require(leaf, requirements="C") for name, leaf in flat.items()}
    data = safetensors.numpy.save(arrays, metadata=dict(metadata or {}))
    with replaced(path) as temporary:
        temporary.write_bytes(data)


def load_params(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a file of `save_params`, exactly.

    Args:
        path: the file.

    Returns:
        ``(params, metadata)``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a safetensors file, or holds 64-bit arrays while JAX's x64 mode
            is off.
    """
    path = Path(path)
    with opened(path) as file:
        metadata = dict(file.metadata() or {})
        flat = {name: _to_jax(name, file.get_tensor(name)) for name in file.keys()}
    parents = {name[:i] for name in flat for i, letter in enumerate(name) if letter == "."}
    if both := parents & flat.keys():
        raise ValueError(f"path={str(path)!r}: {min(both)!r} is an array, and has arrays below it.")
    return Checkpoint(traverse_util.unflatten_dict(flat, sep="."), metadata)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file, open.

    Args:
        path: the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no safetensors file, or a tensor that is read has a dtype that NumPy has
            not.
    """
    if not path.is_file():
        raise FileNotFoundError(f"path={str(path)!r} is not a file; there are no weights there.")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            yield file
    except (safetensors.SafetensorError, TypeError) as error:
        raise ValueError(
            f"path={str(path)!r} is not a safetensors file with NumPy's dtypes ({error}). Pickles "
            "(.bin, .pt, .pth) are not read: write one with safetensors.torch.save_file."
        ) from error


def with_params(module: M, params: Mapping[Any, Any]) -> M:
    """A copy of the module with these parameters in place of its own.

    Args:
        module: any Flax NNX module, also an abstract one (`nnx.eval_shape`).
        params: nested mappings with the names and shapes of the module's parameters, such as
            `load_params` and `jaxttp.from_nnx` return.

    Returns:
        A new module; the one given stays as it is.

    Raises:
        ValueError: names or shapes differ; the message lists all that is missing, unexpected or of
            another shape.

    Example:
        >>> from jaxttp.models import MLP
        >>> model = MLP((4, 2), rngs=nnx.Rngs(0))
        >>> with_params(model, {"head": {"kernel": jnp.ones((4, 2)), "bias": jnp.ones(2)}})(
        ...     jnp.ones((1, 4))
        ... ).tolist()
        [[5.0, 5.0]]
    """
    check_instance("module", module, nnx.Module, "flax.nnx")
    copy = nnx.clone(module)
    shapes = {name: tuple(leaf.shape) for name, leaf in arrays_of(copy, nnx.Param).items()}
    leaves = _leaves_by_name(params)
    problems = misfits(shapes, {name: np.shape(leaf) for name, leaf in leaves.items()})
    if problems:
        raise ValueError(
            f"params do not fit this {type(module).__name__}: {list_problems(problems)}."
        )
    fill(copy, {name: jnp.asarray(value) for name, value in leaves.items()})
    return copy


def arrays_of(module: nnx.Module, *kinds: type[nnx.Variable]) -> dict[str, Any]:
    """A module's arrays, abstract ones too, by their names: paths joined by dots."""
    state = nnx.to_flat_state(nnx.state(module, kinds))
    return {".".join(map(str, keys)): leaf for keys, leaf in state}


def fill(module: nnx.Module, values: Mapping[str, Any]) -> None:
    """Put arrays into a module, each by its name; other arrays stay."""
    new = []
    for keys, leaf in nnx.to_flat_state(nnx.state(module)):
        name = ".".join(map(str, keys))
        if name in values:
            new.append((keys, leaf.replace(values[name])))
    nnx.update(module, nnx.from_flat_state(new))


def misfits(
    required: Mapping[str, tuple[int, ...]],
    available: Mapping[str, tuple[int, ...]],
    is_ignored: Callable[[str], bool] = lambda name: False,
) -> dict[str, list[str]]:
    """The differences between required and available arrays, by kind.

    Args:
        required: shapes by name.
        available: likewise.
        is_ignored: whether a further array is no problem.

    Returns:
        Names that are missing, unexpected or of another shape; empty where all fits.

    Example:
        >>> misfits({"a": (2,), "b": (3,)}, {"b": (4,)})
        {'missing': ['a'], 'of another shape': ['b (4,) instead of (3,)']}
    """
    problems = {
        "missing": [name for name in required if name not in available],
        "unexpected": [n for n in available if n not in required and not is_ignored(n)],
        "of another shape": [
            f"{name} {available[name]} instead of {shape}"
            for name, shape in required.items()
            if available.get(name, shape) != shape
        ],
    }
    return {kind: names for kind, names in problems.items() if names}


def list_problems(problems: Mapping[str, list[str]]) -> str:
    """Names by kind of problem, a few of each.

    Example:
        >>> list_problems({"missing": ["a", "b"], "unexpected": []})
        'missing: a, b'
    """
    return "; ".join(f"{kind}: {list_names(names)}" for kind, names in problems.items() if names)


def list_names(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - 6
    return ", ".join(names[:6]) + (f" and {more} more" if more > 0 else "")


def _leaves_by_name(params: Any) -> dict[str, Any]:
    """The leaves of nested mappings by dotted name, in their order."""
    if not isinstance(params, Mapping):
        raise TypeError(f"params must be nested mappings of arrays; got {type(params).__name__}.")
    flat: dict[str, Any] = {}
    for key, child in params.items():
        if not isinstance(key, str | int):
            raise TypeError(f"params: keys must be strings or ints; got {key!r}.")
        if key == "" or "." in str(key):
            raise ValueError(f"params: the key {key!r} is empty or has a dot.")
        if isinstance(child, Mapping):
            leaves = {f"{key}.{name}": leaf for name, leaf in _leaves_by_name(child).items()}
        else:
            leaves = {str(key): child.get_value() if isinstance(child, nnx.Variable) else child}
        if twice := flat.keys() & leaves.keys():
            raise ValueError(f"params: {min(twice)} is there twice, with an int and a string.")
        flat |= leaves
    return flat


def _to_jax(name: str, array: np.ndarray) -> jax.Array:
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        raise ValueError(
            f"{name} is {array.dtype}, which JAX would narrow; load it under jax.enable_x64(True)."
        )
    return jax.device_put(array)  # `jnp.asarray` compiles a program for every shape


SHIPPED = ("digits-resnet", "digits-resnet-32")
"""The names for `load_pretrained`."""


def checkpoint_path(name: str = "digits-resnet") -> Path:
    """The path of a shipped checkpoint, for `load_params` and its metadata.

    Args:
        name: one of `SHIPPED`.

    Returns:
        The path of the safetensors file.

    Raises:
        ValueError: for an unknown name.

    Example:
        >>> checkpoint_path("digits-resnet").name
        'digits-resnet.safetensors'
    """
    check_choice("name", name, SHIPPED)
    return Path(__file__).with_name(f"{name}.safetensors")


def load_pretrained(name: str = "digits-resnet") -> ResNet:
    """A network with the weights that ship with the library.

    ``digits-resnet``: `digits_resnet` with five outputs, trained on the digits 0-4 of
    scikit-learn's 8x8 digits (``python -m experiments.pretrain_digits``), inputs as
    ``load_dataset("digits")`` gives them, in [0, 1]. Fine-tune it with `fresh_head`.
    ``digits-resnet-32``: the same on images enlarged to 32x32 pixels.

    Args:
        name: one of `SHIPPED`.

    Returns:
        The network, float32.

    Raises:
        ValueError: an unknown name, or a file that does not fit the network.
        FileNotFoundError: the installation lacks the file.

    Example:
        >>> import jax.numpy as jnp
        >>> load_pretrained("digits-resnet")(jnp.zeros((1, 8, 8, 1))).shape
        (1, 5)
    """
    params = load_params(checkpoint_path(name)).params
    return with_params(nnx.eval_shape(lambda: digits_resnet(5, rngs=nnx.Rngs(0))), params)
