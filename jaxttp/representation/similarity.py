"""Distances of kernels and similarities of features: numbers between 0 and 1."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.arrays import as_double, double
from jaxttp._core.checks import check_finite_value, check_several, refuse
from jaxttp._core.results import RESULT
from jaxttp.representation.geometry import feature_rows


def _check_kernel(name: str, value: Any) -> Array:
    """A finite, non-zero kernel in float64, divided by its largest entry."""
    value = value if hasattr(value, "dtype") else np.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.floating) or value.size == 0:
        raise ValueError(
            f"{name} must be a floating-point kernel, (N, C, N, C) or (N, N); got {value.dtype} "
            f"{tuple(value.shape)}."
        )
    value = check_finite_value(name, jnp.asarray(value)).astype(jnp.float64)
    size = jnp.max(jnp.abs(value))
    return refuse(value, size == 0, f"{name} must not be zero: it has no direction.") / size


def kernel_distance(first: ArrayLike, second: ArrayLike) -> Float[Array, ""]:
    """S = 1 - <K, K'>_F / (||K||_F ||K'||_F): 0 for proportional kernels, at most 1 for PSD ones.

    Args:
        first: a kernel of any shape, such as (N, C, N, C).
        second: another on the same samples, of the same shape.

    Returns:
        A scalar in float64.

    Raises:
        ValueError: shapes that differ, kernels that are empty, zero or not finite.

    Example:
        >>> import numpy as np
        >>> round(float(kernel_distance(np.eye(2), np.diag([1.0, 0.0]))), 6)
        0.292893

    Source:
        Fort et al. 2020, "Deep learning versus kernel learning"; XGN's kernel-distance figures.
        Averaging K v over random v before the cosine is one probe, not an estimate: give the exact
        kernel, of a subset where it is large.
    """
    return _distance(("first", first), ("second", second))


def _distance(first: tuple[str, Any], second: tuple[str, Any]) -> Array:
    """`kernel_distance` of two kernels and what messages call them."""
    with double():
        a, b = _check_kernel(*first), _check_kernel(*second)
        if a.shape != b.shape:
            raise ValueError(
                f"{second[0]} must have the shape of {first[0]}, {a.shape}; got {b.shape}."
            )
        a, b = a / jnp.linalg.norm(a.reshape(-1)), b / jnp.linalg.norm(b.reshape(-1))
        # |a - b|^2 / 2 = 1 - <a, b> without the cancellation near 0.
        return 0.5 * jnp.sum((a - b) ** 2)


def kernel_rate(
    kernels: Sequence[Any] | ArrayLike, ts: Sequence[float] | ArrayLike
) -> Float[Array, " t"]:
    """The rate of change of the kernel, S(K_t, K_{t + dt}) / dt between consecutive checkpoints.

    Args:
        kernels: T kernels on the same samples, a sequence or an array (T, ...).
        ts: their times (T,), increasing.

    Returns:
        (T - 1,) in float64.

    Raises:
        ValueError: fewer than two kernels, times that do not match or do not increase, and what
            `kernel_distance` refuses.

    Example:
        >>> import numpy as np
        >>> kernels = [np.eye(2), np.diag([1.0, 0.0]), np.eye(2)]
        >>> kernel_rate(kernels, [0.0, 1.0, 3.0]).round(4).tolist()
        [0.2929, 0.1464]
    """
    with double():
        times = as_double("ts", ts, 1)
        kernels = check_several("kernels", kernels, "kernels")
        count = len(kernels)
        if count < 2 or times.shape != (count,):
            raise ValueError(
                f"ts must give one time for each of the kernels, two at least; got {count} "
                f"kernels and times {times.shape}."
            )
        steps = refuse(jnp.diff(times), jnp.diff(times) <= 0, "ts must increase.")
        named = [(f"kernels[{i}]", kernel) for i, kernel in enumerate(kernels)]
        return jnp.stack([_distance(*pair) for pair in itertools.pairwise(named)]) / steps


def linear_cka(first: ArrayLike, second: ArrayLike) -> Float[Array, ""]:
    """||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F), centered features; 1 for the same up to rotation.

    Args:
        first: X (N, h1), or (N, ...), flattened.
        second: Y (N, h2) on the same samples, or (N, ...).

    Returns:
        A scalar in [0, 1], in float64. With few samples (N not well above the widths) it is large
        for unrelated features, too.

    Raises:
        ValueError: numbers of samples that differ, features that are empty, constant, not finite.

    Example:
        >>> import numpy as np
        >>> x = np.array([[1.0, 0], [0, 1], [-1, 0], [0, -1]])
        >>> float(linear_cka(x, 3 * x @ np.array([[0.0, 1], [-1, 0]])).round(12))
        1.0

    Source:
        Kornblith et al. 2019, eq (3); XGN's CKA figures.
    """
    with double():
        x, y = _centered("first", first), _centered("second", second)
        if x.shape[0] != y.shape[0]:
            raise ValueError(
                f"second must have the samples of first, {x.shape[0]} rows; got {y.shape[0]}."
            )
        return _cka(x, y)


def _centered(name: str, features: Any) -> Array:
    rows = feature_rows(name, features)
    rows = rows - jnp.mean(rows, axis=0, keepdims=True)
    return rows / jnp.linalg.norm(rows)


def _inner_product(x: Array, y: Array) -> Array:
    """||Y^T X||_F^2 = <X X^T, Y Y^T>, by the smaller matrices."""
    n = x.shape[0]
    if x.shape[1] * y.shape[1] <= n * n:
        return jnp.sum(jnp.matmul(y.T, x, precision="highest") ** 2)
    k, l = (jnp.matmul(z, z.T, precision="highest") for z in (x, y))  # noqa: E741
    return jnp.sum(k * l)


def _cka(x: Array, y: Array) -> Array:
    return _inner_product(x, y) / jnp.sqrt(_inner_product(x, x) * _inner_product(y, y))


class CKATable(NamedTuple):
    """CKA between every layer of one network and every layer of another.

    Attributes:
        values: (A, B) in float64.
        rows: names of the first network's layers.
        columns: names of the second's.
    """

    values: Array
    rows: tuple[str, ...]
    columns: tuple[str, ...]

    plot, _repr_html_, __repr__ = RESULT


def cka_table(first: Mapping[str, Any], second: Mapping[str, Any] | None = None) -> CKATable:
    """Linear CKA between layers: of one network, or of two (two optimizers, moments or seeds).

    Args:
        first: name -> features (N, ...), such as ``model.activations(x)``.
        second: the same of another network on the same samples; the first again when None.

    Returns:
        A `CKATable`; symmetric with a diagonal of ones for one network.

    Raises:
        ValueError: no layers, numbers of samples that differ, features that `linear_cka` refuses.

    Example:
        >>> import numpy as np
        >>> x = np.eye(3)
        >>> table = cka_table({"in": x, "out": x[:, :1]})
        >>> table.rows, table.values.round(3).tolist()
        (('in', 'out'), [[1.0, 0.707], [0.707, 1.0]])
    """
    with double():
        sides = []
        for name, layers in (("first", first), ("second", first if second is None else second)):
            if not isinstance(layers, Mapping) or not layers:
                raise ValueError(
                    f"{name} must name at least one layer, name -> features; got "
                    f"{type(layers).__name__}."
                )
            sides.append({key: _centered(f"{name}[{key!r}]", z) for key, z in layers.items()})
        counts = {len(rows) for layers in sides for rows in layers.values()}
        if len(counts) != 1:
            raise ValueError(f"all layers must have the same samples; got {sorted(counts)} rows.")
        values = [[_cka(a, b) for b in sides[1].values()] for a in sides[0].values()]
        return CKATable(
            jnp.stack([jnp.stack(row) for row in values]), tuple(sides[0]), tuple(sides[1])
        )
