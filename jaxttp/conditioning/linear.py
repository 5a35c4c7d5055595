"""The Gauss-Newton matrix of a deep linear network, in closed form.

With f(x) = W_L ... W_1 x, S_l = W_L ... W_{l+1} (k, a_l), P_l = W_{l-1} ... W_1 (a_{l-1}, d),
A_l = S_l S_l^T, B_l = P_l^T P_l and R = Sigma^(1/2),

    G^_O = sum_l A_l ⊗ (R B_l R)    (k d, k d), index out * d + in,

which shares its non-zero eigenvalues with the (p, p) matrix E[(df/dtheta)^T (df/dtheta)].
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.arrays import Covariance, as_double, check_covariance, double
from jaxttp._core.checks import check_integer, check_integers, check_number, is_concrete
from jaxttp.ntk.kernels import register_symmetric


def matmul(a: Array, b: Array) -> Array:
    """A product at full precision on every device."""
    return jnp.matmul(a, b, precision="highest")


def partial_products(
    weights: list[Array], scales: list[Array] | None = None
) -> tuple[list[Array], list[Array]]:
    """The products behind and before each layer l = 1..L, with factors D_l = diag(scales[l]).

    Args:
        weights: W_1 ... W_L.
        scales: (a_l,) behind every layer but the last, or None.

    Returns:
        S_l = W_L D_{L-1} ... W_{l+1} D_l, (k, a_l), and P_l = D_{l-1} W_{l-1} ... D_1 W_1,
        (a_{l-1}, d); S_L and P_1 are identities.
    """
    factors = scales or [jnp.ones(1, weights[0].dtype)] * (len(weights) - 1)
    outer = [jnp.eye(weights[-1].shape[0], dtype=weights[-1].dtype)]
    for weight, factor in zip(weights[:0:-1], factors[::-1], strict=True):
        outer.append(matmul(outer[-1], weight) * factor[None])
    inner = [jnp.eye(weights[0].shape[1], dtype=weights[0].dtype)]
    for weight, factor in zip(weights[:-1], factors, strict=True):
        inner.append(matmul(weight, inner[-1]) * factor[:, None])
    return outer[::-1], inner


def check_weights(weights: Any, names: Sequence[str] = ()) -> list[Array]:
    """W_1 (a_1, d), ..., W_L (k, a_{L-1}) in float64, or `ValueError` where they do not chain.

    Args:
        weights: a list of matrices.
        names: of the matrices in messages; weights[0] and so on when empty.
    """
    if not isinstance(weights, Sequence) or len(weights) == 0:
        raise ValueError(
            "weights must be a list of at least one matrix, [W_1 (a1, d), ..., W_L (k, a)]; "
            f"got {type(weights).__name__}."
        )
    names = names or [f"weights[{i}]" for i in range(len(weights))]
    chain = [as_double(name, weight, 2) for name, weight in zip(names, weights, strict=True)]
    for i in range(1, len(chain)):
        if chain[i].shape[1] != chain[i - 1].shape[0]:
            raise ValueError(
                f"{names[i]} has shape {chain[i].shape} but {names[i - 1]} gives "
                f"{chain[i - 1].shape[0]} features; the columns of each must be the rows of the "
                "one before it (the first layer comes first)."
            )
    return chain


def check_scales(scales: Any, weights: list[Array]) -> list[Array] | None:
    """Fixed factors (a_l,) behind every layer but the last, or None."""
    if scales is None:
        return None
    if not isinstance(scales, Sequence) or len(scales) != len(weights) - 1:
        raise ValueError(
            f"scales must be a list of {len(weights) - 1} vectors, one for every hidden layer."
        )
    out = [as_double(f"scales[{i}]", scale, 1) for i, scale in enumerate(scales)]
    for i, (scale, weight) in enumerate(zip(out, weights, strict=False)):
        if scale.shape[0] != weight.shape[0]:
            raise ValueError(
                f"scales[{i}] has {scale.shape[0]} entries, hidden layer {i} has {weight.shape[0]}."
            )
    return out


def check_linear(
    weights: Any, covariance: Any, skip: Any = 0.0, scales: Any = None
) -> tuple[list[Array], list[Array] | None, Covariance]:
    """W_1 ... W_L including skips, the scales and Sigma, checked; call it inside `double`."""
    chain = check_weights(weights)
    factors = check_scales(scales, chain)
    sigma = check_covariance(covariance, chain[0].shape[1])
    check_number("skip", skip)
    if not is_concrete(skip) or float(skip) != 0.0:
        beta = jnp.asarray(skip).astype(jnp.float64)
        chain = [w + beta * jnp.eye(*w.shape, dtype=w.dtype) for w in chain]
    return chain, factors, sigma


def gauss_newton_linear(
    weights: Any, covariance: ArrayLike | None = None, *, skip: Any = 0.0, scales: Any = None
) -> Float[Array, "kd kd"]:
    """The Gauss-Newton matrix of a deep linear network, sum_l A_l ⊗ (R B_l R).

    Args:
        weights: [W_1 (a1, d), ..., W_L (k, a)].
        covariance: Sigma (d, d), the second moments of the inputs; the identity when None.
        skip: beta of W_l + beta I on every layer (rectangular identity).
        scales: fixed factors (a_l,) behind every hidden layer, as of a frozen batch norm.

    Returns:
        (k d, k d), index out * d + in, symmetric PSD, in float64 for any weights.

    Raises:
        ValueError: shapes that do not chain, a covariance that is not PSD.

    Example:
        >>> import numpy as np
        >>> v, w = np.array([[1.0, 2.0]]), np.array([[3.0]])    # f(x) = 3 (x_1 + 2 x_2)
        >>> gauss_newton_linear([v, w]).tolist()                # 9 I + v^T v
        [[10.0, 2.0], [2.0, 13.0]]

    Source:
        GNC eq (5) and Lemma 2; eq (7) with `skip`. Erratum: U is the vertical stack of the blocks.
    """
    return gauss_newton_linear_operator(weights, covariance, skip=skip, scales=scales).as_matrix()


class LinearGaussNewton(lx.AbstractLinearOperator):
    """G^_O of a deep linear network without its matrix: V (k, d) -> sum_l A_l V R B_l R.

    A product costs two passes through the layers; the memory is that of the weights. `mv` takes
    flat vectors (k d,) or matrices (k, d). `jaxttp.conditioning.condition_number` uses the
    structure and finds the smallest eigenvalue by a preconditioned iteration.

    Attributes:
        weights: W_1 ... W_L, including skips and scales.
        outer: S_1 ... S_L (k, a_l).
        lefts: A_1 ... A_L (k, k).
        covariance: Sigma with its root.
    """

    weights: list[Array]
    outer: list[Array]
    lefts: list[Array]
    covariance: Covariance

    @property
    def shape(self) -> tuple[int, int]:
        """(k, d)."""
        return self.weights[-1].shape[0], self.weights[0].shape[1]

    def mv(self, vector: ArrayLike) -> Array:
        """G^_O v, in the shape of v: (k d,) or (k, d)."""
        with double():
            vector = jnp.asarray(vector)
            k, d = self.shape
            if vector.shape not in ((k * d,), (k, d)):
                raise ValueError(
                    f"vector must have shape {(k * d,)} or {(k, d)}; got {vector.shape}."
                )
            root = self.covariance.root
            v = vector.astype(jnp.float64).reshape(k, d)
            # Horner's scheme through the layers.
            states = [v if root is None else matmul(v, root)]
            for weight in self.weights[:-1]:
                states.append(matmul(states[-1], weight.T))
            total = matmul(self.lefts[-1], states[-1])
            for index in range(len(states) - 2, -1, -1):
                below = matmul(total, self.weights[index])
                total = matmul(self.lefts[index], states[index]) + below
            return (total if root is None else matmul(total, root)).reshape(vector.shape)

    def as_matrix(self) -> Array:
        """The dense (k d, k d) matrix."""
        with double():
            k, d = self.shape
            total = jnp.zeros((k * d, k * d), jnp.float64)
            for a, right in zip(self.lefts, partial_products(self.weights)[1], strict=True):
                root = self.covariance.root
                right = right if root is None else matmul(right, root)
                total = total + jnp.kron(a, matmul(right.T, right))
            return 0.5 * (total + total.T)

    def transpose(self) -> "LinearGaussNewton":
        """The operator itself: it is symmetric."""
        return self

    def in_structure(self) -> jax.ShapeDtypeStruct:
        """A flat float64 vector (k d,)."""
        k, d = self.shape
        with double():
            return jax.ShapeDtypeStruct((k * d,), jnp.float64)

    def out_structure(self) -> jax.ShapeDtypeStruct:
        """A flat float64 vector (k d,)."""
        return self.in_structure()


register_symmetric(LinearGaussNewton)


def gauss_newton_linear_operator(
    weights: Any, covariance: ArrayLike | None = None, *, skip: Any = 0.0, scales: Any = None
) -> LinearGaussNewton:
    """The matrix of `gauss_newton_linear` as a linear operator, for when k d is large.

    Args:
        weights: [W_1 (a1, d), ..., W_L (k, a)].
        covariance: Sigma (d, d), the second moments of the inputs; the identity when None.
        skip: beta of W_l + beta I on every layer (rectangular identity).
        scales: fixed factors (a_l,) behind every hidden layer, as of a frozen batch norm.

    Returns:
        A `lineax` operator; `mv` takes (k d,) or (k, d), in float64.

    Raises:
        ValueError: shapes that do not chain, a covariance that is not PSD.

    Example:
        >>> import numpy as np
        >>> operator = gauss_newton_linear_operator([np.array([[1.0, 2.0]]), np.array([[3.0]])])
        >>> operator.mv(np.array([1.0, 0.0])).tolist()
        [10.0, 2.0]

    Source:
        GNC Lemma 2.
    """
    with double():
        chain, factors, sigma = check_linear(weights, covariance, skip, scales)
        outer, _ = partial_products(chain, factors)
        if factors is not None:
            chain = [w * s[:, None] for w, s in zip(chain, factors, strict=False)] + chain[-1:]
        return LinearGaussNewton(chain, outer, [matmul(s, s.T) for s in outer], sigma)


def batch_norm_scales(
    weights: Any, covariance: ArrayLike | None = None, *, epsilon: Any = 1e-5
) -> list[Array]:
    """The factors of a frozen batch normalization behind every hidden layer (gain 1).

    In evaluation mode batch norm divides by fixed standard deviations: unit j of layer l has
    variance (M_l Sigma M_l^T)_jj, M_l the map from the inputs to that layer, earlier factors
    included. The inputs are assumed centered, so that Sigma is their covariance.

    Args:
        weights: [W_1 (a1, d), ..., W_L (k, a)].
        covariance: Sigma (d, d); the identity when None.
        epsilon: added to the variances, at least 0.

    Returns:
        L - 1 float64 vectors (a_l,), for `scales` of the functions here.

    Raises:
        ValueError: shapes that do not chain, a covariance that is not PSD, negative epsilon.

    Example:
        >>> import numpy as np
        >>> scales = batch_norm_scales([np.diag([1.0, 100.0]), np.eye(2)], epsilon=0.0)
        >>> scales[0].tolist()
        [1.0, 0.01]

    Source:
        GNC Section 6 (which gives measurements, no formula); derived for frozen statistics.
    """
    check_number("epsilon", epsilon, at_least=0.0)
    with double():
        chain, _, sigma = check_linear(weights, covariance)
        total = jnp.eye(chain[0].shape[1]) if sigma.root is None else sigma.root
        scales = []
        for weight in chain[:-1]:
            total = matmul(weight, total)
            variance = jnp.sum(total**2, axis=1) + epsilon
            scale = jnp.where(variance > 0, 1 / jnp.sqrt(jnp.where(variance > 0, variance, 1)), 0.0)
            scales.append(scale)
            total = total * scale[:, None]
        return scales


def generic_rank(widths: Any, data_rank: int | None = None) -> int:
    """The rank of G^_O for almost all weights: k r - (k - q)(r - q).

    r is the rank of the data and q = min(r, a_1, ..., a_L) the narrowest width of the network.

    Args:
        widths: (d, a_1, ..., a_{L-1}, k), the inputs first, the outputs last.
        data_rank: rank of X or Sigma; d when None.

    Returns:
        The rank, at most k d.

    Raises:
        ValueError: fewer than two widths, widths that are not positive, a rank outside 1..d.

    Example:
        >>> generic_rank((196, 300, 300, 10))
        1960
        >>> generic_rank((4, 2, 3))         # a bottleneck: 3*4 - (3-2)*(4-2)
        10

    Source:
        Singh et al. (2021), used in GNC Section 4.
    """
    widths = check_integers("widths", widths)
    if len(widths) < 2:
        raise ValueError(f"widths must be two or more positive integers (d, ..., k); got {widths}.")
    d = widths[0]
    r = d if data_rank is None else check_integer("data_rank", data_rank, at_least=1, at_most=d)
    k, q = widths[-1], min([r, *widths[1:]])
    return k * r - (k - q) * (r - q)
