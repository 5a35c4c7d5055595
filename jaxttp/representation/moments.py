"""Second moments of features, accumulated over batches: a data set larger than memory is no matter.

The state is (samples, mean, scatter) and merges by Chan's formula, so that the order and the size
of the batches do not matter up to rounding, and nothing cancels when the mean is large.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.checks import check_array, check_finite, check_instance, check_integer
from jaxttp._core.compile import full_precision
from jaxttp._core.double import double
from jaxttp._core.results import RESULT
from jaxttp._core.roots import root
from jaxttp._core.types import ApplyFn, Params
from jaxttp._core.xla_cpu.threads import decompose
from jaxttp.adapters.inputs import traced_outputs
from jaxttp.adapters.outputs import check_per_sample, flatten_tokens
from jaxttp.representation._inputs import as_rows, refuse_constant


class FeatureMoments(NamedTuple):
    """What the measures need to know of samples that were seen and forgotten, in float64.

    Attributes:
        samples: how many so far, N.
        mean: (h,).
        scatter: sum of (z - mean)(z - mean)^T, (h, h).
    """

    samples: Array
    mean: Array
    scatter: Array

    plot, _repr_html_, __repr__ = RESULT

    @property
    def covariance(self) -> Array:
        """Scatter / N, (h, h)."""
        with double():
            return self.scatter / self.samples

    @property
    def second_moment(self) -> Array:
        """Mean of z z^T, (h, h)."""
        with double():
            return self.covariance + jnp.outer(self.mean, self.mean)


def init_moments(width: int) -> FeatureMoments:
    """No samples yet.

    Args:
        width: h, features of a sample.

    Returns:
        An empty `FeatureMoments`.

    Raises:
        ValueError: width below 1.

    Example:
        >>> init_moments(3).scatter.shape
        (3, 3)
    """
    check_integer("width", width, at_least=1)
    with double():
        zero = jnp.zeros((), jnp.float64)
        return FeatureMoments(zero, jnp.zeros(width), jnp.zeros((width, width)))


def update_moments(moments: FeatureMoments, features: ArrayLike) -> FeatureMoments:
    """The moments with one batch more.

    Args:
        moments: of the samples so far.
        features: (n, h), or (n, ...), flattened to (n, h); batches may differ in size.

    Returns:
        A new `FeatureMoments`; nothing is changed in place.

    Raises:
        ValueError: features that are empty, not finite, or of another width.

    Example:
        >>> import numpy as np
        >>> moments = update_moments(init_moments(2), np.array([[1.0, 0.0], [3.0, 0.0]]))
        >>> moments.mean.tolist(), moments.covariance.tolist()
        ([2.0, 0.0], [[1.0, 0.0], [0.0, 0.0]])

    Source:
        Chan, Golub, LeVeque 1983.
    """
    check_instance("moments", moments, FeatureMoments, "init_moments")
    with double():
        rows = as_rows("features", features)
        width = moments.mean.shape[0]
        if rows.shape[1] != width:
            raise ValueError(f"features must have {width} columns; got shape {rows.shape}.")
        mean = jnp.mean(rows, axis=0)
        centred = rows - mean[None, :]
        scatter = jnp.matmul(centred.T, centred, precision="highest")
        batch = FeatureMoments(jnp.asarray(float(rows.shape[0])), mean, scatter)
        return merge_moments(moments, batch)


def merge_moments(first: FeatureMoments, second: FeatureMoments) -> FeatureMoments:
    """The moments of both sets of samples together, as of two devices or two files.

    Args:
        first: moments of some samples.
        second: moments of others, of the same width.

    Returns:
        A `FeatureMoments`.

    Raises:
        ValueError: widths that differ.

    Example:
        >>> import numpy as np
        >>> one = update_moments(init_moments(1), np.array([[1.0]]))
        >>> two = update_moments(init_moments(1), np.array([[3.0]]))
        >>> merge_moments(one, two).scatter.tolist()
        [[2.0]]
    """
    for name, moments in (("first", first), ("second", second)):
        check_instance(name, moments, FeatureMoments, "init_moments")
    if first.mean.shape != second.mean.shape:
        raise ValueError(
            f"second must be of the same width as first, {first.mean.shape[0]}; got "
            f"{second.mean.shape[0]}."
        )
    with double():
        count = first.samples + second.samples
        share = jnp.where(count > 0, second.samples / jnp.where(count > 0, count, 1.0), 0.0)
        shift = second.mean - first.mean
        between = first.samples * share * jnp.outer(shift, shift)
        return FeatureMoments(
            count, first.mean + share * shift, first.scatter + second.scatter + between
        )


@full_precision
def feature_moments(
    apply_fn: ApplyFn, params: Params, x: Any, *, batch_size: int = 256
) -> FeatureMoments:
    """The moments of a network's outputs over a data set, a batch at a time.

    Args:
        apply_fn: ``(params, x) -> features (N, h)`` or (N, ...), such as an adapter's or that of
            `jaxttp.models.LayerOutput`.
        params: its parameters.
        x: samples (N, ...).
        batch_size: samples in memory at once; the last batch may be smaller.

    Returns:
        A `FeatureMoments`.

    Raises:
        ValueError: no samples, a batch size below 1, features that are not finite.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.arange(10.0).reshape(5, 2)
        >>> moments = feature_moments(lambda w, x: x @ w, jnp.eye(2), x, batch_size=2)
        >>> float(moments.samples), moments.mean.tolist()
        (5.0, [4.0, 5.0])
    """
    check_integer("batch_size", batch_size, at_least=1)
    if jnp.ndim(x) == 0 or jnp.shape(x)[0] == 0:
        raise ValueError(f"x must hold samples (N, ...); got shape {jnp.shape(x)}.")
    x = check_array("x", x)
    check_finite("x", x)
    check_finite("params", params)
    _check_features(apply_fn, params, x)
    evaluate = jax.jit(lambda *given: apply_fn(*given))  # JAX keeps functions by identity
    moments = None
    for start in range(0, jnp.shape(x)[0], batch_size):
        features = evaluate(params, x[start : start + batch_size])
        check_finite("apply_fn: what it returns", features)
        if moments is None:
            moments = init_moments(max(1, features.size // features.shape[0]))
        moments = update_moments(moments, features)
    assert moments is not None
    return moments


def _check_features(apply_fn: ApplyFn, params: Params, x: Array) -> None:
    """Refuse what gives no features (N, h) or (N, ...), one row for each sample alone."""
    found = traced_outputs(apply_fn, params, x)
    shape = getattr(found, "shape", None)
    if shape is None or len(shape) < 2 or shape[0] != len(x) or 0 in shape:
        raise ValueError(
            f"apply_fn must return features (N, h), a row for each of {len(x)} samples; it "
            f"returned {type(found).__name__ if shape is None else shape}."
        )
    kind = found.dtype
    if jnp.issubdtype(kind, jnp.complexfloating):
        raise ValueError(f"apply_fn must return real features; it returned {kind}.")
    if jnp.issubdtype(kind, jnp.floating):
        check_per_sample(flatten_tokens(apply_fn), params, x)


def singular_values(
    features: ArrayLike | FeatureMoments, *, center: bool = False
) -> Float[Array, " r"]:
    """Singular values of the features, largest first, over all their directions.

    Args:
        features: (N, h), or (N, ...), flattened to (N, h); or the `FeatureMoments` of a stream,
            whose small values are lost below 1e-8 of the largest: they are roots of eigenvalues.
        center: subtract the mean of the samples first; then sigma^2 / N are the eigenvalues of the
            covariance.

    Returns:
        min(N, h) values in float64; h values from moments, zeros where the rank is smaller.

    Raises:
        ValueError: features that are empty, constant over the samples, or not finite.

    Example:
        >>> import numpy as np
        >>> singular_values(np.array([[3.0, 0.0], [0.0, 4.0]])).tolist()
        [4.0, 3.0]
    """
    return values_of("features", features, center=center)


def values_of(name: str, features: ArrayLike | FeatureMoments, *, center: bool) -> Array:
    """`singular_values` of what messages call `name`."""
    with double():
        if not isinstance(features, FeatureMoments):
            rows = as_rows(name, features)
            spread = jnp.max(jnp.abs(rows - rows[:1]))
            rows = refuse_constant(name, rows, spread, jnp.max(jnp.abs(rows)))
            if center:
                rows = rows - jnp.mean(rows, axis=0, keepdims=True)
            return decompose(jnp.linalg.svd, rows, compute_uv=False)
        count, mean, scatter = features
        width = mean.shape[0]
        size = jnp.sqrt(count) * (jnp.linalg.norm(mean) + jnp.sqrt(jnp.trace(scatter)))
        scatter = refuse_constant(name, scatter, jnp.sqrt(jnp.trace(scatter)), size)
        gram = scatter if center else scatter + count * jnp.outer(mean, mean)
        values = decompose(jnp.linalg.eigvalsh, gram)[::-1]
        floor = width * 2.0**-52 * values[0]
        return root(jnp.where(values > floor, values, 0.0))
