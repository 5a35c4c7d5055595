"""Square roots that have a derivative where they are zero."""

import jax.numpy as jnp
from jaxtyping import Array


def root(squares: Array) -> Array:
    """Square roots of what is not negative; the derivative at 0 is 0.

    That of `jnp.sqrt` is infinite, and NaN once it is multiplied by the zero of a distance to
    itself: ``jax.grad`` of such a norm would be NaN in every entry.

    Args:
        squares: array of any shape, not negative; NaN stays.

    Example:
        >>> import jax
        >>> jax.grad(lambda x: root(jnp.sum((x - x) ** 2)))(2.0).tolist()
        0.0
    """
    is_zero = squares == 0
    return jnp.where(is_zero, 0.0, jnp.sqrt(jnp.where(is_zero, 1.0, squares)))
