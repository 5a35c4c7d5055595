"""Bounds on the condition number of the Gauss-Newton matrix, one function a statement.

All of them were checked against brute force on thousands of random networks. Where a printed
statement is false, the corrected one is implemented. A vacuous bound is +inf, that of a zero matrix
nan. Smallest singular values are those of k values for S_l and of d for P_l: a narrow layer makes
them 0.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.arrays import as_double, check_covariance, double
from jaxttp._core.checks import check_integer, check_number, is_concrete
from jaxttp._core.results import RESULT
from jaxttp._core.xla_cpu.threads import after, decompose
from jaxttp.conditioning.linear import check_linear, check_weights, partial_products


class Bounds(NamedTuple):
    """Two upper bounds on kappa(G^_O), and their terms.

    Attributes:
        convex: kappa(Sigma) sum_l gamma_l kappa_l; the tighter one.
        maximum: kappa(Sigma) max_l kappa_l.
        terms: kappa_l = kappa^2(S_l) kappa^2(P_l), (L,); +inf where a layer is too narrow.
        weights: gamma_l = alpha_l / sum(alpha), (L,); nan where all alpha_l are zero.
        alphas: alpha_l = sigma_min^2(S_l) sigma_min^2(P_l), (L,).
        covariance_condition: kappa(Sigma), over its non-zero eigenvalues.
    """

    convex: Float[Array, "..."]
    maximum: Float[Array, "..."]
    terms: Float[Array, "... l"]
    weights: Float[Array, "... l"]
    alphas: Float[Array, "... l"]
    covariance_condition: Float[Array, "..."]

    plot, _repr_html_, __repr__ = RESULT


def ratio(above: Array, below: Array) -> Array:
    """Above / below with +inf for below = 0, and nan where both vanish."""
    quotient = above / jnp.where(below > 0, below, 1.0)
    return jnp.where(below > 0, quotient, jnp.where(above > 0, jnp.inf, jnp.nan))


def extreme_singular_values(matrix: Array, count: int) -> tuple[Array, Array]:
    """sigma_max and the `count`-th singular value, zero where the matrix has fewer.

    A smallest value that is zero to rounding is returned as zero, so that a bound becomes +inf
    and not merely large.
    """
    values = decompose(jnp.linalg.svd, matrix, compute_uv=False)
    if values.shape[0] < count:
        return values[0], jnp.zeros_like(values[0])
    floor = max(matrix.shape) * 2.0**-52 * values[0]
    return values[0], jnp.where(values[count - 1] > floor, values[count - 1], 0.0)


def linear_bound(
    weights: Any, covariance: ArrayLike | None = None, *, skip: Any = 0.0, scales: Any = None
) -> Bounds:
    """Deep linear and residual networks: the convex and the maximum bound.

        kappa <= kappa(Sigma) sum_l s_max^2(S_l) s_max^2(P_l) / sum_l s_min^2(S_l) s_min^2(P_l)
              <= kappa(Sigma) max_l kappa^2(S_l) kappa^2(P_l)

    One wide pair of factors is enough for a finite convex bound; the maximum bound needs all of
    them. With one hidden layer and Sigma = I the convex bound is the condition number itself.
    A singular Sigma enters with the condition number of its non-zero part, and then the bound is
    one of the pseudo-condition number.

    Args:
        weights: [W_1 (a1, d), ..., W_L (k, a)].
        covariance: Sigma (d, d), the second moments of the inputs; the identity when None.
        skip: beta of W_l + beta I on every layer (rectangular identity).
        scales: fixed factors (a_l,) behind every hidden layer, as of a frozen batch norm.

    Returns:
        `Bounds`; +inf where a bound is vacuous, nan for a matrix that is zero.

    Raises:
        ValueError: shapes that do not chain, a covariance that is not PSD.

    Example:
        >>> import numpy as np
        >>> bounds = linear_bound([np.diag([1.0, 2.0]), np.diag([1.0, 3.0])])
        >>> float(bounds.convex), float(bounds.maximum)     # (4 + 9) / (1 + 1), and 9
        (6.5, 9.0)

    Source:
        GNC Lemma 1, Lemma 2, eq (7). Errata: the smallest singular values are zero-padded, without
        which the bound is violated; m > max(d, k) is not needed; "skips always improve" is false.
    """
    with double():
        chain, factors, sigma = check_linear(weights, covariance, skip, scales)
        k, d = chain[-1].shape[0], chain[0].shape[1]
        largest, smallest = [], []
        done = [sigma.values]
        for left, right in zip(*partial_products(chain, factors), strict=True):
            left_max, left_min = extreme_singular_values(after(left, *done), k)
            right_max, right_min = extreme_singular_values(after(right, left_max, *done), d)
            done += [left_max, right_max]
            largest.append((left_max * right_max) ** 2)
            smallest.append((left_min * right_min) ** 2)
        above, alphas = jnp.stack(largest), jnp.stack(smallest)
        total, condition = jnp.sum(alphas), sigma.condition()
        convex = condition * ratio(jnp.sum(above), total)
        terms = jnp.where(alphas > 0, above / jnp.where(alphas > 0, alphas, 1.0), jnp.inf)
        maximum = jnp.where(jnp.any(above > 0), condition * jnp.max(terms), jnp.nan)
        fractions = jnp.where(total > 0, alphas / jnp.where(total > 0, total, 1.0), jnp.nan)
        return Bounds(convex, maximum, terms, fractions, alphas, condition)


def functional_hessian_bound(
    output_weights: ArrayLike,
    input_weights: ArrayLike,
    teacher: ArrayLike,
    covariance: ArrayLike | None = None,
) -> Float[Array, "..."]:
    """The functional Hessian of W V x under squared error with targets Z x: kappa(WV - Z) kappa(S).

    The spectrum of H_F is plus and minus the singular values of Omega = (WV - Z) Sigma, each m
    times, and zeros; the bound is one of the ratio of its extreme
    non-zero absolute eigenvalues.

    Args:
        output_weights: W (k, m).
        input_weights: V (m, d).
        teacher: Z (k, d).
        covariance: Sigma (d, d), positive definite; the identity when None.

    Returns:
        The bound, over the non-zero singular values of WV - Z; nan when WV = Z.

    Raises:
        ValueError: shapes that do not chain, a singular covariance.

    Example:
        >>> import numpy as np
        >>> float(functional_hessian_bound(np.eye(2), np.eye(2), np.diag([0.0, -1.0])))
        2.0

    Source:
        GNC eq (17)-(18). Errata: ||H_F^-1|| is 1 / s_min, Sigma must be positive definite. The
        full Hessian of the loss is indefinite and has no such bound.
    """
    with double():
        v, w = check_weights([input_weights, output_weights], ("input_weights", "output_weights"))
        z = as_double("teacher", teacher, 2)
        if z.shape != (w.shape[0], v.shape[1]):
            raise ValueError(f"teacher must have shape {(w.shape[0], v.shape[1])}; got {z.shape}.")
        sigma = check_covariance(covariance, v.shape[1])
        singular = jnp.any(sigma.values <= 0)
        if is_concrete(singular) and bool(np.asarray(singular)):
            raise ValueError(
                "covariance is singular; eq (18) needs a positive definite one. Remove constant "
                "and redundant inputs, or add samples."
            )
        residual = after(jnp.matmul(w, v, precision="highest") - z, sigma.values)
        values = decompose(jnp.linalg.svd, residual, compute_uv=False)
        floor = max(z.shape) * 2.0**-52 * values[0]
        smallest = jnp.min(jnp.where(values > floor, values, jnp.inf))
        bound = jnp.where(values[0] > 0, values[0] / smallest, jnp.nan) * sigma.condition()
        return jnp.where(singular, jnp.nan, bound)


def _as_float64(value: Any) -> Array:
    return jnp.asarray(value).astype(jnp.float64)


def gaussian_init_bound(
    d: int, k: int, m: int, *, var_w: Any, var_v: Any, t: Any, covariance_condition: Any = 1.0
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
        The bound; +inf where t (or d and k) is too large for a finite one.

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
    for name, value in (("d", d), ("k", k), ("m", m)):
        check_integer(name, value, at_least=1)
    check_number("var_w", var_w, at_least=0.0)
    check_number("var_v", var_v, at_least=0.0)
    check_number("covariance_condition", covariance_condition, at_least=1.0)
    with double():
        t, var_w, var_v = _as_float64(t), _as_float64(var_w), _as_float64(var_v)
        root_d, root_k, root_m = (float(np.sqrt(value)) for value in (d, k, m))
        above = var_w * (root_m + root_k + t) ** 2 + var_v * (root_m + root_d + t) ** 2
        low_w = jnp.maximum(root_m - root_k - t, 0.0)
        low_v = jnp.maximum(root_m - root_d - t, 0.0)
        below = var_w * low_w**2 + var_v * low_v**2
        return _as_float64(covariance_condition) * ratio(above, below)


def gaussian_init_probability(t: Any) -> Float[Array, "..."]:
    """The least probability of `gaussian_init_bound`: max(0, 1 - 4 exp(-t^2 / 2)).

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
    bound = gaussian_init_bound(
        d, k, m, var_w=var_w, var_v=var_v, t=0.0, covariance_condition=covariance_condition
    )
    if m <= max(d, k):
        raise ValueError(
            f"m must be larger than d and k for eq (22); got m={m}, d={d}, k={k}. Use "
            "gaussian_init_bound, which holds for every width."
        )
    return bound
