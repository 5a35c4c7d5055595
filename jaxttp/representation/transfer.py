"""Scores of checkpoints by their features or outputs on the new task's samples, without training.

They say how well labels can be read off features (LogME, the neighbours) or off a classifier's
probabilities (LEEP); none says how long that takes, which `jaxttp.compare` does. The larger, the
better, on one set of samples: scores of different sets, or of different ones of these three, are
not to be held against each other.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.checks import check_choice, check_integer, check_known
from jaxttp._core.double import as_double, double
from jaxttp._core.xla_cpu.threads import decompose
from jaxttp.representation._inputs import ROUNDING, as_rows, refuse

REACH = 1e12
"""The ratio alpha/beta is looked for within these times the largest eigenvalue of F^T F."""
GRID, REFINED = 241, 48
"""Ratios that are tried first, and golden sections around the best of them."""
ROUNDED = 1e-2
"""By how much the sum of a row of probabilities may differ from 1. A softmax in bfloat16 differs
by up to 0.006, whatever dtype its values are handed over in.
"""


def logme(features: ArrayLike, y: Any) -> Float[Array, ""]:
    """The evidence of labels under Bayesian linear regression on features, a sample (LogME).

        max over alpha, beta of  (1/N) log N(y; 0, I/beta + F F^T/alpha),

    the mean of it over the columns of one-hot labels (or of targets). There is no bias: features
    that have a constant part can express one.

    Args:
        features: F, (N, h) or (N, ...).
        y: integer labels (N,), at least two of them different, or targets (N,) or (N, K) of a
            floating dtype.

    Returns:
        A scalar; in nats a sample and column.

    Raises:
        ValueError: shapes, features or a target that are all zero, what is not finite.

    Example:
        >>> import numpy as np
        >>> good, y = np.array([[1.0], [1.1], [-0.9], [-1.0]]), np.array([0, 0, 1, 1])
        >>> bool(logme(np.hstack([good, 0 * good + 1]), y) > logme(np.array([[1.0]] * 4), y))
        True

    Source:
        You et al. 2021, "LogME: practical assessment of pre-trained models for transfer learning".
        It iterates on alpha and beta, a few times; here beta is eliminated, N/beta = sum_i z_i^2
        t/(s_i + t) + |y_perp|^2 at t = alpha/beta (s_i the eigenvalues of F^T F, z = U^T y), and
        the maximum over t is searched. Where labels are an exact linear function of fewer than N
        features the evidence has no maximum; the value is then that at the smallest ratio, 1e-12
        of s_1, and large.
    """
    with double():
        rows = as_rows("features", features)
        targets = _targets(y, rows.shape[0])
        size = jnp.max(jnp.abs(rows))
        rows = refuse("features", rows, size == 0, "must not all be zero.")
        sizes = jnp.sum(targets**2, axis=0)
        targets = refuse("y", targets, sizes == 0, "must not have a target that is all zero.")
        left, values, _ = decompose(jnp.linalg.svd, rows, full_matrices=False)
        along = (left.T @ targets) ** 2
        beyond = sizes - jnp.sum(along, axis=0)
        beyond = jnp.where(beyond > rows.shape[0] * ROUNDING * sizes, beyond, 0.0)
        return _evidences(values**2, along, beyond, rows.shape[0])


@jax.jit
def _evidences(values: Array, along: Array, beyond: Array, n: Any) -> Array:
    """The mean over targets of `_evidence`."""
    each = jax.vmap(lambda z, rest: _evidence(values, z, rest, n), in_axes=(1, 0))
    return jnp.mean(each(along, beyond))


def _evidence(values: Array, along: Array, beyond: Array, n: Any) -> Array:
    """The largest evidence a sample, by s (r,), z^2 (r,) and the squared rest of a target."""

    def at(log_ratio: Array) -> Array:
        ratio = values[0] * jnp.exp(log_ratio)
        error = beyond + jnp.sum(along * ratio / (values + ratio))
        spread = jnp.sum(jnp.log1p(values / ratio))
        return -0.5 * (jnp.log(2 * jnp.pi * error / n) + 1.0 + spread / n)

    tried = jnp.linspace(-jnp.log(REACH), jnp.log(REACH), GRID)
    best = jnp.argmax(jax.vmap(at)(tried))
    low, high = tried[jnp.maximum(best - 1, 0)], tried[jnp.minimum(best + 1, GRID - 1)]
    golden = (5**0.5 - 1) / 2

    def narrow(_: Any, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        one, two = high - golden * (high - low), low + golden * (high - low)
        first = at(one) > at(two)
        return jnp.where(first, low, one), jnp.where(first, two, high)

    low, high = jax.lax.fori_loop(0, REFINED, narrow, (low, high))
    return jnp.maximum(at((low + high) / 2), at(tried[best]))


def leep(probabilities: ArrayLike, y: Any) -> Float[Array, ""]:
    """The log-likelihood of new labels by a classifier of old ones, a sample (LEEP).

        (1/N) sum_i log sum_z p(y_i | z) theta_z(x_i),
        p(y | z) = sum_(i: y_i = y) theta_z(x_i) / sum_i theta_z(x_i)

    Args:
        probabilities: theta, (N, Z): the old classifier's on the new samples, a row sums to 1
            within 1 % (those of bfloat16 do).
        y: integer labels (N,).

    Returns:
        A scalar, at most 0.

    Raises:
        ValueError: shapes, rows that are no probabilities, what is not finite.

    Example:
        >>> import numpy as np
        >>> theta = np.array([[0.9, 0.1], [0.8, 0.2], [0.1, 0.9], [0.2, 0.8]])
        >>> bool(leep(theta, [1, 1, 0, 0]) > leep(theta, [0, 1, 0, 1]))
        True

    Source:
        Nguyen et al. 2020, "LEEP: a new measure to evaluate transferability of learned
        representations".
    """
    with double():
        theta = as_double("probabilities", probabilities, 2)
        bad = jnp.any(theta < 0, axis=1) | (jnp.abs(jnp.sum(theta, axis=1) - 1) > ROUNDED)
        text = "must be (N, Z) probabilities, rows that sum to 1; take jax.nn.softmax of logits."
        theta = refuse("probabilities", theta, bad, text)
        known = _one_hot(known_labels(y, theta.shape[0]))
        joint = known.T @ theta
        marginal = jnp.sum(theta, axis=0)
        given = joint / jnp.where(marginal > 0, marginal, 1.0)[None]
        expected = jnp.sum((theta @ given.T) * known, axis=1)
        return jnp.mean(jnp.log(expected))


def neighbor_accuracy(
    features: ArrayLike, y: Any, *, neighbors: int = 5, metric: str = "cosine"
) -> float:
    """The share of samples whose label most of their nearest neighbours among the others have.

    Args:
        features: (N, h) or (N, ...), known values.
        y: integer labels (N,).
        neighbors: k, below N. A tie goes to the smaller label.
        metric: "cosine" or "euclidean".

    Returns:
        A share in [0, 1].

    Raises:
        ValueError: shapes, an unknown metric, too many neighbours, what is not finite.

    Example:
        >>> import numpy as np
        >>> z = np.array([[1.0, 0], [1, 0.1], [0, 1], [0.1, 1]])
        >>> neighbor_accuracy(z, [0, 0, 1, 1], neighbors=1)
        1.0

    Source:
        Leave-one-out k nearest neighbours, by scikit-learn.
    """
    check_choice("metric", metric, ("cosine", "euclidean"))
    check_known(features=features, neighbors=neighbors, y=y)
    with double():
        rows = np.asarray(as_rows("features", features))
    check_integer("neighbors", neighbors, at_least=1, at_most=len(rows) - 1)
    labels = known_labels(y, len(rows))
    from sklearn.neighbors import NearestNeighbors

    found = NearestNeighbors(n_neighbors=neighbors, metric=metric).fit(rows)
    votes = labels[found.kneighbors(return_distance=False)]
    counts = (votes[:, :, None] == np.arange(labels.max() + 1)).sum(axis=1)
    return float(np.mean(counts.argmax(axis=1) == labels))


def known_labels(y: Any, n: int) -> np.ndarray:
    """Known integer labels (N,) as 0..K-1, in their order."""
    check_known(y=y)
    labels = np.asarray(y)
    if labels.shape != (n,) or labels.dtype.kind not in "iub":
        raise ValueError(
            f"y must be integer labels ({n},), one a sample; got {labels.dtype} {labels.shape}."
        )
    return np.unique(labels, return_inverse=True)[1]


def _one_hot(labels: np.ndarray) -> Array:
    """(N, K) in float64, of labels 0..K-1; call it inside `double`."""
    return jax.nn.one_hot(labels, int(labels.max()) + 1, dtype=jnp.float64)


def _targets(y: Any, n: int) -> Array:
    """One-hot labels, or targets as they are, (N, K) in float64; call it inside `double`."""
    given = y if hasattr(y, "dtype") else np.asarray(y)
    if not jnp.issubdtype(given.dtype, jnp.floating):
        labels = known_labels(y, n)
        if labels.max() == 0:
            raise ValueError("y must hold at least two different labels; all samples have one.")
        return _one_hot(labels)
    targets = as_double("y", given)
    if targets.ndim not in (1, 2) or targets.shape[0] != n:
        raise ValueError(f"y must be targets ({n},) or ({n}, K); got shape {targets.shape}.")
    return targets.reshape(n, -1)
