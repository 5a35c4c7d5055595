"""Targets of a loss, made of integer labels, weights and masks.

`weighted` adds weights of samples, classes or outputs to labels. `encode_targets` turns labels (N,)
into one-hot targets (N, C), labels of tokens (N, T) into labels and weights (N, 2 T), and
`Weighted` labels into targets followed by their weights (N, 2 C).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxttp._core.checks import check_array, check_finite_value, check_known, is_concrete, refuse
from jaxttp.losses.functions import (
    Loss,
    binary_cross_entropy,
    cross_entropy,
    get_loss,
    misclassified,
    squared_error,
    token_loss,
    wrong_tokens,
)

IGNORED = -100
"""The label of masked samples and tokens, by the convention of token classification."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weighted:
    """Labels with weights, accepted in place of labels; `weighted` makes it.

    Attributes:
        y: integer labels (N,) or targets (N, C).
        weight: (N,), or (N, C) for every output of its own; zero for masked ones.
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
    """Labels with weights of samples, classes or outputs, or with a mask.

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
        parts.append(_class_weight(class_weight, y, is_label, 1 if counts is None else parts[0]))
    weight = functools.reduce(lambda a, b: (a.T * b.T).T, parts)  # (N,) and (N, C) meet at N
    if is_concrete(weight) and not np.any(np.asarray(weight) > 0):
        raise ValueError("sample_weight, class_weight and mask leave no sample that counts.")
    return Weighted(y, weight)


def _marked(y: Any) -> np.ndarray | None:
    """Which of the integer labels (N,) are `IGNORED`; None for none, and for traced labels."""
    if not is_concrete(y) or np.ndim(y) != 1:
        return None
    if not jnp.issubdtype(getattr(y, "dtype", jnp.float32), jnp.signedinteger):
        return None
    is_ignored = np.asarray(y) == IGNORED
    return is_ignored if is_ignored.any() else None


def _what_counts(y: Any, mask: Any) -> Any:
    """The samples that the mask and labels of `IGNORED` leave; None for all."""
    marked = _marked(y)
    counts = None if mask is None else _weight_array("mask", mask, y.shape) != 0
    if marked is None:
        return counts
    return ~marked if counts is None else counts & ~marked


def _fill_masked(y: Any, counts: Any, is_label: bool) -> Any:
    """Labels or targets with valid values where they are masked.

    Masked values may be -1 or NaN, which checks of labels refuse. A label becomes 0, a row of
    targets equal fractions of all classes, a single target 0.
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
        weights = np.asarray(values, float)
        if not np.all(np.isfinite(weights)) or np.any(weights < 0):
            raise ValueError(f"{name} must be finite and not negative.")
    return values if name == "mask" else values * 1.0


def _class_weight(class_weight: Any, y: Any, is_label: bool, counts: Any) -> Any:
    """The weight of every sample (or, with targets, of every output) by its class."""
    labels = np.asarray(y).astype(int) if is_label and is_concrete(y) else None
    if isinstance(class_weight, str):
        if class_weight != "balanced" or labels is None:
            raise ValueError(
                f"class_weight={class_weight!r}: the only name is 'balanced', for integer labels "
                "(N,)."
            )
        sizes = np.bincount(labels, np.ones(len(labels)) * counts)
        present = sizes > 0
        class_weight = sizes.sum() / (present.sum() * np.where(present, sizes, np.inf))
    elif isinstance(class_weight, dict):
        by_class = class_weight
        class_weight = np.full(max(map(int, by_class), default=-1) + 1, np.nan)
        class_weight[list(map(int, by_class))] = list(by_class.values())
    check_known(class_weight=class_weight)
    check_array("class_weight", class_weight)
    table = np.asarray(class_weight, float)
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


# --- targets --------------------------------------------------------------------------------------


def encode_targets(
    loss: str | Loss, y: Any, outputs: Float[Array | jax.ShapeDtypeStruct, "n *c"]
) -> tuple[Array, Loss]:
    """Targets (N, C) in the outputs' dtype, and the loss whose error suits them.

    For outputs (N, T, V) and integer labels (N, T), -100 for what does not count, the loss is the
    mean cross-entropy of all the tokens that count, M of them (w_it = 0 for the others):

        L = (1/M) sum_it w_it l_it,    of a mini-batch of B samples:  N/(B M) sum_(i in batch) ...,

    so that the mean over batches is L, as for samples of -100 (PyTorch divides a batch's sum by
    what counts in it). It acts on outputs flattened to (N, T V).

    Args:
        loss: a name or a `Loss`.
        y: integer labels (N,) in 0..C-1, or targets (N, C); for C = 1 also (N,) floats, or (N,)
            labels 0/1 with binary cross-entropy. For weights and masks, `weighted` of these.
            Labels of -100 do not count, as ``weighted(y, mask=y != -100)`` has it: the mean is over
            the other samples; that of a mini-batch divides the sum over its others by B times the
            fraction of others in all of `y`, so that batches are unbiased, forecast and training
            alike (PyTorch divides by the number of others in the batch, which is not). Where the
            values of `y` are traced, give the mask.
        outputs: the network's outputs (N, C), or a `jax.ShapeDtypeStruct`: shape and dtype matter.
            For labels of tokens (N, T), which may be `weighted` by (N,) or (N, T), (N, T, V).

    Returns:
        ``(targets, loss)``; with integer labels the squared error counts misclassified samples.
        Targets of weighted labels are (N, 2 C), and the loss is the weighted one; those of tokens
        (N, 2 T).

    Raises:
        ValueError: `y` has the wrong length, shape, dtype, label range, is not finite, or holds
            nothing but -100; targets of a cross-entropy that are not probabilities.

    Example:
        >>> import jax.numpy as jnp
        >>> targets, _ = encode_targets("cross_entropy", jnp.array([0, 2]), jnp.zeros((2, 3)))
        >>> targets.tolist()
        [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    """
    targets, loss = _encode(get_loss(loss), y, outputs)
    like = jax.ShapeDtypeStruct((targets.shape[0], math.prod(outputs.shape[1:])), outputs.dtype)
    return targets, loss.keyed(like, targets)


def _encode(loss: Loss, y: Any, outputs: Any) -> tuple[Array, Loss]:
    shape, dtype = getattr(outputs, "shape", ()), getattr(outputs, "dtype", object)
    if len(shape) not in (2, 3) or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            "outputs must be floating-point outputs (N, C), or (N, T, V) of tokens; got "
            f"{type(outputs).__name__} of shape {shape}."
        )
    y = token_labels(y, outputs.shape)
    if isinstance(y, Weighted) and y.vocabulary:
        return _encode_tokens(loss, y, outputs)
    n, c = outputs.shape
    if not isinstance(y, Weighted | jax.Array):
        y = _as_labels(y)
    marked = _marked(y.y if isinstance(y, Weighted) else y)
    if marked is not None:
        if marked.all():
            raise ValueError(
                f"y holds nothing but {IGNORED}, the label of what does not count; give at least "
                "one sample a label of 0 or more."
            )
        if isinstance(y, Weighted):
            left = (~marked).reshape(-1, *[1] * (np.ndim(y.weight) - 1))
            y = Weighted(_fill_masked(y.y, ~marked, True), y.weight * left)
        else:
            y = weighted(y, mask=~marked)
    if isinstance(y, Weighted):
        targets, loss = encode_targets(loss, y.y, outputs)
        return _attach(loss, targets, y.weight)
    if loss.weighted or loss.centered_from:  # encoded before
        encoded = (n, (1 + loss.weighted) * (loss.tokens or loss.centered_from or c))
        if y.shape != encoded:
            raise ValueError(
                f"y has shape {y.shape}, but {loss!r} takes what encode_targets made of weighted "
                f"labels, {encoded}; give it those, or the loss by its name."
            )
        return jnp.asarray(y, outputs.dtype), loss
    is_label = jnp.issubdtype(y.dtype, jnp.integer) or y.dtype == jnp.bool_
    if c == 1 and loss.sample_loss is cross_entropy.sample_loss:
        raise ValueError(
            f"loss={loss.name!r} with one output is constant; give the network one output a class, "
            "or use 'binary_cross_entropy'; for a regression loss='squared_error'."
        )
    if not is_label and not jnp.issubdtype(y.dtype, jnp.floating):
        raise ValueError(f"y must hold integer labels or floating-point targets; got {y.dtype}.")
    if y.ndim == 0 or y.shape[0] != n:
        raise ValueError(
            f"y has shape {y.shape} but the network gives {n} rows; lengths must match."
        )
    if is_label and y.ndim == 1:
        return _encode_labels(loss, y, n, c, outputs.dtype)
    return _check_targets(loss, y, n, c, outputs.dtype), loss


def _encode_tokens(loss: Loss, y: Weighted, outputs: Any) -> tuple[Array, Loss]:
    """Labels and weights (N, 2 T) of the tokens, and the loss that reads them."""
    n, t = y.y.shape
    if loss.sample_loss is not cross_entropy.sample_loss and not loss.tokens:
        raise ValueError(
            f"loss={loss.name!r} takes no labels of tokens {(n, t)}, only 'cross_entropy' does. "
            "For others flatten outputs and targets to (N, C): jaxttp.flatten_tokens(apply_fn)."
        )
    if y.vocabulary < 2:
        raise ValueError(
            f"loss={loss.name!r} with one output a token is constant: give a token one a class."
        )
    if outputs.shape[0] != n or math.prod(outputs.shape[1:]) != t * y.vocabulary:
        raise ValueError(
            f"y holds labels of {n} x {t} tokens with {y.vocabulary} outputs each; the outputs are "
            f"{tuple(outputs.shape)}."
        )
    targets = token_targets(y, outputs.dtype)
    return targets, Loss(loss.name, token_loss, wrong_tokens, weighted=True, tokens=t)


def _check_targets(loss: Loss, y: Any, n: int, c: int, dtype: Any) -> Array:
    """Targets (N, C), or (N,) for one output, in the outputs' dtype."""
    if y.ndim == 1 and c == 1:
        y = y[:, None]
    if y.shape != (n, c):
        raise ValueError(
            f"y has shape {y.shape} and dtype {y.dtype}, the outputs {(n, c)}; give integer labels "
            "(N,) or targets (N, C). Labels of tokens (N, T) go with outputs (N, T, V)."
        )
    targets = check_finite_value("y", jnp.asarray(y, dtype))
    has_probabilities = (cross_entropy.sample_loss, binary_cross_entropy.sample_loss)
    return _check_probabilities(loss, targets) if loss.sample_loss in has_probabilities else targets


def _as_labels(y: Any) -> np.ndarray:
    """Labels or targets as an array of numbers; errors have a hint."""
    try:
        array = np.asarray(y)
    except ValueError as problem:
        raise ValueError(
            f"y must be integer labels (N,) or targets (N, C); rows of this {type(y).__name__} "
            "differ in length."
        ) from problem
    if array.dtype.kind in "OUS":
        raise ValueError(
            "y must hold integer labels or floating-point targets; got text or Python objects. "
            "Number the classes: np.unique(y, return_inverse=True)[1]."
        )
    return array


def _encode_labels(loss: Loss, y: Any, n: int, c: int, dtype: Any) -> tuple[Array, Loss]:
    classes = 2 if c == 1 else c
    y = np.asarray(y) if is_concrete(y) else y
    y = y.astype(np.int32)  # 8 bits may not hold the number of classes that labels stay below
    if c == 1 and loss.sample_loss is not binary_cross_entropy.sample_loss:
        raise ValueError(
            f"y holds integer labels but the network has one output; for regression with "
            f"{loss.name} give floating-point targets (N, 1)."
        )
    hint = (
        f"What does not count has the label {IGNORED}, where values are known; under jit give "
        f"jaxttp.weighted(y, mask=y != {IGNORED})."
    )
    if not isinstance(y, np.ndarray):
        outside = jnp.any((y < 0) | (y >= classes))
        y = eqx.error_if(y, outside, f"labels must lie in 0..{classes - 1}. {hint}")
    elif y.size and not 0 <= y.min() <= y.max() < classes:
        raise ValueError(
            f"y holds labels from {y.min()} to {y.max()}, but the network has {c} output(s): "
            f"labels must lie in 0..{classes - 1}. {hint}"
        )
    if loss is squared_error:
        loss = dataclasses.replace(loss, error=misclassified)
    if c == 1:
        targets = y.astype(dtype).reshape(n, 1)
    elif isinstance(y, np.ndarray):
        targets = np.eye(c, dtype=dtype)[y]
    else:
        targets = jax.nn.one_hot(y, c, dtype=dtype)
    return jax.device_put(targets), loss  # nothing is compiled for known values


def _check_probabilities(loss: Loss, targets: Array) -> Array:
    # Nothing is compiled for known values.
    xp, values = (np, np.asarray(targets)) if is_concrete(targets) else (jnp, targets)
    bad, text = xp.any((values < 0) | (values > 1)), "in [0, 1]"
    if loss.sample_loss is cross_entropy.sample_loss:
        bad = bad | xp.any(xp.abs(xp.sum(values, axis=-1) - 1) > 1e-3)
        text += " with rows that sum to 1"
    return refuse(targets, bad, f"y: the targets of {loss.name} must be probabilities, {text}.")


def _attach(loss: Loss, targets: Array, weight: Any) -> tuple[Array, Loss]:
    """Targets followed by their weights, of mean 1, and the loss that reads both."""
    w = jnp.asarray(weight, targets.dtype)
    if w.shape not in (targets.shape[:1], targets.shape):
        raise ValueError(
            f"weights have shape {w.shape}, the targets {targets.shape}: give (N,) or (N, C)."
        )
    if w.ndim == 2 and loss.sample_loss not in _BY_OUTPUT:
        raise ValueError(f"{loss!r} is no sum over outputs: give weights (N,).")
    w = jnp.broadcast_to(w if w.ndim == 2 else w[:, None], targets.shape)
    # In the cross-entropy of soft targets the weights occur only in the products w * y, so the
    # mean that has to be positive is that of w * y.
    by_class = loss.sample_loss is cross_entropy.sample_loss
    mean = jnp.sum(w * targets) / targets.shape[0] if by_class else jnp.mean(w)
    text = "the weights of y must leave something that counts; all are zero."
    mean = refuse(mean, ~(mean > 0), text)
    loss = dataclasses.replace(
        loss, sample_loss=_WeightedSample(loss), error=_WeightedError(loss), weighted=True
    )
    return jnp.concatenate([targets, w / mean], axis=1), loss


@dataclasses.dataclass(frozen=True)
class _WeightedSample:
    """A sample's loss times its weight; equal for equal losses."""

    loss: Loss

    def __call__(self, outputs: Array, both: Array) -> Array:
        targets, weights = jnp.split(both, 2)
        by_output = _BY_OUTPUT.get(self.loss.sample_loss)
        if by_output is None:
            return weights[0] * self.loss.sample_loss(outputs, targets)
        return by_output(outputs, targets, weights)


@dataclasses.dataclass(frozen=True)
class _WeightedError:
    """The weighted error; equal for equal losses."""

    loss: Loss

    def __call__(self, outputs: Array, both: Array) -> Array:
        targets, weights = jnp.split(both, 2, axis=-1)
        return self.loss.error(outputs, targets, weights)

    @property
    def __name__(self) -> str:  # which results name
        return getattr(self.loss.error, "__name__", "error")


_BY_OUTPUT: dict[Any, Callable[[Array, Array, Array], Array]] = {
    cross_entropy.sample_loss: lambda f, y, w: cross_entropy.sample_loss(f, w * y),
    squared_error.sample_loss: lambda f, y, w: 0.5 * jnp.sum(w * (f - y) ** 2),
    binary_cross_entropy.sample_loss: lambda f, y, w: jnp.sum(w * (jax.nn.softplus(f) - y * f)),
}
"""The losses that are sums over outputs, with a weight for each."""


# --- tokens ---------------------------------------------------------------------------------------


def token_labels(y: Any, shape: tuple[int, ...]) -> Any:
    """Labels with the number of outputs of a token, for outputs (N, T, V); else `y` itself.

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
    hint = ""
    if y.shape == (n,):
        hint = (
            " One label a sample goes with outputs (N, C): jaxttp.label_words(apply_fn, ids) "
            "takes the logits of a few words at the last token."
        )
    elif y.ndim == 2 and y.shape[0] == n and y.shape[1] != t:
        hint = f" The outputs have {t} tokens a sample: pad the labels with {IGNORED}, or cut."
    raise ValueError(
        f"y must be integer labels of tokens {(n, t)}, as the outputs are {shape}; got "
        f"{y.dtype} {y.shape}.{hint}"
    )


def token_targets(y: Weighted, dtype: Any) -> jax.Array:
    """Labels of tokens followed by their weights: T labels, T weights of a sample.

    The weights are zero for labels of `IGNORED`, and scaled so that their sum is N: the mean over
    samples of weighted token losses is the mean over all tokens that count.

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
    is_known = is_concrete(labels) and is_concrete(weight)
    xp: Any = np if is_known else jnp
    labels, weight = xp.asarray(labels), xp.asarray(weight, float)
    weight = weight[:, None] if weight.ndim == 1 else weight
    weights = xp.where(labels != IGNORED, weight, 0.0)
    outside = (weights > 0) & ((labels < 0) | (labels >= v))
    total = xp.sum(weights)
    if not is_known:
        text = f"token labels must lie in 0..{v - 1} or be {IGNORED}, and one at least must count"
        weights = eqx.error_if(weights, xp.any(outside) | ~(total > 0), text)
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
