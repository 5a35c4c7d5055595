"""Files that are written atomically, and strict JSON."""

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
    """A temporary path in the folder of a file; at the end it takes the file's name.

    Args:
        path: the file, which may exist; its folder is created if needed. A pipe or a device is
            written to directly.

    Yields:
        The path to write to, of the same suffix.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replaced(Path(folder, "new", "words.txt")) as temporary:
        ...         _ = temporary.write_text("all of them")
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
    """The value of a JSON text; Python's own parser accepts NaN and infinity, which JSON has not.

    Args:
        text: of a file.

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
