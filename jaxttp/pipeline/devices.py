"""Over how many devices kernels are computed, of one process or of several, as a mesh of JAX."""

import re
from typing import Any

import jax
from jax.sharding import Mesh

from jaxttp._core.checks import check_integer

MESH = "all"
"""Every device that JAX sees."""
CLUSTER = "auto"
"""Processes as Slurm, Open MPI, GKE or a TPU pod says."""
WAIT = 300
"""Seconds in which all processes have to be there."""


def check_mesh_size(wanted: int | str | None) -> int | None:
    """How many devices are asked for, or None; nothing of JAX is started for what is wrong.

    Args:
        wanted: a number of devices, "all", or None for one device without a mesh.

    Returns:
        The number; None where nothing was asked for.

    Raises:
        ValueError: no such number, or more devices than there are.

    Example:
        >>> check_mesh_size(1)
        1
        >>> check_mesh_size(0)
        Traceback (most recent call last):
        ...
        ValueError: mesh must be an integer of at least 1; got 0. Or 'all', for every device.
    """
    if wanted is None:
        return None
    if wanted == MESH:
        return jax.device_count()
    remedy = f"Or {MESH!r}, for every device."
    count = check_integer("mesh", wanted, at_least=1, remedy=remedy)
    there = jax.device_count()
    if count > there:
        kind = jax.devices()[0].platform
        virtual = (
            f", or make virtual ones of this CPU, enough to try it and no faster: "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )
        raise ValueError(
            f"mesh={count} asks for {count} devices, and JAX sees {there} ({kind}); give at most "
            f"{there}, or {MESH!r}{virtual if kind == 'cpu' else ''}."
        )
    return count


def mesh_of(wanted: int | str | None) -> Mesh | None:
    """A mesh of the first so many devices, in one row.

    Args:
        wanted: as in `check_mesh_size`.

    Returns:
        A `jax.sharding.Mesh` with the axis "rows"; None for one device.

    Raises:
        ValueError: see `check_mesh_size`.

    Example:
        >>> mesh_of(None) is None, mesh_of(1) is None
        (True, True)
    """
    count = check_mesh_size(wanted)
    if count is None or count == 1:
        return None
    return jax.make_mesh((count,), ("rows",), devices=jax.devices()[:count])


def join_processes(where: str, mesh: int | str | None) -> None:
    """Make this process one of several, whose devices are then those of one mesh.

    To be called before anything is computed, by every process with the same arguments but for its
    own number.

    Args:
        where: "auto" on a cluster that JAX knows; else ``HOST:PORT,COUNT,INDEX``: the address of
            process 0, how many there are, and which one this is.
        mesh: of the settings, which alone use the devices of other processes.

    Raises:
        ValueError: other words, no mesh, one without devices of some process, or the others did not
            come.

    Example:
        >>> join_processes("localhost", "all")
        Traceback (most recent call last):
        ...
        ValueError: distributed='localhost' must be auto, or HOST:PORT,COUNT,INDEX such as \
10.0.0.1:1234,2,0.
    """
    if mesh is None:
        raise ValueError(
            "distributed joins the devices of several processes, which only a mesh uses; add mesh "
            "(--mesh all), or leave distributed out."
        )
    given: dict[str, Any] = {"initialization_timeout": WAIT}
    if where != CLUSTER:
        found = re.fullmatch(r"([^,\s]+:\d+),(\d+),(\d+)", where)
        if found is None:
            raise ValueError(
                f"distributed={where!r} must be {CLUSTER}, or HOST:PORT,COUNT,INDEX such as "
                "10.0.0.1:1234,2,0."
            )
        count, index = int(found[2]), int(found[3])
        if index >= count:
            raise ValueError(
                f"distributed={where!r}: INDEX counts from 0, so of COUNT={count} processes it is "
                f"at most {count - 1}; got {index}."
            )
        given |= {"coordinator_address": found[1], "num_processes": count, "process_id": index}
    try:
        jax.distributed.initialize(**given)
    except (ValueError, RuntimeError) as problem:
        reason = str(problem).strip().partition("\n")[0]
        raise ValueError(
            f"distributed={where!r}: the processes were not joined: {reason}"
        ) from None
    sizes = {device.process_index for device in jax.devices()[: check_mesh_size(mesh)]}
    if len(sizes) < jax.process_count():
        raise ValueError(
            f"mesh={mesh} has no devices of some of the {jax.process_count()} processes; give "
            f"{MESH!r}."
        )
