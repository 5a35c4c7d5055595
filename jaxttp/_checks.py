"""Errors a user can act on: they name the argument, what was given, and what would do.

What is known before tracing raises here. What is known only at run time (the values of a traced
array) is left to `equinox.error_if` or to a field of the result: every check of values below lets
tracers pass.
"""

import contextlib
from collections.abc import Iterable
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

    Look at them with NumPy: inside `jit` a jnp function turns even a known value into a tracer.
    """
    return not isinstance(value, jax.core.Tracer)


def values_known() -> contextlib.AbstractContextManager[Any]:
    """A context in which what known arrays are computed into is known, also in somebody's `jit`.

    Outside a trace it changes nothing: constants of programs would be evaluated one by one there,
    each by a small program of its own.
    """
    traced = isinstance(jax.device_put(np.zeros(())), jax.core.Tracer)
    return jax.ensure_compile_time_eval() if traced else contextlib.nullcontext()


def check_choice(name: str, value: T, choices: Iterable[T], *, remedy: str = "") -> T:
    """Return `value` if it is one of `choices`, else raise `ValueError`."""
    choices = tuple(choices)
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(
            f"{name}={value!r} is not known; choose one of {listed}."
            + (f" {remedy}" if remedy else "")
        )
    return value


def check_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    remedy: str = "",
) -> Any:
    """Return a scalar that lies in the wanted range, else raise `ValueError`.

    A traced scalar is returned as it is: its value is not known yet.
    """
    if not is_concrete(value):
        return value
    try:
        if isinstance(value, str | bytes):
            raise TypeError  # float would read "0.5", and the caller compute with the text
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a number; got {value!r}.") from None
    wanted = [] if np.isfinite(number) else ["finite"]
    if above is not None:
        wanted.append(f"greater than {above:g}")
    if at_least is not None:
        wanted.append(f"at least {at_least:g}")
    if below is not None:
        wanted.append(f"less than {below:g}")
    good = (
        np.isfinite(number)
        and (above is None or number > above)
        and (at_least is None or number >= at_least)
        and (below is None or number < below)
    )
    if not good:
        text = " and ".join(wanted)
        raise ValueError(
            f"{name} must be {text}; got {value!r}." + (f" {remedy}" if remedy else "")
        )
    return value


def check_integer(
    name: str, value: Any, *, at_least: int, at_most: int | None = None, remedy: str = ""
) -> int:
    """Return `value` as an int that lies in the wanted range, else raise `ValueError`."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < at_least or (at_most is not None and value > at_most):
        wanted = f"an integer of at least {at_least}"
        if at_most is not None:
            wanted = f"an integer between {at_least} and {at_most}"
        raise ValueError(
            f"{name} must be {wanted}; got {value!r}." + (f" {remedy}" if remedy else "")
        )
    return int(value)


def check_used(name: str, value: Any, used: bool, remedy: str) -> None:
    """Raise `ValueError` for an option that was given and would do nothing.

    Args:
        name: of the argument.
        value: what was given; None for nothing.
        used: whether the others leave something to do for it.
        remedy: what it is for.

    Raises:
        ValueError: it would be ignored.

    Example:
        >>> check_used("paths", 8, False, "it counts paths of dynamics='sde'")
        Traceback (most recent call last):
        ...
        ValueError: paths=8 does nothing here: it counts paths of dynamics='sde'. Leave it out.
    """
    if value is not None and not used:
        raise ValueError(f"{name}={value!r} does nothing here: {remedy}. Leave it out.")


def check_optimizer(optimizer: Any) -> None:
    """Raise `TypeError` for what is no optax transformation."""
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            "optimizer must be an optax.GradientTransformation, such as optax.sgd(0.1); got "
            f"{optimizer!r}."
        )


def check_key(key: Any, *, optional: bool = True) -> None:
    """Raise `ValueError` for what is no key of `jax.random`; None passes where it is optional."""
    if key is None and optional:
        return
    if isinstance(key, jax.Array):
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            good = key.ndim == 0
        else:  # raw, as jax.random.PRNGKey makes them
            good = key.dtype == jnp.uint32 and key.ndim == 1
        if good:
            return
    shape = np.shape(key) if isinstance(key, jax.Array | np.ndarray) else ()
    given = f"an array of shape {shape}" if shape else repr(key)
    raise ValueError(f"key must be a jax.random.key, such as jax.random.key(0); got {given}.")


def check_finite(name: str, tree: Any) -> None:
    """Raise `ValueError` if an array of `tree` holds NaN or infinity (tracers pass)."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not is_concrete(leaf) or not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            continue
        if isinstance(leaf, jax.Array) and len(leaf.devices()) > 1:  # too large for this host
            bad = int(jnp.sum(~jnp.isfinite(leaf)))
        else:
            bad = int(np.sum(~np.isfinite(np.asarray(leaf))))
        if bad:
            where = name + jax.tree_util.keystr(path)
            raise ValueError(
                f"{where} holds {bad} value(s) that are NaN or infinite, of {jnp.size(leaf)}; "
                "remove or replace them first."
            )


def check_finite_value(name: str, value: T) -> T:
    """Return `value`; NaN or infinity in it is an error, now if concrete, else at run time."""
    if all(is_concrete(leaf) for leaf in jax.tree.leaves(value)):
        check_finite(name, value)
        return value
    return eqx.error_if(value, ~all_finite(value), f"{name} holds NaN or infinity")


def all_finite(tree: Any) -> Array:
    """Whether no array of `tree` holds NaN or infinity, concrete or not."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))
