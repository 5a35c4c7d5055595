"""Linear readouts f = P x_L, fixed: a selection of coordinates, orthonormal rows, or any P."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.checks import check_array, check_finite, check_integer, check_key, is_concrete
from jaxttp._core.compile import full_precision
from jaxttp._core.xla_cpu.threads import decompose


def selection_readout(outputs: int, width: int) -> Float[Array, "c d"]:
    """P that reads the first coordinates of the state.

    Args:
        outputs: rows of P, at most `width`.
        width: d, the width of the network.

    Returns:
        The first rows of the identity (outputs, width), float32 or the default float.

    Raises:
        ValueError: more outputs than the network is wide.

    Example:
        >>> selection_readout(1, 3).tolist()
        [[1.0, 0.0, 0.0]]

    Source:
        XGN section 5: the first d_y coordinates.
    """
    check_integer("width", width, at_least=1)
    check_integer("outputs", outputs, at_least=1, at_most=width, remedy="Widen the network.")
    return jnp.eye(outputs, width)


def orthonormal_readout(key: Array, outputs: int, width: int) -> Float[Array, "c d"]:
    """P with random orthonormal rows, uniformly distributed.

    Args:
        key: a `jax.random.key`.
        outputs: rows of P, at most `width`.
        width: d, the width of the network.

    Returns:
        P (outputs, width) with P Pᵀ = 1.

    Raises:
        ValueError: more outputs than the network is wide.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> p = orthonormal_readout(jax.random.key(0), 2, 5)
        >>> bool(jnp.allclose(p @ p.T, jnp.eye(2), atol=1e-6))
        True

    Source:
        XGN section 5.
    """
    check_integer("width", width, at_least=1)
    check_integer("outputs", outputs, at_least=1, at_most=width, remedy="Widen the network.")
    check_key(key, optional=False)
    return jax.random.orthogonal(key, width)[:outputs]


def check_readout(readout: ArrayLike | None, width: int, dtype: jnp.dtype) -> Array | None:
    """P (C, d) in this dtype.

    A rank below C is a `ValueError`, or of a traced P a run-time error.
    """
    if readout is None:
        return None
    check_finite("readout", readout)
    p = check_array("readout", readout)
    if p.ndim != 2 or p.shape[1] != width or not 1 <= p.shape[0] <= width:
        raise ValueError(
            f"readout must be (C, d) with d = {width} and 1 <= C <= d; got {p.shape}. Give None "
            "for the identity."
        )
    message = (
        "readout must have full row rank: one of its rows is a combination of the others, so some "
        "changes of the outputs cannot be made. Remove dependent rows, or use orthonormal ones "
        "(orthonormal_readout)."
    )
    # The numerical rank of the dtype in which P is used.
    tolerance = max(p.shape) * float(jnp.finfo(dtype).eps)
    if is_concrete(readout):
        values = np.linalg.svd(np.asarray(readout, np.float64), compute_uv=False)
        if not values[-1] > tolerance * values[0]:
            raise ValueError(message)
        return p.astype(dtype)
    p = p.astype(dtype)
    values = decompose(jnp.linalg.svd, p, compute_uv=False)
    return eqx.error_if(p, ~(values[-1] > tolerance * values[0]), message)


def right_inverse(readout: Array | None, changes: Array) -> Array:
    """P⁺ applied to rows (N, C): the smallest changes of the state with P x = changes."""
    if readout is None:
        return changes
    with jax.enable_x64(True):
        p = readout.astype(jnp.float64)
        solved = decompose(jnp.linalg.solve, p @ p.T, changes.astype(jnp.float64).T)
        return (solved.T @ p).astype(changes.dtype)


@full_precision
def read(readout: Array | None, states: Array) -> Array:
    """Outputs P x_L of states (N, d)."""
    return states if readout is None else states @ readout.T
