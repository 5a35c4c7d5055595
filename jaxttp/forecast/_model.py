"""What every forecast asks of a model before anything is computed."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxttp._types import ApplyFn, Params
from jaxttp.adapters import output_shape
from jaxttp.ntk._select import leaf_paths, select_leaves


def check_model(
    apply_fn: ApplyFn, params: Params, x: Any, trainable: Any = None
) -> jax.ShapeDtypeStruct:
    """What a network that is fit for a forecast returns, from shapes alone.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``.
        params: its parameters.
        x: training samples (N, ...).
        trainable: which parameters train, as in `empirical_ntk`.

    Returns:
        Shape (N, C) and dtype of the outputs.

    Raises:
        TypeError: see `output_shape`.
        ValueError: see `output_shape`; parameters that train, or outputs, of less than float32,
            whose losses have two or three digits and their kernels no small eigenvalues.
    """
    shape = output_shape(apply_fn, params, x)
    chosen = select_leaves(params, trainable)
    leaves = zip(leaf_paths(params), jax.tree.leaves(params), chosen, strict=True)
    for path, leaf, counts in leaves:
        dtype = jnp.result_type(leaf)
        if counts and dtype.itemsize < 4:
            raise ValueError(
                f"params{f' at {path}' if path else ''} are {dtype}, too coarse for a forecast; "
                "cast them to float32: params = jax.tree.map(lambda a: a.astype('float32'), "
                "params), and x likewise."
            )
    dtype = jax.eval_shape(apply_fn, params, x).dtype
    if dtype.itemsize < 4:
        raise ValueError(
            f"apply_fn returns {dtype}, too coarse for a forecast; let it return float32: "
            "lambda params, x: apply_fn(params, x).astype('float32')."
        )
    return jax.ShapeDtypeStruct(shape, dtype)
