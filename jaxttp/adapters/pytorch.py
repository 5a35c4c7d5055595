"""Modules of PyTorch as `Model`s, by torchax, which runs PyTorch's operations on JAX arrays."""

import copy
import importlib
import importlib.metadata
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxttp._core.types import Model, Params, noted
from jaxttp.adapters.evaluation import counted, describe
from jaxttp.adapters.inputs import check_samples

PAIR = ("2.9.1", "0.0.13")
"""Versions of torch and torchax that work together, with jax 0.10.2."""
INSTALL = f"pip install 'torch=={PAIR[0]}' 'torchax=={PAIR[1]}', or the extra jaxttp[torch]"
_OUTPUTS = ("logits", "last_hidden_state")
# A call swaps its arrays into the module, and torchax keeps its modes in one environment for all
# modules. So all share one lock; it is re-entrant as modules may be nested.
_LOCK = threading.RLock()


def from_torch(
    module: Any, example: Any, *, select: Callable[[Any], ArrayLike] | None = None
) -> Model:
    """A PyTorch module in evaluation mode, as a pure function and its parameters.

    The module is copied, neither mutated nor referenced. The copy is put into evaluation mode
    (dropout off, batch norm on its running averages); one of transformers gets attention in plain
    operations ("eager"). Its outputs for the example are compared with PyTorch's own. `apply_fn`
    may be traced in several threads, one at a time.

    Args:
        module: an instance of ``torch.nn.Module`` whose row i of the outputs depends on sample i.
        example: a few samples for `apply_fn`, tensors or arrays: an array (N, ...),
            a dict of inputs by name, such as a tokenizer's, or a tuple of inputs. Images are
            (N, channels, height, width) in PyTorch.
        select: from the arrays that the module returns to its outputs; None for one tensor, or the
            entry "logits" or "last_hidden_state".

    Returns:
        ``Model(apply_fn, params)``. `params` is a dict from the parameters' names to arrays, for
        those with ``requires_grad``; a parameter that two layers share is there once. The
        others, and the buffers, are frozen in `apply_fn`. Kernels of linear layers are (out, in):
        with `jaxttp.models.lora` say ``output_axis=0``.

    Raises:
        ImportError: torch or torchax is missing, or this pair of versions does not import.
        TypeError: `module` is no instance of ``torch.nn.Module``; its forward pass needs values of
            x in Python, such as an ``if`` or ``.item()``.
        ValueError: no outputs are found; batch norm without running averages; no parameter with
            ``requires_grad``; outputs that differ from PyTorch's.

    Example:
        >>> from_torch("resnet.pt", None)  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        ...
        TypeError: module must be an instance of torch.nn.Module; got str...

    Source:
        torchax (https://github.com/google/torchax), `extract_jax`.
    """
    if not any(kind.__module__ == "torch.nn.modules.module" for kind in type(module).__mro__):
        raise TypeError(f"module must be an instance of torch.nn.Module; got {_kind(module)}.")
    torch, torchax = import_pair()
    module = copy.deepcopy(module).cpu().eval()
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and part.running_mean is None:
            raise ValueError(
                f"module: {name or _kind(part)} normalizes by its own batch also in evaluation mode"
                " (track_running_stats=False); such a network has no per-example kernel."
            )
    described = list(map(describe, module.modules()))
    if hasattr(module, "set_attn_implementation"):  # of transformers
        module.set_attn_implementation("eager")
    if getattr(getattr(module, "config", None), "use_cache", False):
        module.config.use_cache = False
    signature = inspect.signature(module.forward)
    with torch.no_grad():
        result = _called(module, signature, _as_tensors(torch, example))
        expected = np.asarray(
            _selected(result, select, lambda t: t.detach().double().cpu().numpy())
        )
    with jax.numpy_rank_promotion("allow"):
        arrays, call = torchax.extract_jax(module)
    named = dict(module.named_parameters(remove_duplicate=False))
    weights = {name: array for name, array in arrays.items() if name in named}
    params = {name: array for name, array in weights.items() if named[name].requires_grad}
    if not params:
        raise ValueError("module has no parameter with requires_grad; nothing could be trained.")
    constants = {name: array for name, array in arrays.items() if name not in params}

    def outputs(weights: Params, x: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            with _LOCK:
                # torchax makes a random key at a thread's first call: not as part of a trace.
                with jax.ensure_compile_time_eval():
                    _ = torchax.default_env().prng_key
                return call({**constants, **weights}, args, kwargs)

        # PyTorch's operations broadcast, and mix dtypes.
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return _selected(_called(forward, signature, x), select, lambda array: array)

    def apply_fn(params: Params, x: Any) -> Any:
        return outputs(params, check_samples("x", x))

    # All weights are arguments here: frozen ones would be constants of the compiled function.
    computed = jax.jit(outputs)(weights, check_samples("example", example))
    _compare(np.asarray(computed), expected)
    return Model(noted(apply_fn, lambda: counted(described)), params)


def import_pair() -> tuple[Any, Any]:
    """PyTorch and torchax, or an error that names the packages to install.

    Raises:
        ImportError: one is missing, or the versions do not fit together.
    """
    missing = [name for name in ("torch", "torchax") if _version(name) is None]
    if missing:
        raise ImportError(f"from_torch needs {' and '.join(missing)}: {INSTALL}.")
    try:
        return importlib.import_module("torch"), importlib.import_module("torchax")
    except Exception as problem:  # of many types: operations renamed or dropped in torch
        first = (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
        raise ImportError(
            f"torchax {_version('torchax')} does not import with torch {_version('torch')} and jax "
            f"{jax.__version__} ({first}); torch {PAIR[0]} and torchax {PAIR[1]} do: {INSTALL}."
        ) from problem


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _called(function: Any, signature: inspect.Signature, x: Any) -> Any:
    """A module's call on samples: inputs by name, in order, or one."""
    if isinstance(x, Mapping):
        unknown = [name for name in x if name not in signature.parameters]
        if not unknown or any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
            return function(**x)
        raise ValueError(
            f"x holds {', '.join(map(repr, unknown))}, which module.forward does not take, but "
            f"{', '.join(signature.parameters)}."
        )
    return function(*x) if isinstance(x, tuple) else function(x)


def _selected(result: Any, select: Any, convert: Callable[[Any], Any]) -> Any:
    """The outputs in the result of a module."""
    is_mapping = isinstance(result, Mapping)
    if select is not None:
        return select(jax.tree.map(convert, dict(result) if is_mapping else result))
    if hasattr(result, "shape"):
        return convert(result)
    for name in _OUTPUTS:
        if is_mapping and name in result:
            return convert(result[name])
    kind = f"a mapping with {', '.join(result)}" if is_mapping else _kind(result)
    raise ValueError(
        f"module returns {kind}; choose the array of its outputs, such as select=lambda result: "
        "result[0]."
    )


def _as_tensors(torch: Any, x: Any) -> Any:
    """Samples as tensors of PyTorch, integers as its long integers."""

    def tensor_of(leaf: Any) -> Any:
        tensor = torch.as_tensor(leaf if isinstance(leaf, torch.Tensor) else np.array(leaf))
        is_integer = not tensor.is_floating_point() and tensor.dtype != torch.bool
        return tensor.long() if is_integer else tensor

    if isinstance(x, Mapping):
        return {name: tensor_of(leaf) for name, leaf in x.items()}
    return tuple(map(tensor_of, x)) if isinstance(x, tuple) else tensor_of(x)


def _compare(outputs: np.ndarray, expected: np.ndarray) -> None:
    """Refuse a network whose outputs on JAX are not those of PyTorch."""
    epsilon = float(jnp.finfo(outputs.dtype).eps) if outputs.dtype.kind == "f" else 0.01
    error = np.inf
    if outputs.shape == expected.shape:
        size = np.abs(expected).max(initial=1e-30)
        error = np.abs(outputs.astype(float) - expected).max(initial=0.0) / size
    if not error <= max(1e4 * epsilon, 1e-9):
        raise ValueError(
            f"module computes something else on JAX: outputs {outputs.shape} instead of "
            f"{expected.shape}, off by {error:.1e} of the largest. An operation of it is wrong in "
            "torchax; jaxttp cannot forecast it."
        )


def _kind(value: Any) -> str:
    return type(value).__name__
