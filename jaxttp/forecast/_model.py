"""What every forecast asks of a model, and of bounds on memory, before anything is computed."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxttp._checks import check_integer, check_number
from jaxttp._types import ApplyFn, Params
from jaxttp.adapters import output_shape
from jaxttp.ntk._select import leaf_paths, select_leaves


def check_model(
    apply_fn: ApplyFn, params: Params, x: Any, trainable: Any = None
) -> tuple[int, int]:
    """The outputs' shape (N, C) of a network that is fit for a forecast, from shapes alone.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``.
        params: its parameters.
        x: training samples (N, ...).
        trainable: which parameters train, as in `empirical_ntk`.

    Returns:
        ``(N, C)``.

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
    return shape


def check_memory(batch_size: int | None, max_bytes: int | None) -> None:
    """Refuse bounds on a kernel's working memory that are out of range."""
    if batch_size is not None:
        check_integer("kernel_batch_size", batch_size, at_least=1)
    if max_bytes is not None:
        check_number("max_bytes", max_bytes, above=0.0)
