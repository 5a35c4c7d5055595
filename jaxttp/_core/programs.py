"""Compiled programs that outlive the process: JAX's persistent cache, for the commands.

Most of what a command waits for is compilation, the same at every start. `jaxttp ...` and `python
-m experiments run` therefore `keep` their programs in the user's cache folder; importing the
library never does. Whose programs are used:

- JAX's own key covers the program, its options, the flags of XLA, the device. It does not cover the
  CPU: a program for another instruction set ends the process, and a home directory may be shared by
  many machines. So there is a folder for every combination of the versions of jaxttp, jax and
  jaxlib, the CPU's name and instructions, and the number of cores (XLA cuts programs by it).
- A program is code that will be run: a folder that others own or may write to is left alone.
- A damaged entry is thrown away and made anew.

A folder that cannot be used means compiling as ever, no failure. Together the folders stay below
`LIMIT`: what was used longest ago goes first. (JAX has a limit of its own. It needs another
package, holds for one folder, and lists the folder at every single entry.)

Who says otherwise is obeyed: ``--no-cache``, the variable `VARIABLE` (a folder, or "off"), and all
of JAX's own variables; with JAX_COMPILATION_CACHE_DIR nothing here does anything.
"""

import contextlib
import glob
import hashlib
import importlib.util
import os
import platform
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "JAXTTP_CACHE"
OFF = ("off", "no", "false", "0")

LIMIT = 2**30
"""Bytes of all kept programs; those of README's first command are one or two million."""

CPU_FIELDS = (
    "vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "isa", "cpu", "features",
)  # fmt: skip
"""What of /proc/cpuinfo says for which CPU a program is; the rest are clocks and numbers."""


class Place(NamedTuple):
    """Where compiled programs are kept.

    Attributes:
        folder: ours, or None.
        otherwise: where there is none of ours: what is done with programs, and who chose that.
    """

    folder: Path | None
    otherwise: str = ""

    def __str__(self) -> str:
        """One line: the folder, how many programs of how many bytes; or what is done instead."""
        if self.folder is None:
            return self.otherwise
        found = _entries(self.folder.parent)
        here = [size for _, size, path in found if path.parent == self.folder]
        everywhere = sum(size for _, size, _ in found)
        return (
            f"kept in {self.folder}: {len(here)} of {_mebibytes(sum(here))}; with those of other "
            f"versions {_mebibytes(everywhere)}, at most {_mebibytes(LIMIT)}"
        )


def place(wanted: bool = True) -> Place:
    """Where this process would keep its programs; looks, and changes nothing.

    Args:
        wanted: False for a command that was told not to.

    Returns:
        A `Place`.
    """
    if not _setting("jax_enable_compilation_cache"):
        return Place(None, "not kept: JAX_ENABLE_COMPILATION_CACHE is false")
    given = os.environ.get(VARIABLE, "").strip()
    root = Path(given).expanduser() if given else cache_folder(os.environ, sys.platform)
    folder = None if root is None else root / _name()
    theirs = _setting("jax_compilation_cache_dir")
    if theirs and theirs != str(folder):
        return Place(None, f"kept in {theirs}: JAX_COMPILATION_CACHE_DIR")
    if not wanted:
        return Place(None, "not kept: --no-cache")
    if given.lower() in OFF:
        return Place(None, f"not kept: {VARIABLE}={given}")
    if folder is None or not folder.is_absolute():
        return Place(None, f"not kept: {VARIABLE} must name a folder by its whole path")
    refusal = _refusal(folder)
    return Place(None, f"not kept: {refusal}") if refusal else Place(folder)


def keep(wanted: bool = True) -> Place:
    """Keep compiled programs from now on, for this process.

    Args:
        wanted: False for a command that was told not to.

    Returns:
        The `Place`; where it has no folder of ours, nothing was changed.
    """
    import jax

    found = place(wanted)
    if found.folder is None or _setting("jax_compilation_cache_dir") == str(found.folder):
        return found
    bound(found.folder.parent)
    try:
        found.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as problem:
        return Place(None, f"not kept: {found.folder}: {problem.strerror}")
    refusal = _refusal(found.folder)
    if refusal:
        return Place(None, f"not kept: {refusal}")
    _mend(found.folder)
    jax.config.update("jax_compilation_cache_dir", str(found.folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        # The hundreds of small programs take longer than the few that compile for a second.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return found


def hush() -> None:
    """Keep XLA from a flood of false alarms when it loads a program; before JAX is imported.

    jaxlib 0.9 to 0.10.2 compare the CPU's features with a list to which they have added two wishes
    of their own (``prefer-no-gather``), so that every program that is read raises two alarms of two
    thousand letters (https://github.com/openxla/xla/issues/44565). The folder's name holds what
    they compare. Errors that matter are exceptions. With an accelerator's plugin, whose errors may
    say more, and where the user has chosen a level or a folder, nothing is changed.
    """
    if importlib.util.find_spec("jax_plugins") or importlib.util.find_spec("libtpu"):
        return
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def cache_folder(environment: Mapping[str, str], system: str) -> Path | None:
    """The folder for what can be made anew, as each system has it; None without a home.

    Args:
        environment: variables.
        system: as `sys.platform` names it.

    Example:
        >>> cache_folder({"XDG_CACHE_HOME": "/var/caches"}, "linux").as_posix()
        '/var/caches/jaxttp'
    """
    try:
        home = Path.home()
    except RuntimeError:
        home = None
    if system == "win32":
        local = environment.get("LOCALAPPDATA")
        return Path(local, "jaxttp", "Cache") if local else None
    if system == "darwin":
        return home and home / "Library" / "Caches" / "jaxttp"
    given = Path(environment.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():  # the standard says to ignore any other
        return given / "jaxttp"
    return home and home / ".cache" / "jaxttp"


def cpu_mark(cpuinfo: str, rest: str) -> str:
    r"""A short name for what programs are compiled for.

    Args:
        cpuinfo: the text of /proc/cpuinfo; "" where there is none.
        rest: what else decides.

    Example:
        >>> here, later, there = "flags: sse\nMHz: 1", "flags: sse\nMHz: 2", "flags: sse avx"
        >>> cpu_mark(here, "") == cpu_mark(later, ""), cpu_mark(here, "") == cpu_mark(there, "")
        (True, False)
    """
    rows = (line.partition(":") for line in cpuinfo.split("\n\n")[0].splitlines())
    fields = {key.strip(): value.strip() for key, _, value in rows}
    said = [f"{name}={fields[name]}" for name in CPU_FIELDS if name in fields]
    return hashlib.sha256("\n".join((*said, rest)).encode()).hexdigest()[:16]


def bound(root: Path, limit: int | None = None) -> None:
    """Remove the programs used longest ago until the others have at most `limit` bytes.

    Args:
        root: the folder of the folders.
        limit: `LIMIT` when None.
    """
    found = sorted(_entries(root), reverse=True)  # the latest first
    left = LIMIT if limit is None else limit
    for _, size, path in found:
        left -= size
        if left < 0:
            with contextlib.suppress(OSError):  # another process was faster
                path.unlink()
    for folder in {path.parent for _, _, path in found}:
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()


_PREFIX = "programs-"


def _name() -> str:
    """The folder's name: what a program must have in common with this process."""
    import jax
    from jaxlib.version import __version__ as jaxlib

    from jaxttp._core.versions import __version__

    try:
        info = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        info = ""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    rest = f"{platform.machine()} {platform.processor()} {usable}"
    if not re.search(r"^(flags|Features)\s*:", info, re.MULTILINE):
        rest += f" {platform.node()}"  # where nothing tells CPUs apart, machines are
    return f"{_PREFIX}{__version__}-jax{jax.__version__}-jaxlib{jaxlib}-{cpu_mark(info, rest)}"


def _refusal(folder: Path) -> str:
    """Why a folder cannot be used; "" where it can, or is not there yet."""
    try:
        if not folder.exists():
            return ""
        found = folder.stat()
    except OSError as problem:
        return f"{folder}: {problem.strerror}"
    if not folder.is_dir():
        return f"{folder} is no folder"
    # A program in it is run: nobody else may have put one there.
    if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & 0o022):
        return f"{folder} belongs to others, or they may write to it"
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return f"{folder} cannot be read and written"
    return ""


def _entries(root: Path) -> list[tuple[float, int, Path]]:
    """When each program was used last (to a day: as exactly as systems note it), bytes, path."""
    found = []
    for path in root.glob(f"{_PREFIX}*/*-cache"):
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    return found


def _setting(name: str) -> Any:
    """A setting of JAX, from its variable, or as the program has set it."""
    import jax

    return getattr(jax.config, name)


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def _mend(folder: Path) -> None:
    """Throw away what JAX cannot read, which it would leave there for ever; without its words.

    It has no other way to say so than a warning, which names the program: its files go, and in the
    same breath it is compiled and written anew.
    """
    usual = warnings.showwarning

    def show(message: Any, *args: Any, **options: Any) -> None:
        words = re.match(r"Error (reading|writing) persistent compilation cache entry for '(.*?)'",
                         str(message))  # fmt: skip
        if words is None:
            usual(message, *args, **options)
            return
        if words[1] == "reading":
            for path in folder.glob(f"{glob.escape(words[2])}-*-cache"):
                with contextlib.suppress(OSError):
                    path.unlink()

    warnings.showwarning = show
