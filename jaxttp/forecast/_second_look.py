"""A linearised path, run once more with what the network says along it.

A forecast with one kernel knows the weights that it predicts, w_t = c_t w_0 + J_0^T a_t. So the
network can be asked at a few of them: what are its outputs, and how long is its gradient? The
recursion is then run again with the answers (`Course`): weights move as fast as the network's
gradient moves them, in the directions of J_0, and outputs are those of the network there. That is
no forecast of its own, but where it moves a training time the forecast is not to be trusted.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxttp._types import Params
from jaxttp.dynamics._kernels import apply_kernel
from jaxttp.dynamics._segment import compile_network
from jaxttp.dynamics._trajectory import Trajectory
from jaxttp.dynamics.batches import batch_indices
from jaxttp.dynamics.recursion import Coefficients, Course, follow
from jaxttp.losses import Loss

Network = Callable[[Params, Any], Array]
POINTS = (0.3, 0.6, 1.0)
"""Shares of the way to the predicted last weights at which the network is asked."""
NEAR = 1e-3
"""A point that is nearer to the start counts as one there."""


class Look(NamedTuple):
    """A forecast with one kernel beside what it becomes with the network's answers.

    Attributes:
        loss: of the linearised network, and of the second run (2, T + 1).
        error: likewise.
        finite: whether the network is finite at the predicted weights, and the second run too.
        passes: gradient evaluations that it took.
    """

    loss: Float[Array, "2 t"]
    error: Float[Array, "2 t"]
    finite: bool
    passes: int


def second_look(
    network: Network,
    params: Params,
    x: Any,
    targets: Array,
    loss: Loss,
    kernel: Array,
    f0: Array,
    optimizer: optax.GradientTransformation,
    steps: int,
    *,
    path: Trajectory | None = None,
    tangent: Array | None = None,
    batch_size: int | None = None,
    key: Array | None = None,
    protocol: str = "epochs",
) -> Look | None:
    """Follow the linearised network, ask the real one along the way, and follow it again.

    Args:
        network: ``(params, x) -> outputs (N, C)``.
        params: w_0, the part that is trained.
        x: samples (N, ...).
        targets: encoded.
        loss: exact.
        kernel: Theta.
        f0: outputs before training (N, C).
        optimizer: linear.
        steps: the horizon T.
        path: of `recursion` with all this, where it is at hand.
        tangent: J w_0, with weight decay.
        batch_size: as in `recursion`.
        key: likewise.
        protocol: likewise.

    Returns:
        A `Look`, with equal curves for a linear network; None where the linearised network
        diverges or does not move.
    """
    indices = None
    if batch_size is not None:
        indices = batch_indices(key, len(f0), batch_size, steps, protocol=protocol)
    run = functools.partial(
        follow, kernel, f0, targets, loss, optimizer, steps=steps, indices=indices, tangent=tangent
    )
    if path is None:
        first = run()
    else:
        assert path.dual is not None
        assert path.scale is not None
        assert path.diverged_at is not None
        first = (Coefficients(path.dual, path.scale), path.train, path.diverged_at < 0)
    return look_along(first, run, network, params, x, targets, loss, kernel, batch_size)


def look_along(
    first: tuple[Coefficients, Array, Array],
    run: Callable[..., tuple[Coefficients, Array, Array]],
    network: Network,
    params: Params,
    x: Any,
    targets: Array,
    loss: Loss,
    kernel: Array,
    batch_size: int | None,
) -> Look | None:
    """`second_look` for what `follow` gave first, and a function that follows a `Course`."""
    path, train, alive = first
    if not bool(jnp.all(alive)):
        return None
    course, passes = ask(network, params, x, targets, loss, kernel, train, path, batch_size)
    if course is None:
        return None
    finite = all(bool(jnp.all(jnp.isfinite(part))) for part in course)
    again = train
    if finite:
        _, again, alive = run(course=course)
        finite = bool(jnp.all(alive))
    losses, errors = _curves(jnp.stack([train, again]), targets, loss)
    return Look(losses, errors, finite, passes)


@functools.partial(jax.jit, static_argnums=2)
def _curves(paths: Array, targets: Array, loss: Loss) -> tuple[Array, Array]:
    each = jax.vmap(jax.vmap(lambda f: (loss.value(f, targets), loss.error(f, targets))))
    return each(paths)


def ask(
    network: Network,
    params: Params,
    x: Any,
    targets: Array,
    loss: Loss,
    kernel: Array,
    train: Float[Array, "t n c"],
    path: Coefficients,
    batch_size: int | None,
) -> tuple[Course | None, int]:
    """Ask the network at a few of the weights that a linearised path predicts.

    At outputs f_t with gradient g the linearised weights move by |J_0^T g| = sqrt(g^T Theta g), the
    network's at w_t by |J_t^T g|: the ratio is the speed there. A point costs two products with
    J^T, in batches of the training's own size, and the outputs.

    Args:
        network: ``(params, x) -> outputs (N, C)``.
        params: w_0, the part that is trained.
        x: samples (N, ...).
        targets: encoded.
        loss: exact.
        kernel: Theta.
        train: linearised outputs f_t.
        path: a_t and c_t of the weights.
        batch_size: samples at once; all of them when None.

    Returns:
        A `Course`, with speeds 1 and defects 0 for a linear network, or None where the weights do
        not move; and the gradient evaluations that it took.
    """
    compass, share = _measure(kernel, path.dual)
    shares = np.asarray(share)
    if not np.isfinite(shares[-1]):
        return None, 0
    n = train.shape[1]
    size = n if batch_size is None else min(batch_size, n)
    outputs, pull, _ = compile_network(network)

    def pull_all(weights: Params, cotangent: Array) -> Params:
        total = None
        for start in range(0, n, size):
            places = jnp.arange(start, start + size)
            rows = jnp.minimum(places, n - 1)  # the last batch is filled up with nothing
            some = jnp.where((places < n)[:, None], cotangent[rows], 0.0)
            part = pull(weights, x[rows], some)
            total = part if total is None else jax.tree.map(jnp.add, total, part)
        return total

    places = [*(int(np.argmax(shares >= share)) for share in POINTS[:-1]), len(train) - 1]
    places.sort(key=lambda t: shares[t])
    lengths, said = [], []
    for t in places:
        moved = pull_all(params, path.dual[t])
        weights = _moved(params, moved, path.weights[t])
        lengths.append(_length(pull_all(weights, loss.gradient(train[t], targets))))
        said.append(outputs(weights, x))
    there = train[jnp.asarray(places)]
    course = _course(
        kernel, compass, shares[places], there, targets, loss, jnp.stack(lengths), jnp.stack(said)
    )
    return course, 2 * len(POINTS)


@jax.jit
def _measure(kernel: Array, dual: Array) -> tuple[Array, Array]:
    """The compass (N, C) and the share of the way (T,) along a path."""
    last = apply_kernel(kernel, dual[-1])
    compass = last / jnp.vdot(dual[-1], last)
    return compass, jnp.einsum("tnc,nc->t", dual, compass, precision="highest")


@jax.jit
def _moved(params: Params, moved: Params, scale: Array) -> Params:
    return jax.tree.map(lambda w, m: scale.astype(w.dtype) * w + m, params, moved)


@jax.jit
def _length(pulled: Params) -> Array:
    return jnp.sqrt(sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(pulled)))


@functools.partial(jax.jit, static_argnames="loss")
def _course(
    kernel: Array,
    compass: Array,
    shares: Array,
    train: Array,
    targets: Array,
    loss: Loss,
    lengths: Array,
    outputs: Array,
) -> Course:
    """From outputs at points, linearised and of the network, and the lengths of its gradients."""
    dtype = train.dtype
    shares = jnp.maximum(shares, NEAR).astype(dtype)
    gradients = jax.vmap(lambda f: loss.gradient(f, targets))(train)
    moved = apply_kernel(kernel, gradients)
    expected = jnp.sqrt(jnp.maximum(jnp.sum(gradients * moved, axis=(1, 2)), 0.0))
    speeds = jnp.where(expected > 0, lengths / jnp.where(expected > 0, expected, 1.0), 1.0)
    defects = (outputs - train) / shares[:, None, None]
    return Course(
        compass,
        jnp.concatenate([jnp.zeros(1, dtype), shares]),
        jnp.concatenate([jnp.ones(1, dtype), speeds.astype(dtype)]),
        jnp.concatenate([jnp.zeros_like(defects[:1]), defects]),
    )
