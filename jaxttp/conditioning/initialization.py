"""Condition numbers before any weight is drawn: one hidden linear layer with Gaussian weights."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxttp._core.arrays import double
from jaxttp._core.checks import check_integer, check_number
from jaxttp.conditioning.bounds import ratio


def _as_float64(value: Any) -> Array:
    return jnp.asarray(value).astype(jnp.float64)


def _check_gaussian_network(d: int, k: int, m: int, var_w: Any, var_v: Any, condition: Any) -> None:
    for name, value in (("d", d), ("k", k), ("m", m)):
        check_integer(name, value, at_least=1)
    check_number("var_w", var_w, at_least=0.0)
    check_number("var_v", var_v, at_least=0.0)
    check_number("covariance_condition", condition, at_least=1.0)


def gaussian_init_bound(
    d: int,
    k: int,
    m: int,
    *,
    var_w: Any,
    var_v: Any,
    t: Any,
    covariance_condition: Any = 1.0,
) -> Float[Array, "..."]:
    """A bound on kappa of W V x that holds with probability `gaussian_init_probability(t)`.

        kappa(Sigma) [s_w^2 (√m + √k + t)^2 + s_v^2 (√m + √d + t)^2]
                   / [s_w^2 (√m - √k - t)_+^2 + s_v^2 (√m - √d - t)_+^2]

    Args:
        d: inputs.
        k: outputs.
        m: hidden units.
        var_w: variance of the entries of W (k, m), s_w^2.
        var_v: variance of the entries of V (m, d), s_v^2.
        t: at least 0; a larger t is a looser bound that holds more often.
        covariance_condition: kappa(Sigma), at least 1.

    Returns:
        The bound; +inf where t (or d and k) is too large for it to say anything.

    Raises:
        ValueError: a width below 1, a negative variance or t, a condition number below 1.

    Example:
        >>> bound = gaussian_init_bound(10, 2, 1000, var_w=1e-3, var_v=0.1, t=3.0)
        >>> round(float(bound), 3), round(float(gaussian_init_probability(3.0)), 3)
        (2.197, 0.956)

    Source:
        GNC Lemma 7. Errata: every difference is clipped at 0 (squared unclipped, it makes the
        statement false), and the probability is 1 - 4 exp(-t^2/2): two matrices, two sides.
    """
    check_number("t", t, at_least=0.0)
    _check_gaussian_network(d, k, m, var_w, var_v, covariance_condition)
    with double():
        t, var_w, var_v = _as_float64(t), _as_float64(var_w), _as_float64(var_v)
        root_d, root_k, root_m = (float(np.sqrt(value)) for value in (d, k, m))
        above = var_w * (root_m + root_k + t) ** 2 + var_v * (root_m + root_d + t) ** 2
        low_w = jnp.maximum(root_m - root_k - t, 0.0)
        low_v = jnp.maximum(root_m - root_d - t, 0.0)
        below = var_w * low_w**2 + var_v * low_v**2
        return _as_float64(covariance_condition) * ratio(above, below)


def gaussian_init_probability(t: Any) -> Float[Array, "..."]:
    """How often `gaussian_init_bound` holds at least: max(0, 1 - 4 exp(-t^2 / 2)).

    Args:
        t: at least 0.

    Returns:
        A probability; 0 below t = 1.67.

    Raises:
        ValueError: a negative t.

    Example:
        >>> round(float(gaussian_init_probability(4.0)), 5)
        0.99866

    Source:
        GNC Lemma 7, whose 1 - 8 exp(-t^2/2) counts every side twice.
    """
    check_number("t", t, at_least=0.0)
    with double():
        return jnp.maximum(0.0, 1.0 - 4.0 * jnp.exp(-(_as_float64(t) ** 2) / 2))


def asymptotic_bound(
    d: int, k: int, m: int, *, var_w: Any, var_v: Any, covariance_condition: Any = 1.0
) -> Float[Array, "..."]:
    """The limit of the bound on kappa of W V x as d, k and m grow together, d, k < m.

        kappa(Sigma) [s_w^2 (1 + √(k/m))^2 + s_v^2 (1 + √(d/m))^2]
                   / [s_w^2 (1 - √(k/m))^2 + s_v^2 (1 - √(d/m))^2]

    Args:
        d: inputs, fewer than m.
        k: outputs, fewer than m.
        m: hidden units.
        var_w: variance of the entries of W (k, m).
        var_v: variance of the entries of V (m, d).
        covariance_condition: kappa(Sigma), at least 1.

    Returns:
        The limit of the bound: an estimate at finite widths, not a bound.

    Raises:
        ValueError: m <= max(d, k), a width below 1, a negative variance, a condition below 1.

    Example:
        >>> float(asymptotic_bound(25, 25, 100, var_w=1.0, var_v=1.0))     # (1.5 / 0.5)^2
        9.0

    Source:
        GNC eq (22); it needs d, k < m.
    """
    _check_gaussian_network(d, k, m, var_w, var_v, covariance_condition)
    if m <= max(d, k):
        raise ValueError(
            f"m must be larger than d and k for eq (22); got m={m}, d={d}, k={k}. Use "
            "gaussian_init_bound, which holds for every width."
        )
    return gaussian_init_bound(
        d, k, m, var_w=var_w, var_v=var_v, t=0.0, covariance_condition=covariance_condition
    )
