"""Files that are there whole or not at all, and JSON from anywhere."""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxttp._core.process import unfinished


@contextlib.contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A place beside a file to write to; at the end it takes the file's name.

    Args:
        path: the file, which may exist; its folder is made if need be. What is there and no file (a
            pipe, a device) is written to as it is.

    Yields:
        The path to write to, of the same suffix.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replaced(Path(folder, "new", "words.txt")) as place:
        ...         _ = place.write_text("all of them")
        ...     Path(folder, "new", "words.txt").read_text()
        'all of them'
    """
    path = Path(os.path.realpath(path))  # a link stays one
    if path.exists() and not path.is_file():
        yield path
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
    unfinished.add(part)
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
        unfinished.discard(part)


def parse_json(text: str) -> Any:
    """What a JSON text says; Python's own parser takes NaN and infinity, which JSON has not.

    Args:
        text: of a file, from anywhere.

    Raises:
        ValueError: it is no JSON, holds a number that is not finite, or is nested too deeply.

    Example:
        >>> parse_json('{"epsilon": 1e-5}')
        {'epsilon': 1e-05}
        >>> parse_json('{"epsilon": NaN}')
        Traceback (most recent call last):
        ...
        ValueError: NaN is not a finite number
    """
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError as problem:
        raise ValueError("it is nested too deeply") from problem


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number
