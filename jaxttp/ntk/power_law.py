"""How eigenvalues fall: a power law over a window of ranks."""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxttp._core.checks import (
    check_array,
    check_finite_value,
)
from jaxttp._core.results import RESULT


class PowerLaw(NamedTuple):
    """λ_k ≈ coefficient · k^−exponent over a window of ranks.

    Attributes:
        coefficient: c.
        exponent: s.
        window: first and last rank of the fit, from 1, both included.
        r_squared: share of the variance of log λ over the window that the line explains.
    """

    coefficient: Array
    exponent: Array
    window: tuple[int, int]
    r_squared: Array

    plot, _repr_html_, __repr__ = RESULT


def fit_power_law(values: ArrayLike, *, window: tuple[int, int] | None = None) -> PowerLaw:
    """Least squares for log λ_k = log c − s log k over a window of ranks.

    Args:
        values: eigenvalues in decreasing order (K,); those of the window must be positive (an error
            at run time otherwise).
        window: first and last rank, counted from 1, both included; None for K/10 to K/2, the bulk
            between the head, which follows no law, and the tail, which feels the sample's end.

    Raises:
        ValueError: a window that holds fewer than two ranks of `values`.

    Example:
        >>> import jax.numpy as jnp
        >>> law = fit_power_law(3.0 * jnp.arange(1.0, 101.0) ** -1.5)
        >>> round(float(law.exponent), 3), round(float(law.coefficient), 3), law.window
        (1.5, 3.0, (10, 50))
    """
    values = check_finite_value("values", check_array("values", values, ndim=1, floating=True))
    size = values.shape[0]
    first, last = window if window is not None else (max(1, size // 10), max(2, size // 2))
    if not 1 <= first < last <= size:
        raise ValueError(
            f"window=({first}, {last}) must hold at least two ranks between 1 and {size}."
        )
    chosen = values[first - 1 : last]
    chosen = eqx.error_if(
        chosen, jnp.any(chosen <= 0), "values: eigenvalues in the window must be positive"
    )
    x = jnp.log(jnp.arange(first, last + 1).astype(values.dtype))
    y = jnp.log(chosen)
    dx, dy = x - jnp.mean(x), y - jnp.mean(y)
    slope = jnp.sum(dx * dy) / jnp.sum(dx**2)
    total = jnp.sum(dy**2)
    residual = jnp.sum((dy - slope * dx) ** 2)
    goodness = jnp.where(total > 0, 1 - residual / jnp.where(total > 0, total, 1), 1)
    intercept = jnp.mean(y) - slope * jnp.mean(x)
    return PowerLaw(jnp.exp(intercept), -slope, (first, last), goodness.astype(values.dtype))
