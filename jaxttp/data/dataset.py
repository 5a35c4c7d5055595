"""Data sets, and parts of them: some classes, some samples of each, some held out."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array
from numpy.typing import ArrayLike

from jaxttp._core.checks import check_instance, check_integer, check_key, check_known, check_number
from jaxttp._core.types import count, shape_words, take


def standardized(values: ArrayLike) -> np.ndarray:
    """Mean 0 and deviation 1 in every column (N, D), in float64; constant columns become 0."""
    x = np.asarray(values, np.float64)
    constant = x.max(axis=0) == x.min(axis=0)  # rounding may make their deviation positive
    mean = np.where(constant, x[0], x.mean(axis=0))
    return (x - mean) / np.where(constant, 1.0, x.std(axis=0))


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Dataset:
    """Samples with labels (classification) or targets (regression).

    Attributes:
        x: inputs (N, ...), float32, images (N, height, width, channels); or tokens, a dict of
            int32 arrays (N, T), "ids" and "mask".
        y: labels (N,), int32 in 0..num_classes-1, or targets (N, K), float32.
        name: its name in `load_dataset`.
        description: of the samples, and of how x and y were scaled.
        num_classes: number of classes; None for regression.
        class_names: the classes' names in the order of their labels; empty for regression.

    Raises:
        ValueError: dtypes, lengths or labels that do not fit together.

    Example:
        >>> x, y = np.zeros((2, 3), np.float32), np.array([0, 1], np.int32)
        >>> Dataset(x, y, "toy", "Two points.", num_classes=2, class_names=("a", "b"))
        Dataset('toy': x (2, 3), 2 classes)
    """

    x: Any
    y: np.ndarray
    name: str
    description: str
    num_classes: int | None = None
    class_names: tuple[str, ...] = ()

    def __post_init__(self):
        if isinstance(self.x, Mapping):
            if count(self.x) != len(self.y):
                raise ValueError(f"y has {len(self.y)} rows; {shape_words(self.x)}.")
            for name, array in self.x.items():
                if array.dtype != np.int32:
                    raise ValueError(f"x[{name!r}] must be int32; got {array.dtype}.")
        elif self.x.dtype != np.float32:
            raise ValueError(f"x must be float32; got {self.x.dtype}.")
        elif self.x.ndim < 2 or self.y.ndim < 1 or len(self.x) != len(self.y):
            raise ValueError(
                f"x is (N, ...) and y has the same length; got {self.x.shape} and {self.y.shape}."
            )
        if self.num_classes is None:
            if self.y.dtype != np.float32 or self.y.ndim != 2:
                raise ValueError(
                    f"without classes y holds targets (N, K) in float32; got {self.y.dtype} "
                    f"{self.y.shape}."
                )
            return
        if self.y.dtype != np.int32 or self.y.ndim != 1:
            raise ValueError(f"y holds labels (N,) in int32; got {self.y.dtype} {self.y.shape}.")
        low, high = np.min(self.y, initial=0), np.max(self.y, initial=0)
        if low < 0 or high >= self.num_classes:
            raise ValueError(
                f"y holds labels from {low} to {high}; they must lie in 0..{self.num_classes - 1}."
            )

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        what = f"y {self.y.shape}" if self.num_classes is None else f"{self.num_classes} classes"
        shape = shape_words(self.x) if isinstance(self.x, Mapping) else f"x {self.x.shape}"
        return f"Dataset({self.name!r}: {shape}, {what})"

    def take(self, indices: np.ndarray) -> "Dataset":
        """The same data set with these rows only, in this order.

        Args:
            indices: row numbers (M,).

        Returns:
            A data set of M samples; labels are not renumbered.
        """
        return dataclasses.replace(self, x=take(self.x, indices), y=self.y[indices])


class Split(NamedTuple):
    """A data set in two disjoint parts.

    Attributes:
        train: the samples to train on.
        held_out: the others.
    """

    train: Dataset
    held_out: Dataset


def select(
    dataset: Dataset,
    *,
    classes: Sequence[int] | int | None = None,
    per_class: int | None = None,
    fewer: bool = False,
    key: Array | None = None,
) -> Dataset:
    """Some classes of a data set, renumbered from 0, with some samples of each.

    Samples are drawn without replacement and stay in the order of the data set. The draw of a class
    depends on the key and the class alone, not on the other classes. A smaller draw is part of a
    larger one with the same key.

    Args:
        dataset: a data set with classes.
        classes: the labels to keep: ``classes[j]`` becomes label j. An int draws that many classes
            at random, in ascending order. None keeps all.
        per_class: samples of each class; None keeps all.
        fewer: whether a class that has fewer samples gives all it has, instead of an error.
        key: a JAX random key, needed where something is drawn.

    Returns:
        The subset, with ``num_classes`` and ``class_names`` to match.

    Raises:
        ValueError: the data set has no classes, a class is not in it or is given twice, there are
            too few classes or samples, or the key is missing.

    Example:
        >>> import jax
        >>> from jaxttp.data import load_dataset
        >>> part = select(
        ...     load_dataset("digits"), classes=(7, 5), per_class=30, key=jax.random.key(0)
        ... )
        >>> part, part.class_names
        (Dataset('digits': x (60, 8, 8, 1), 2 classes), ('7', '5'))
    """
    check_instance("dataset", dataset, Dataset, "load_dataset")
    if dataset.num_classes is None:
        raise ValueError(f"dataset: {dataset.name} is a regression, it has no classes to select.")
    rows, labels, names = select_rows(
        dataset.y, dataset.class_names, name=dataset.name, classes=classes, per_class=per_class,
        fewer=fewer, key=key,
    )  # fmt: skip
    return dataclasses.replace(
        dataset, x=take(dataset.x, rows), y=labels, num_classes=len(names), class_names=names
    )


def select_rows(
    labels: np.ndarray,
    class_names: tuple[str, ...],
    *,
    name: str,
    classes: Sequence[int] | int | None = None,
    per_class: int | None = None,
    fewer: bool = False,
    key: Array | None = None,
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Rows that `select` keeps, their new labels, and the names of the classes.

    Example:
        >>> select_rows(np.array([0, 1, 0, 2]), ("a", "b", "c"), name="toy", classes=(2, 0))[1]
        array([1, 1, 0], dtype=int32)
    """
    kept_classes = _choose_classes(class_names, name, classes, key)
    new = np.full(len(labels), -1, np.int32)
    for label, old in enumerate(kept_classes):
        rows = np.flatnonzero(labels == old)
        if per_class is not None:
            check_integer("per_class", per_class, at_least=1)
            if per_class > len(rows) and not fewer:
                raise ValueError(
                    f"per_class={per_class}, but {name} has only {len(rows)} samples of class "
                    f"{old} ({class_names[old]})."
                )
            rows = rows[_permutation(key, old, len(rows))[:per_class]]
        new[rows] = label
    kept = np.flatnonzero(new >= 0)
    return kept, new[kept], tuple(class_names[old] for old in kept_classes)


def split(dataset: Dataset, *, held_out: float, key: Array) -> Split:
    """Hold out a random fraction of the samples, of every class the same fraction.

    Args:
        dataset: any data set.
        held_out: the fraction, in (0, 1); of each class it is rounded to whole samples.
        key: a JAX random key.

    Returns:
        ``(train, held_out)``, both in the order of the data set.

    Raises:
        ValueError: `held_out` is not in (0, 1), or leaves one part empty.

    Example:
        >>> import jax
        >>> from jaxttp.data import load_dataset
        >>> parts = split(load_dataset("wine"), held_out=0.2, key=jax.random.key(0))
        >>> len(parts.train), len(parts.held_out)
        (142, 36)
    """
    check_instance("dataset", dataset, Dataset, "load_dataset")
    check_known(held_out=held_out)
    check_number("held_out", held_out, above=0, below=1)
    groups = np.zeros(len(dataset), np.int32) if dataset.num_classes is None else dataset.y
    out = np.zeros(len(dataset), bool)
    for label in range(dataset.num_classes or 1):
        rows = np.flatnonzero(groups == label)
        order = _permutation(key, label, len(rows))
        out[rows[order[: round(held_out * len(rows))]]] = True
    if out.all() or not out.any():
        raise ValueError(
            f"held_out={held_out:g} leaves one part of the {len(dataset)} samples empty."
        )
    return Split(dataset.take(np.flatnonzero(~out)), dataset.take(np.flatnonzero(out)))


def _choose_classes(class_names: tuple[str, ...], name: str, classes: Any, key: Any) -> list[int]:
    """The labels that `classes` names or, as a number, draws."""
    labels = range(len(class_names))
    if classes is None:
        return list(labels)
    if np.ndim(classes) == 0:
        hint = f"{name} has {len(labels)} classes."
        count = check_integer("classes", classes, at_least=1, at_most=len(labels), hint=hint)
        # The draws within the classes fold in their labels; this one must differ from them.
        return sorted(_permutation(key, len(labels), len(labels))[:count].tolist())
    classes = [int(label) if label in labels else label for label in classes]
    absent = [label for label in classes if label not in labels]
    if absent or len(classes) == 0:
        listed = ", ".join(f"{label} ({class_names[label]})" for label in labels)
        what = f"{absent} not in {name}" if absent else "no class at all"
        raise ValueError(f"classes: {what}; choose among {listed}.")
    if len(set(classes)) < len(classes):
        raise ValueError(f"classes={tuple(classes)!r} names a class twice.")
    return classes


def _permutation(key: Array | None, stream: int, n: int) -> np.ndarray:
    """A random order of 0..n-1, the same whether or not JAX's x64 mode is on."""
    if key is None:
        raise ValueError("key is needed to draw classes or samples; give a jax.random.key(seed).")
    check_key(key)
    check_known(key=key)
    stream_key = jax.random.fold_in(key, stream)
    # `jax.random.permutation` compiles a function for every n. Sorted by NumPy, one serves many n:
    # bits of a longer array begin with those of a shorter one.
    order = np.arange(n, dtype=np.int32)
    for _ in range(math.ceil(3 * math.log(max(n, 1)) / math.log(np.iinfo(np.uint32).max))):
        stream_key, draw = jax.random.split(stream_key)
        bits = jax.random.bits(draw, (max(256, 1 << (n - 1).bit_length()),), np.uint32)
        order = order[np.argsort(np.asarray(bits)[:n], kind="stable")]
    return order
