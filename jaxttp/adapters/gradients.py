"""Gradients that are not finite behind outputs that are: which sample's, and of which parameter."""

import functools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp._core.checks import is_concrete, is_finite
from jaxttp._core.types import ApplyFn, Params, count
from jaxttp.adapters.outputs import FEW

DERIVATIVES = {1: "gradient", 2: "second derivative"}


def check_gradients(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    result: Any,
    *,
    trainable: Sequence[bool] | None = None,
    order: int = 1,
    name: str = "x",
) -> None:
    """Raise `ValueError` if `result` is not finite because the gradient of a sample is not.

    The norm of a row of zeros is 0 and has no derivative: outputs are finite and the Jacobian is
    not. Where `result` is finite nothing else is computed. Else samples are differentiated
    in turn, 8 at a time, until one has a gradient that is not finite. If none has, nothing is
    raised: `result` has another reason, such as a learning rate that is too high.

    Traced values, and arrays spread over several processes, pass.

    Args:
        apply_fn: ``(params, x) -> outputs (N, ...)``; row i depends on row i of x alone.
        params: pytree of arrays.
        x: samples (N, ...), an array or a pytree of arrays.
        result: pytree of arrays that were computed from the gradients.
        trainable: for each leaf of `params`, whether it is differentiated by; None for all that
            are floating-point.
        order: 1, or 2 for results of second derivatives.
        name: what the message calls `x`.

    Raises:
        ValueError: with the index of the first such sample, and the path of the parameter.

    Example:
        >>> x = jnp.array([[3.0, 4.0], [0.0, 0.0]])
        >>> network = lambda w, x: jnp.linalg.norm(x * w[None], axis=1, keepdims=True)
        >>> check_gradients(network, jnp.ones(2), x, jnp.nan)
        Traceback (most recent call last):
        ...
        ValueError: apply_fn: the gradient of sample 1 of x with respect to params is not finite...
    """
    given = jax.tree.leaves((params, x, result))
    if not all(is_concrete(a) and getattr(a, "is_fully_addressable", True) for a in given):
        return
    if all(map(is_finite, jax.tree.leaves(result))):
        return
    params = jax.tree.map(jnp.asarray, params)
    mask: Any = eqx.is_inexact_array
    if trainable is not None:
        mask = jax.tree.unflatten(jax.tree.structure(params), trainable)
    chosen, frozen = eqx.partition(params, mask)

    def signed_sum(chosen: Params, frozen: Params, rows: Any) -> Array:
        """A scalar with a different weight on every output of a row, so that none cancel."""
        outputs = apply_fn(eqx.combine(chosen, frozen), rows)
        signs = np.cos(np.arange(outputs[0].size)).reshape(1, *outputs.shape[1:])
        return jnp.sum(outputs * signs.astype(outputs.dtype))

    @functools.partial(jax.jit, static_argnums=4)
    def are_bad(chosen: Params, frozen: Params, x: Any, start: Any, size: int) -> Array:
        """For each leaf that is differentiated by, whether rows from `start` on spoil it."""
        rows = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(jnp.asarray(a), start, size), x)
        derivative = functools.partial(jax.grad(signed_sum), frozen=frozen, rows=rows)
        found = derivative(chosen)
        if order == 2:
            found = jax.jvp(derivative, (chosen,), (jax.tree.map(jnp.ones_like, chosen),))[1]
        return jnp.stack([~jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(found)])

    low, high = 0, count(x)
    for size in (min(FEW, high), 1):
        for start in range(low, high, size):
            bad = np.asarray(are_bad(chosen, frozen, x, start, size))
            if bad.any():
                low, high = start, min(start + size, high)
                break
        else:
            return
    path = jax.tree_util.tree_leaves_with_path(chosen)[bad.argmax()][0]
    raise ValueError(
        f"apply_fn: the {DERIVATIVES[order]} of sample {low} of {name} with respect to "
        f"params{jax.tree_util.keystr(path)} is not finite. A norm, a square root or a power has "
        "no derivative at 0, where its value is finite. Add an epsilon inside, such as "
        "jnp.sqrt(jnp.sum(h**2, axis=-1) + 1e-12), or leave the sample out."
    )
