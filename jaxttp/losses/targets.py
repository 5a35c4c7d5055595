"""Labels as targets: what a loss takes, made once of integer labels, weights and masks.

`encode_targets` turns labels (N,) into one-hot targets (N, C), labels of tokens (N, T) into labels
and weights (N, 2 T), and `Weighted` labels into targets with their weights beside them (N, 2 C).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxttp._core.checks import check_finite_value, is_concrete
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
from jaxttp.losses.weights import IGNORED, Weighted, token_labels, token_targets, without_marked


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
            share of others in all of `y`, so that batches are unbiased, forecast and training alike
            (PyTorch divides by the number of others in the batch, which is not). Where the values
            of `y` are traced, give the mask.
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
    y = without_marked(y)
    if isinstance(y, Weighted):
        targets, loss = encode_targets(loss, y.y, outputs)
        return _attach(loss, targets, y.weight)
    if loss.weighted or loss.contrasts_of:  # encoded before
        encoded = (n, (1 + loss.weighted) * (loss.tokens or loss.contrasts_of or c))
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
    """Targets that are given as such, (N, C), or (N,) for one output, in the outputs' dtype."""
    if y.ndim == 1 and c == 1:
        y = y[:, None]
    if y.shape != (n, c):
        raise ValueError(
            f"y has shape {y.shape} and dtype {y.dtype}, the outputs {(n, c)}; give integer labels "
            "(N,) or targets (N, C). Labels of tokens (N, T) go with outputs (N, T, V)."
        )
    targets = check_finite_value("y", jnp.asarray(y, dtype))
    if loss.sample_loss in (cross_entropy.sample_loss, binary_cross_entropy.sample_loss):
        targets = _check_probabilities(loss, targets)
    return targets


def _as_labels(y: Any) -> np.ndarray:
    """Labels or targets as an array of numbers; what is none is named with the cure."""
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
    is_binary = loss.sample_loss is binary_cross_entropy.sample_loss
    classes = 2 if c == 1 and is_binary else c
    y = np.asarray(y) if is_concrete(y) else y
    y = y.astype(np.int32)  # 8 bits may not hold the number of classes that labels stay below
    if c == 1 and not is_binary:
        raise ValueError(
            f"y holds integer labels but the network has one output; for regression with "
            f"{loss.name} give floating-point targets (N, 1)."
        )
    remedy = (
        f"What does not count has the label {IGNORED}, where values are known; under jit give "
        f"jaxttp.weighted(y, mask=y != {IGNORED})."
    )
    if not isinstance(y, np.ndarray):
        outside = jnp.any((y < 0) | (y >= classes))
        y = eqx.error_if(y, outside, f"labels must lie in 0..{classes - 1}. {remedy}")
    elif y.size and not 0 <= y.min() <= y.max() < classes:
        raise ValueError(
            f"y holds labels from {y.min()} to {y.max()}, but the network has {c} output(s): "
            f"labels must lie in 0..{classes - 1}. {remedy}"
        )
    if loss is squared_error:
        loss = dataclasses.replace(loss, error=misclassified)
    if isinstance(y, np.ndarray):  # no compiled function for known values
        known = y.astype(dtype).reshape(n, 1) if c == 1 else np.eye(c, dtype=dtype)[y]
        return jax.device_put(known), loss
    return (y.astype(dtype).reshape(n, 1) if c == 1 else jax.nn.one_hot(y, c, dtype=dtype)), loss


def _check_probabilities(loss: Loss, targets: Array) -> Array:
    has_rows = loss.sample_loss is cross_entropy.sample_loss
    known = is_concrete(targets)
    xp, values = (np, np.asarray(targets)) if known else (jnp, targets)  # no program for a check
    outside = xp.any((values < 0) | (values > 1))
    if has_rows:
        outside = outside | xp.any(xp.abs(xp.sum(values, axis=-1) - 1) > 1e-3)
    text = "in [0, 1]" + (" with rows that sum to 1" if has_rows else "")
    if known:
        if bool(outside):
            raise ValueError(f"y: the targets of {loss.name} must be probabilities, {text}.")
        return targets
    return eqx.error_if(targets, outside, f"the targets of {loss.name} must be {text}")


def _attach(loss: Loss, targets: Array, weight: Any) -> tuple[Array, Loss]:
    """Targets and weights side by side, the weights of mean 1, and the loss that reads them."""
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
    if is_concrete(mean):
        if not float(np.asarray(mean)) > 0:
            raise ValueError("the weights of y must leave something that counts; all are zero.")
    else:
        mean = eqx.error_if(mean, ~(mean > 0), "the weights of y are all zero")
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
