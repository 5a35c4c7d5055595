"""Shared types of functions, parameters, models and samples, and operations on them.

Samples are one array (N, ...), or a pytree of arrays with N rows each. A tokenizer returns
``{"input_ids": (N, T), "attention_mask": (N, T)}``; graphs and tables of mixed columns are similar.
Functions here count, slice and join samples of both kinds.

The trainable parameters are given by a mask, a prefix of one, or a predicate on the path
(`select_leaves`).
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp._core.checks import check_leaves

Params: TypeAlias = Any
"""Any pytree of floating-point arrays."""

ApplyFn: TypeAlias = Callable[[Any, Any], Array]
"""A function ``(params, x) -> outputs`` with x (N, ...) and outputs (N, C).

Row i of the outputs depends on row i of x alone.
"""

Progress: TypeAlias = Callable[[str, int, int], None]
"""Is called with (stage, done, total), or with (message, 0, 0)."""

_NOTES = "jaxttp_notes"


def noted(apply_fn: ApplyFn, notes: Callable[[], tuple[str, ...]]) -> ApplyFn:
    """Attach notes to a function on how the network is evaluated.

    Args:
        apply_fn: a function of ours, ``(params, x) -> outputs``.
        notes: returns lines such as "2 BatchNorm on running averages"; called after `apply_fn` was
            traced.

    Returns:
        `apply_fn` itself, with an attribute, so that its identity and hash stay the same.
    """
    setattr(apply_fn, _NOTES, notes)
    return apply_fn


def notes_of(apply_fn: ApplyFn) -> tuple[str, ...]:
    """Notes on how a network is evaluated, if the function has any.

    Args:
        apply_fn: any function.

    Example:
        >>> notes_of(noted(lambda params, x: x, lambda: ("1 dropout (0.5) off",)))
        ('1 dropout (0.5) off',)
        >>> notes_of(abs)
        ()
    """
    notes: Callable[[], tuple[str, ...]] | None = getattr(apply_fn, _NOTES, None)
    return () if notes is None else notes()


class Model(NamedTuple):
    """A network as a pure function and its parameters.

    Unpacks where a function asks for ``apply_fn, params``, so ``empirical_ntk(*model, x)`` works.

    Attributes:
        apply_fn: ``(params, x) -> outputs``, with x (N, ...) and outputs (N, C).
        params: the parameters, a plain pytree of arrays.
    """

    apply_fn: ApplyFn
    params: Params


def count(x: Any, name: str = "x") -> int:
    """N, the rows that every array of `x` has.

    Args:
        x: samples (N, ...): an array, a ``jax.ShapeDtypeStruct`` or a pytree of these.
        name: their name in messages.

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


def leaf_paths(params: Params) -> tuple[str, ...]:
    """The path of each leaf as text, such as "layers/0/kernel"."""
    paths = jax.tree_util.tree_leaves_with_path(params)
    return tuple(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths)


def select_leaves(params: Params, trainable: Any = None) -> tuple[bool, ...]:
    """Whether each leaf is trainable; leaves that are not floating-point never are.

    Args:
        params: pytree of arrays.
        trainable: None for all, a pytree of bools (a prefix is enough), or a predicate on the path.

    Raises:
        ValueError: a mask of another structure or with other values than bools; no leaf selected.
    """
    leaves = jax.tree.leaves(params)
    paths = leaf_paths(params)
    check_leaves("params", params)
    if trainable is None:
        selected = [True] * len(leaves)
    elif callable(trainable):
        selected = [bool(trainable(path)) for path in paths]
    else:
        try:
            full = jax.tree.map(lambda m, part: jax.tree.map(lambda _: m, part), trainable, params)
        except (ValueError, TypeError) as error:
            raise ValueError(
                "trainable must be None, a predicate on the path, or a pytree of bools that params "
                f"extends; {error}"
            ) from None
        selected = jax.tree.leaves(full)
        are_bools = all(value is True or value is False for value in selected)
        if not are_bools or len(selected) != len(leaves):
            raise ValueError(
                f"trainable must hold True or False for each part of params; got {trainable!r}."
            )
    mask = []
    for path, is_selected, leaf in zip(paths, selected, leaves, strict=True):
        dtype = jnp.result_type(leaf)
        mask.append(is_selected and jnp.issubdtype(dtype, jnp.floating))
        if not is_selected or not jnp.issubdtype(dtype, jnp.complexfloating):
            continue
        raise ValueError(
            f"params holds complex numbers at {path or 'its only leaf'}: kernels and "
            "gradients are of real ones. Give real and imaginary parts, or leave them out "
            "(trainable)."
        )
    if not any(mask):
        raise ValueError(_why_nothing_counts(params, trainable))
    return tuple(mask)


def _why_nothing_counts(params: Params, trainable: Any) -> str:
    """The message for parameters, or a selection, without floating-point leaves."""
    if trainable is None:
        kinds = ", ".join(sorted({str(jnp.result_type(leaf)) for leaf in jax.tree.leaves(params)}))
        held = f"holds {kinds} alone: convert the weights to float" if kinds else "is empty"
        return f"params has no floating-point leaf, which is what trains; it {held}."
    paths = leaf_paths(params)
    listed = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
    return f"trainable leaves no floating-point parameter to count; params has {listed}."


def split_trainable(
    params: Params, trainable: Any = None
) -> tuple[Params, Callable[[Params], Params]]:
    """The trainable parameters, and the function that adds the others again.

    Args:
        params: pytree of arrays.
        trainable: as in `select_leaves`.

    Returns:
        ``(weights, restore)`` with ``restore(weights)`` the whole parameters; where all of them
        are trainable, `params` itself and the identity.
    """
    mask = select_leaves(params, trainable)
    if all(mask):
        return params, lambda weights: weights
    leaves, treedef = jax.tree.flatten(params)

    def restore(weights: Params) -> Params:
        trained = iter(weights)
        pairs = zip(mask, leaves, strict=True)
        return jax.tree.unflatten(treedef, [next(trained) if m else leaf for m, leaf in pairs])

    return list(itertools.compress(leaves, mask)), restore
