"""Texts as tokens: a tokenizer, a CSV of texts with labels, and running text cut into windows."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxttp._core.checks import check_integer
from jaxttp._core.files import parse_json
from jaxttp.data._cells import Cells, read_labels, read_rows
from jaxttp.data.dataset import Dataset, standardized
from jaxttp.data.tables import class_labels, encode_labels

COLUMNS = ("text", "label")


class Tokenizer:
    """Texts to ids and masks (N, T), padded on the right to the longest.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        pad: the token of padded positions, any token; the mask hides it.
        end: the token that ends a text; None where there is none.

    Example:
        >>> load_tokenizer("no-such-folder")
        Traceback (most recent call last):
        ...
        FileNotFoundError: folder='no-such-folder' has no tokenizer.json...
    """

    def __init__(self, tokenizer: Any, pad: int = 0, end: int | None = None):
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.pad = pad
        self.end = end

    def __len__(self) -> int:
        return self.tokenizer.get_vocab_size()

    def encode(self, text: str) -> np.ndarray:
        """The ids of one text (L,), int32: all of it, without special tokens."""
        self.tokenizer.no_truncation()
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def __call__(
        self, texts: Sequence[str], *, max_length: int | None = None
    ) -> dict[str, np.ndarray]:
        """Ids and masks of texts.

        Args:
            texts: N strings.
            max_length: tokens to keep of each, those added to the text included; None for all.

        Returns:
            ``{"ids": (N, T), "mask": (N, T)}``, int32; the mask is 1 where a token is.

        Raises:
            TypeError: one string in place of several.
            ValueError: no texts, a text without a token, a `max_length` with no room for one.
        """
        if isinstance(texts, str):
            raise TypeError("texts must be several strings, such as a list; got one.")
        texts = list(map(str, texts))
        if not texts:
            raise ValueError("texts is empty; give at least one.")
        self.tokenizer.no_truncation()
        if max_length is not None:
            added = self.tokenizer.num_special_tokens_to_add(False)
            check_integer(
                "max_length", max_length, at_least=added + 1,
                hint=f"The tokenizer adds {added} tokens to each text.",
            )  # fmt: skip
            self.tokenizer.enable_truncation(max_length)
        encoded = [encoding.ids for encoding in self.tokenizer.encode_batch(texts)]
        if empty := [row for row, ids in enumerate(encoded) if not ids]:
            raise ValueError(
                f"texts[{empty[0]}]={texts[empty[0]]!r} has no token, {len(empty)} of {len(texts)} "
                "have none; leave them out."
            )
        ids = np.full((len(encoded), max(map(len, encoded))), self.pad, np.int32)
        mask = np.zeros_like(ids)
        for row, tokens in enumerate(encoded):
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        return {"ids": ids, "mask": mask}


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, from its ``tokenizer.json``; no download.

    Needs the extra `text`. Tokens that the tokenizer adds to every text ([CLS], [SEP], <s>) are
    added here, too.

    Args:
        folder: with ``tokenizer.json``, and perhaps ``config.json``, whose ``pad_token_id`` pads
            and whose ``eos_token_id`` ends a text.

    Returns:
        A `Tokenizer`.

    Raises:
        FileNotFoundError: there is no ``tokenizer.json``.
        ImportError: the extra `text` is not installed.
        ValueError: a file that is no tokenizer.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"folder={str(folder)!r} has no tokenizer.json; write one with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder) of transformers, or give "
            "ids and masks of your own."
        )
    try:
        import tokenizers  # pyright: ignore[reportMissingImports]
    except ImportError as problem:
        raise ImportError(
            f"{path} needs the package tokenizers ({problem}); install the extra: "
            "pip install 'jaxttp[text]'."
        ) from problem
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as problem:  # the package raises Exception itself
        raise ValueError(f"{path} is no tokenizer: {problem}.") from problem
    config = folder / "config.json"
    pad, end = _special_token(config, "pad_token_id"), _special_token(config, "eos_token_id")
    return Tokenizer(tokenizer, pad or 0, end)


def _special_token(config: Path, name: str) -> int | None:
    """A special token of ``config.json``, the first of several; None if it has none."""
    try:
        token = parse_json(config.read_text(encoding="utf-8")).get(name)
    except (OSError, ValueError, AttributeError):
        return None
    token = token[0] if isinstance(token, list) and token else token
    return token if isinstance(token, int) and token >= 0 else None


def load_texts(
    path: str | os.PathLike[str], tokenizer: Tokenizer, *, max_length: int | None = None
) -> Dataset:
    """A data set from a CSV with the columns ``text`` and ``label``, by the names in its head.

    Labels are words or whole numbers, other numbers are targets, as in `load_table`; other columns
    are left out. A text may have commas and line breaks within quotes.

    Args:
        path: the file.
        tokenizer: of the network.
        max_length: tokens to keep of each text; None for all.

    Returns:
        A data set whose `x` is ``{"ids": (N, T), "mask": (N, T)}``.

    Raises:
        ValueError: no such file, no head with both names, rows of different lengths, labels that
            are missing, what `Tokenizer` refuses.
    """
    path = Path(path)
    head, rows, line_numbers = _read(path)
    columns = [_column(path, head, name) for name in COLUMNS]
    texts, labels = ([row[column] for row in rows] for column in columns)
    if blank := [line for line, text in zip(line_numbers, texts, strict=True) if not text.strip()]:
        raise ValueError(
            f"data={str(path)!r}: the text in line {blank[0]} is empty, {len(blank)} of "
            f"{len(texts)} are; fill them in, or leave them out."
        )
    cells = np.array(labels, object)[:, None]
    y = read_labels(Cells(path, np.array(line_numbers), cells, ["column 'label'"]))
    names = class_labels(path, y)
    x = tokenizer(texts, max_length=max_length)
    left = [name for name in head if name.lower() not in COLUMNS]
    also = f", {', '.join(left)} left out" if left else ""
    cut = "" if max_length is None else f", cut at {max_length}"
    description = f"{path.name}, texts of up to {x['ids'].shape[1]} tokens{cut}{also}."
    if names is None:
        return Dataset(x, standardized(y.reshape(-1, 1)).astype(np.float32), path.name, description)
    codes, classes = encode_labels(names, y)
    return Dataset(x, codes, path.name, description, len(classes), classes)


def has_texts(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a CSV whose head names a column ``text``.

    Example:
        >>> has_texts("no-such-file.csv")
        False
    """
    path = Path(path)
    if path.suffix.lower() != ".csv" or not path.is_file():
        return False
    try:
        return COLUMNS[0] in [name.lower() for name in _read(path)[0]]
    except ValueError:
        return False


def _read(path: Path) -> tuple[list[str], list[list[str]], list[int]]:
    """Names of columns, rows, and their line numbers in the file."""
    if path.suffix.lower() != ".csv" or not path.is_file():
        raise ValueError(f"data={str(path)!r} is not a CSV file; texts come as one.")
    (_, head), *read = read_rows(path) or [(1, [])]
    for line, row in read:
        if len(row) != len(head):
            raise ValueError(
                f"data={str(path)!r}: line {line} has {len(row)} cells, the head {len(head)}; put "
                "texts with commas between quotes."
            )
    return head, [row for _, row in read], [line for line, _ in read]


def _column(path: Path, head: list[str], name: str) -> int:
    columns = [index for index, column in enumerate(head) if column.lower() == name]
    if len(columns) != 1:
        raise ValueError(
            f"data={str(path)!r}: texts need one column {name!r} in the first line, which has "
            f"{', '.join(head) or 'nothing'}."
        )
    return columns[0]


SUFFIXES = (".txt", ".md", ".py")
"""Suffixes of the files of a folder that are read."""


class Corpus(NamedTuple):
    """A text, cut.

    Attributes:
        x: tokens that a network sees (N, T), int32.
        y: those that follow them (N, T).
        tokens: of the whole text, those that are left over at its end included.
        files: how many were read.
    """

    x: Int[np.ndarray, "n t"]
    y: Int[np.ndarray, "n t"]
    tokens: int
    files: int


def load_corpus(path: str | os.PathLike[str], tokenizer: Any, *, length: int) -> Corpus:
    """A text as sequences for next-token loss, each token predicted once.

    Files are joined in the order of their names, each followed by the tokenizer's token for the end
    of a text if there is one, and cut every T tokens, without other special tokens.

    Args:
        path: a file of text, or a folder: all .txt, .md and .py in it, and in folders within.
        tokenizer: a `Tokenizer`, of the network.
        length: T, tokens of a sequence.

    Returns:
        A `Corpus`; in the order of the text.

    Raises:
        ValueError: nothing there to read, a file that is no UTF-8, less than one sequence.

    Example:
        >>> load_corpus("no-such-file.txt", None, length=8)
        Traceback (most recent call last):
        ...
        ValueError: text='no-such-file.txt' is not there; give a file of text, or a folder of ...
    """
    check_integer("length", length, at_least=1)
    texts = _read_files(Path(path))
    parts = []
    for text in texts:
        parts.append(tokenizer.encode(text))
        if tokenizer.end is not None:
            parts.append(np.array([tokenizer.end], np.int32))
    ids = np.concatenate(parts)
    count = (len(ids) - 1) // length
    if count < 1:
        raise ValueError(
            f"text={str(path)!r} has {len(ids)} tokens; a sequence of {length} and the token after "
            "it need more. Give a longer text, or shorter sequences."
        )
    x, y = (ids[shift : shift + count * length].reshape(count, length) for shift in (0, 1))
    return Corpus(x, y, len(ids), len(texts))


def _read_files(path: Path) -> list[str]:
    """The texts of the files."""
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file())
        if not files:
            raise ValueError(f"text={str(path)!r} holds no {', '.join(SUFFIXES)}.")
    elif path.is_file():
        files = [path]
    else:
        raise ValueError(
            f"text={str(path)!r} is not there; give a file of text, or a folder of "
            f"{', '.join(SUFFIXES)}."
        )
    texts = []
    for file in files:
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as problem:
            raise ValueError(f"text: {str(file)!r} is no text in UTF-8: {problem}.") from problem
    if not any(texts):
        raise ValueError(f"text={str(path)!r} is empty.")
    return texts
