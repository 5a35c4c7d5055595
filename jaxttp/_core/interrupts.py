"""What Ctrl-C does to a command, one line and status 130.

The interpreter cannot be left in the usual way: while XLA compiles, its threads run on into an
interpreter that is being taken down, and the process ends in a segmentation fault. So the process
leaves at once, from the signal's handler. Only the standard library is imported here, so that
`jaxttp` can begin to watch before it imports anything else.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

STATUS = 130
"""128 and the signal's number, as shells have it."""
_SHOW_CURSOR = "\r\x1b[2K\x1b[?25h"

unfinished: set[Path] = set()
"""Files that are being written, under names of their own: they do not stay."""
_held = {"depth": 0, "wanted": 0}


def is_command() -> bool:
    """Whether this process was started as `jaxttp` or `python -m jaxttp`."""
    given = sys.orig_argv
    if sys.argv[:1] == ["-m"]:  # as long as Python looks for the module
        return "jaxttp" in given and given[given.index("jaxttp") - 1] == "-m"
    return bool(sys.argv) and Path(sys.argv[0]).stem == "jaxttp"


def watch() -> None:
    """Leave on Ctrl-C from now on; a signal that is ignored or handled otherwise stays so."""
    with contextlib.suppress(ValueError):  # not the main thread
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupted)


@contextlib.contextmanager
def whole() -> Iterator[None]:
    """Work that is done to its end before Ctrl-C is heard; the second one is heard at once."""
    _held["depth"] += 1
    try:
        yield
    finally:
        _held["depth"] -= 1
        if _held["wanted"] and not _held["depth"]:
            leave()


def _interrupted(*_: Any) -> None:
    _held["wanted"] += 1
    if not _held["depth"] or _held["wanted"] > 1:
        leave()


def leave() -> NoReturn:
    """Remove what is half-written, say so in one line, and go without the interpreter's end."""
    for path in list(unfinished):
        with contextlib.suppress(OSError):
            path.unlink()
    with contextlib.suppress(OSError):
        terminal = os.isatty(2)  # a progress bar hides the cursor
        os.write(2, f"{_SHOW_CURSOR if terminal else ''}jaxttp: interrupted\n".encode())
    os._exit(STATUS)
