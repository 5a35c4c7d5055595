"""How the harness talks to a worker: JSON lines over its standard input and output.

A worker module ends with ``serve(WORKS, PACKAGES)``. Requests are objects with a "do":

    {"do": "prepare", "work": name, "problem": file.npz, "options": {...}}
    {"do": "call"}                      -> {"wall": s, "cpu": s}, the whole process's CPU seconds
    {"do": "answer", "file": file.npz}  -> {}, the last call's answer as arrays
    {"do": "count"}                     -> {"operations": number or null}
    {"do": "memory"}                    -> {"peak": bytes, "idle": bytes}
    {"do": "stop"}

Every reply is one object; {"error": line} where something did not work. Whatever a package prints
goes to standard error. This module imports the standard library and NumPy alone.
"""

import gc
import importlib.metadata
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

import numpy as np

Problem = dict[str, np.ndarray]
Options = Mapping[str, Any]

OVER_MEMORY = 86
"""Exit status of a worker that took more memory than it may."""
_WATCH = 0.1
"""Seconds between two looks at the memory."""


class Prepared(NamedTuple):
    """One piece of work, ready to be repeated.

    Attributes:
        call: does it, to the end: what it returns is computed, not promised.
        answer: from what `call` returned to arrays by name, to be held against the others'.
        count: operations of a call, where they can be counted.
    """

    call: Callable[[], Any]
    answer: Callable[[Any], Problem]
    count: Callable[[], float] | None = None


Work = Callable[[Problem, Options], Prepared]


def read_problem(file: str) -> Problem:
    """The arrays of an .npz file by name."""
    with np.load(file) as arrays:
        return {name: arrays[name] for name in arrays.files}


def memory() -> tuple[int, int]:
    """(highest, present) resident memory of this process in bytes.

    Linux keeps them by program: the highest of `getrusage` would be that of the process which
    started this one, where that was larger.
    """
    try:
        with open("/proc/self/status") as file:
            kept = dict(line.split(":", 1) for line in file if line.startswith("Vm"))
        return tuple(1024 * int(kept[key].split()[0]) for key in ("VmHWM", "VmRSS"))  # type: ignore
    except (OSError, KeyError):
        unit = 1 if sys.platform == "darwin" else 1024
        highest = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return highest, highest


class Session:
    """What a worker does with the requests it gets.

    Args:
        works: what it can do.
        packages: whose versions are told.
    """

    def __init__(self, works: Mapping[str, Work], packages: Sequence[str] = ()):
        self.works, self.packages = works, packages
        self.idle = memory()[0]
        self.prepared: Prepared | None = None
        self.result: Any = None

    def reply(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request; a failure is an answer, too."""
        try:
            what = str(request.get("do"))
            if what not in ("prepare", "call", "answer", "count", "memory"):
                raise ValueError(f"do must be prepare, call, answer, count or memory; got {what}.")
            return getattr(self, f"_{what}")(request)
        except (Exception, SystemExit) as problem:
            return {"error": one_line(problem)}

    def _prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        name = request["work"]
        if name not in self.works:
            raise ValueError(f"work must be one of {', '.join(self.works)}; got {name}.")
        begun = time.perf_counter()
        self.result = None
        self.prepared = self.works[name](read_problem(request["problem"]), request["options"])
        versions = {name: importlib.metadata.version(name) for name in self.packages}
        return {"seconds": time.perf_counter() - begun, "versions": versions}

    def _ready(self) -> Prepared:
        if self.prepared is None:
            raise ValueError("prepare must come before call, answer and count.")
        return self.prepared

    def _call(self, _: Mapping[str, Any]) -> dict[str, Any]:
        prepared = self._ready()
        self.result = None
        gc.collect()
        wall, cpu = time.perf_counter(), time.process_time()
        self.result = prepared.call()
        return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self.result is None:
            raise ValueError("call must come before answer.")
        found = self._ready().answer(self.result)
        np.savez(request["file"], **found)
        return {}

    def _count(self, _: Mapping[str, Any]) -> dict[str, Any]:
        count = self._ready().count
        return {"operations": None if count is None else float(count())}

    def _memory(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return {"peak": memory()[0], "idle": self.idle}


def one_line(problem: BaseException) -> str:
    """The kind of a failure and its first line, cut to what a cell of a table can hold."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return f"{type(problem).__name__}: {lines[0][:200] if lines else 'without a word'}"


def watch_memory(most: int) -> None:
    """End this process with the status `OVER_MEMORY` once it holds more than `most` bytes."""

    def watch() -> None:
        while True:
            if memory()[1] > most:
                os._exit(OVER_MEMORY)
            time.sleep(_WATCH)

    threading.Thread(target=watch, daemon=True).start()


def answer_all(session: Session, requests: TextIO, replies: TextIO) -> None:
    """Answer requests, a line each, until there are no more or one says stop."""
    for line in requests:
        try:
            request = json.loads(line)
        except json.JSONDecodeError as problem:
            reply = {"error": f"a request is one line of JSON; got {line.strip()!r} ({problem})."}
        else:
            if request.get("do") == "stop":
                return
            reply = session.reply(request)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def serve(works: Mapping[str, Work], packages: Sequence[str] = ()) -> None:
    """Be a worker until the harness says stop: the last line of a worker module.

    Args:
        works: what it can do, by name.
        packages: whose versions the table names.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if most := os.environ.get("PEERS_MAX_BYTES"):
        watch_memory(int(most))
    answer_all(Session(works, packages), sys.stdin, replies)
