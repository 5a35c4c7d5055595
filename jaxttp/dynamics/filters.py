"""Which optimisers the dual recursion simulates exactly: one linear scalar filter for everything.

An optax transformation is a linear scalar filter when its update of EVERY coordinate is the same
linear function of that coordinate's gradients and initial weight,

    u_t = sum_{s <= t} k[t, s] g_s + d[t] w_0 .

Then any weight-space vector it builds is a combination of the vectors it was fed, and the same
transformation acting on the COEFFICIENTS of that combination gives the new coefficients. Momentum,
Nesterov, schedules and decoupled weight decay are such filters; Adam, clipping, sign, `centralize`,
`masked` and `multi_transform` are not. Probes tell them apart.
"""

import functools
import itertools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxttp._checks import is_concrete
from jaxttp._result import RESULT
from jaxttp._types import Params

PROBE_STEPS = 64
_TOLERANCE = 1e-3
_LEAVES = {"kernel": (4, 3), "bias": (5,), "scale": (3, 2, 2, 2)}
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


def linear_filter(
    optimizer: optax.GradientTransformation, params: Params | None = None
) -> LinearFilter:
    """The response of a linear optimiser, or an error for one that is not linear.

    Args:
        optimizer: any optax transformation.
        params: the weights that it is to train. Only with them can it be seen whether a mask or
            label function that looks at names treats all of them alike.

    Returns:
        A `LinearFilter` over its first `PROBE_STEPS` steps.

    Raises:
        TypeError: not an optax transformation.
        ValueError: not one linear scalar filter for every coordinate, or one that does nothing in
            these steps, so that it cannot be told.
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
    shapes, tree = jax.tree.flatten(jax.tree.map(_small, params))
    try:
        return _concrete_filter(optimizer, tuple(shapes), tree)
    except _TracedError:  # nothing that is traced may be kept
        return _filter(optimizer, tuple(shapes), tree)


class _TracedError(Exception):
    """The optimiser holds traced values."""


class _Shape(tuple):
    """The shape of a small leaf; a class of its own is a leaf of a pytree."""


def _small(leaf: Any) -> _Shape:
    """As many axes as a leaf has, none longer than 2."""
    return _Shape(min(size, 2) for size in np.shape(leaf))


@functools.lru_cache(maxsize=64)
def _concrete_filter(optimizer: Any, shapes: tuple, tree: Any) -> LinearFilter:
    found = _filter(optimizer, shapes, tree)
    if found.weight_decay is None:
        raise _TracedError
    return found


def _filter(optimizer: Any, shapes: tuple, tree: Any) -> LinearFilter:
    params = jax.tree.unflatten(tree, shapes)
    try:
        with jax.ensure_compile_time_eval(), jax.numpy_dtype_promotion("standard"):
            impulse, decay, deviation = _probe(optimizer, params)
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        raise ValueError(f"{_REFUSAL} (The probe failed with: {problem})") from problem
    if is_concrete(deviation):
        if not float(deviation) < _TOLERANCE:
            raise ValueError(_REFUSAL)
        return LinearFilter(impulse, decay, bool(np.any(np.asarray(decay) != 0)))
    # Both carry the check: what nobody reads is not computed.
    impulse, decay = eqx.error_if((impulse, decay), ~(deviation < _TOLERANCE), _REFUSAL)
    return LinearFilter(impulse, decay, None)


def _probe(optimizer: Any, params: Params) -> tuple[Array, Array, Array]:
    """Impulse response of single weights, and the largest deviation from it elsewhere.

    In the leaf "impulse" weight s gets a unit gradient at step s and the last weight starts at one
    without any; the other leaves hold random gradients and weights of several shapes, names and
    magnitudes. The responses of the first run's impulses must explain all of a second run, whose
    other leaves are larger (a clipped norm would change the response), and of a third over leaves
    with the names of `params`.
    """
    runs = [_run(optimizer, _probe_tree(seed, size)) for seed, size in ((0, 1.0), (1, 100.0))]
    response = runs[0][2]["impulse"]
    impulse, decay = response[:, :PROBE_STEPS], response[:, PROBE_STEPS]
    if params is not None:
        runs.append(_run(optimizer, _named_tree(params)))
    deviation = jnp.where(jnp.any(response != 0), 0.0, jnp.inf)  # no response tells nothing
    for first, grads, updates in runs:
        for w, g, update in zip(*map(jax.tree.leaves, (first, grads, updates)), strict=True):
            want = jnp.tensordot(impulse, g, 1) + jnp.tensordot(decay, w, 0)
            size = jnp.max(jnp.abs(want)) + 1e-30
            deviation = jnp.maximum(deviation, jnp.max(jnp.abs(update - want)) / size)
    return impulse, decay, deviation


def _probe_tree(seed: int, size: float) -> tuple[Params, Params]:
    """Initial weights, and gradients of all steps."""
    rng = np.random.default_rng(seed)
    first: dict[str, Any] = {"impulse": np.eye(1, PROBE_STEPS + 1, PROBE_STEPS)[0]}
    grads: dict[str, Any] = {"impulse": np.eye(PROBE_STEPS, PROBE_STEPS + 1)}
    for scale, (name, shape) in itertools.product(_SCALES, _LEAVES.items()):
        key = f"{name}_{scale:g}" if scale != _SCALES[0] else name
        first[key] = size * scale * rng.standard_normal(shape)
        grads[key] = size * scale * rng.standard_normal((PROBE_STEPS, *shape))
    return first, grads


def _named_tree(params: Params) -> tuple[Params, Params]:
    """Small leaves with the names and axes of `params`."""
    rng = np.random.default_rng(2)
    return (
        jax.tree.map(lambda shape: rng.standard_normal(shape), params),
        jax.tree.map(lambda shape: rng.standard_normal((PROBE_STEPS, *shape)), params),
    )


def _run(optimizer: Any, tree: tuple[Params, Params]) -> tuple[Params, Params, Params]:
    """Initial weights, gradients and updates (both stacked over steps) of one probe run."""
    first, grads = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)

    def step(carry: tuple, gradient: Params) -> tuple[tuple, Params]:
        params, state = carry
        updates, new = optimizer.update(gradient, state, params)
        # A rate in float64 makes the state so, too.
        new = jax.tree.map(lambda a, like: jnp.asarray(a, jnp.result_type(like)), new, state)
        return (optax.apply_updates(params, updates), new), updates

    _, updates = jax.lax.scan(step, (first, optimizer.init(first)), grads)
    return first, grads, updates
