"""One hidden leaky-ReLU layer, f(X) = W s(V X) with s(z) = max(z, alpha z).

With Lambda^i = diag(s'(V_i X)) and Gamma = s(VX)^T s(VX),

    G^_O = sum_i (Lambda^i X^T X Lambda^i) ⊗ (W_i W_i^T) + Gamma ⊗ I_k,

(k n, k n), index sample * k + out; alpha = 1 is the linear network, alpha = 0 ReLU.
"""

from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.arrays import as_double, double
from jaxttp._core.checks import check_number, is_concrete
from jaxttp._core.xla_cpu.threads import after
from jaxttp.conditioning.bounds import extreme_singular_values, ratio
from jaxttp.conditioning.linear import matmul


def _check_one_hidden_layer(
    output_weights: Any, input_weights: Any, data: Any, alpha: Any
) -> tuple[Array, Array, Array]:
    check_number("alpha", alpha, at_least=0.0)
    if is_concrete(alpha) and float(alpha) > 1.0:
        raise ValueError(f"alpha must lie in [0, 1]; got {alpha!r}.")
    w = as_double("W", output_weights, 2)
    v = as_double("V", input_weights, 2)
    x = as_double("X", data, 2)
    if w.shape[1] != v.shape[0]:
        raise ValueError(f"W {w.shape} and V {v.shape} do not chain: W is (k, m), V is (m, d).")
    if v.shape[1] != x.shape[0]:
        raise ValueError(
            f"X has shape {x.shape} but V reads {v.shape[1]} inputs; X is (d, n), a sample a "
            "column: transpose it."
        )
    return w, v, x


def _slopes(hidden: Array, alpha: Any) -> Array:
    return jnp.where(hidden >= 0, 1.0, jnp.asarray(alpha).astype(hidden.dtype))


def leaky_relu_gram(W: ArrayLike, V: ArrayLike, X: ArrayLike, alpha: Any) -> Float[Array, "kn kn"]:
    """The Gauss-Newton matrix of W s(V X) in output space, the Gram matrix of its Jacobian.

    Args:
        W: output weights (k, m).
        V: input weights (m, d).
        X: data (d, n), a sample a column; not divided by n.
        alpha: negative slope in [0, 1]; the slope at 0 is 1.

    Returns:
        (k n, k n), index sample * k + out, in float64.

    Raises:
        ValueError: shapes that do not chain, alpha outside [0, 1].

    Example:
        >>> import numpy as np
        >>> x = np.array([[1.0, -1.0]])
        >>> leaky_relu_gram(np.eye(1), np.eye(1), x, 0.5).tolist()
        [[2.0, -1.0], [-1.0, 0.5]]

    Source:
        GNC Lemma 3, eq (10).
    """
    with double():
        w, v, x = _check_one_hidden_layer(W, V, X, alpha)
        hidden = matmul(v, x)  # (m, n)
        slopes = _slopes(hidden, alpha)
        active = slopes * hidden
        k, n = w.shape[0], x.shape[1]
        per_sample = (w[None] * slopes.T[:, None, :]).reshape(n * k, -1)  # W Lambda_s
        grown = jnp.repeat(jnp.repeat(matmul(x.T, x), k, axis=0), k, axis=1)
        gram = grown * matmul(per_sample, per_sample.T)
        return gram + jnp.kron(matmul(active.T, active), jnp.eye(k, dtype=gram.dtype))


def leaky_relu_bound(W: ArrayLike, V: ArrayLike, X: ArrayLike, alpha: Any) -> Float[Array, "..."]:
    """A bound on kappa of `leaky_relu_gram`, from singular values alone.

        kappa <= (s_max^2(X) s_max^2(W) + l_max(Gamma))
                 / (alpha^2 s_min^2(X) s_min^2(W) + l_min(Gamma))

    s_min(X) is over n values and s_min(W) over k: zero for n > d, and for k > m. l_min(Gamma) is
    zero for n > m. Where both vanish the bound is +inf.

    Args:
        W: output weights (k, m).
        V: input weights (m, d).
        X: data (d, n), a sample a column.
        alpha: negative slope in [0, 1].

    Returns:
        A scalar; +inf where the bound is vacuous, nan for a zero network.

    Raises:
        ValueError: shapes that do not chain, alpha outside [0, 1].

    Example:
        >>> import numpy as np
        >>> float(leaky_relu_bound(np.eye(2), np.eye(2), np.diag([1.0, 2.0]), 0.5))
        6.4

    Source:
        GNC Lemma 4, eq (11). Its second bound is false: (25) and (26) pull the slopes out of the
        sum, which is wrong where units cancel. With X = I, V = [[1, -1],
        [-1, 0.01]] and alpha = 0.1, l_min(Gamma) is 0 but (25) says at least 0.0037; with
        V = [[1, 1], [1, -1]] and alpha = 0, l_max(Gamma) is 2.618 but (26) says at most 2.
    """
    with double():
        w, v, x = _check_one_hidden_layer(W, V, X, alpha)
        hidden = matmul(v, x)
        k, n = w.shape[0], x.shape[1]
        x_max, x_min = extreme_singular_values(x, n)
        w_max, w_min = extreme_singular_values(after(w, x_max), k)
        active = _slopes(hidden, alpha) * hidden
        g_max, g_min = extreme_singular_values(after(active, x_max, w_max), n)
        above = (x_max * w_max) ** 2 + g_max**2
        slope = jnp.asarray(alpha).astype(above.dtype)
        return ratio(above, (slope * x_min * w_min) ** 2 + g_min**2)
