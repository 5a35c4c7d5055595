"""The memory that a kernel may take: a device's own, or what a process may have of the host's."""

from collections.abc import Iterable
from typing import Any

import jax
from jaxtyping import Array

from jaxttp._core.checks import is_concrete
from jaxttp._core.versions import host_memory


def room_on(devices: Iterable[Any]) -> int | None:
    """Bytes that fit on these devices together; None where one of them does not say.

    Args:
        devices: of JAX. Those that count no memory of their own, as CPUs, have the host's, or of
            that as much as a control group allows.
    """
    stats = [_stats(device).get("bytes_limit") for device in set(devices)]
    host = host_memory().get("MemTotal")
    if None in stats and host is None:
        return None
    of_host = 0 if host is None or None not in stats else int(host * 2**30)
    return of_host + sum(limit for limit in stats if limit is not None)


def devices_of(arrays: Iterable[Any]) -> set[Any]:
    """Where a computation with these arrays runs: on their devices, or where JAX puts new ones."""
    there = [a.devices() for a in arrays if isinstance(a, Array) and is_concrete(a)]
    default: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    default = default if isinstance(default, jax.Device) else jax.local_devices(backend=default)[0]
    return set().union(*there) or {default}


def _stats(device: Any) -> dict[str, int]:
    try:
        return device.memory_stats() or {}
    except (RuntimeError, NotImplementedError):  # of another process, or of a backend without them
        return {}
