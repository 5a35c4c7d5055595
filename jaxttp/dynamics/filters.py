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

from jaxttp._core.checks import check_integer, check_optimizer, is_concrete, values_known
from jaxttp._core.compile import jit
from jaxttp._core.results import RESULT
from jaxttp._core.types import Params
from jaxttp.dynamics.optimizers import (
    HeavyBall,
    Optimizer,
    inlined,
    keep_dtypes,
    same_program,
    slots,
)

PROBE_STEPS = 64
"""The least number of steps that a verdict is about."""
_SEQUENCES = 3
_MIXTURE = np.array([60.0, 80.0])
_TOLERANCE = 1e-3
_ROUNDING = 1e-14
"""Less is no decay: the probe is in float64, for an average of weights hardly moves."""
_LEAVES = {"kernel": (4, 3), "bias": (5,), "scale": (3, 2, 2, 2)}
_SCALES = (1e-4, 1e4)
_REFUSAL = (
    "optimizer is not one linear scalar filter for every weight (Adam, clipping, sign, centralize, "
    "masked and multi_transform are not), so its path cannot be followed in function space. "
    "Simulate the linearised network in weight space instead (jaxttp.dynamics.weight_space, or "
    "dynamics='weight_space' in a forecast), or use SGD, momentum, Nesterov, schedules or "
    "decoupled weight decay."
)

_HIDDEN = (
    "optimizer keeps a state that cannot be followed from one linearisation to the next: what it "
    "accumulates must have the shape of the weights, and start at zero or as a multiple of them. "
    "Use relinearize=0 (jaxttp.dynamics.recursion), or SGD, momentum, Nesterov or schedules."
)


class LinearFilter(NamedTuple):
    """Response of a linear optimiser over its first T steps.

    Attributes:
        impulse: k (S, S), the update at step t to a unit gradient at step s, for the first 64.
        decay: d (T,), the update at step t of a unit weight with no gradient.
        weight_decay: whether d is not zero; None where the values are traced.
    """

    impulse: Float[Array, "s s"]
    decay: Float[Array, " t"]
    weight_decay: bool | None

    plot, _repr_html_, __repr__ = RESULT


def linear_filter(
    optimizer: optax.GradientTransformation,
    params: Params | None = None,
    *,
    steps: int = PROBE_STEPS,
) -> LinearFilter:
    """The response of a linear optimiser, or an error for one that is not linear.

    The verdict is about the steps asked for, 64 at least: what an optimiser starts doing after them
    (a schedule that ends, decay or clipping that sets in) is not looked at.

    Args:
        optimizer: any optax transformation.
        params: the weights that it is to train. Only with them can it be seen whether a mask or
            label function that looks at names treats all of them alike.
        steps: the horizon.

    Returns:
        A `LinearFilter`.

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
    check_optimizer(optimizer)
    steps = max(PROBE_STEPS, check_integer("steps", steps, at_least=1))
    shapes, tree = jax.tree.flatten(jax.tree.map(_small, params))
    shown = tuple(shapes), tree, steps, jnp.result_type(float)
    return _filter(optimizer, *shown)


class _Shape(tuple):
    """The shape of a small leaf; a class of its own is a leaf of a pytree."""


def _small(leaf: Any) -> _Shape:
    """As many axes as a leaf has, none longer than 2."""
    return _Shape(min(size, 2) for size in np.shape(leaf))


def _filter(optimizer: Any, shapes: tuple, tree: Any, steps: int, dtype: Any) -> LinearFilter:
    params = jax.tree.unflatten(tree, shapes)
    try:
        with (
            values_known(),
            jax.numpy_dtype_promotion("standard"),
            jax.enable_x64(True),
        ):
            impulse, decay, deviation = _probe(optimizer, params, steps)
            impulse, decay = jnp.asarray(impulse, dtype), jnp.asarray(decay, dtype)
            is_linear = deviation < _TOLERANCE  # in double precision, like the probe
    except (ValueError, TypeError, LookupError, AttributeError) as problem:
        raise ValueError(f"{_REFUSAL} (The probe failed with: {problem})") from problem
    if is_concrete(deviation):
        if not bool(is_linear):
            raise ValueError(_REFUSAL)
        return LinearFilter(impulse, decay, bool(np.any(np.asarray(decay) != 0)))
    # Both carry the check: what nobody reads is not computed.
    impulse, decay = eqx.error_if((impulse, decay), ~is_linear, _REFUSAL)
    return LinearFilter(impulse, decay, None)


def _probe(optimizer: Any, params: Params, steps: int) -> tuple[Any, Any, Any]:
    """Impulse response and decay of single weights, and how far anything is from ONE linear filter.

    A few random sequences of gradients, with random initial weights, drive a few weights of the
    leaf "impulse". All other leaves, of several shapes, names and magnitudes, get combinations of
    the same sequences, so their updates must be the same combinations, at every step. A second run
    has other sequences; a third 100 times a combination of both runs, which a filter that looks at
    more than one weight (a norm) does not answer by the same combination. The last run has the
    names of `params`.
    """
    rng = np.random.default_rng(0)
    sequences = rng.standard_normal((2, 1 + steps, _SEQUENCES))  # first the initial weights
    mixed = np.tensordot(_MIXTURE, sequences, 1)[None]
    sequences = np.concatenate([sequences, mixed])
    weights = {
        f"{name}_{scale:g}" if scale != _SCALES[0] else name: scale
        * rng.standard_normal((_SEQUENCES, *shape))
        for scale, (name, shape) in itertools.product(_SCALES, _LEAVES.items())
    }
    named = jax.tree.map(lambda shape: rng.standard_normal((_SEQUENCES, *shape)), params)
    first = {"impulse": _reference(sequences)}
    first |= {name: np.tensordot(sequences, mix, 1) for name, mix in weights.items()}
    inputs = None
    if params is not None:
        inputs = jax.tree.map(lambda mix: np.tensordot(sequences[0], mix, 1), named)
    starts = _begun(first, 1)
    of_names = () if inputs is None else (_begun(inputs, 0),)
    descent = same_program(optimizer, jax.tree.map(lambda leaf: leaf[0], starts), *of_names)
    respond = inlined(_responses, descent)
    updates = respond(descent, _arrays(first), jax.vmap(optimizer.init)(starts))
    some = None
    if inputs is not None:
        some = inlined(_run, descent)(descent, _arrays(inputs), optimizer.init(*of_names))
    if is_concrete(updates["impulse"]):  # small arrays: nothing to compile
        return _compare(np, jax.tree.map(np.asarray, updates), weights, some, named)
    return _compare(jnp, updates, weights, some, named)


@jit
def _responses(optimizer: Optimizer, inputs: Params, states: optax.OptState) -> Params:
    """Updates (3, T, ...) in all runs, from what drives them."""
    return jax.vmap(functools.partial(_drive, optimizer))(inputs, states)


def _compare(xp: Any, updates: Params, weights: Params, some: Params, named: Params) -> tuple:
    """Impulse response, decay, and the deviation; `some` are the updates with the real names."""
    response = updates["impulse"]
    answers, decay = response[:, :, :_SEQUENCES], response[0, :, _SEQUENCES]
    shown = min(PROBE_STEPS, response.shape[1])
    impulse = response[0, :shown, _SEQUENCES + 1 :][:, :shown]
    deviation = xp.where(xp.any(response != 0), 0.0, xp.inf)  # no response tells nothing
    pairs: list[tuple[Any, Any, Any]] = [
        (updates[name], answers, mix) for name, mix in weights.items()
    ]
    pairs.append((answers[2], answers[:2], None))
    leaves = zip(jax.tree.leaves(some), jax.tree.leaves(named), strict=True)
    pairs += [(xp.asarray(update), answers[0], mix) for update, mix in leaves]
    for got, answer, mix in pairs:
        if mix is None:
            want, lead = xp.tensordot(xp.asarray(_MIXTURE, got.dtype), answer, 1), 1
        else:
            want, lead = xp.tensordot(answer, xp.asarray(mix, got.dtype), 1), answer.ndim - 1
        axes = tuple(range(lead, want.ndim))  # every step by itself: a late one may be small
        size = xp.max(xp.abs(want), axis=axes) + 1e-30
        off = xp.max(xp.abs(got - want), axis=axes) / size
        deviation = xp.maximum(deviation, xp.max(off))  # NaN stays
    return impulse, xp.where(xp.abs(decay) > _ROUNDING, decay, 0.0), deviation


def _begun(inputs: Params, axis: int) -> Params:
    """The initial weights, the first of what drives a run."""
    return jax.tree.map(lambda rows: jnp.asarray(np.take(rows, 0, axis)), inputs)


def _reference(sequences: np.ndarray) -> np.ndarray:
    """Weights driven by the sequences, one that only decays, and one for every unit impulse."""
    runs, rows, _ = sequences.shape
    shown = min(PROBE_STEPS, rows - 1)
    extra = np.zeros((runs, rows, 1 + shown))
    extra[:, 0, 0] = 1.0
    extra[:, np.arange(1, shown + 1), np.arange(1, shown + 1)] = 1.0
    return np.concatenate([sequences, extra], axis=2)


def _arrays(tree: Params) -> Params:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), tree)


def _drive(optimizer: Optimizer, inputs: Params, state: optax.OptState) -> Params:
    """Updates, stacked over steps, from initial weights (the first row) and gradients."""
    first, grads = (jax.tree.map(lambda leaf, s=s: leaf[s], inputs) for s in (0, slice(1, None)))

    def step(carry: tuple, gradient: Params) -> tuple[tuple, Params]:
        params, state = carry
        updates, new = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), keep_dtypes(new, state)), updates

    return jax.lax.scan(step, (first, state), grads)[1]


_run = jit(_drive)


def start_shares(optimizer: optax.GradientTransformation | HeavyBall) -> tuple[float, ...]:
    """What the accumulators of a fresh state hold, as multiples of the weights.

    A velocity starts at zero, but schedule-free SGD averages a copy of the weights.

    Raises:
        ValueError: a state that starts, or is kept, otherwise.
    """
    if isinstance(optimizer, HeavyBall):
        return () if optimizer.momentum is None else (0.0,)
    weights = np.array([0.7, -1.3, 0.4, 2.1, -0.6], np.float32)
    starts = (weights, -3.0 * weights[:4])  # of two lengths: a state that mixes weights shows it
    with values_known():
        states = [optimizer.init(jnp.asarray(w)) for w in starts]
        try:
            found = [slots(optimizer, state) for state in states]
            rest = [
                optax.tree_utils.tree_map_params(optimizer, lambda _: None, state)
                for state in states
            ]
        except (ValueError, TypeError, AttributeError) as problem:
            raise ValueError(f"{_HIDDEN} ({problem})") from problem
        shapes = [[jnp.shape(leaf) for leaf in jax.tree.leaves(state)] for state in rest]
        if shapes[0] != shapes[1]:
            raise ValueError(_HIDDEN)
        shares = []
        for leaves in zip(*found, strict=True):
            share = float(leaves[0][0] / weights[0])
            pairs = zip(leaves, starts, strict=True)
            if not all(np.allclose(leaf, share * w, rtol=1e-5, atol=1e-7) for leaf, w in pairs):
                raise ValueError(_HIDDEN)
            shares.append(share)
    return tuple(shares)
