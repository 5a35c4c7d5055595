"""Results in a folder: one line of JSON for each piece, its arrays in an npz file beside it.

A piece is made once. A killed run goes on with the first piece that is missing; what is there is
not made again. Values may be numbers, strings, None, NumPy arrays, and lists, tuples, dictionaries,
and dataclasses and named tuples of this repository, made of them; what is read back equals what was
written.
"""

import dataclasses
import hashlib
import importlib
import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

Report = Callable[[str, int, int], None]
Pieces = dict[str, Callable[[], Any]]
"""Name -> what makes the piece; of a script, in the order in which they are made."""


class MissingError(LookupError):
    """A piece that was asked for without leave to make it."""


class Store:
    """Pieces by name, in a folder or only in memory.

    Args:
        folder: where pieces are kept; None for memory.
        settings: what the pieces depend on; a folder that holds others' is refused.
        read_only: raise `MissingError` instead of making a piece.
        report: called with (name, done, total) when a piece of `all` begins, and at the end.

    Raises:
        ValueError: the folder holds the results of other settings.

    Example:
        >>> store = Store()
        >>> store.get("squares", lambda: np.arange(3) ** 2).tolist()
        [0, 1, 4]
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        settings: Any = None,
        read_only: bool = False,
        report: Report | None = None,
    ) -> None:
        self.folder, self.read_only, self.report = folder, read_only, report
        self.records: dict[str, dict[str, Any]] = {}
        self._memory: dict[str, Any] = {}
        if folder is None:
            return
        self._lines = folder / "records.jsonl"
        self._check(folder / "settings.json", _pack(settings, {}))
        if self._lines.exists():
            self._read()

    def _check(self, path: Path, settings: Any) -> None:
        settings = json.loads(json.dumps(settings))
        if path.exists():
            if json.loads(path.read_text()) != settings:
                raise ValueError(
                    f"{path.parent} holds the results of other settings ({path.name} says which): "
                    "choose another folder, or start afresh."
                )
        elif self.read_only:
            raise MissingError(f"nothing is saved in {path.parent}.")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(settings, indent=1) + "\n")

    def _read(self) -> None:
        whole = []
        for line in self._lines.read_text().splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # the run was killed while it wrote this line
                continue
            self.records[record["name"]] = record
            whole.append(line)
        if not self.read_only:
            self._lines.write_text("".join(f"{line}\n" for line in whole))

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """What is kept under `name`, made now if it is not there yet."""
        if name in self._memory:
            return self._memory[name]
        if name in self.records and self.folder is not None:
            record, arrays = self.records[name], {}
            if record["arrays"] is not None:
                with np.load(self.folder / record["arrays"]) as file:
                    arrays = dict(file)
            self._memory[name] = _unpack(record["value"], arrays)
            return self._memory[name]
        if self.read_only:
            raise MissingError(f"{name!r} is not among the saved results in {self.folder}.")
        begun = time.perf_counter()
        arrays: dict[str, np.ndarray] = {}
        value = _pack(make(), arrays)
        seconds = time.perf_counter() - begun
        self._memory[name] = _unpack(value, arrays)
        if self.folder is not None:
            self._write(name, value, arrays, seconds)
        return self._memory[name]

    def _write(self, name: str, value: Any, arrays: dict[str, np.ndarray], seconds: float) -> None:
        assert self.folder is not None
        place = None
        if arrays:
            mark = hashlib.sha256(name.encode()).hexdigest()[:8]
            place = f"arrays/{re.sub('[^A-Za-z0-9.]+', '-', name)}-{mark}.npz"
            path = self.folder / place
            path.parent.mkdir(exist_ok=True)
            np.savez_compressed(path, **arrays)  # pyright: ignore[reportArgumentType]
        record = {
            "name": name, "seconds": round(seconds, 3), "arrays": place, "value": value,
        }  # fmt: skip
        with self._lines.open("a") as file:  # last: what has a line is complete
            file.write(json.dumps(record) + "\n")
        self.records[name] = record

    def all(self, pieces: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Many pieces, with progress reported.

        Args:
            pieces: name -> function that makes it.

        Returns:
            name -> value, in the same order.
        """
        out = {}
        for done, (name, make) in enumerate(pieces.items()):
            if self.report is not None:
                self.report(name, done, len(pieces))
            out[name] = self.get(name, make)
        if self.report is not None:
            self.report("", len(pieces), len(pieces))
        return out

    @property
    def seconds(self) -> float:
        """Wall time of all pieces that are kept in the folder."""
        return sum(record["seconds"] for record in self.records.values())


def runner(
    pieces: Callable[[Any], Pieces], gather: Callable[[Any, dict[str, Any]], Any]
) -> Callable[..., Any]:
    """The `run` of a script from its pieces.

    Args:
        pieces: settings -> name -> function that makes the piece.
        gather: (settings, name -> piece) -> the script's result.

    Returns:
        ``run(settings, store=None) -> result``; without a store the pieces stay in memory.

    Example:
        >>> run = runner(lambda n: {f"{k} squared": (lambda k=k: k**2) for k in range(n)},
        ...              lambda n, found: list(found.values()))
        >>> run(4)
        [0, 1, 4, 9]
    """

    def run(settings: Any, store: Store | None = None) -> Any:
        made = pieces(settings)
        return gather(settings, (store or Store()).all(made))

    return run


def listed(_settings: Any, found: dict[str, Any]) -> list[Any]:
    """The pieces themselves, where they are the result."""
    return list(found.values())


def _pack(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Plain JSON; arrays move to `arrays`."""

    def inner(part: Any) -> Any:
        return _pack(part, arrays)

    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, np.generic):
        return inner(value.item())
    if isinstance(value, float):
        # JSON has no nan and no infinity
        return value if np.isfinite(value) else {"float": repr(value)}
    if isinstance(value, np.ndarray | jax.Array):
        name = f"a{len(arrays)}"
        arrays[name] = np.asarray(value)
        return {"array": name}
    if isinstance(value, list):
        return [inner(part) for part in value]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _named(value, {name: inner(getattr(value, name)) for name in type(value)._fields})
    if isinstance(value, tuple):
        return {"tuple": [inner(part) for part in value]}
    if isinstance(value, Mapping):
        return {"items": [[inner(key), inner(part)] for key, part in value.items()]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return _named(value, {name: inner(getattr(value, name)) for name in names})
    raise TypeError(f"results of {type(value)} cannot be kept; make them arrays or plain values.")


def _named(value: Any, fields: dict[str, Any]) -> Any:
    kind = type(value)
    return {"class": f"{kind.__module__}:{kind.__qualname__}", "fields": fields}


def _unpack(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_unpack(part, arrays) for part in value]
    if not isinstance(value, dict):
        return value
    if "float" in value:
        return float(value["float"])
    if "array" in value:
        return arrays[value["array"]]
    if "tuple" in value:
        return tuple(_unpack(part, arrays) for part in value["tuple"])
    if "items" in value:
        return {_unpack(key, arrays): _unpack(part, arrays) for key, part in value["items"]}
    module, name = value["class"].split(":")
    if module.split(".")[0] not in ("experiments", "jaxttp"):
        raise ValueError(f"results of {value['class']} are not of this repository.")
    kind = getattr(importlib.import_module(module), name)
    return kind(**{key: _unpack(part, arrays) for key, part in value["fields"].items()})
