"""Ids and masks of language models, and checks of them with one-line errors."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp._core.checks import is_concrete

_NAMES = {"input_ids": "ids", "attention_mask": "mask", "token_type_ids": "types"}


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
        return jnp.maximum(jnp.cumsum(self.seen.astype(jnp.int32), axis=1) - 1, 0)

    @property
    def first(self) -> Array:
        """(N,): the index of the first token that is seen."""
        return jnp.argmax(self.seen, axis=1)

    @property
    def last(self) -> Array:
        """(N,): the index of the last token that is seen."""
        return self.seen.shape[1] - 1 - jnp.argmax(self.seen[:, ::-1], axis=1)


def read_tokens(
    ids: Any, mask: Any = None, types: Any = None, *, vocabulary: int, length: int, segments: int
) -> Tokens:
    """Ids, mask and types by order or by the names of a tokenizer, checked.

    Known values are checked here. Inside `jit`, an id out of range and a sequence without a token
    give NaN.

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
        TypeError: other names.
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


def _by_name(arrays: Mapping[str, Any], mask: Any, types: Any) -> tuple[Any, Any, Any]:
    renamed = {_NAMES.get(name, name): value for name, value in arrays.items()}
    if not {"ids"} <= renamed.keys() <= {*_NAMES.values()}:
        raise TypeError(
            "a language model takes ids, mask and types (input_ids, attention_mask, "
            f"token_type_ids); got {', '.join(map(str, arrays))}."
        )
    return renamed["ids"], renamed.get("mask", mask), renamed.get("types", types)


def _integers(name: str, value: Any) -> Any:
    value = value if hasattr(value, "dtype") else np.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers; got {value.dtype}.")
    return value


def _check_range(name: str, value: Any, size: int, limit: str) -> None:
    if not is_concrete(value):
        return
    ids = np.asarray(value)
    bad = np.argwhere((ids < 0) | (ids >= size))
    if len(bad):
        row, column = bad[0]
        raise ValueError(
            f"{name}[{row}, {column}]={ids[row, column]} is out of range: {limit.format(size)}, "
            f"0 to {size - 1}. {len(bad)} of {ids.size} are; is the tokenizer that of the network?"
        )


def _check_seen(seen: np.ndarray) -> None:
    empty = np.flatnonzero(~seen.any(axis=1))
    if len(empty):
        raise ValueError(
            f"mask: all tokens of sample {empty[0]} are masked, {len(empty)} of {len(seen)} "
            "samples have none; leave them out, or give them one."
        )
