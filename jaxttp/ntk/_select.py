"""Which parameters count: a mask, a prefix of one, or a predicate on the path."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxttp._core.checks import check_leaves
from jaxttp._core.types import Params


def leaf_paths(params: Params) -> tuple[str, ...]:
    """The path of each leaf as text, such as "layers/0/kernel"."""
    paths = jax.tree_util.tree_leaves_with_path(params)
    return tuple(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths)


def select_leaves(params: Params, trainable: Any = None) -> tuple[bool, ...]:
    """Whether each leaf counts; leaves that are not floating-point never do.

    Args:
        params: pytree of arrays.
        trainable: None for all, a pytree of bools (a prefix is enough), or a predicate on the path.

    Raises:
        ValueError: a mask of another structure or with other values than bools; nothing chosen.
    """
    leaves = jax.tree.leaves(params)
    paths = leaf_paths(params)
    check_leaves("params", params)
    if trainable is None:
        chosen = [True] * len(leaves)
    elif callable(trainable):
        chosen = [bool(trainable(path)) for path in paths]
    else:
        try:
            full = jax.tree.map(lambda m, part: jax.tree.map(lambda _: m, part), trainable, params)
        except (ValueError, TypeError) as error:
            raise ValueError(
                "trainable must be None, a predicate on the path, or a pytree of bools that params "
                f"extends; {error}"
            ) from None
        chosen = jax.tree.leaves(full)
        wrong = [value for value in chosen if value is not True and value is not False]
        if wrong or len(chosen) != len(leaves):
            raise ValueError(
                f"trainable must hold True or False for each part of params; got {trainable!r}."
            )
    mask = tuple(
        choice and jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        for choice, leaf in zip(chosen, leaves, strict=True)
    )
    strange = [
        path for path, choice, leaf in zip(paths, chosen, leaves, strict=True)
        if choice and jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating)
    ]  # fmt: skip
    if strange:
        raise ValueError(
            f"params holds complex numbers at {strange[0] or 'its only leaf'}: kernels and "
            "gradients are of real ones. Give real and imaginary parts, or leave them out "
            "(trainable)."
        )
    if not any(mask):
        raise ValueError(_why_nothing_counts(params, trainable))
    return mask


def _why_nothing_counts(params: Params, trainable: Any) -> str:
    """Words of a refusal: it is up to the parameters, or to what was chosen of them."""
    if trainable is None:
        kinds = ", ".join(sorted({str(jnp.result_type(leaf)) for leaf in jax.tree.leaves(params)}))
        held = f"holds {kinds} alone: convert the weights to float" if kinds else "is empty"
        return f"params has no floating-point leaf, which is what trains; it {held}."
    paths = leaf_paths(params)
    known = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
    refusal = f"trainable leaves no floating-point parameter to count; params has {known}."
    # `from_torch` and `from_keras` give one dict with the layers in the order of registration.
    last = str(next(reversed(params), "")) if isinstance(params, dict) else ""
    layer = last[: max(last.rfind("."), last.rfind("/")) + 1]
    if not callable(trainable) or not layer:
        return refusal
    return (
        f"{refusal} Its last entry is of the layer {layer[:-1]!r}: "
        f"trainable=lambda path: path.startswith({layer!r})."
    )


def split_trainable(
    params: Params, trainable: Any = None
) -> tuple[Params, Callable[[Params], Params]]:
    """The parameters that count, and the function that puts the others back.

    Args:
        params: pytree of arrays.
        trainable: as in `select_leaves`.

    Returns:
        ``(chosen, restore)`` with ``restore(chosen)`` the whole parameters; where all of them
        count, `params` itself and the identity.
    """
    mask = select_leaves(params, trainable)
    if all(mask):
        return params, lambda chosen: chosen
    leaves, treedef = jax.tree.flatten(params)
    pairs = list(zip(mask, leaves, strict=True))
    frozen = [leaf for counts, leaf in pairs if not counts]

    def restore(chosen: Params) -> Params:
        trained, rest = iter(chosen), iter(frozen)
        return jax.tree.unflatten(treedef, [next(trained if m else rest) for m in mask])

    return [leaf for counts, leaf in pairs if counts], restore
