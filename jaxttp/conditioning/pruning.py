"""Layer-wise pruning by magnitude, and an optimizer that keeps pruned weights at zero."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxttp._core.checks import check_known, check_leaves, check_number, check_optimizer
from jaxttp._core.types import Params


def magnitude_masks(
    params: Params, rate: float, *, prune: Callable[[str, Any], bool] | None = None
) -> Params:
    """Masks that remove the smallest entries of every layer.

    Args:
        params: pytree of arrays.
        rate: fraction of each layer to remove, in [0, 1); floor(rate * size) entries go.
        prune: ``(path, leaf) -> bool``, which leaves are pruned; those with two axes or more when
            None (weights, not biases and norms).

    Returns:
        A pytree of boolean arrays, True for entries that stay. Ties are broken by position.

    Raises:
        ValueError: rate outside [0, 1).

    Example:
        >>> import jax.numpy as jnp
        >>> magnitude_masks({"w": jnp.array([[1.0, -3.0], [0.5, 2.0]])}, 0.5)["w"].tolist()
        [[False, True], [False, True]]

    Source:
        GNC Figure 1 and Appendix I.1: layer-wise, by magnitude, at initialization.
    """
    check_known(rate=rate)
    check_number("rate", rate, at_least=0.0, below=1.0)
    _check_params(params)
    is_pruned = prune or (lambda path, leaf: jnp.ndim(leaf) >= 2)

    def mask(path: Any, leaf: Any) -> Any:
        if not is_pruned(jax.tree_util.keystr(path), leaf):
            return jnp.ones(jnp.shape(leaf), bool)
        size = jnp.size(leaf)
        order = jnp.argsort(jnp.abs(jnp.ravel(leaf)), stable=True)
        # A rate like 0.29 must remove 29 of 100, however 0.29 * 100 is rounded.
        removed = math.floor(rate * size + 1e-9)
        keep = jnp.ones(size, bool).at[order[:removed]].set(False)
        return keep.reshape(jnp.shape(leaf))

    return jax.tree_util.tree_map_with_path(mask, params)


def apply_masks(params: Params, masks: Params) -> Params:
    """The parameters with masked entries set to zero.

    Args:
        params: pytree of arrays.
        masks: pytree of booleans of the same structure.

    Returns:
        A pytree like `params`.

    Raises:
        ValueError: trees that differ.

    Example:
        >>> import jax.numpy as jnp
        >>> apply_masks(jnp.array([1.0, 2.0]), jnp.array([True, False])).tolist()
        [1.0, 0.0]
    """
    _check_params(params)
    _check_masks(masks)
    shapes = [[jnp.shape(leaf) for leaf in jax.tree.leaves(tree)] for tree in (params, masks)]
    if jax.tree.structure(params) != jax.tree.structure(masks) or shapes[0] != shapes[1]:
        raise ValueError(
            "masks must be the tree of params, with a mask of its shape for every leaf; "
            "magnitude_masks(params, rate) makes them."
        )
    return jax.tree.map(lambda leaf, keep: jnp.where(keep, leaf, 0), params, masks)


def _check_params(params: Any) -> None:
    check_leaves("params", params)
    if not jax.tree.leaves(params):
        raise ValueError("params holds no array.")


def _check_masks(masks: Any) -> None:
    check_leaves("masks", masks)
    leaves = jax.tree.leaves(masks)
    if not leaves or any(not jnp.issubdtype(jnp.result_type(leaf), jnp.bool_) for leaf in leaves):
        raise ValueError("masks must hold an array of bools, or several; see magnitude_masks.")


def keep_pruned(
    optimizer: optax.GradientTransformation, masks: Params
) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose updates leave pruned entries alone.

    Gradients are masked before, so that they do not enter momenta and norms, and updates after,
    so that weight decay and noise do not change pruned entries.

    Args:
        optimizer: any optax transformation.
        masks: of `magnitude_masks`.

    Returns:
        An optax transformation; start it from `apply_masks(params, masks)`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> tx = keep_pruned(optax.sgd(1.0), jnp.array([True, False]))
        >>> updates, _ = tx.update(jnp.ones(2), tx.init(jnp.zeros(2)))
        >>> updates.tolist()
        [-1.0, 0.0]
    """
    check_optimizer(optimizer)
    _check_masks(masks)
    inner = optax.with_extra_args_support(optimizer)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, state = inner.update(apply_masks(updates, masks), state, params, **extra)
        return apply_masks(updates, masks), state

    return optax.GradientTransformationExtraArgs(inner.init, update)
