"""What a data set is: NumPy arrays and the words that go with them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxttp._core.samples import count, shape_words, take
from jaxttp.data.columns import Columns


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Dataset:
    """Samples with labels (classification) or targets (regression).

    Attributes:
        x: inputs (N, ...), float32, images (N, height, width, channels); or tokens, a dict of
            int32 arrays (N, T), "ids" and "mask".
        y: labels (N,), int32 in 0..num_classes-1, or targets (N, K), float32.
        name: its name in `load_dataset`.
        description: what it is, and how x and y were scaled.
        num_classes: number of classes; None for regression.
        class_names: the classes' names in the order of their labels; empty for regression.
        columns: of a table of one's own, how its columns became x and y: means, deviations, fills,
            and `Columns.prepare` for new rows; None for other data.

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
    columns: Columns | None = None

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
        if len(self.class_names) != self.num_classes:
            raise ValueError(
                f"class_names={self.class_names!r} must name the {self.num_classes} classes."
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
