"""What became of a table's columns, so that new rows can be prepared in the same way."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxttp.data._cells import is_missing, is_number
from jaxttp.data._standardized import moments


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a table, in the units of the file.

    Attributes:
        name: as its head says, or "column 3".
        mean: what was taken off: a number, or the share of every word of a column of words.
        deviation: what it was divided by then, likewise; 1 where a column is constant.
        words: the words of a column of words in the order of their indicators; empty for numbers.
        fill: the number or word in place of a missing value; None where none was asked for.

    Example:
        >>> Column("sex", mean=(0.25, 0.75), deviation=(0.43, 0.43), words=("f", "m")).width
        2
    """

    name: str
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    words: tuple[str, ...] = ()
    fill: float | str | None = None

    @property
    def width(self) -> int:
        """How many numbers it is for a network."""
        return len(self.mean)

    @classmethod
    def fitted(
        cls, name: str, values: ArrayLike, *, words: tuple[str, ...] = (), fill: Any = None
    ) -> "Column":
        """A column of these values (N,) or indicators (N, W), by their means and deviations."""
        mean, deviation = moments(np.reshape(np.asarray(values, np.float64), (len(values), -1)))  # type: ignore[arg-type]
        return cls(name, tuple(mean.tolist()), tuple(deviation.tolist()), words, fill)

    def standardized(self, values: np.ndarray) -> np.ndarray:
        """Values (N, W) in units of its deviations, around its means."""
        return (values - np.array(self.mean)) / np.array(self.deviation)

    def numbers(self, cells: Sequence[Any]) -> np.ndarray:
        """Cells as numbers (N, 1), or as indicators (N, W); missing ones filled.

        Args:
            cells: N numbers or words, as text or not; None, NaN and no text are missing.

        Raises:
            ValueError: a missing value where no fill is known, what is no number, a word that the
                table does not have.
        """
        texts = ["" if cell is None else str(cell).strip() for cell in cells]
        missing = [row for row, text in enumerate(texts) if is_missing(text)]
        if missing and self.fill is None:
            raise ValueError(
                f"rows: {self.name!r} is missing in row {missing[0]}, {len(missing)} of "
                f"{len(texts)} miss it, and no fill was asked for; load the table with "
                "fill='median' (--fill median), or leave such rows out."
            )
        for row in missing:
            texts[row] = str(self.fill)
        for row, text in enumerate(texts):
            if self.words and text not in self.words:
                known = ", ".join(map(repr, self.words))
                raise ValueError(
                    f"rows: {self.name!r} in row {row} holds {text!r}; the table knows {known}."
                )
            if not self.words and not is_number(text):
                raise ValueError(
                    f"rows: {self.name!r} in row {row} holds {text!r}, which is no finite number."
                )
        if self.words:
            return (np.array(texts, str)[:, None] == np.array(self.words)).astype(float)
        return np.array(texts, float).reshape(-1, 1)


@dataclasses.dataclass(frozen=True)
class Columns:
    r"""How a table's columns became features (and targets), in the order of the file.

    Means, deviations and fills are those of all rows that the table was read from, also where a
    training takes a part of them.

    Attributes:
        features: of `x`, without the label's column; empty where x stayed as it was.
        targets: of `y` in a regression; empty where y are labels.

    Example:
        >>> import tempfile, pathlib
        >>> from jaxttp.data import load_table
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "own.csv")
        ...     _ = path.write_text("width,price\n1,10\n3,30.5\n,20\n")
        ...     found = load_table(path, fill="mean")
        >>> found.columns.features[0].fill, found.columns.prepare([["2"], [""]]).tolist()
        (2.0, [[0.0], [0.0]])
        >>> found.columns.restore(found.y).round(3).tolist()
        [[10.0], [30.5], [20.0]]
    """

    features: tuple[Column, ...]
    targets: tuple[Column, ...] = ()

    def prepare(self, rows: Sequence[Sequence[Any]] | np.ndarray) -> np.ndarray:
        """New rows as the network takes them.

        Args:
            rows: M rows of cells, numbers or words as in the file, the label's column left out; a
                list, an array or a data frame with the columns in the order of the file.

        Returns:
            x (M, D), float32, standardised by the table's means and deviations.

        Raises:
            ValueError: another number of cells, inputs that were left as they are, and what
                `Column.numbers` refuses.
        """
        if not self.features:
            raise ValueError("prepare is for tables; the inputs of these data stay as they are.")
        if hasattr(rows, "to_numpy"):  # a data frame, which is iterated by its columns' names
            rows = rows.to_numpy()  # type: ignore[union-attr]
        for row, cells in enumerate(rows):
            if len(cells) != len(self.features):
                names = ", ".join(column.name for column in self.features[:20])
                raise ValueError(
                    f"rows: row {row} has {len(cells)} cells; the features are {names}, "
                    f"{len(self.features)} of them, without the label."
                )
        parts = [
            column.standardized(column.numbers([row[i] for row in rows]))
            for i, column in enumerate(self.features)
        ]
        return np.concatenate(parts, axis=1).astype(np.float32)

    def restore(self, outputs: ArrayLike) -> np.ndarray:
        """Outputs or standardised targets (M, K) in the units of the file, float64.

        Args:
            outputs: of a regression, (M, K).

        Raises:
            ValueError: the table has classes, or another number of targets.
        """
        values = np.asarray(outputs, np.float64)
        if not self.targets:
            raise ValueError("restore is for targets, and this table has classes: take the argmax.")
        if values.ndim != 2 or values.shape[1] != len(self.targets):
            raise ValueError(
                f"outputs must be (M, {len(self.targets)}), one for every target; got "
                f"{values.shape}."
            )
        mean = np.array([column.mean[0] for column in self.targets])
        return values * np.array([column.deviation[0] for column in self.targets]) + mean

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `columns.json` has them; `from_json` reads them back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Columns":
        """The columns of `to_json`, or of a `columns.json` that `json.load` has read.

        Raises:
            ValueError: values of something else.

        Example:
            >>> same = Columns((Column("w", (1.0,), (2.0,)),))
            >>> Columns.from_json(same.to_json()) == same
            True
        """
        try:
            several = {
                part: tuple(
                    Column(
                        one["name"], tuple(one["mean"]), tuple(one["deviation"]),
                        tuple(one["words"]), one["fill"],
                    )
                    for one in values[part]
                )
                for part in ("features", "targets")
            }  # fmt: skip
        except (KeyError, TypeError) as problem:
            raise ValueError(
                f"values must be those of a columns.json, with features and targets: {problem!r}."
            ) from problem
        return cls(**several)
