"""Samples out of a pipeline of batches: a few at random, and how many there are in all."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxttp._core.checks import check_integer, check_known
from jaxttp._core.types import count, take

LABELS = ("label", "labels", "y", "target", "targets")
"""Keys under which the batches of a data set may have their labels."""


class Drawn(NamedTuple):
    """Some samples of a pipeline.

    Attributes:
        x: samples (M, ...), an array or a pytree of arrays, in random order.
        y: their labels or targets (M, ...).
        total: N, the samples that were read, or `total` as given.
    """

    x: Any
    y: np.ndarray
    total: int


def draw_samples(
    batches: Any,
    *,
    samples: int = 512,
    total: int | None = None,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> Drawn:
    """Samples of a pipeline drawn uniformly at random, and the number of all samples.

    One pass over the batches, in a few times the memory of the drawn samples. The pipeline need not
    be shuffled nor fit into memory. It may be a Grain or PyTorch loader, a tensorflow-datasets data
    set, a Hugging Face data set in batches, a generator.

    Args:
        batches: each ``(x, y)`` with a row for every sample, or a mapping with the labels under
            "label", "labels", "y", "target" or "targets" and the rest as `x`: an array where that
            is one entry, else a dictionary of arrays.
        samples: M, how many to draw; all where there are no more.
        total: N, how many samples training sees: no more are read. Needed for a pipeline that
            repeats for ever; the end of the batches when None.
        seed: of the draw.
        progress: called with ("samples", read so far, all of them or as many).

    Returns:
        A `Drawn`; give its `total` to `predict_training_time` as `total_samples`.

    Raises:
        TypeError: something that is not iterable, or whose batches are neither pairs nor mappings.
        ValueError: no batch, batches of different structure or shapes, labels of another length
            than the samples, a mapping without labels, fewer samples than `total`.

    Example:
        >>> pipeline = ((np.full((8, 3), i), np.full(8, i % 2)) for i in range(100))
        >>> x, y, total = draw_samples(pipeline, samples=50)
        >>> x.shape, y.shape, total
        ((50, 3), (50,), 800)
        >>> bool(np.all(x[:, 0] % 2 == y))
        True
    """
    check_integer("samples", samples, at_least=1)
    check_integer("seed", seed, at_least=0)
    if total is not None:
        check_integer("total", total, at_least=1)
    rng, read = np.random.default_rng(seed), 0
    draws, rows = np.zeros(0), None  # a random number for each sample; the lowest ones are kept
    if not isinstance(batches, Iterable):
        raise TypeError(f"batches must be iterable, of pairs (x, y); got {type(batches).__name__}.")
    for batch in batches:
        x, y = _split(batch)
        check_known(batches=(x, y))
        new = {"x": _arrays(x), "y": np.asarray(y)}
        size = _check(new, rows)
        if total is not None:
            size = min(size, total - read)
        read += size
        drawn = rng.random(size)
        low = np.flatnonzero(drawn < draws[-1] if len(draws) >= samples else drawn >= 0)
        if len(low):
            kept = take(new, low)
            if rows is not None:
                kept = jax.tree.map(lambda *parts: np.concatenate(parts), rows, kept)
            draws = np.concatenate([draws, drawn[low]])
            order = np.argsort(draws)[:samples]
            draws, rows = draws[order], take(kept, order)
        if progress is not None:
            progress("samples", read, read if total is None else total)
        if read == total:
            break
    if rows is None:
        raise ValueError("batches must hold at least one sample; got none.")
    if total is not None and read < total:
        raise ValueError(f"total={total} samples were announced; the batches hold {read}.")
    return Drawn(rows["x"], rows["y"], read)


def _arrays(x: Any) -> Any:
    """NumPy arrays of tensors of any framework, of lists of numbers or of rows."""
    if isinstance(x, Mapping):
        return {name: _arrays(value) for name, value in x.items()}
    return tuple(map(_arrays, x)) if isinstance(x, tuple) else np.asarray(x)


def _split(batch: Any) -> tuple[Any, Any]:
    """Samples and labels of a batch."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    names = ", ".join(map(repr, LABELS))
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"batches must hold pairs (x, y), or mappings with the labels under {names}; got "
            f"{type(batch).__name__}."
        )
    named = [name for name in LABELS if name in batch]
    x = {name: value for name, value in batch.items() if name not in named}
    if len(named) != 1 or not x:
        raise ValueError(
            f"a batch must have samples, and labels under one of {names}; got "
            f"{', '.join(map(repr, batch)) or 'nothing'}."
        )
    return next(iter(x.values())) if len(x) == 1 else x, batch[named[0]]


def _check(batch: Any, earlier: Any) -> int:
    """The number of rows of a batch; its structure must be that of earlier rows, if any."""
    size = count(batch["x"])
    if batch["y"].ndim == 0 or len(batch["y"]) != size:
        raise ValueError(
            f"a batch must have a label for every sample; got {size} samples and labels of shape "
            f"{batch['y'].shape}."
        )
    if earlier is None:
        return size
    shape, before = (jax.tree.map(lambda leaf: leaf.shape[1:], b) for b in (batch, earlier))
    if shape != before:
        raise ValueError(f"batches must be alike; after {before} came {shape}, shapes of a row.")
    return size
