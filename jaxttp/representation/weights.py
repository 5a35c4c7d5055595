"""How far and in which direction weights move along training."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxttp._core.arrays import double, root
from jaxttp._core.checks import check_finite, check_leaves, check_several
from jaxttp._core.results import RESULT
from jaxttp._core.types import Params, leaf_paths


def _rows(history: Sequence[Params]) -> dict[str, Array]:
    """The floating-point leaves by path in float64, flat, one row for each checkpoint (T, n)."""
    rows = []
    for t, params in enumerate(history):
        name = f"history[{t}]"
        check_leaves(name, params)
        check_finite(name, params)
        pairs = zip(leaf_paths(params), jax.tree.leaves(params), strict=True)
        rows.append({
            path: jnp.asarray(leaf).astype(jnp.float64).reshape(-1)
            for path, leaf in pairs
            if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        })  # fmt: skip
        if not rows[-1]:
            raise ValueError(f"{name} must hold at least one floating-point array.")
        if jax.tree.map(jnp.shape, rows[-1]) != jax.tree.map(jnp.shape, rows[0]):
            raise ValueError(
                f"{name} must be the same tree as history[0], with leaves of equal sizes."
            )
    return {path: jnp.stack([row[path] for row in rows]) for path in rows[0]}


def _norm(rows: Array) -> Array:
    return root(jnp.sum(rows**2, axis=-1))


def _cosine(first: Array, second: Array) -> Array:
    """Of rows; nan where one of two is zero."""
    sizes = jnp.sum(first**2, axis=-1) * jnp.sum(second**2, axis=-1)
    safe = jnp.sqrt(jnp.where(sizes > 0, sizes, 1.0))
    return jnp.where(sizes > 0, jnp.sum(first * second, axis=-1) / safe, jnp.nan)


class WeightPath(NamedTuple):
    """Weights along T checkpoints, in float64; a cosine is nan where a vector is zero.

    Attributes:
        names: paths of the L leaves.
        norm: of all weights, (T,).
        distance: from the first checkpoint, (T,).
        cosine: with the first checkpoint, all leaves as one vector, (T,).
        step_norm: length of every move between neighbours, (T - 1,).
        step_cosine: between a move and the one before, (T - 2,): near 1 on a straight path,
            negative where the weights oscillate.
        leaf_norm: norms leaf by leaf, (T, L).
        leaf_cosine: with the first checkpoint, leaf by leaf, (T, L).
    """

    names: tuple[str, ...]
    norm: Array
    distance: Array
    cosine: Array
    step_norm: Array
    step_cosine: Array
    leaf_norm: Array
    leaf_cosine: Array

    plot, _repr_html_, __repr__ = RESULT


def weight_path(history: Sequence[Params]) -> WeightPath:
    """Norms, distances and cosines of the weights along training.

    Args:
        history: the weights at T checkpoints, the first one the reference; one at least.

    Returns:
        A `WeightPath`.

    Raises:
        ValueError: no checkpoints, trees that differ, values that are not finite.

    Example:
        >>> import numpy as np
        >>> path = weight_path([{"w": np.array([1.0, 0])}, {"w": np.array([1.0, 1.0])}])
        >>> path.distance.tolist(), path.cosine.round(3).tolist(), path.names
        ([0.0, 1.0], [1.0, 0.707], ('w',))

    Source:
        XGN's figures of weight norms and cosines along training.
    """
    history = check_several("history", history, "parameters")
    if len(history) == 0:
        raise ValueError("history must hold the weights of at least one checkpoint.")
    with double():
        rows = _rows(history)
        whole = jnp.concatenate(list(rows.values()), axis=1)
        moves = jnp.diff(whole, axis=0)
        return WeightPath(
            names=tuple(rows),
            norm=_norm(whole),
            distance=_norm(whole - whole[:1]),
            cosine=_cosine(whole, whole[:1]),
            step_norm=_norm(moves),
            step_cosine=_cosine(moves[:-1], moves[1:]),
            leaf_norm=jnp.stack([_norm(leaf) for leaf in rows.values()], axis=1),
            leaf_cosine=jnp.stack([_cosine(leaf, leaf[:1]) for leaf in rows.values()], axis=1),
        )
