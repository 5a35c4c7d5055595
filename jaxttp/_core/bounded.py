"""Compiled functions of jaxttp are dropped before Linux lets the process map no more memory.

JAX keeps every function that it compiles, one for each shape, and on a CPU a compiled function maps
some twenty pieces of memory. Linux allows a process 65,530 of them: after some hundred forecasts of
new shapes the next compilation would end the process. What the user compiled is left alone.
"""

import ctypes
import gc
from pathlib import Path

from jaxttp._core.compile import drop_programs

SHARE = 0.4
"""Of the pieces that are allowed; beyond it all compiled functions of jaxttp are dropped, which
took some five GiB by then."""
ALLOWED, USED = Path("/proc/sys/vm/max_map_count"), Path("/proc/self/maps")


def bound_programs() -> bool:
    """Drop what jaxttp compiled where it maps too much; what is needed again is compiled again.

    Returns:
        Whether they were dropped; never where there is no such limit.

    Example:
        >>> bound_programs() in (True, False)  # by what this process has compiled so far
        True
    """
    try:
        allowed = int(ALLOWED.read_text())
        with USED.open("rb") as file:
            used = sum(1 for _ in file)
    except (OSError, ValueError):
        return False
    if used <= SHARE * allowed:
        return False
    drop_programs()
    give_back()
    return True


def give_back() -> None:
    """What is garbage goes back to the machine; what is freed alone stays with the process."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
