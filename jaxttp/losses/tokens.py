"""The outputs of a network over tokens, logits (N, T, V), that are linearized.

With N T V up to a few thousand, all of them: forecasts, `train` and curvature matrices take outputs
(N, T, V) with labels (N, T), and their loss is the mean cross-entropy of the tokens that count
(-100 for the others). A kernel of more outputs does not fit into memory; then one of these reduces
them. For large V only the first does, since one token has V outputs.

    label_words      the logits of a few words at the last token: classification by prompt
    sample_tokens    the logits of a few tokens of every sequence, drawn at random
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp._core.checks import (
    check_finite,
    check_integer,
    check_key,
    check_known,
    check_several,
    is_concrete,
)
from jaxttp._core.types import ApplyFn, Params, count, noted, notes_of
from jaxttp.losses.targets import IGNORED, Weighted

MASKS = ("attention_mask", "mask")
"""Keys of samples that hold the mask of padding."""


def label_words(
    apply_fn: ApplyFn, ids: Sequence[int], *, mask: Callable[[Any], Any] | None = None
) -> ApplyFn:
    """The logits of a few label words at the last token: a classifier by prompt.

        g(x)_k = f(x)[t, ids_k],    t the last token of x that is no padding

    Labels are then 0 ... K - 1, indices into `ids`, one a sequence; the softmax is over K words.

    Args:
        apply_fn: ``(params, x) -> logits (N, T, V)``.
        ids: K >= 2 different token ids, one word a class.
        mask: from samples to (N, T), zero for padding, on either side; None for
            x["attention_mask"] or x["mask"] if there is one, else for all T tokens. A row without
            any token counts as full.

    Returns:
        ``(params, x) -> outputs (N, K)``.

    Raises:
        ValueError: ids that are no two different ones at least, or negative; by the function that
            is returned: logits of another shape, ids beyond V, a mask of another shape.

    Example:
        >>> table = jnp.arange(35.0).reshape(7, 5)
        >>> classify = label_words(lambda w, x: w[x["ids"]], [1, 4])
        >>> x = {"ids": jnp.array([[0, 1, 2], [0] * 3]), "mask": jnp.array([[1, 1, 0], [1, 0, 0]])}
        >>> classify(table, x).tolist()
        [[6.0, 9.0], [1.0, 4.0]]

    Source:
        Malladi et al. 2023, "A kernel-based view of language model fine-tuning": prompts make
        fine-tuning look like its kernel.
    """
    if not callable(apply_fn):
        raise TypeError(f"apply_fn must be a function (params, x) -> logits; got {apply_fn!r}.")
    labels = [operator.index(token) for token in check_several("ids", ids, "token ids")]
    if len({*labels}) != len(labels) or len(labels) < 2 or min(labels) < 0:
        raise ValueError(f"ids must be two or more different token ids, one a class; got {labels}.")
    columns = np.asarray(labels).astype(np.int32)  # in JAX's x64 mode, too

    def classify(params: Params, x: Any) -> Array:
        logits = _logits(apply_fn, params, x)
        t, v = logits.shape[1:]
        if max(labels) >= v:
            raise ValueError(f"ids holds {max(labels)}, but the network has {v} words: 0..{v - 1}.")
        logits = logits[:, :, columns]
        seen = _mask_of(x, mask)
        if seen is None:
            return logits[:, -1]
        if seen.shape != logits.shape[:2]:
            raise ValueError(
                f"mask gives {seen.shape} for logits {(logits.shape[0], t, v)}: (N, T) is needed."
            )
        last = t - 1 - jnp.argmax(seen[:, ::-1] != 0, axis=1)
        return jnp.take_along_axis(logits, last[:, None, None], axis=1)[:, 0]

    return noted(classify, lambda: notes_of(apply_fn))


class TokenSample(NamedTuple):
    """A network, samples and labels of some tokens; unpacks as ``apply_fn, x, y``.

    Attributes:
        apply_fn: ``(params, x) -> logits (N, S, V)`` of the tokens that were drawn.
        x: the samples, with the positions of the tokens (N, S).
        y: their labels (N, S), weighted so that the mean is that of all tokens in expectation.
    """

    apply_fn: ApplyFn
    x: Any
    y: Weighted


def sample_tokens(apply_fn: ApplyFn, x: Any, y: Any, *, tokens: int, key: Array) -> TokenSample:
    """Some of the tokens of every sequence that count, drawn at random without replacement.

        L_S = (1/M) sum_i (m_i / s_i) sum_(t drawn) l_it,    s_i = min(tokens, m_i),

    with m_i the tokens of sequence i that count, M their sum: its mean over draws is the loss of
    all of them. A forecast is then that of a training run on these tokens alone, which learns them
    faster than a run on all tokens.

    Args:
        apply_fn: ``(params, x) -> logits (N, T, V)``.
        x: samples (N, ...).
        y: integer labels (N, T), -100 for what does not count; `jaxttp.weighted` for weights.
        tokens: S, how many of a sequence at most.
        key: a `jax.random.key`.

    Returns:
        A `TokenSample`: ``apply_fn, x, y = sample_tokens(...)`` goes where the three went.

    Raises:
        ValueError: labels that are no integers (N, T) or known too late, no token that counts, more
            tokens than T.

    Example:
        >>> rows = sample_tokens(lambda w, x: w[x], jnp.arange(6).reshape(2, 3),
        ...                      np.array([[1, 2, 0], [-100, 3, -100]]), tokens=2,
        ...                      key=jax.random.key(0))
        >>> rows.apply_fn(jnp.ones((6, 4)), rows.x).shape, rows.y.y[1].tolist()
        ((2, 2, 4), [3, -100])
    """
    if not callable(apply_fn):
        raise TypeError(f"apply_fn must be a function (params, x) -> logits; got {apply_fn!r}.")
    check_known(x=x, y=y, key=key)
    check_finite("x", x)
    check_key(key, optional=False)
    weight = y.weight if isinstance(y, Weighted) else 1.0
    y = y.y if isinstance(y, Weighted) else y
    labels = np.asarray(y) if is_concrete(y) else None
    if labels is None or labels.ndim != 2 or labels.dtype.kind not in "iu":
        kind = "traced values" if labels is None else f"{labels.dtype} {labels.shape}"
        raise ValueError(f"y must be integer labels of tokens (N, T); got {kind}.")
    if len(labels) != count(x):
        raise ValueError(f"y has {len(labels)} rows, x {count(x)}; lengths must match.")
    check_integer("tokens", tokens, at_least=1, at_most=labels.shape[1], hint="That is T.")
    weight = np.asarray(weight, float)
    weight = np.broadcast_to(weight[:, None] if weight.ndim == 1 else weight, labels.shape)
    counts = (labels != IGNORED) & (weight > 0)
    if not counts.any():
        raise ValueError(f"y leaves no token that counts: all are {IGNORED} or of weight 0.")
    order = np.asarray(jax.random.uniform(key, labels.shape)) - counts  # those that count first
    positions = np.argsort(order, axis=1)[:, :tokens]
    drawn = np.take_along_axis(counts, positions, axis=1)
    total = counts.sum(1, keepdims=True)
    factor = total / np.maximum(np.minimum(total, tokens), 1)
    drawn_labels = np.where(drawn, np.take_along_axis(labels, positions, axis=1), IGNORED)
    weights = np.where(drawn, factor * np.take_along_axis(weight, positions, axis=1), 0.0)

    def rows(params: Params, sample: Any) -> Array:
        logits = _logits(apply_fn, params, sample["x"])
        return jnp.take_along_axis(logits, sample["places"][:, :, None], axis=1)

    samples = {"x": x, "places": jnp.asarray(positions)}
    apply = noted(rows, lambda: notes_of(apply_fn))
    return TokenSample(apply, samples, Weighted(drawn_labels, weights))


def _logits(apply_fn: ApplyFn, params: Params, x: Any) -> Array:
    logits = apply_fn(params, x)
    shape = getattr(logits, "shape", None)
    if shape is None or len(shape) != 3:
        kind = f"a {type(logits).__name__}" if shape is None else f"{shape}"
        raise ValueError(f"apply_fn must return logits of tokens (N, T, V); it returned {kind}.")
    return logits


def _mask_of(x: Any, mask: Callable[[Any], Any] | None) -> Any:
    """(N, T), zero for padding; None if there is no mask."""
    if mask is not None:
        return jnp.asarray(mask(x))
    if isinstance(x, Mapping):
        return next((jnp.asarray(x[name]) for name in MASKS if name in x), None)
    return None
