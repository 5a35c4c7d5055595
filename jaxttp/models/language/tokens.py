"""Ids and masks as language models take them, and what is wrong with them in one line."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp._core.checks import is_concrete

_NAMES = {
    "ids": ("ids", "input_ids"),
    "mask": ("mask", "attention_mask"),
    "types": ("types", "token_type_ids"),
}


class Tokens(NamedTuple):
    """Sequences of tokens, padded to one length.

    Attributes:
        ids: (N, T) integers.
        seen: (N, T) bools, False at padded positions.
        types: (N, T) segments, or None for the first one everywhere.
    """

    ids: Array
    seen: Array
    types: Array | None = None

    @property
    def positions(self) -> Array:
        """(N, T): 0 for the first token that is seen; the side of the padding does not matter."""
        counted = jnp.cumsum(self.seen.astype(jnp.int32), axis=1) - 1
        return jnp.maximum(counted, 0)

    @property
    def first(self) -> Array:
        """(N,): where the first token that is seen stands."""
        return jnp.argmax(self.seen, axis=1)

    @property
    def last(self) -> Array:
        """(N,): where the last token that is seen stands."""
        return self.seen.shape[1] - 1 - jnp.argmax(self.seen[:, ::-1], axis=1)


def read_tokens(
    ids: Any, mask: Any = None, types: Any = None, *, vocabulary: int, length: int, segments: int
) -> Tokens:
    """Ids, mask and types by order or by the names of a tokenizer, looked at.

    Values are looked at where they are known. Inside `jit` an id that is none, and a sequence
    without a token, give NaN.

    Args:
        ids: (N, T) integers, or a mapping with "ids" or "input_ids", and perhaps the others.
        mask: (N, T), not 0 where a token is; None for everywhere.
        types: (N, T) segments of BERT.
        vocabulary: V.
        length: the longest sequence.
        segments: how many there are.

    Returns:
        `Tokens`.

    Raises:
        TypeError: names that are none of theirs.
        ValueError: shapes or dtypes that do not fit, sequences that are too long, ids or types out
            of range, a sequence of padding alone.

    Example:
        >>> read_tokens([[3, 9]], vocabulary=8, length=4, segments=0)
        Traceback (most recent call last):
        ...
        ValueError: ids[0, 1]=9 is out of range: the vocabulary has 8 tokens, 0 to 7...
    """
    if isinstance(ids, Mapping):
        ids, mask, types = _by_name(ids, mask, types)
    ids = _integers("ids", ids)
    if ids.ndim != 2 or ids.shape[1] < 1:
        raise ValueError(f"ids must be tokens (N, T); got shape {ids.shape}.")
    if ids.shape[1] > length:
        raise ValueError(
            f"ids: sequences of {ids.shape[1]} tokens are longer than the {length} positions of "
            "the network; cut them (max_length; --max-length on the command line)."
        )
    _check_range("ids", ids, vocabulary, "the vocabulary has {} tokens")
    if mask is None:
        seen = jnp.ones(ids.shape, bool)
    else:
        mask = mask if hasattr(mask, "dtype") else np.asarray(mask)
        if mask.shape != ids.shape:
            raise ValueError(f"mask of shape {mask.shape} must have the ids' {ids.shape}.")
        if is_concrete(mask) and np.ndim(mask):
            _check_seen(np.asarray(mask) != 0)
        seen = jnp.asarray(mask) != 0
    if types is not None:
        types = _integers("types", types)
        if types.shape != ids.shape:
            raise ValueError(f"types of shape {types.shape} must have the ids' {ids.shape}.")
        _check_range("types", types, max(segments, 1), "the network has {} segments")
    ids = jnp.where(ids < 0, vocabulary, jnp.asarray(ids))  # NaN, not the last tokens
    return Tokens(ids, seen, None if types is None else jnp.asarray(types))


def _by_name(given: Mapping[str, Any], mask: Any, types: Any) -> tuple[Any, Any, Any]:
    known = {other: name for name, others in _NAMES.items() for other in others}
    strange = [name for name in given if name not in known]
    found = {known[name]: value for name, value in given.items() if name in known}
    if strange or "ids" not in found:
        raise TypeError(
            "a language model takes ids, mask and types (input_ids, attention_mask, "
            f"token_type_ids); got {', '.join(map(str, given))}."
        )
    return found["ids"], found.get("mask", mask), found.get("types", types)


def _integers(name: str, value: Any) -> Any:
    value = value if hasattr(value, "dtype") else np.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers; got {value.dtype}.")
    return value


def _check_range(name: str, value: Any, size: int, words: str) -> None:
    if not is_concrete(value):
        return
    known = np.asarray(value)
    bad = np.argwhere((known < 0) | (known >= size))
    if len(bad):
        row, column = bad[0]
        raise ValueError(
            f"{name}[{row}, {column}]={known[row, column]} is out of range: {words.format(size)}, "
            f"0 to {size - 1}. {len(bad)} of {known.size} are; is the tokenizer that of the "
            "network?"
        )


def _check_seen(seen: np.ndarray) -> None:
    empty = np.flatnonzero(~seen.any(axis=1))
    if len(empty):
        raise ValueError(
            f"mask: all tokens of sample {empty[0]} are masked, {len(empty)} of {len(seen)} "
            "samples have none; leave them out, or give them one."
        )
