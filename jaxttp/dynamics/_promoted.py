"""Weights in half precision as float32, for what follows small differences of outputs."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp._core.checks import is_concrete
from jaxttp._core.types import Params, select_leaves


def promote(params: Params, trainable: Any = None) -> tuple[Params, tuple[str, ...]]:
    """Parameters that train, those in half precision as float32, and what was done in words.

    A forecast needs small differences of outputs and small eigenvalues, which the two or three
    digits of bfloat16 and float16 do not have; the cast itself is exact. What does not train stays.

    Args:
        params: pytree of arrays.
        trainable: which parameters train, as in `empirical_ntk`.

    Returns:
        ``(params, notes)``; `params` itself and no note where nothing is that coarse.

    Example:
        >>> promote({"w": jnp.ones(2, "bfloat16")})
        ({'w': Array([1., 1.], dtype=float32)}, ('parameters promoted from bfloat16',))
    """
    leaves, treedef = jax.tree.flatten(params)
    chosen = select_leaves(params, trainable)
    coarse = [on and _is_coarse(leaf) for leaf, on in zip(leaves, chosen, strict=True)]
    if not any(coarse):
        return params, ()
    names = dict.fromkeys(jnp.result_type(a).name for a, is_so in zip(leaves, coarse, strict=True)
                          if is_so)  # fmt: skip
    pairs = zip(leaves, coarse, strict=True)
    wide = [_widened(leaf) if is_so else leaf for leaf, is_so in pairs]
    return jax.tree.unflatten(treedef, wide), (f"parameters promoted from {' and '.join(names)}",)


def promote_samples(x: Any) -> Any:
    """Samples in half precision as float32, which goes with parameters that were promoted."""
    return jax.tree.map(lambda leaf: _widened(leaf) if _is_coarse(leaf) else leaf, x)


def promote_all(params: Params, *samples: Any) -> tuple[Any, ...]:
    """Parameters and samples, in float32 where parameters are coarser, which a warning says.

    Args:
        params: pytree of arrays, all of which train.
        *samples: arrays or pytrees of arrays; None stays None.

    Returns:
        (params, *samples).
    """
    params, notes = promote(params)
    if not notes:
        return params, *samples
    warn_of(notes)
    return params, *map(promote_samples, samples)


def warn_of(notes: tuple[str, ...]) -> None:
    """Say once what was promoted, for results that carry no notes."""
    for note in notes:
        warnings.warn(
            f"{note} to float32 for the forecast: half precision has no small eigenvalues. The "
            "training itself may go on in half precision; its rounding is not forecast.",
            UserWarning, stacklevel=4,
        )  # fmt: skip


def _widened(leaf: Any) -> Array:
    """In float32; on CPUs by NumPy, since XLA converts no float16 where the CPU does not (F16C)."""
    if is_concrete(leaf) and jax.default_backend() == "cpu":
        return jax.device_put(np.asarray(leaf).astype(np.float32))
    return jnp.asarray(leaf, jnp.float32)


def _is_coarse(leaf: Any) -> bool:
    dtype = jnp.result_type(leaf)
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
