"""What every function here does first: shapes that chain, fixed scales, skips.

All of this package computes in float64 (`jaxttp._core.arrays`), whatever comes in.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxttp._core.arrays import as_double
from jaxttp._core.checks import check_number, is_concrete


def check_weights(weights: Any, names: Sequence[str] = ()) -> list[Array]:
    """W_1 (a_1, d), ..., W_L (k, a_{L-1}) in float64, or `ValueError` where they do not chain.

    Args:
        weights: a list of matrices.
        names: what the messages call them, weights[0] and so on where there are none.
    """
    if not isinstance(weights, Sequence) or len(weights) == 0:
        raise ValueError(
            "weights must be a list of at least one matrix, [W_1 (a1, d), ..., W_L (k, a)]; "
            f"got {type(weights).__name__}."
        )
    names = names or [f"weights[{i}]" for i in range(len(weights))]
    chain = [as_double(name, weight, 2) for name, weight in zip(names, weights, strict=True)]
    for i in range(1, len(chain)):
        if chain[i].shape[1] != chain[i - 1].shape[0]:
            raise ValueError(
                f"{names[i]} has shape {chain[i].shape} but {names[i - 1]} gives "
                f"{chain[i - 1].shape[0]} features; the columns of each must be the rows of the "
                "one before it (the first layer comes first)."
            )
    return chain


def check_scales(scales: Any, weights: list[Array]) -> list[Array] | None:
    """Fixed factors (a_l,) behind every layer but the last, or None."""
    if scales is None:
        return None
    if not isinstance(scales, Sequence) or len(scales) != len(weights) - 1:
        raise ValueError(
            f"scales must be a list of {len(weights) - 1} vectors, one for every hidden layer."
        )
    out = [as_double(f"scales[{i}]", scale, 1) for i, scale in enumerate(scales)]
    for i, (scale, weight) in enumerate(zip(out, weights, strict=False)):
        if scale.shape[0] != weight.shape[0]:
            raise ValueError(
                f"scales[{i}] has {scale.shape[0]} entries, hidden layer {i} has {weight.shape[0]}."
            )
    return out


def check_skip(skip: Any) -> Any:
    """A finite skip weight."""
    return check_number("skip", skip)


def add_skip(weights: list[Array], skip: Any) -> list[Array]:
    """W_l + skip I, with a rectangular identity."""
    if is_concrete(skip) and float(skip) == 0.0:
        return weights
    skip = jnp.asarray(skip).astype(jnp.float64)
    return [w + skip * jnp.eye(*w.shape, dtype=w.dtype) for w in weights]
