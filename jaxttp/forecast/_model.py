"""What every forecast asks of a model before anything is computed."""

from typing import Any

import jax

from jaxttp._core.types import ApplyFn, Params
from jaxttp.adapters import as_rows


def check_model(apply_fn: ApplyFn, params: Params, x: Any) -> tuple[ApplyFn, jax.ShapeDtypeStruct]:
    """A network that is fit for a forecast, and what it returns, from shapes alone.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``, or (N, T, V).
        params: its parameters.
        x: training samples (N, ...).

    Returns:
        The network with outputs (N, C), and the shape and dtype of its own, see `as_rows`.

    Raises:
        TypeError: see `output_shape`.
        ValueError: see `output_shape`; outputs of less than float32, whose losses have two or three
            digits and their kernels no small eigenvalues.
    """
    rows, outputs = as_rows(apply_fn, params, x)
    if outputs.dtype.itemsize < 4:
        raise ValueError(
            f"apply_fn returns {outputs.dtype}, too coarse for a forecast; let the network compute "
            "in float32 (modules of Flax: dtype=jnp.float32); if all but its last cast does, undo "
            "that with lambda params, x: apply_fn(params, x).astype('float32')."
        )
    return rows, outputs
