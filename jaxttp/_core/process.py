"""This process and its machine: Ctrl-C, the compiled functions it keeps, versions, memory.

**Ctrl-C** ends a command with one line and status 130. The interpreter cannot be left in the usual
way: while XLA compiles, its threads run on into an interpreter that is being taken down, and the
process ends in a segmentation fault. So the process leaves at once, from the signal's handler. Only
the standard library is imported here, so that `jaxttp` can begin to watch before it imports
anything else.

**Compiled functions** outlive a command in JAX's persistent cache. Most of what a command waits for
is compilation, the same at every start. So `jaxttp ...` and `python -m experiments run` call
`keep_compiled`, which puts them into the user's cache folder; importing the library never does.
JAX's own key covers the function, its options and the versions, but not the CPU: one for another
instruction set ends the process, and a home directory may be shared by many machines. So there is a
folder for every kind of CPU.
"""

import contextlib
import hashlib
import importlib.util
import os
import platform
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

__version__ = "0.1.0"
STATUS = 130
"""128 and the signal's number, as shells have it."""
_SHOW_CURSOR = "\r\x1b[2K\x1b[?25h"

unfinished: set[Path] = set()
"""Files that are being written, under names of their own: they do not stay."""
_blocks = {"depth": 0, "signals": 0}


def is_command() -> bool:
    """Whether this process was started as `jaxttp` or `python -m jaxttp`."""
    arguments = sys.orig_argv
    if sys.argv[:1] == ["-m"]:  # while Python looks for the module
        return "jaxttp" in arguments and arguments[arguments.index("jaxttp") - 1] == "-m"
    return bool(sys.argv) and Path(sys.argv[0]).stem == "jaxttp"


def watch() -> None:
    """Leave on Ctrl-C from now on; a signal that is ignored or handled otherwise stays so."""
    with contextlib.suppress(ValueError):  # not the main thread
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupted)


@contextlib.contextmanager
def whole() -> Iterator[None]:
    """A block that is finished before the process leaves on Ctrl-C; a second one leaves at once."""
    _blocks["depth"] += 1
    try:
        yield
    finally:
        _blocks["depth"] -= 1
        if _blocks["signals"] and not _blocks["depth"]:
            leave()


def _interrupted(*_: Any) -> None:
    _blocks["signals"] += 1
    if not _blocks["depth"] or _blocks["signals"] > 1:
        leave()


def leave() -> NoReturn:
    """Remove unfinished files, print one line, and exit without the interpreter's finalization."""
    for path in list(unfinished):
        with contextlib.suppress(OSError):
            path.unlink()
    with contextlib.suppress(OSError):
        terminal = os.isatty(2)  # a progress bar hides the cursor
        os.write(2, f"{_SHOW_CURSOR if terminal else ''}jaxttp: interrupted\n".encode())
    os._exit(STATUS)


LIMIT = 2**30
"""Bytes from which on the folder is emptied; README's first command takes one or two million."""


def keep_compiled(wanted: bool = True) -> str:
    """Keep compiled functions from now on, for this process, unless JAX has a folder already.

    Args:
        wanted: False for a command with caching off.

    Returns:
        The folder, or the reason why there is none.
    """
    import jax

    if (theirs := getattr(jax.config, "jax_compilation_cache_dir")) is not None:  # noqa: B009
        return f"kept in {theirs}"
    if not wanted:
        return "not kept"
    try:
        folder = _folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if sum(path.stat().st_size for path in folder.iterdir()) > LIMIT:
            shutil.rmtree(folder)
        is_ours = not hasattr(os, "getuid") or folder.stat().st_uid == os.getuid()
    except (OSError, RuntimeError) as problem:  # no home, or one that cannot be written to
        return f"not kept: {problem}"
    if not is_ours:  # code in it is executed
        return f"not kept: {folder} belongs to another user"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        # The hundreds of small programs take longer than the few that compile for a second.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return f"kept in {folder}"


def _folder() -> Path:
    """In the user's cache folder, with a mark of the CPU in its name."""
    root = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    info = Path("/proc/cpuinfo")
    first = info.read_text(errors="replace").split("\n\n")[0] if info.exists() else platform.node()
    fixed = [line for line in first.splitlines() if "MHz" not in line]  # changes with the load
    mark = hashlib.sha256("\n".join(fixed).encode()).hexdigest()[:16]
    return Path(root or Path.home() / ".cache").resolve() / "jaxttp" / f"programs-{mark}"


def hush() -> None:
    """Silence false warnings of XLA when it loads a compiled function; before JAX is imported.

    jaxlib 0.9 to 0.10.2 compare the CPU's features with a list to which they add two preferences
    (``prefer-no-gather``), so every function that is loaded logs two warnings of 2,000 characters
    (https://github.com/openxla/xla/issues/44565). Real errors are exceptions. With the plugin of an
    accelerator nothing is changed.
    """
    if importlib.util.find_spec("jax_plugins") or importlib.util.find_spec("libtpu"):
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def versions() -> dict[str, str]:
    """The versions of packages, Python and the device, for records of a result.

    Returns:
        Name -> version, the device and the Python included.

    Example:
        >>> sorted(versions())
        ['Python', 'device', 'jax', 'jaxlib', 'jaxttp', 'numpy']
    """
    import jax
    import jaxlib.version
    import numpy as np

    return {
        "jaxttp": __version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "numpy": np.__version__,
        "Python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
    }


def host_memory() -> dict[str, float]:
    """GiB as "MemTotal", of this machine, or of its container if that is less."""
    if not hasattr(os, "sysconf"):
        return {}
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # versions 2 and 1
        file = Path("/sys/fs/cgroup", name)
        text = file.read_text().strip() if file.exists() else ""
        limits += [int(text)] if text.isdigit() else []
    return {"MemTotal": min(limits) / 2**30}
