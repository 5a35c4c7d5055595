"""How far and in which direction weights move along training."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxttp._core.arrays import double, root
from jaxttp._core.checks import check_finite, check_leaves, check_several
from jaxttp._core.results import RESULT
from jaxttp._core.types import Params, leaf_paths


def _leaves(name: str, params: Any) -> tuple[tuple[str, ...], list[Array]]:
    """Names and flat float64 values of the floating-point leaves."""
    check_leaves(name, params)
    check_finite(name, params)
    pairs = [
        (path, jnp.asarray(leaf).astype(jnp.float64).reshape(-1))
        for path, leaf in zip(leaf_paths(params), jax.tree.leaves(params), strict=True)
        if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
    ]
    if not pairs:
        raise ValueError(f"{name} must hold at least one floating-point array.")
    return tuple(path for path, _ in pairs), [leaf for _, leaf in pairs]


def _matching(name: str, params: Any, other: Any) -> tuple[tuple[str, ...], list, list]:
    names, leaves = _leaves("params" if name == "reference" else "history[0]", params)
    others, other_leaves = _leaves(name, other)
    shapes = [a.shape == b.shape for a, b in zip(leaves, other_leaves, strict=False)]
    if names != others or not all(shapes):
        raise ValueError(f"{name} must be the same tree as params, with leaves of equal sizes.")
    return names, leaves, other_leaves


def _cosine(dot: Array, a: Array, b: Array) -> Array:
    """Dot / sqrt(a b), nan where one of them is zero."""
    both = a * b
    return jnp.where(both > 0, dot / jnp.sqrt(jnp.where(both > 0, both, 1.0)), jnp.nan)


def _sums(first: list[Array], second: list[Array]) -> Array:
    """Inner products leaf by leaf, (L,)."""
    return jnp.stack([jnp.sum(a * b) for a, b in zip(first, second, strict=True)])


def weight_cosine(params: Params, reference: Params) -> Float[Array, ""]:
    """The cosine between two sets of weights, all leaves as one vector.

    Args:
        params: pytree of arrays.
        reference: the same tree: the weights at initialisation, or of another optimiser.

    Returns:
        A scalar in [-1, 1]; nan where one of the two is zero.

    Raises:
        ValueError: trees that differ, no floating-point leaf, values that are not finite.

    Example:
        >>> import numpy as np
        >>> float(weight_cosine([np.array([1.0, 0.0])], [np.array([1.0, 1.0])]))
        0.7071067811865...
    """
    with double():
        _, a, b = _matching("reference", params, reference)
        return _cosine(jnp.sum(_sums(a, b)), jnp.sum(_sums(a, a)), jnp.sum(_sums(b, b)))


class WeightPath(NamedTuple):
    """Weights along T checkpoints, in float64; a cosine is nan where a vector is zero.

    Attributes:
        names: paths of the L leaves.
        norm: of all weights, (T,).
        distance: from the first checkpoint, (T,).
        cosine: with the first checkpoint, (T,).
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
        start = history[0]
        names, first, _ = _matching("history[0]", start, start)
        steps = [first]
        for t in range(1, len(history)):
            steps.append(_matching(f"history[{t}]", start, history[t])[2])
        squares = jnp.stack([_sums(leaves, leaves) for leaves in steps])  # (T, L)
        dots = jnp.stack([_sums(leaves, first) for leaves in steps])
        away = jnp.stack([_sums(d, d) for d in (_minus(leaves, first) for leaves in steps)])
        moves = [_minus(b, a) for a, b in itertools.pairwise(steps)]
        lengths = jnp.asarray([jnp.sum(_sums(m, m)) for m in moves], jnp.float64)
        turns = [jnp.sum(_sums(a, b)) for a, b in itertools.pairwise(moves)]
        total = jnp.sum(squares, axis=1)
        return WeightPath(
            names=names,
            norm=root(total),
            distance=root(jnp.sum(away, axis=1)),
            cosine=_cosine(jnp.sum(dots, axis=1), total, total[:1]),
            step_norm=root(lengths),
            step_cosine=_cosine(jnp.asarray(turns, jnp.float64), lengths[:-1], lengths[1:]),
            leaf_norm=root(squares),
            leaf_cosine=_cosine(dots, squares, squares[:1]),
        )


def _minus(a: list[Array], b: list[Array]) -> list[Array]:
    return [p - q for p, q in zip(a, b, strict=True)]
