"""Single samples: how the loss of each one falls, and which of them fall alike."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from jaxttp._core.checks import check_array, check_finite_value, check_integer, check_key
from jaxttp._core.compile import jit
from jaxttp.losses import Loss, encode_targets


def sample_losses(train: ArrayLike, y: Any, *, loss: str | Loss) -> Float[Array, "t n"]:
    """The loss of every sample along a trajectory.

    Args:
        train: outputs (T, N, C), such as `Trajectory.train`.
        y: integer labels (N,) or targets (N, C).
        loss: a name or a `Loss`.

    Returns:
        l(f_i(t), y_i), (T, N); its mean over samples is the loss curve.

    Raises:
        ValueError: bad labels.

    Example:
        >>> import jax.numpy as jnp
        >>> sample_losses(jnp.zeros((3, 2, 1)), jnp.array([[1.0], [2.0]]),
        ...               loss="squared_error")[0].tolist()
        [0.5, 2.0]

    Source:
        TTP Figure 3b.
    """
    train = check_array("train", train, ndim=3, floating=True)
    if len(train) == 0:
        raise ValueError("train must be outputs (T, N, C) of at least one step; it is empty.")
    targets, loss = encode_targets(loss, y, train[0])
    return _sample_losses(train, targets, loss)


@functools.partial(jit, static_argnums=2)
def _sample_losses(train: Array, targets: Array, loss: Loss) -> Array:
    return jax.vmap(lambda f: jax.vmap(loss.sample_loss)(f, targets))(train)


def cluster_samples(
    curves: ArrayLike, clusters: int, *, key: Array, iterations: int = 50
) -> Int[Array, " n"]:
    """Samples grouped by their curves: k-means, started far apart (k-means++ taken to the letter).

    Args:
        curves: one curve a sample (T, N), such as `sample_losses`.
        clusters: number of groups.
        key: a `jax.random.key`, for the first centre.
        iterations: of Lloyd's algorithm.

    Returns:
        Group of every sample (N,), numbered by falling mean of the curves: group 0 learns last.

    Raises:
        ValueError: fewer samples than groups.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> curves = jnp.array([[1.0, 1.0, 1.0, 1.0], [0.0, 0.9, 0.1, 1.0]])
        >>> cluster_samples(curves, 2, key=jax.random.key(0)).tolist()
        [1, 0, 1, 0]

    Source:
        TTP Figure 3b: samples of one group have gradients that point alike.
    """
    curves = check_array("curves", curves, ndim=2, floating=True)
    points = check_finite_value("curves", curves).T  # (N, T)
    check_key(key, optional=False)
    check_integer("iterations", iterations, at_least=0)
    if points.size == 0:
        raise ValueError(f"curves must be (T, N), not empty; got shape {curves.shape}.")
    n = points.shape[0]
    check_integer("clusters", clusters, at_least=1, at_most=n, remedy=f"There are {n} samples.")
    return _cluster(points, key, iterations, clusters)


@functools.partial(jit, static_argnums=3)
def _cluster(points: Array, key: Array, iterations: Any, clusters: int) -> Array:
    n = points.shape[0]
    distance = lambda centres: jnp.sum((points[:, None] - centres[None]) ** 2, axis=2)  # noqa: E731
    chosen = [points[jax.random.randint(key, (), 0, n)]]
    for _ in range(clusters - 1):
        nearest = jnp.min(distance(jnp.stack(chosen)), axis=1)
        chosen.append(points[jnp.argmax(nearest)])

    def refine(_: Any, centres: Array) -> Array:
        member = jax.nn.one_hot(jnp.argmin(distance(centres), axis=1), clusters, dtype=points.dtype)
        size = jnp.sum(member, axis=0)[:, None]
        return jnp.where(size > 0, member.T @ points / jnp.maximum(size, 1.0), centres)

    centres = jax.lax.fori_loop(0, iterations, refine, jnp.stack(chosen))
    order = jnp.argsort(-jnp.mean(centres, axis=1))
    return jnp.argmin(distance(centres[order]), axis=1)
