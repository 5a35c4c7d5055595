"""Independent brute force: short, slow, and written without the library."""

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree


def jacobian(apply_fn, params, x):
    """J (N, C, D) by reverse mode over the flattened parameters, for the whole batch at once."""
    flat, unravel = ravel_pytree(params)
    return jax.jacrev(lambda w: apply_fn(unravel(w), x))(flat)


def ntk(apply_fn, params, x1, x2=None):
    """Θ (N1, C, N2, C) = J(x1) J(x2)ᵀ."""
    first = jacobian(apply_fn, params, x1)
    second = first if x2 is None else jacobian(apply_fn, params, x2)
    return jnp.einsum("ncd,med->ncme", first, second)
