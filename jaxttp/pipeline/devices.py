"""Over how many devices kernels are computed: a number of devices, as a mesh of JAX."""

import jax
from jax.sharding import Mesh

from jaxttp._checks import check_integer

MESH = "all"
"""Every device that JAX sees."""


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
