"""Compiled programs that outlive the process: JAX's persistent cache, for the commands.

Most of what a command waits for is compilation, the same at every start. `jaxttp ...` and `python
-m experiments run` therefore `keep` their programs in the user's cache folder; importing the
library never does. JAX's own key covers the program, its options and the versions, but not the CPU:
a program for another instruction set ends the process, and a home directory may be shared by many
machines. So there is a folder for every kind of CPU.
"""

import hashlib
import importlib.util
import os
import platform
import shutil
from pathlib import Path

LIMIT = 2**30
"""Bytes from which on the folder is emptied; README's first command takes one or two million."""


def keep(wanted: bool = True) -> str:
    """Keep compiled programs from now on, for this process, unless JAX has a folder already.

    Args:
        wanted: False for a command that was told not to.

    Returns:
        Where they are kept, or why they are not.
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
    if not is_ours:  # a program in it is run
        return f"not kept: {folder} belongs to somebody else"
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
    """Keep XLA from a flood of false alarms when it loads a program; before JAX is imported.

    jaxlib 0.9 to 0.10.2 compare the CPU's features with a list to which they have added two wishes
    of their own (``prefer-no-gather``), so that every program that is read raises two alarms of two
    thousand letters (https://github.com/openxla/xla/issues/44565). Errors that matter are
    exceptions. With an accelerator's plugin, whose errors may say more, nothing is changed.
    """
    if importlib.util.find_spec("jax_plugins") or importlib.util.find_spec("libtpu"):
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
