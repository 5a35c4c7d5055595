"""Checks of arguments; errors name the argument, its value, and valid values.

Checks before tracing raise here. Values of traced arrays are left to `equinox.error_if` or to a
field of the result: every check of values below lets tracers pass.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

T = TypeVar("T")


def is_concrete(value: Any) -> bool:
    """Whether the values (not only the shape) of an array or number are known now.

    Read them with NumPy: inside `jit` a jnp function turns even a known value into a tracer.
    """
    return not isinstance(value, jax.core.Tracer)


def values_known() -> contextlib.AbstractContextManager[Any]:
    """A context in which functions of known arrays have known values, also in a caller's `jit`.

    Outside a trace it does nothing: with `jax.ensure_compile_time_eval`, constants would be
    evaluated one by one there, each by a small compiled function.
    """
    traced = isinstance(jax.device_put(np.zeros(())), jax.core.Tracer)
    return jax.ensure_compile_time_eval() if traced else contextlib.nullcontext()


def check_choice(name: str, value: T, choices: Iterable[T], *, hint: str = "") -> T:
    """Return `value` if it is one of `choices`, else raise `ValueError`."""
    choices = tuple(choices)
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name}={value!r} is not known; choose one of {listed}. {hint}".rstrip())
    return value


def check_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    hint: str = "",
) -> Any:
    """Return a scalar that lies in the given range, else raise `ValueError`.

    A traced scalar is returned as it is: its value is not known yet.
    """
    if not is_concrete(value):
        return value
    try:
        if isinstance(value, str | bytes):
            raise TypeError  # float would parse "0.5", and the caller compute with the text
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a number; got {value!r}.") from None
    limits = [] if np.isfinite(number) else [("finite", False)]
    if above is not None:
        limits.append((f"greater than {above:g}", number > above))
    if at_least is not None:
        limits.append((f"at least {at_least:g}", number >= at_least))
    if below is not None:
        limits.append((f"less than {below:g}", number < below))
    if not all(is_met for _, is_met in limits):
        text = " and ".join(limit for limit, _ in limits)
        raise ValueError(f"{name} must be {text}; got {value!r}. {hint}".rstrip())
    return value


def check_integer(
    name: str, value: Any, *, at_least: int, at_most: int | None = None, hint: str = ""
) -> int:
    """Return `value` as an int that lies in the given range, else raise `ValueError`."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < at_least or (at_most is not None and value > at_most):
        limits = (
            f"of at least {at_least}" if at_most is None else f"between {at_least} and {at_most}"
        )
        raise ValueError(f"{name} must be an integer {limits}; got {value!r}. {hint}".rstrip())
    return int(value)


def check_used(name: str, value: Any, used: bool, hint: str) -> None:
    """Raise `ValueError` for an option that was given and has no effect.

    Args:
        name: of the argument.
        value: of the option; None if it was not given.
        used: whether it has an effect beside the other options.
        hint: the purpose of the option.

    Raises:
        ValueError: it would be ignored.

    Example:
        >>> check_used("paths", 8, False, "it counts paths of dynamics='sde'")
        Traceback (most recent call last):
        ...
        ValueError: paths=8 does nothing here: it counts paths of dynamics='sde'. Leave it out.
    """
    if value is not None and not used:
        text = repr(value)
        is_long = "\n" in text or len(text) > 200  # an array of samples, for instance
        option = f"{name} (a {type(value).__name__})" if is_long else f"{name}={text}"
        raise ValueError(f"{option} does nothing here: {hint}. Leave it out.")


def check_optimizer(optimizer: Any) -> None:
    """Raise `TypeError` for objects other than an optax transformation."""
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            "optimizer must be an optax.GradientTransformation, such as optax.sgd(0.1); got "
            f"{optimizer!r}."
        )


def check_key(key: Any, *, optional: bool = True) -> None:
    """Raise `ValueError` unless it is a key of `jax.random`; None passes where it is optional."""
    if key is None and optional:
        return
    if isinstance(key, jax.Array):
        is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        is_raw = key.dtype == jnp.uint32 and key.ndim == 1  # as jax.random.PRNGKey makes them
        if is_raw or (is_typed and key.ndim == 0):
            return
    shape = np.shape(key) if isinstance(key, jax.Array | np.ndarray) else ()
    text = f"an array of shape {shape}" if shape else repr(key)
    raise ValueError(f"key must be a jax.random.key, such as jax.random.key(0); got {text}.")


def check_finite(name: str, tree: Any) -> None:
    """Raise `ValueError` if an array of `tree` holds NaN or infinity (tracers pass).

    A leaf that is not numeric is a `TypeError`, see `check_leaves`.
    """
    check_leaves(name, tree)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        real = is_concrete(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        if real and not is_finite(leaf):
            where = name + jax.tree_util.keystr(path)
            with values_known():
                bad = int(jnp.sum(~jnp.isfinite(leaf)))
            raise ValueError(
                f"{where} holds {bad} value(s) that are NaN or infinite, of {jnp.size(leaf)}; "
                "remove or replace them first."
            )


def is_finite(leaf: Any) -> bool:
    """Whether a known array holds no NaN or infinity; on one CPU nothing is compiled for it."""
    if isinstance(leaf, jax.Array) and [d.platform for d in leaf.devices()] != ["cpu"]:
        with values_known():
            return bool(_all_finite(leaf))
    values = np.asarray(leaf)
    with np.errstate(all="ignore"):  # the sum takes a quarter of the time of testing every number
        return bool(np.isfinite(np.sum(values)) or np.all(np.isfinite(values)))


def check_finite_value(name: str, value: T) -> T:
    """Return `value`; NaN or infinity in it is an error, now if concrete, else at run time."""
    if all(map(is_concrete, jax.tree.leaves(value))):
        check_finite(name, value)
        return value
    return eqx.error_if(value, ~all_finite(value), f"{name} holds NaN or infinity")


def refuse(value: Any, bad: Any, text: str, detail: Callable[[], str] | None = None) -> Any:
    """Return `value`; where `bad` holds it is an error, now if concrete, else at run time.

    Args:
        value: array, or a pytree of arrays.
        bad: bools.
        text: the message.
        detail: gives the rest of the message where values are known.
    """
    if not is_concrete(bad):
        return eqx.error_if(value, jnp.any(bad), text)
    if np.any(np.asarray(bad)):
        raise ValueError(text + (detail() if detail else ""))
    return value


def all_finite(tree: Any) -> Array:
    """Whether no array of `tree` holds NaN or infinity, concrete or not."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


_all_finite = jax.jit(all_finite)


def check_array(
    name: str, value: Any, *, ndim: int | tuple[int, ...] | None = None, floating: bool = False
) -> Array:
    """Real numbers as an array of JAX, traced or not, else `ValueError`.

    Args:
        name: of the argument.
        value: an array or nested lists.
        ndim: allowed numbers of axes; None for any.
        floating: integers become floats, and half precision becomes single, for LAPACK.

    Raises:
        ValueError: text, objects, complex numbers, another number of axes.

    Example:
        >>> check_array("curve", [3, 2, 1], ndim=1, floating=True).tolist()
        [3.0, 2.0, 1.0]
        >>> check_array("curve", "falling")
        Traceback (most recent call last):
        ...
        ValueError: curve must hold real numbers; got text.
    """
    raw = value if hasattr(value, "dtype") else _as_numpy(name, value)
    real = jnp.issubdtype(raw.dtype, jnp.floating) or jnp.issubdtype(raw.dtype, jnp.integer)
    if not real and raw.dtype != bool:
        names = {"U": "text", "S": "text", "O": type(value).__name__}
        kind = names.get(getattr(raw.dtype, "kind", ""), raw.dtype)
        raise ValueError(f"{name} must hold real numbers; got {kind}.")
    allowed = (ndim,) if isinstance(ndim, int) else ndim
    if allowed is not None and raw.ndim not in allowed:
        axes = " or ".join(map(str, allowed))
        raise ValueError(f"{name} must have {axes} axes; got shape {tuple(raw.shape)}.")
    array = jnp.asarray(raw)
    if not floating:
        return array
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array.astype(jnp.float64 if jax.config.read("jax_enable_x64") else jnp.float32)
    return array.astype(jnp.float32) if array.dtype.itemsize < 4 else array


def _as_numpy(name: str, value: Any) -> np.ndarray | Array:
    if not all(map(is_concrete, jax.tree.leaves(value))):
        return jnp.asarray(value)
    try:
        return np.asarray(value)
    except ValueError as problem:  # rows of different lengths
        raise ValueError(f"{name} must be one array of numbers: {problem}") from None


def check_instance(name: str, value: Any, kind: type, source: str) -> None:
    """Raise `TypeError` unless `value` is a `kind`; `source` names the function that makes one."""
    if not isinstance(value, kind):
        raise TypeError(
            f"{name} must be a {kind.__name__}, of {source}; got {type(value).__name__}."
        )


def check_several(name: str, values: Any, of: str) -> tuple[Any, ...]:
    """The items of a list, tuple or array as a tuple, else `TypeError`; `of` names them."""
    array = isinstance(values, jax.Array | np.ndarray) and values.ndim > 0
    if not (isinstance(values, Sequence) or array) or isinstance(values, str | bytes):
        raise TypeError(f"{name} must be a list of {of}; got {values!r}.")
    return tuple(values)


def check_integers(name: str, values: Any, *, at_least: int = 1) -> tuple[int, ...]:
    """Several integers, each at least `at_least`, as a tuple of int; whole floats do not pass."""
    items = check_several(name, values, "integers")
    scalars = (item if isinstance(item, int) else np.asarray(item)[()] for item in items)
    return tuple(check_integer(name, scalar, at_least=at_least) for scalar in scalars)


def check_floating(name: str, tree: Any) -> None:
    """Raise `ValueError` where a leaf of a pytree that is trained is not floating-point."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        kind = leaf.dtype if hasattr(leaf, "dtype") else type(leaf)
        if not jnp.issubdtype(kind, jnp.floating):
            kind = getattr(kind, "__name__", kind)
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} holds {kind}; what is trained must be "
                "floating-point. Let the function close over the rest."
            )


def check_known(**values: Any) -> None:
    """Raise `ValueError` where an argument has a traced leaf, for functions that read values."""
    for name, value in values.items():
        if not all(map(is_concrete, jax.tree.leaves(value))):
            raise ValueError(
                f"{name} is traced, and its values are looked at: call this outside of jit and "
                "vmap."
            )


def check_leaves(name: str, tree: Any) -> None:
    """Raise `TypeError` where a leaf of a pytree is not a number or an array of numbers."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, bool | int | float | complex | np.number | jax.Array):
            continue
        kind = getattr(getattr(leaf, "dtype", None), "kind", None)
        if kind is None or kind in "OUS":
            where = name + jax.tree_util.keystr(path)
            raise TypeError(f"{where} must be an array of numbers; got {type(leaf).__name__}.")
