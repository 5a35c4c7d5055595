"""Labels with weights: of samples, of classes, of outputs, and masks.

They come with the labels and travel in the targets that `jaxttp.losses.encode_targets` makes of
them, so that whatever takes labels takes them.
"""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from jaxttp._core.checks import check_array, check_known, is_concrete

IGNORED = -100
"""The label of what does not count, by the convention of token classification."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weighted:
    """Labels with weights, to be given wherever labels are; `weighted` makes it.

    Attributes:
        y: integer labels (N,) or targets (N, C).
        weight: (N,), or (N, C) for every output of its own; zero for what does not count.
        vocabulary: V, where `y` are labels of tokens (N, T) that are known to go with outputs
            (N, T, V), flattened to (N, T V); 0 elsewhere. `token_labels` sets it.
    """

    y: Any
    weight: Any
    vocabulary: int = dataclasses.field(default=0, metadata={"static": True})


def weighted(
    y: Any,
    *,
    sample_weight: Any = None,
    class_weight: Any = None,
    mask: Any = None,
) -> Weighted:
    """Labels whose samples, classes or outputs do not count alike, or not at all.

    The loss becomes the weighted mean

        L(f) = (sum_i w_i l(f_i, y_i)) / (sum_i w_i),

    and a mini-batch the mean over its B samples of w_i l_i / mean(w), unbiased for it. Give the
    result in place of `y` to forecast and training alike.

    Args:
        y: integer labels (N,) or targets (N, C). Labels that are masked may be anything, such as
            -1 or NaN; integer labels of -100 are masked without a mask. Labels of tokens (N, T),
            for outputs (N, T, V), with weights and masks (N,) or (N, T).
        sample_weight: non-negative weights (N,), or (N, C) for every output of its own (binary and
            multi-label: ``where(y == 1, p, 1)`` weighs positives p-fold).
        class_weight: weights of the classes (K,), a dictionary from class to weight, or "balanced"
            for N / (K n_k). With targets (N, C) they weigh the C outputs.
        mask: (N,) or (N, C), true for what counts.

    Returns:
        A `Weighted`; the weights given are multiplied.

    Raises:
        ValueError: nothing given, bad shapes, negative or non-finite weights, no weight left, a
            class without a weight.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxttp.losses import encode_targets
        >>> y = weighted([0, 1, -1], class_weight=[1.0, 3.0], mask=[True, True, False])
        >>> y.weight.tolist()
        [1.0, 3.0, 0.0]
        >>> targets, loss = encode_targets("cross_entropy", y, jnp.zeros((3, 2)))
        >>> round(float(loss.value(jnp.zeros((3, 2)), targets)), 4)
        0.6931

    Source:
        Standard (scikit-learn's arguments; Keras divides a batch's sum by B as here, PyTorch by the
        batch's own weight).
    """
    if sample_weight is None and class_weight is None and mask is None:
        raise ValueError("give at least one of sample_weight, class_weight and mask.")
    y = y if isinstance(y, jax.Array) else np.asarray(y)
    if y.ndim not in (1, 2) or y.shape[0] == 0:
        raise ValueError(f"y must be labels (N,) or targets (N, C); got shape {y.shape}.")
    is_label = y.ndim == 1 and (jnp.issubdtype(y.dtype, jnp.integer) or y.dtype == jnp.bool_)
    parts = []
    counts = _what_counts(y, mask)
    if counts is not None:
        y = _fill_masked(y, counts, is_label)
        parts.append(counts.astype(float))
    if sample_weight is not None:
        parts.append(_weight_array("sample_weight", sample_weight, y.shape))
    if class_weight is not None:
        masked = 1 if counts is None else parts[0]
        parts.append(_class_weight(class_weight, y, is_label, masked))
    if any(part.ndim == 2 for part in parts):
        parts = [part if part.ndim == 2 else part[:, None] for part in parts]
    weight = functools.reduce(lambda a, b: a * b, parts)
    if is_concrete(weight) and not np.any(np.asarray(weight) > 0):
        raise ValueError("sample_weight, class_weight and mask leave no sample that counts.")
    return Weighted(y, weight)


def without_marked(y: Any) -> Any:
    """Labels of which some are `IGNORED`, as `Weighted` ones that leave these out; else `y` itself.

    Args:
        y: an array of labels or targets, or `Weighted` ones.

    Raises:
        ValueError: all labels are `IGNORED`.

    Example:
        >>> without_marked(np.array([1, -100, 0])).weight.tolist()
        [1.0, 0.0, 1.0]
    """
    marked = _marked(y.y if isinstance(y, Weighted) else y)
    if marked is None:
        return y
    if marked.all():
        raise ValueError(
            f"y holds nothing but {IGNORED}, the label of what does not count; give at least one "
            "sample a label of 0 or more."
        )
    if isinstance(y, Weighted):
        left = (~marked).reshape(-1, *[1] * (np.ndim(y.weight) - 1))
        return Weighted(_fill_masked(y.y, ~marked, True), y.weight * left)
    return weighted(y, mask=~marked)


def token_labels(y: Any, shape: tuple[int, ...]) -> Any:
    """Labels that know how many outputs a token has, where outputs are (N, T, V); else `y` itself.

    Args:
        y: integer labels (N, T), or `Weighted` ones with weights (N,) or (N, T).
        shape: of the outputs, (N, T, V) or (N, C).

    Raises:
        ValueError: labels that are no integers (N, T).

    Example:
        >>> token_labels(np.array([[3, -100]]), (1, 2, 5)).vocabulary
        5
    """
    if len(shape) != 3:
        return y
    n, t, v = shape
    weight = y.weight if isinstance(y, Weighted) else 1.0
    y = y.y if isinstance(y, Weighted) else y
    y = y if isinstance(y, jax.Array) else np.asarray(y)
    if y.shape == (n, t) and jnp.issubdtype(y.dtype, jnp.integer):
        return Weighted(y, weight, v)
    remedy = ""
    if y.shape == (n,):
        remedy = (
            " One label a sample goes with outputs (N, C): jaxttp.label_words(apply_fn, ids) "
            "takes the logits of a few words at the last token."
        )
    elif y.ndim == 2 and y.shape[0] == n and y.shape[1] != t:
        remedy = f" The outputs have {t} tokens a sample: pad the labels with {IGNORED}, or cut."
    raise ValueError(
        f"y must be integer labels of tokens {(n, t)}, as the outputs are {shape}; got "
        f"{y.dtype} {y.shape}.{remedy}"
    )


def token_targets(y: Weighted, dtype: Any) -> jax.Array:
    """Labels of tokens and their weights, side by side: T labels, T weights of a sample.

    The weights are zero for labels of `IGNORED`, and scaled so that their sum is N: a mean over
    samples of what they weigh is the mean over all tokens that count.

    Args:
        y: from `token_labels`; values may be traced.
        dtype: of the outputs; the targets are in it, and in float32 at least.

    Returns:
        Targets (N, 2 T).

    Raises:
        ValueError: labels out of range, nothing that counts.

    Example:
        >>> labels = token_labels(np.array([[3, -100]]), (1, 2, 5))
        >>> token_targets(labels, "float32").tolist()
        [[3.0, 0.0, 1.0, 0.0]]
    """
    labels, weight, v = y.y, y.weight, y.vocabulary
    known = is_concrete(labels) and is_concrete(weight)
    xp: Any = np if known else jnp
    labels, weight = xp.asarray(labels), xp.asarray(weight, float)
    weight = weight[:, None] if weight.ndim == 1 else weight
    weights = xp.where(labels != IGNORED, weight, 0.0)
    outside = (weights > 0) & ((labels < 0) | (labels >= v))
    total = xp.sum(weights)
    if not known:
        words = f"token labels must lie in 0..{v - 1} or be {IGNORED}, and one at least must count"
        weights = eqx.error_if(weights, xp.any(outside) | ~(total > 0), words)
    elif outside.any():
        raise ValueError(
            f"y holds token labels such as {labels[outside][0]}, but the network has {v} outputs a "
            f"token: labels must lie in 0..{v - 1}, or be {IGNORED} for what does not count."
        )
    elif not total > 0:
        raise ValueError(
            f"y leaves no token that counts: all are {IGNORED} or of weight 0; give at least one a "
            "label of 0 or more."
        )
    dtype = jnp.promote_types(dtype, jnp.float32)
    labels = xp.where(weights > 0, labels, 0).astype(dtype)
    scaled = (weights * (len(labels) / total)).astype(dtype)
    return jnp.asarray(xp.concatenate([labels, scaled], axis=1))


def _marked(y: Any) -> np.ndarray | None:
    """Which of the integer labels (N,) are `IGNORED`; None for none, and where nobody knows yet."""
    if not is_concrete(y) or np.ndim(y) != 1:
        return None
    if not jnp.issubdtype(getattr(y, "dtype", jnp.float32), jnp.signedinteger):
        return None
    found = np.asarray(y) == IGNORED
    return found if found.any() else None


def _what_counts(y: Any, mask: Any) -> Any:
    """What the mask and labels of `IGNORED` leave; None for everything."""
    marked = _marked(y)
    given = None if mask is None else _weight_array("mask", mask, y.shape) != 0
    if marked is None:
        return given
    return ~marked if given is None else given & ~marked


def _fill_masked(y: Any, counts: Any, is_label: bool) -> Any:
    """Labels or targets with something harmless where the mask says that nothing counts.

    What stands there may be -1 or NaN, which no check of labels would let pass: a label becomes 0,
    a row of targets equal shares of all classes, a single target 0.
    """
    fill = 0 if is_label or y.ndim == 1 or counts.ndim == 2 else 1.0 / y.shape[1]
    where = counts if counts.ndim == y.ndim else counts[:, None]
    use = jnp if isinstance(y, jax.Array) else np
    return use.where(where, y, use.asarray(fill, y.dtype))


def _weight_array(name: str, values: Any, shape: tuple[int, ...]) -> Any:
    values = values if isinstance(values, jax.Array) else np.asarray(values)
    check_array(name, values)
    if values.shape not in (shape[:1], shape):
        text = f"{shape[:1]}" + (f" or {shape}" if len(shape) == 2 else "")
        raise ValueError(f"{name} must have shape {text}, as y has; got {values.shape}.")
    if is_concrete(values):
        known = np.asarray(values, float)
        if not np.all(np.isfinite(known)) or np.any(known < 0):
            raise ValueError(f"{name} must be finite and not negative.")
    return values if name == "mask" else values * 1.0


def _class_weight(given: Any, y: Any, is_label: bool, counts: Any) -> Any:
    """The weight that every sample (or, with targets, every output) gets from its class."""
    labels = np.asarray(y).astype(int) if is_label and is_concrete(y) else None
    if isinstance(given, str):
        if given != "balanced" or labels is None:
            raise ValueError(
                f"class_weight={given!r}: the only name is 'balanced', for integer labels (N,)."
            )
        share = np.bincount(labels, np.ones(len(labels)) * counts)
        share = np.where(share > 0, share, np.inf)
        given = share[np.isfinite(share)].sum() / (np.isfinite(share).sum() * share)
    elif isinstance(given, dict):
        size = max(map(int, given), default=-1) + 1
        table = np.full(size, np.nan)
        table[list(map(int, given))] = list(given.values())
        given = table
    check_known(class_weight=given)
    check_array("class_weight", given)
    table = np.asarray(given, float)
    if table.ndim != 1 or np.any(table < 0) or np.any(np.isinf(table)):
        raise ValueError("class_weight must be finite weights (K,), none of them negative.")
    if not is_label:
        if y.ndim != 2 or table.shape != (y.shape[1],) or not np.all(np.isfinite(table)):
            raise ValueError(
                f"class_weight must have one weight an output of y {y.shape}; got {table.shape}."
            )
        return np.broadcast_to(table, y.shape)
    if labels is None:
        return jnp.asarray(table)[y]
    inside = (labels >= 0) & (labels < len(table))
    if not np.all(inside) or not np.all(np.isfinite(table[labels[inside]])):
        raise ValueError("class_weight must have a weight for every class that occurs in y.")
    return table[labels]
