"""From the cells of a table to the columns of its features: filled, encoded, or refused by name."""

import numpy as np

from jaxttp.data._cells import Cells, are_words, is_missing, is_number
from jaxttp.data.columns import Column

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
    found = [problem for problem in _problems(table, fill, one_hot) if problem]
    if found:
        raise ValueError(f"data={str(table.path)!r}: {' And '.join(found)}")


def _problems(table: Cells, fill: str | None, one_hot: bool) -> list[str | None]:
    gaps = _empty_in(table) if fill is not None else _missing_in(table)
    return [gaps, None if one_hot else _words_in(table)]


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
