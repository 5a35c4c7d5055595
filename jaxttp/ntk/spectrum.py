"""The eigenvalues and eigenvectors of a kernel, and measures of them.

With Θ = Σ_k λ_k v_k v_kᵀ: the part of a residual δy along v_k decays as exp(−η λ_k t / N), so the
spectrum and the alignment p_k = (v_k·δy)² make the whole training curve.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxttp._core.checks import (
    check_array,
    check_choice,
    check_finite_value,
    check_instance,
    check_integer,
    is_concrete,
)
from jaxttp._core.compile import full_precision
from jaxttp._core.results import RESULT
from jaxttp._core.xla_cpu.threads import decompose
from jaxttp.ntk.kernels import Factored, KernelLike


class Eigensystem(NamedTuple):
    """Eigenvalues in decreasing order, cleaned of negative rounding.

    Attributes:
        values: (K,), never negative.
        vectors: (K, N, C), or (K, N) for a kernel (N, N); row k belongs to value k.
        clipped: the most negative eigenvalue that was set to zero, 0 if none.
        rank: how many values exceed size · eps · λmax.
    """

    values: Array
    vectors: Array
    clipped: Array
    rank: Array

    plot, _repr_html_, __repr__ = RESULT


class ClassSeparation(NamedTuple):
    """How well the leading gradient components tell the classes apart.

    Attributes:
        between_fraction: variance between class means / total variance, in [0, 1], per component
            ("component") or over all of them together ("together").
        nearest_mean: fraction of samples whose nearest class mean is their own class's.
    """

    between_fraction: Array
    nearest_mean: Array

    plot, _repr_html_, __repr__ = RESULT


def as_matrix(kernel: KernelLike) -> Array:
    """(N, C, N, C) or (N, N) as a square matrix.

    Raises:
        ValueError: any other shape.

    Example:
        >>> import jax.numpy as jnp
        >>> as_matrix(jnp.zeros((3, 2, 3, 2))).shape
        (6, 6)
    """
    shape = kernel.shape if isinstance(kernel, Factored) else jnp.shape(kernel)
    half = shape[: len(shape) // 2]
    if len(shape) not in (2, 4) or half != shape[len(shape) // 2 :]:
        raise ValueError(f"kernel must be (N, C, N, C) or (N, N); got {shape}.")
    size = half[0] * (half[1] if len(half) == 2 else 1)
    if isinstance(kernel, Factored):
        return kernel.as_matrix()
    return check_array("kernel", kernel, floating=True).reshape(size, size)


def eigendecomposition(kernel: KernelLike) -> Eigensystem:
    """Θ = Σ_k λ_k v_k v_kᵀ with λ_1 ≥ λ_2 ≥ ... ≥ 0.

    Negative eigenvalues are rounding in a kernel that is a Gram matrix; they become zero, and the
    most negative of them is reported. An error at run time if the kernel is not finite.

    Args:
        kernel: (N, C, N, C) or (N, N); in float32 without `jax_enable_x64`, whatever it is. For
            float64 there, `numpy.linalg.eigh` of the matrix.

    Example:
        >>> import jax.numpy as jnp
        >>> eigendecomposition(jnp.diag(jnp.array([1.0, 4.0]))).values.tolist()
        [4.0, 1.0]
    """
    matrix = check_finite_value("kernel", as_matrix(kernel))
    half = jnp.asarray(0.5, matrix.dtype)
    values, vectors = decompose(jnp.linalg.eigh, half * (matrix + matrix.T))
    values, vectors = values[::-1], vectors.T[::-1]
    rank = jnp.sum(values > values[0] * matrix.shape[0] * jnp.finfo(matrix.dtype).eps)
    shape = jnp.shape(kernel)[: jnp.ndim(kernel) // 2]
    clipped = jnp.minimum(values[-1], jnp.zeros((), values.dtype))
    values = jnp.maximum(values, jnp.zeros((), values.dtype))
    return Eigensystem(values, vectors.reshape(-1, *shape), clipped, rank)


@full_precision
def label_alignment(system: Eigensystem, residual: ArrayLike) -> Array:
    """p_k = (v_k · δy)², how much of the residual lies along each eigenvector.

    They sum to ‖δy‖². Squared: the print of TTP (Appendix D and F.2) misses the square.

    Args:
        system: from `eigendecomposition`.
        residual: δy = f_0 − y, of the shape of one eigenvector, (N, C) or (N,).

    Example:
        >>> import jax.numpy as jnp
        >>> system = eigendecomposition(jnp.diag(jnp.array([1.0, 4.0])))
        >>> label_alignment(system, jnp.array([2.0, 3.0])).tolist()
        [9.0, 4.0]
    """
    check_instance("system", system, Eigensystem, "eigendecomposition")
    residual = check_finite_value("residual", check_array("residual", residual))
    if jnp.shape(residual) != system.vectors.shape[1:]:
        raise ValueError(
            f"residual must be {system.vectors.shape[1:]} like an eigenvector; "
            f"got {jnp.shape(residual)}."
        )
    return (system.vectors.reshape(len(system.values), -1) @ jnp.reshape(residual, -1)) ** 2


def gradient_components(system: Eigensystem, count: int) -> Array:
    """Uncentred PCA of the gradients g_i: coordinates (g_i · u_k)_i = √λ_k v_k, without any g_i.

    Args:
        system: from `eigendecomposition`.
        count: how many leading components.

    Returns:
        (N, C, count), or (N, count): a point for each gradient.

    Source:
        TTP Proposition 2, whose last line must read √λ_k v_k = (g_i · u_k)_i.

    Example:
        >>> import jax.numpy as jnp
        >>> system = eigendecomposition(jnp.diag(jnp.array([1.0, 4.0])))
        >>> abs(gradient_components(system, 1)).tolist()
        [[0.0], [2.0]]
    """
    check_instance("system", system, Eigensystem, "eigendecomposition")
    count = check_integer("count", count, at_least=1, at_most=len(system.values))
    scale = jnp.sqrt(system.values[:count]).reshape(-1, *([1] * (system.vectors.ndim - 1)))
    return jnp.moveaxis(scale * system.vectors[:count], 0, -1)


@full_precision
def class_separation(
    components: ArrayLike, labels: ArrayLike, *, classes: int, over: str = "together"
) -> ClassSeparation:
    """Separation of classes in the space of leading gradient components.

    Args:
        components: from `gradient_components`; the C gradients of a sample are one point.
        labels: integer labels (N,) in 0..classes-1.
        classes: the number of classes.
        over: "together" for one fraction of variance, "component" for one for each coordinate.

    Source:
        TTP Figure 3.

    Example:
        >>> import jax.numpy as jnp
        >>> points = jnp.array([[0.0], [0.1], [1.0], [1.1]])
        >>> result = class_separation(points, jnp.array([0, 0, 1, 1]), classes=2)
        >>> float(result.nearest_mean), float(result.between_fraction) > 0.9
        (1.0, True)
    """
    check_choice("over", over, ("together", "component"))
    classes = check_integer("classes", classes, at_least=1)
    components = check_array("components", components, floating=True)
    components = check_finite_value("components", components)
    if components.ndim == 0 or components.size == 0:
        raise ValueError(f"components must be (N, ...), not empty; got {components.shape}.")
    n = components.shape[0]
    labels = check_array("labels", labels)
    values = np.asarray(labels) if is_concrete(labels) else np.zeros(1, int)
    if labels.shape != (n,) or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"labels must be ({n},) integers, one a sample; got {labels.dtype} {labels.shape}."
        )
    low, high = values.min(), values.max()
    if low < 0 or high >= classes:
        raise ValueError(f"labels must lie in 0..{classes - 1}; got {low}..{high}.")
    points = components.reshape(n, -1)
    size = jnp.max(jnp.abs(points))  # fractions and distances do not depend on the scale
    points = points / jnp.where(size > 0, size, jnp.ones((), points.dtype))
    member = jax.nn.one_hot(jnp.asarray(labels, jnp.int32), classes, dtype=points.dtype)  # (N, K)
    counts = jnp.sum(member, axis=0)
    means = (member.T @ points) / jnp.maximum(counts, jnp.ones((), points.dtype))[:, None]
    centre = jnp.mean(points, axis=0, keepdims=True)
    total = jnp.sum((points - centre) ** 2, axis=0)
    between = jnp.sum(counts[:, None] * (means - centre) ** 2, axis=0)
    if over == "together":
        total, between = jnp.sum(total), jnp.sum(between)
    fraction = jnp.where(total > 0, between / jnp.where(total > 0, total, 1), 0)
    distances = jnp.sum((points[:, None] - means[None]) ** 2, axis=-1)
    distances = jnp.where(counts[None] > 0, distances, jnp.inf)
    right = jnp.argmin(distances, axis=1) == labels
    return ClassSeparation(fraction.astype(points.dtype), jnp.mean(right.astype(points.dtype)))


class PowerLaw(NamedTuple):
    """λ_k ≈ coefficient · k^−exponent over a window of ranks.

    Attributes:
        coefficient: c.
        exponent: s.
        window: first and last rank of the fit, from 1, both included.
        r_squared: fraction of the variance of log λ over the window that the line explains.
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
    fitted = values[first - 1 : last]
    text = "values: eigenvalues in the window must be positive"
    fitted = eqx.error_if(fitted, jnp.any(fitted <= 0), text)
    x = jnp.log(jnp.arange(first, last + 1).astype(values.dtype))
    y = jnp.log(fitted)
    dx, dy = x - jnp.mean(x), y - jnp.mean(y)
    slope = jnp.sum(dx * dy) / jnp.sum(dx**2)
    total = jnp.sum(dy**2)
    residual = jnp.sum((dy - slope * dx) ** 2)
    goodness = jnp.where(total > 0, 1 - residual / jnp.where(total > 0, total, 1), 1)
    intercept = jnp.mean(y) - slope * jnp.mean(x)
    return PowerLaw(jnp.exp(intercept), -slope, (first, last), goodness.astype(values.dtype))
