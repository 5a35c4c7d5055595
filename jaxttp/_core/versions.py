"""The version of this library, and what its results are made with."""

import platform

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """What a result was made with.

    Returns:
        Name -> version, the device and the Python included.

    Example:
        >>> sorted(versions())
        ['Python', 'device', 'jax', 'jaxttp', 'numpy']
    """
    import jax
    import numpy as np

    return {
        "jaxttp": __version__,
        "jax": jax.__version__,
        "numpy": np.__version__,
        "Python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
    }
