"""The version of this library, what its results are made with, and the memory of this machine."""

import os
import platform
from pathlib import Path

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """What a result was made with.

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
    """GiB as "MemTotal", of this machine or of a control group of this process if that is less."""
    if not hasattr(os, "sysconf"):
        return {}
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    groups = Path("/proc/self/cgroup")
    for line in groups.read_text().splitlines() if groups.exists() else ():
        path = line.split(":", 2)[2].lstrip("/")
        for root, name in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
            folder = Path("/sys/fs/cgroup", root, path)
            files = [one / name for one in (folder, *folder.parents)]
            texts = [file.read_text().strip() for file in files if file.exists()]
            limits += [int(text) for text in texts if text.isdigit()]
    return {"MemTotal": min(limits) / 2**30}
