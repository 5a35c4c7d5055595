"""How far a forecast can be trusted, in words."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxttp._types import Params
from jaxttp.dynamics._segment import compile_network
from jaxttp.dynamics._trajectory import Trajectory
from jaxttp.dynamics._walk import RISE
from jaxttp.dynamics.relinearize import RelinearizedTrajectory

Network = Callable[[Params, Any], Array]
DOUBTS = ((10.0, "half"), (5.0, "a third"), (2.0, "an eighth"))
"""Speeds of learning at the end, and how far off times were at most, see `trust_in_end`."""
ROSE = 2.0
"""A re-linearised loss that ends this many times above its least is said to have risen."""
SHARE = 0.05
"""And that by at least this share of its drop."""


def learning_speed(
    network: Network,
    params: Params,
    x: Any,
    gradient: Float[Array, "n c"],
    path: Trajectory,
    batch_size: int | None,
) -> float:
    """How fast the loss falls at the predicted last weights, as a share of the forecast's speed.

    At outputs f_T with gradient g the loss falls by g^T Theta g, which is |J^T g|^2: with the J of
    the weights w_T = c w_0 + J_0^T a that the forecast ends at, over that with J_0. It costs three
    products with J^T, in batches of the training's own size.

    Args:
        network: ``(params, x) -> outputs (N, C)``.
        params: w_0, the part that is trained.
        x: samples (N, ...).
        gradient: g, of the loss at f_T.
        path: of `recursion`, which knows a and c.
        batch_size: samples at once; all of them when None.

    Returns:
        1 for a linear network; infinite where the network at w_T is not finite; NaN where the
        gradient is zero.
    """
    n = len(gradient)
    size = n if batch_size is None else min(batch_size, n)
    pull = compile_network(network)[1]

    def pull_all(weights: Params, cotangent: Array) -> Params:
        total = None
        for start in range(0, n, size):
            places = jnp.arange(start, start + size)
            rows = jnp.minimum(places, n - 1)  # the last batch is filled up with nothing
            some = jnp.where((places < n)[:, None], cotangent[rows], 0.0)
            part = pull(weights, x[rows], some)
            total = part if total is None else jax.tree.map(jnp.add, total, part)
        return total

    dual, scale = path.end_dual, path.end_scale
    assert dual is not None
    assert scale is not None
    moved = pull_all(params, dual)
    last = jax.tree.map(lambda w, m: scale.astype(w.dtype) * w + m, params, moved)
    speeds = []
    for weights in (last, params):
        pulled = pull_all(weights, gradient)
        speeds.append(sum(float(jnp.vdot(leaf, leaf)) for leaf in jax.tree.leaves(pulled)))
    if not np.isfinite(speeds[0]):
        return np.inf
    return speeds[0] / speeds[1] if speeds[1] > 0 else np.nan


def trust_in_end(speed: float) -> str | None:
    """What `learning_speed` says of a forecast with one kernel.

    In 32 runs of the tasks that constants are chosen on (`experiments.bench.accuracy_tasks.TUNING`,
    gradient descent with and without momentum), the largest error of three training times was at
    most 0.09 of the horizon for a speed below 2, 0.13 from 2 to 5, 0.35 up to 10 and 0.51 beyond.

    Args:
        speed: of learning at the end, 1 where the linearisation holds.

    Returns:
        A sentence, or None where there is no doubt.
    """
    if np.isnan(speed):
        return None
    factor = max(speed, 1 / speed if speed > 0 else np.inf)
    for least, off in DOUBTS:
        if factor >= least:
            times = "over 100" if factor > 100 else f"{factor:.2g}"
            words = f"{times} times as {'fast' if speed > 1 else 'slowly'}"
            return (
                f"at the predicted last weights the network learns {words} as this one "
                f"linearization has it: times can be off by {off} of the horizon; "
                "relinearize='auto' follows such changes"
            )
    return None


def trust_in_path(path: RelinearizedTrajectory) -> str | None:
    """What a re-linearised path says of itself."""
    if path.held_from >= 0 and path.edge_at >= 0:
        return (
            f"at the edge of stability by step {path.edge_at}: a real training oscillates there; "
            f"this is a mean path with the kernel of step {path.held_from} held"
        )
    if path.held_from >= 0:
        return (
            "the network denies its linearisations further on: the kernel of step "
            f"{path.held_from} was held"
        )
    if path.edge_at >= 0:
        return (
            f"crosses the edge of stability by step {path.edge_at}: a real training oscillates "
            "there; this is the mean path"
        )
    loss = np.asarray(path.loss)
    if loss.max() > RISE * loss[0]:
        return (
            "the loss rises on the way: at the edge of stability re-linearised networks leave the "
            "range from which the real one often recovers; see relinearize=0"
        )
    least = int(loss.argmin())
    if loss[-1] > ROSE * loss[least] and loss[-1] - loss[least] > SHARE * (loss[0] - loss[least]):
        return (
            f"the loss rises again from step {least} on, which a real training seldom does: more "
            "kernels (relinearize) or a shorter horizon would be surer"
        )
    return None
