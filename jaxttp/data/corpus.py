"""Running text as sequences of tokens: a file, or a folder of files, cut into windows."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxttp._core.checks import check_integer

SUFFIXES = (".txt", ".md", ".py")
"""Of the files of a folder that are read."""


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

    Files are joined in the order of their names, with the tokenizer's token for the end of a text
    after each where it knows one, and cut every T tokens; what it adds to single texts is left out.

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
    texts = _read(Path(path))
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


def _read(path: Path) -> list[str]:
    """The texts of the files."""
    if path.is_dir():
        files = sorted(one for one in path.rglob("*") if one.suffix in SUFFIXES and one.is_file())
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
