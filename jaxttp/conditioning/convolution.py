"""Linear convolutional networks: the Toeplitz form and the exact Gauss-Newton matrix.

A valid cross-correlation is a matrix, so a linear CNN is a product of matrices. The bounds for
fully-connected layers do NOT transfer: the entries of those matrices are shared, which changes the
Jacobian. This module computes the exact matrix instead.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.arrays import as_double, check_covariance, double
from jaxttp._core.checks import check_integers
from jaxttp.conditioning.linear import matmul


def _check_filters(name: str, filters: Any, shape: tuple[int, ...]) -> Array:
    filters = as_double(name, filters)
    if filters.ndim - 2 not in (1, 2) or filters.ndim - 2 != len(shape):
        raise ValueError(
            f"{name} must be (out, in, size) for inputs (length,), or (out, in, height, width) for "
            f"inputs (height, width); got {filters.shape} for {shape}."
        )
    if any(size > length for size, length in zip(filters.shape[2:], shape, strict=True)):
        raise ValueError(f"{name} of size {filters.shape[2:]} do not fit into {shape}.")
    return filters


def _toeplitz(filters: Array, shape: tuple[int, ...]) -> Array:
    channels, size = filters.shape[1], math.prod(shape)
    basis = jnp.eye(channels * size, dtype=filters.dtype).reshape(-1, channels, *shape)
    images = jax.lax.conv_general_dilated(
        basis, filters, (1,) * len(shape), "VALID", precision="highest"
    )
    return images.reshape(channels * size, -1).T


def toeplitz(filters: ArrayLike, shape: Sequence[int]) -> Float[Array, "rows columns"]:
    """The matrix of a valid cross-correlation, 1-D or 2-D.

    Args:
        filters: (out, in, size) or (out, in, height, width).
        shape: (length,) or (height, width) of the inputs.

    Returns:
        (out * prod(shape - size + 1), in * prod(shape)): channels first, then positions row by row.

    Raises:
        ValueError: filters that do not fit the shape.

    Example:
        >>> import numpy as np
        >>> toeplitz(np.array([[[1.0, 2.0]]]), (3,)).tolist()
        [[1.0, 2.0, 0.0], [0.0, 1.0, 2.0]]

    Source:
        GNC Appendix B (its convolution is the valid cross-correlation of deep learning).
    """
    with double():
        shape = check_integers("shape", shape)
        return _toeplitz(_check_filters("filters", filters, shape), shape)


def _check_chain(
    layers: list[Any], shape: Sequence[int]
) -> tuple[list[Array], list[tuple[int, ...]]]:
    if not isinstance(layers, Sequence) or len(layers) == 0:
        raise ValueError("filters must be a list of at least one array of filters.")
    shapes, out = [check_integers("shape", shape)], []
    for i, layer in enumerate(layers):
        filters = _check_filters(f"filters[{i}]", layer, shapes[-1])
        if i > 0 and filters.shape[1] != out[-1].shape[0]:
            raise ValueError(
                f"filters[{i}] reads {filters.shape[1]} channels, filters[{i - 1}] gives "
                f"{out[-1].shape[0]}."
            )
        out.append(filters)
        shapes.append(
            tuple(n - size + 1 for n, size in zip(shapes[-1], filters.shape[2:], strict=True))
        )
    return out, shapes


def gauss_newton_convolution(
    filters: Any, shape: Sequence[int], covariance: ArrayLike | None = None
) -> Float[Array, "kd kd"]:
    """The Gauss-Newton matrix of a linear CNN, weight sharing included.

    With M = T_L ... T_1 (k, d) the map of the network, R = Sigma^(1/2) and p shared filter entries,
    G^_O = sum_p vec(dM/dw_p R) vec(dM/dw_p R)^T: its rank is at most p.

    Args:
        filters: [(out, in, size...), ...], the first layer first; valid cross-correlations.
        shape: (length,) or (height, width) of the inputs.
        covariance: Sigma (d, d) of the flattened inputs (channel, position); identity when None.

    Returns:
        (k d, k d), index out * d + in, in float64.

    Raises:
        ValueError: filters that do not chain or fit, a covariance that is not PSD.

    Example:
        >>> import numpy as np
        >>> gauss_newton_convolution([np.array([[[3.0]]])], (2,)).tolist()[0]     # I vec I^T
        [1.0, 0.0, 0.0, 1.0]

    Source:
        GNC Appendix B. Erratum: the fully-connected bounds do not hold for it: filters (1, -0.5)
        and (1, -0.499) on inputs of length 12 have a condition number of 7.3e6 against a "bound"
        of 15.
    """
    with double():
        layers, shapes = _check_chain(filters, shape)
        d = layers[0].shape[1] * math.prod(shapes[0])
        root = check_covariance(covariance, d).root

        def network(parts: list[Array]) -> Array:
            total = jnp.eye(d, dtype=jnp.float64) if root is None else root
            for part, size in zip(parts, shapes, strict=False):
                total = matmul(_toeplitz(part, size), total)
            return total.reshape(-1)

        parts = jax.jacfwd(network)(layers)
        size = layers[-1].shape[0] * math.prod(shapes[-1]) * d
        jacobian = jnp.concatenate([part.reshape(size, -1) for part in parts], axis=1)
        return matmul(jacobian, jacobian.T)
