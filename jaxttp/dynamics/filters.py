"""Which optimisers the dual recursion simulates exactly: one linear scalar filter for everything.

An optax transformation is a linear scalar filter when its update of EVERY coordinate is the same
linear function of that coordinate's gradients and initial weight,

    u_t = sum_{s <= t} k[t, s] g_s + d[t] w_0 .

Then any weight-space vector it builds is a combination of the vectors it was fed, and the same
transformation acting on the COEFFICIENTS of that combination gives the new coefficients. Momentum,
Nesterov, schedules and decoupled weight decay are such filters; Adam, clipping, sign, `centralize`,
`masked` and `multi_transform` are not. Probes tell them apart.
"""

import itertools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxttp._checks import is_concrete
from jaxttp._result import RESULT

PROBE_STEPS = 6
_SHAPES = ((4, 3), (3, 2, 2, 2), (5,))
_SCALES = (1e-4, 1e4)
_REFUSAL = (
    "optimizer is not one linear scalar filter for every weight (Adam, clipping, sign, centralize, "
    "masked and multi_transform are not), so its path cannot be followed in function space. "
    "Simulate the linearised network in weight space instead (jaxttp.dynamics.weight_space, or "
    "dynamics='weight_space' in a forecast), or use SGD, momentum, Nesterov, schedules or "
    "decoupled weight decay."
)


class LinearFilter(NamedTuple):
    """Response of a linear optimiser over its first steps.

    Attributes:
        impulse: k (S, S), the update at step t to a unit gradient at step s.
        decay: d (S,), the update at step t of a unit weight with no gradient.
        weight_decay: whether d is not zero; None where the values are traced.
    """

    impulse: Float[Array, "s s"]
    decay: Float[Array, " s"]
    weight_decay: bool | None

    plot, _repr_html_, __repr__ = RESULT


def linear_filter(optimizer: optax.GradientTransformation) -> LinearFilter:
    """The response of a linear optimiser, or an error for one that is not linear.

    Args:
        optimizer: any optax transformation.

    Returns:
        A `LinearFilter` over its first `PROBE_STEPS` steps.

    Raises:
        TypeError: not an optax transformation.
        ValueError: not one linear scalar filter for every coordinate.
        RuntimeError: the same, found at run time when its hyper-parameters are traced.

    Example:
        >>> import optax
        >>> linear_filter(optax.sgd(0.5)).impulse[0, 0].item()
        -0.5

    Source:
        MATH: the dual recursion is exact for this class of optimisers (derived).
    """
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            f"optimizer must be an optax.GradientTransformation, such as optax.sgd(0.1); got "
            f"{optimizer!r}."
        )
    try:
        with jax.ensure_compile_time_eval(), jax.numpy_dtype_promotion("standard"):
            impulse, decay, deviation = _probe(optimizer)
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        raise ValueError(f"{_REFUSAL} (The probe failed with: {problem})") from problem
    tolerance = 1e-3
    if is_concrete(deviation):
        if not float(deviation) < tolerance:
            raise ValueError(_REFUSAL)
        return LinearFilter(impulse, decay, bool(np.any(np.asarray(decay) != 0)))
    impulse = eqx.error_if(impulse, ~(deviation < tolerance), _REFUSAL)
    return LinearFilter(impulse, decay, None)


def _probe(optimizer: optax.GradientTransformation) -> tuple[Array, Array, Array]:
    """Impulse response of single weights, and the largest deviation from it elsewhere.

    In the leaf "impulse" weight s gets a unit gradient at step s and the last weight starts at one
    without any; the other leaves hold random gradients and weights of several shapes and
    magnitudes. The responses of the first run's impulses must explain all of a second run, whose
    other leaves are larger (a clipped norm would change the response).
    """
    runs = [_run(optimizer, seed, size) for seed, size in ((0, 1.0), (1, 100.0))]
    response = runs[0][2]["impulse"]
    impulse, decay = response[:, :PROBE_STEPS], response[:, PROBE_STEPS]
    deviation = jnp.zeros((), jnp.float32)
    for params, grads, updates in runs:
        for name, update in updates.items():
            want = jnp.tensordot(impulse, grads[name], 1) + jnp.tensordot(decay, params[name], 0)
            size = jnp.max(jnp.abs(want)) + 1e-30
            deviation = jnp.maximum(deviation, jnp.max(jnp.abs(update - want)) / size)
    return impulse, decay, deviation


def _run(optimizer: optax.GradientTransformation, seed: int, size: float) -> tuple:
    """Initial weights, gradients and updates (all stacked over steps) of one probe run."""
    rng = np.random.default_rng(seed)
    first = {"impulse": np.eye(1, PROBE_STEPS + 1, PROBE_STEPS)[0]}
    grads = {"impulse": np.eye(PROBE_STEPS, PROBE_STEPS + 1)}
    for i, (shape, scale) in enumerate(itertools.product(_SHAPES, _SCALES)):
        first[f"leaf{i}"] = size * scale * rng.standard_normal(shape)
        grads[f"leaf{i}"] = size * scale * rng.standard_normal((PROBE_STEPS, *shape))
    first, grads = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), (first, grads))
    params, state, history = first, optimizer.init(first), []
    for t in range(PROBE_STEPS):
        updates, state = optimizer.update(jax.tree.map(lambda g, t=t: g[t], grads), state, params)
        params = optax.apply_updates(params, updates)
        history.append(updates)
    return first, grads, jax.tree.map(lambda *leaves: jnp.stack(leaves), *history)
