"""Checks of samples and networks, with errors that name the fix."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp._core.checks import check_finite, check_floating, check_leaves, is_concrete
from jaxttp._core.types import count, shape_words

ADAPTERS = {
    "flax.nnx": "apply_fn, params = jaxttp.from_nnx(module)",
    "flax.linen": "apply_fn, params = jaxttp.from_linen(module, variables)",
    "equinox": "apply_fn, params = jaxttp.from_equinox(module)",
}
_TORCH = (
    "jaxttp differentiates functions of JAX: apply_fn, params = jaxttp.from_torch(module, x) makes "
    "it one, or load its weights into a network of JAX (jaxttp.models.load_weights)."
)


def check_samples(name: str, x: Any) -> Any:
    """Samples (N, ...) as one array of numbers, or as a pytree of such arrays.

    Arrays, lists, data frames and tensors on the CPU become one array. Pytrees are: a mapping
    (as tokenizers give, ``{"input_ids": ..., "attention_mask": ...}``), a NamedTuple, a tuple of
    arrays, a class registered as a pytree. A list is data, nested or not, also inside of one.

    Args:
        name: of the samples in messages.
        x: the argument.

    Returns:
        A JAX array, or a pytree of them in which a mapping that is no pytree becomes a dict;
        integers stay integers (they may be tokens).

    Raises:
        ValueError: rows of different shapes, text, mixed columns; in a pytree, arrays of different
            lengths, scalars, no array at all; no sample.

    Example:
        >>> check_samples("x", [[1.0, 2.0], [3.0, 4.0]]).shape
        (2, 2)
        >>> tokens = {"ids": [[1, 2], [3, 0]], "mask": [[1, 1], [1, 0]]}
        >>> jax.tree.map(jnp.shape, check_samples("x", tokens))
        {'ids': (2, 2), 'mask': (2, 2)}
    """
    if not _is_tree(x):
        samples = _as_array(name, x)
        rows = len(samples) if samples.ndim else None
    else:
        samples = _as_arrays(name, x)
        rows = count(samples, name)
    if rows == 0:
        raise ValueError(f"{name} must hold at least one sample; got {shape_words(samples, name)}.")
    return samples


def _is_tree(x: Any) -> bool:
    """Whether samples are a pytree of arrays, rather than the data of one array."""
    if isinstance(x, Mapping):
        return True
    if x is None or isinstance(x, list | jax.Array | np.ndarray):
        return False
    if type(x) is tuple:  # of arrays; one of numbers or of lists is data
        leaves = jax.tree.leaves(x)
        return any(isinstance(leaf, jax.Array | np.ndarray) and leaf.ndim > 0 for leaf in leaves)
    return not jax.tree_util.treedef_is_leaf(jax.tree.structure(x))


def _as_arrays(name: str, x: Any) -> Any:
    """A pytree with its leaves as arrays; None, an empty pytree in JAX, stays."""
    if isinstance(x, Mapping) and jax.tree_util.treedef_is_leaf(jax.tree.structure(x)):
        x = dict(x)  # such as the BatchEncoding of a tokenizer
    pairs, treedef = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda node: node is not x)
    children = []
    for path, child in pairs:
        label = name + jax.tree_util.keystr(path)
        convert = _as_arrays if _is_tree(child) else _as_array
        children.append(None if child is None else convert(label, child))
    return jax.tree.unflatten(treedef, children)


def _as_array(name: str, x: Any) -> Array:
    """One array of numbers."""
    if isinstance(x, jax.Array):
        return x
    try:
        array = np.asarray(x)
    except Exception as problem:  # raised by NumPy, or by the library of the object
        if any(not is_concrete(leaf) for leaf in jax.tree.leaves(x)):
            return jnp.asarray(x)
        raise ValueError(
            f"{name} must be one array (N, ...), and this {type(x).__name__} does not make one: "
            f"{_first_line(problem)}. All rows need one shape: pad or crop them."
        ) from problem
    if not (jnp.issubdtype(array.dtype, np.number) or array.dtype == bool):
        kind = "text" if array.dtype.kind in "US" else f"dtype {array.dtype}"
        raise ValueError(
            f"{name} must hold numbers; got {kind}. Convert it, such as {name}.astype(float), and "
            "encode text as numbers first."
        )
    return jnp.asarray(array)


def check_network(apply_fn: Any, params: Any, name: str = "apply_fn") -> None:
    """Refuse anything but a JAX function of parameters.

    Args:
        apply_fn: should be ``(params, x) -> outputs``.
        params: should be a pytree of arrays.
        name: of `apply_fn` in messages.

    Raises:
        TypeError: a module or tensors of PyTorch; an object that cannot be called.
    """
    owner = getattr(apply_fn, "__self__", None)
    if _comes_from(type(apply_fn), "torch") or _comes_from(type(owner), "torch"):
        raise TypeError(f"{name} is a module of PyTorch ({type(apply_fn).__name__}). {_TORCH}")
    if any(_comes_from(type(leaf), "torch") for leaf in jax.tree.leaves(params)):
        raise TypeError(
            "params holds tensors of PyTorch, which JAX does not see; convert them: "
            "jax.tree.map(lambda t: jnp.asarray(t.detach().numpy()), params)."
        )
    if not callable(apply_fn):
        raise TypeError(
            f"{name} must be a function (params, x) -> outputs (N, C); got a "
            f"{type(apply_fn).__name__}."
        )
    check_leaves("params", params)


def check_trained(apply_fn: Any, params: Any, x: Any) -> Any:
    """The samples of a network that trains, checked with its finite floating-point parameters."""
    check_network(apply_fn, params)
    x = check_samples("x", x)
    check_floating("params", params)
    check_finite("params", params)
    check_finite("x", x)
    return x


def traced_outputs(apply_fn: Any, params: Any, x: Any, name: str = "apply_fn") -> Any:
    """Shapes and dtypes of the outputs; where tracing fails for a known reason, that reason.

    Args:
        apply_fn: ``(params, x) -> outputs``.
        params: its parameters.
        x: inputs (N, ...), an array or a ``jax.ShapeDtypeStruct``.
        name: of `apply_fn` in messages.

    Returns:
        The result of `jax.eval_shape`.

    Raises:
        TypeError: see `check_network`; a module in place of its function.
        ValueError: arguments the wrong way round.
        Exception: errors of `apply_fn` itself.

    Example:
        >>> import jax.numpy as jnp
        >>> traced_outputs(lambda x, params: x @ params, jnp.ones((3, 2)), jnp.ones((5, 3)))
        Traceback (most recent call last):
        ...
        ValueError: apply_fn takes its arguments the other way round...
    """
    check_network(apply_fn, params, name)
    try:
        if _are_known_tokens(x):  # the network itself may check them: ids out of range
            return jax.eval_shape(lambda params: apply_fn(params, x), params)
        # A new function each time: JAX caches traces by the identity of the function.
        return jax.eval_shape(lambda *args: apply_fn(*args), params, x)
    except Exception as problem:
        if (kind := library_of(type(apply_fn))) is not None:
            raise TypeError(
                f"{name} is a module ({type(apply_fn).__name__}), not a function of its parameters;"
                f" {ADAPTERS[kind]} makes it one."
            ) from problem
        if is_swapped(apply_fn, params, x):
            raise ValueError(swapped_words(name)) from problem
        raise


def _are_known_tokens(x: Any) -> bool:
    """Whether samples are JAX arrays of integers with known values."""
    leaves = jax.tree.leaves(x)
    is_known = all(isinstance(leaf, jax.Array) and is_concrete(leaf) for leaf in leaves)
    return is_known and all(jnp.issubdtype(leaf.dtype, jnp.integer) for leaf in leaves)


def is_swapped(apply_fn: Any, params: Any, x: Any) -> bool:
    """Whether ``apply_fn(x, params)`` gives outputs (N, C)."""
    try:
        outputs = jax.eval_shape(lambda *args: apply_fn(*args), x, params)
    except Exception:
        return False
    if not isinstance(outputs, jax.ShapeDtypeStruct) or len(outputs.shape) != 2:
        return False
    return {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(x)} == {outputs.shape[:1]}


def swapped_words(name: str) -> str:
    """The message for swapped arguments."""
    return (
        f"{name} takes its arguments the other way round: it is called as {name}(params, x). Give "
        f"lambda params, x: {name}(x, params)."
    )


def library_of(kind: type) -> str | None:
    """The library, Flax or Equinox, of a class or one of its bases."""
    return next((library for library in ADAPTERS if _comes_from(kind, library)), None)


def _comes_from(kind: type, package: str) -> bool:
    names = (base.__module__ for base in kind.__mro__)
    return any(f"{name}.".startswith(f"{package}.") for name in names)


def _first_line(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
