"""Samples as they come: one array (N, ...), or a pytree of arrays with N rows each.

A tokenizer gives ``{"input_ids": (N, T), "attention_mask": (N, T)}``, a graph or a table of mixed
columns something like it. Whatever counts, cuts or joins samples does so here, for both; for one
array these are the array's own operations, and compile to what they always did.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def count(x: Any, name: str = "x") -> int:
    """N, the rows that every array of `x` has.

    Args:
        x: samples (N, ...): an array, a ``jax.ShapeDtypeStruct`` or a pytree of these.
        name: what the messages call them.

    Raises:
        ValueError: no array, a scalar, arrays of different lengths.

    Example:
        >>> count({"ids": np.ones((5, 7)), "mask": np.ones((5, 7))})
        5
        >>> count({"ids": np.ones((5, 7)), "mask": np.ones((4, 7))})
        Traceback (most recent call last):
        ...
        ValueError: x['mask'] has 4 rows, x['ids'] 5: every array of x needs a row for each sample.
    """
    shapes = leaf_shapes(x, name)
    if not shapes:
        raise ValueError(f"{name} must have a row for every sample, (N, ...); it holds no array.")
    for leaf, shape in shapes.items():
        if not shape:
            raise ValueError(f"{leaf} must have a row for every sample, (N, ...); got a scalar.")
    first = next(iter(shapes))
    for leaf, shape in shapes.items():
        if shape[0] != shapes[first][0]:
            raise ValueError(
                f"{leaf} has {shape[0]} rows, {first} {shapes[first][0]}: every array of {name} "
                "needs a row for each sample."
            )
    return shapes[first][0]


def take(x: Any, rows: Any) -> Any:
    """Some of the samples, ``x[rows]`` of every array.

    Args:
        x: samples (N, ...).
        rows: a slice, or indices of any shape.

    Example:
        >>> take({"ids": np.arange(4)}, slice(1, 3))
        {'ids': array([1, 2])}
    """
    return jax.tree.map(lambda leaf: leaf[rows], x)


def concatenate(parts: Sequence[Any]) -> Any:
    """Samples one after the other.

    Args:
        parts: samples of one structure.

    Example:
        >>> concatenate([{"ids": jnp.arange(2)}, {"ids": jnp.arange(3)}])["ids"].shape
        (5,)
    """
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def leaf_shapes(x: Any, name: str = "x") -> dict[str, tuple[int, ...]]:
    """The shape of every array by its name, such as ``x['mask']``; `name` itself for one array."""
    pairs = jax.tree_util.tree_leaves_with_path(x)
    return {name + jax.tree_util.keystr(path): tuple(np.shape(leaf)) for path, leaf in pairs}


def shape_words(x: Any, name: str = "x") -> str:
    """Shapes for messages: ``x of shape (5, 7)``, or ``x['ids'] (5, 7), x['mask'] (5, 7)``."""
    shapes = leaf_shapes(x, name)
    if list(shapes) == [name]:
        return f"{name} of shape {shapes[name]}"
    return ", ".join(f"{leaf} {shape}" for leaf, shape in shapes.items())
