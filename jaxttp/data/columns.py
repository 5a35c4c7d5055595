"""From the cells of a table to numbers: features filled, encoded, standardised, or refused by name.

What became of every column is kept (`Columns`), so that new rows can be prepared in the same way.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxttp.data._cells import Cells, are_words, is_missing, is_number


def moments(values: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of every column (N, D), in float64; a constant column's is 1."""
    x = np.asarray(values, np.float64)
    constant = x.max(axis=0) == x.min(axis=0)  # whose mean and deviation may be rounding
    return np.where(constant, x[0], x.mean(axis=0)), np.where(constant, 1.0, x.std(axis=0))


def standardized(values: ArrayLike) -> np.ndarray:
    """Mean 0 and deviation 1 in every column (N, D), in float64; constant columns become 0."""
    mean, deviation = moments(values)
    return (np.asarray(values, np.float64) - mean) / deviation


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


FILLS = ("median", "mean", "most_frequent")
MOST_CLASSES = 100
"""Whole numbers with more values than this are targets, not labels; so many words are a mistake."""


def without_missing(table: Cells, done: list[str]) -> Cells:
    """The rows in which no value is missing; how many were not is added to `done`."""
    total = len(table.rows)
    table = table.only([i for i, row in enumerate(table.rows) if not any(map(is_missing, row))])
    done.append(f"{total - len(table.rows)} of {total} rows with missing values dropped")
    if len(table.rows) < 2:
        raise ValueError(
            f"data={str(table.path)!r}: {len(table.rows)} of {total} rows have no missing value; "
            "drop the columns that miss most, or fill them in (fill='median'; --fill median)."
        )
    return table


def fit_features(
    table: Cells, done: list[str], *, fill: str | None, one_hot: bool
) -> tuple[tuple[Column, ...], np.ndarray]:
    """The features' columns, and x (N, D) in float64; what was done to them is added to `done`.

    Raises:
        ValueError: missing values and words that nobody said what to do with, cells that are
            neither numbers nor words.
    """
    _refuse_cells(table, fill, one_hot)
    columns, parts = [], []
    for index in table.features:
        column, values = _fit(table, index, fill)
        columns.append(column)
        parts.append(column.standardized(values))
    encoded = [column for column in columns if column.words]
    if fill is not None:
        done.append(_filled_words(table, fill, columns))
    if one_hot:
        width = sum(column.width for column in encoded)
        of_words = f"{len(encoded)} column{'' if len(encoded) == 1 else 's'} of words"
        done.append(f"{of_words} as {width} indicators" if encoded else "no column of words")
    return tuple(columns), np.concatenate(parts, axis=1)


def _fit(table: Cells, index: int, fill: str | None) -> tuple[Column, np.ndarray]:
    """One feature's column, and its numbers or indicators (N, W)."""
    cells = table.of(index)
    words = _words_of(table, index) if _is_column_of_words(table, index) else ()
    value = None if fill is None else _fill_value(cells, fill, words=bool(words))
    # The same reading of cells as that of new rows later; its scale comes of what it reads.
    unscaled = Column(table.heads[index], (0.0,), (1.0,), words, value)
    values = unscaled.numbers(cells)
    return Column.fitted(table.heads[index], values, words=words, fill=value), values


def _fill_value(cells: list[str], fill: str, *, words: bool) -> float | str:
    """What stands for the missing values of a column, as scikit-learn's `SimpleImputer` says.

    Of words there is no median or mean: they get the most frequent one.
    """
    from sklearn.impute import SimpleImputer

    known = [cell for cell in cells if not is_missing(cell)]
    if words:
        column, strategy = np.array(known, dtype=object)[:, None], "most_frequent"
    else:
        column, strategy = np.array([[float(cell)] for cell in known]), fill
    return np.asarray(SimpleImputer(strategy=strategy).fit(column).statistics_).tolist()[0]


def _filled_words(table: Cells, fill: str, columns: list[Column]) -> str:
    """How many values were filled, and with what."""
    of_words = [index for index in table.features if columns[index].words]
    words = any(is_missing(row[index]) for row in table.rows for index in of_words)
    gaps = [sum(map(is_missing, row[:-1])) for row in table.rows]
    total, rows = sum(gaps), sum(map(bool, gaps))
    kind = "most frequent value" if fill == "most_frequent" else fill
    also = ", words with the most frequent" if words and fill != "most_frequent" else ""
    values = f"{total} missing value{'' if total == 1 else 's'} in {rows} of {len(gaps)} rows"
    return f"{values} filled with the column's {kind}{also}"


def _refuse_cells(table: Cells, fill: str | None, one_hot: bool) -> None:
    """Name all at once what nobody said what to do with: missing values, and words."""
    problems = [_missing_in(table) if fill is None else _empty_in(table)]
    problems += [] if one_hot else [_words_in(table)]
    if found := [problem for problem in problems if problem]:
        raise ValueError(f"data={str(table.path)!r}: {' And '.join(found)}")


def _empty_in(table: Cells) -> str | None:
    """The features without any value, which nothing can be filled in of."""
    empty = [table.column(i) for i in table.features if all(map(is_missing, table.of(i)))]
    if not empty:
        return None
    return f"no row has a value in {_first_five(empty)}; take such a column out of the file."


def _missing_in(table: Cells) -> str | None:
    """The features in which values are missing, with their rows counted, and what would do."""
    gaps = {
        index: [i for i, cell in enumerate(table.of(index)) if is_missing(cell)]
        for index in table.features
    }
    gaps = {index: rows for index, rows in gaps.items() if rows}
    if not gaps:
        return None
    shown = [f"{table.column(index)} in {len(rows)}" for index, rows in gaps.items()]
    index, rows = next(iter(gaps.items()))
    count = len(set().union(*map(set, gaps.values())))
    return (
        f"values are missing in {count} of {len(table.rows)} rows: {_first_five(shown)}; the first "
        f"is {table.rows[rows[0]][index]!r} in line {table.lines[rows[0]]}. Drop these rows "
        "(drop_missing=True; --drop-missing on the command line) or fill them in (fill='median'; "
        "--fill median)."
    )


def _words_in(table: Cells) -> str | None:
    """The features whose values are words, with the different ones counted, and what would do."""
    shown = []
    for index in table.features:
        cells = [(i, cell) for i, cell in enumerate(table.of(index)) if not is_missing(cell)]
        words = [(i, cell) for i, cell in cells if not is_number(cell)]
        if are_words([cell for _, cell in cells]):
            (row, first), values = words[0], len({cell for _, cell in cells})
            shown.append(
                f"{table.column(index)} holds words, {values} different ones in {len(cells)} rows, "
                f"such as {first!r} in line {table.lines[row]}"
            )
    if not shown:
        return None
    return (
        f"{_first_five(shown)}. Drop such a column, or encode it: one_hot=True (--one-hot on the "
        "command line) makes one for every word. If it is the label: label (--label) names it."
    )


def _first_five(shown: list[str]) -> str:
    """The first five of a list in words, and how many more there are."""
    more = f" and {len(shown) - 5} more columns" if len(shown) > 5 else ""
    return ", ".join(shown[:5]) + more


def _is_column_of_words(table: Cells, index: int) -> bool:
    """Whether a feature's values are words; refused where only some are."""
    known = [(i, cell) for i, cell in enumerate(table.of(index)) if not is_missing(cell)]
    words = [(i, cell) for i, cell in known if not is_number(cell)]
    if not words:
        return False
    if not are_words([cell for _, cell in known]):
        row, first = words[0]
        raise ValueError(
            f"data={str(table.path)!r}: line {table.lines[row]}, {table.column(index)} holds "
            f"{first!r}, while {len(known) - len(words)} of {len(known)} rows hold a "
            "number; features must be finite numbers, or all words. Write a number, or empty "
            "the cell and leave such rows out (drop_missing=True; --drop-missing) or fill them "
            "in (fill='median'; --fill median)."
        )
    return True


def _words_of(table: Cells, index: int) -> tuple[str, ...]:
    """The words of a feature, in sorted order: each becomes an indicator."""
    values = sorted({cell for cell in table.of(index) if not is_missing(cell)})
    if len(values) > MOST_CLASSES:
        raise ValueError(
            f"data={str(table.path)!r}: {table.column(index)} holds {len(values)} different words, "
            f"such as {values[0]!r}; a column for every word is for up to {MOST_CLASSES}. Drop it."
        )
    return tuple(values)
