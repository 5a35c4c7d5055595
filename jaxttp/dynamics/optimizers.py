"""Optimizers as arguments of compiled functions, and which of them are linear filters.

A fresh `optax.sgd(0.1)` is made of fresh functions, and a compiled function that closes over them
is compiled anew. Two values help. `HeavyBall` is the optimizer whose rate and momentum are numbers
on the leaves of a pytree. `OptaxProgram` is any optax transformation, equal to another one where
the equations of their updates are the same; numbers held only in its INITIAL state, such as those
of `optax.inject_hyperparams`, are arguments and may differ.

An optax transformation is a linear scalar filter when its update of EVERY coordinate is the same
linear function of that coordinate's gradients and initial weight,

    u_t = sum_{s <= t} k[t, s] g_s + d[t] w_0 .

Then any weight-space vector it builds is a combination of the vectors it was fed, and the same
transformation acting on the COEFFICIENTS of that combination gives the new coefficients. Momentum,
Nesterov, schedules and decoupled weight decay are such filters; Adam, clipping, sign, `centralize`,
`masked` and `multi_transform` are not. `linear_filter` tests this by probes.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxttp._core.checks import (
    check_integer,
    check_number,
    check_optimizer,
    is_concrete,
    values_known,
)
from jaxttp._core.compile import full_precision, jit
from jaxttp._core.results import RESULT
from jaxttp._core.traced import Keyed
from jaxttp._core.types import Params


class HeavyBall(eqx.Module):
    """Gradient descent with heavy-ball momentum whose numbers are traced: `optax.sgd`, in effect.

        u_{t+1} = m u_t + g_t,     w_{t+1} = w_t - eta_t u_{t+1}

    It has `init` and `update`, so it stands where an optax transformation does.

    Attributes:
        rates: eta, a number, or one for every step (T,).
        momentum: m in [0, 1); None for none, which keeps no velocity.
        nesterov: whether the momentum is Nesterov's.

    Example:
        >>> import jax.numpy as jnp
        >>> descent = HeavyBall(0.5)
        >>> updates, _ = descent.update(jnp.ones(2), descent.init(jnp.zeros(2)))
        >>> updates.tolist()
        [-0.5, -0.5]
    """

    rates: Any
    momentum: Any = None
    nesterov: bool = eqx.field(static=True, default=False)

    def optimizer(self) -> optax.GradientTransformation:
        """The optax transformation, which closes over the (possibly traced) numbers."""
        rates = self.rates
        rate = (lambda count: rates[count]) if np.ndim(rates) == 1 else rates
        return optax.sgd(rate, self.momentum, self.nesterov)

    def init(self, params: Any) -> optax.OptState:
        """The state before the first step: zeros, made by NumPy, which compiles nothing."""
        shapes = jax.eval_shape(self.optimizer().init, params)
        return jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype)), shapes)

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, optax.OptState]:
        """One step."""
        return self.optimizer().update(updates, state, params)

    def with_velocity(self) -> "HeavyBall":
        """The same steps with a velocity in any case, so that one compiled function serves both."""
        return self if self.momentum is not None else HeavyBall(self.rates, 0.0, self.nesterov)


class OptaxProgram(eqx.Module):
    """An optax transformation as a static argument, equal to others whose steps are the same.

    Attributes:
        code: the transformation, equal to others of the same equations.
    """

    code: "_KeyedUpdate" = eqx.field(static=True)

    def init(self, params: Any) -> optax.OptState:
        """The initial state of ONE of the transformations that are equal; its numbers may differ.

        It shows which leaves of a state are shaped like the parameters.
        """
        return self.code.optimizer.init(params)

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, optax.OptState]:
        """One step."""
        return self.code.optimizer.update(updates, state, params)


class LinearRecurrence(eqx.Module):
    """The filter of an optimizer, as an optimizer of coefficients.

        (u_t, a_{t+1}) = M_t (g_t, a_t),    w_{t+1} = w_t - u_t

    Attributes:
        matrices: M (T, k + 1, k + 1), for k accumulators.
    """

    matrices: Float[Array, "t k_plus_1 k_plus_1"]

    def init(self, params: Any) -> tuple[list, Array]:
        """The state before the first step."""
        zeros = [jax.tree.map(jnp.zeros_like, params)] * (self.matrices.shape[1] - 1)
        return zeros, jnp.zeros((), jnp.int32)

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, tuple]:
        """One step."""
        accumulators, count = state
        new = jnp.tensordot(self.matrices[count], jnp.stack([updates, *accumulators]), 1)
        return -new[0], (list(new[1:]), count + 1)


Optimizer = HeavyBall | OptaxProgram | LinearRecurrence
"""An optimizer as an argument of compiled functions: a pytree with `init` and `update`."""


def same_program(optimizer: Any, *params: Any) -> Optimizer:
    """An optimizer as an argument of compiled functions.

    Its update is traced for this, so that globals and attributes are read now.

    Args:
        optimizer: an optax transformation; a `HeavyBall` or `OptaxProgram` is returned as it is.
        params: weights that it updates, of which shapes and structure matter; none for one vector.

    Returns:
        A pytree; functions compiled for it serve others equal to it. Call `init` of `optimizer`
        itself outside, as the initial states of equal optimizers may differ in their numbers.

    Raises:
        TypeError: not an optax transformation.

    Example:
        >>> import optax
        >>> same_program(optax.sgd(0.1)) == same_program(optax.sgd(0.1))
        True
        >>> same_program(optax.sgd(0.1)) == same_program(optax.sgd(0.2))
        False
        >>> injected = optax.inject_hyperparams(optax.sgd)
        >>> same_program(injected(0.1)) == same_program(injected(0.2))
        True
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    check_optimizer(optimizer)
    return OptaxProgram(_KeyedUpdate(optimizer, *params))


def inlined(function: Any, descent: Optimizer) -> Any:
    """A compiled function of an optimizer, or its body where the optimizer holds traced values.

    Such values belong to one trace, and must not be kept with a compiled function.
    """
    if isinstance(descent, OptaxProgram) and descent.code.is_traced:
        return full_precision(function.__wrapped__)
    return function


class _KeyedUpdate(Keyed):
    """An optax transformation, equal to others whose update has the same equations.

    The numbers of a state are arguments of the update: only its structure counts. Without
    weights, examples of several shapes are used, as an optimizer may depend on shapes or names.

    Attributes:
        optimizer: the transformation.
    """

    def __init__(self, optimizer: Any, *params: Any) -> None:
        self.optimizer = optimizer
        likes = [_VECTOR, *(params or [_SEVERAL])]

        def steps(pairs: list[Any]) -> list[Any]:
            updates = [_try(optimizer.update, params, state, params) for params, state in pairs]
            if all(update is None for update in updates):
                raise ValueError("optimizer steps none of these weights")
            return updates

        def state_of(like: Any) -> Any:
            return jax.eval_shape(lambda w: optimizer.init(w), like)

        with jax.numpy_dtype_promotion("standard"):
            super().__init__(steps, [(like, _try(state_of, like)) for like in likes])


_VECTOR = jax.ShapeDtypeStruct((3,), np.float32)
_SEVERAL = {
    "kernel": jax.ShapeDtypeStruct((4, 3), np.float32),
    "bias": jax.ShapeDtypeStruct((3,), np.float32),
    "scale": jax.ShapeDtypeStruct((), np.float32),
}


def _try(function: Any, *args: Any) -> Any:
    """The result; None where the optimizer does not take these weights or needs more arguments."""
    try:
        return function(*args)
    except Exception:
        return None


def keep_dtypes(state: Any, like: Any) -> Any:
    """A state with the dtypes of the one before it: a rate in float64 makes it so, too."""

    def keep(new: Any, old: Any) -> Any:
        dtype = getattr(old, "dtype", None) or jnp.result_type(old)
        if jnp.issubdtype(dtype, jax.dtypes.extended):  # a random key
            return new
        return jnp.asarray(new, dtype)

    return jax.tree.map(keep, state, like)


def slots(optimizer: Any, state: optax.OptState) -> list[Array]:
    """The leaves of an optimizer's state that are shaped like its parameters (accumulators)."""
    leaves: list[Array] = []
    optax.tree_utils.tree_map_params(optimizer, lambda leaf: leaves.append(leaf) or leaf, state)
    return leaves


def effective_learning_rate(learning_rate: Any, momentum: Any) -> Any:
    """Eta / (1 - m): the rate of plain gradient descent that heavy-ball momentum tends to.

    The accumulator needs about 1/(1 - m) steps to fill; until then the true motion is slower, by a
    delay of m/(1 - m) steps in the long run. `recursion` follows the accumulator exactly; use
    this where there is none (flow, closed form, diffusion).

    Args:
        learning_rate: eta > 0, a number or an array of numbers.
        momentum: m in [0, 1).

    Returns:
        The effective rate, of the same kind.

    Raises:
        ValueError: a rate or a momentum out of range.

    Example:
        >>> round(effective_learning_rate(0.1, 0.9), 6)
        1.0

    Source:
        TTP Section 3.1. The paper also divides the noise by a factor sqrt(1/(1 - m)), which is
        larger than 1 and not needed when the effective rate stands in the noise term as well.
    """
    check_number("learning_rate", learning_rate, at_least=0.0)
    check_number("momentum", momentum, at_least=0.0, below=1.0)
    return learning_rate / (1.0 - momentum)


# --- linear filters -------------------------------------------------------------------------------

PROBE_STEPS = 64
"""Steps that are probed, at least."""
_REFUSAL = (
    "optimizer is not one linear scalar filter for every weight (Adam, clipping, sign, centralize, "
    "masked and multi_transform are not), so its path cannot be followed in function space. "
    "Simulate the linearized network in weight space instead (jaxttp.dynamics.weight_space, or "
    "dynamics='weight_space' in a forecast), or use SGD, momentum, Nesterov, schedules or "
    "decoupled weight decay."
)
_HIDDEN = (
    "optimizer keeps a state that cannot be followed from one linearization to the next: what it "
    "accumulates must have the shape of the weights, and start at zero or as a multiple of them. "
    "Use relinearize=0 (jaxttp.dynamics.recursion), or SGD, momentum, Nesterov or schedules."
)


class LinearFilter(NamedTuple):
    """Response of a linear optimizer over its first T steps.

    Attributes:
        decay: d (T,), the update at step t of a unit weight with no gradient.
        weight_decay: whether d is not zero; None where the values are traced.
    """

    decay: Float[Array, " t"]
    weight_decay: bool | None

    plot, _repr_html_, __repr__ = RESULT


def linear_filter(
    optimizer: optax.GradientTransformation,
    params: Params | None = None,
    *,
    steps: int = PROBE_STEPS,
) -> LinearFilter:
    """The response of a linear optimizer, or an error for one that is not linear.

    Only `steps` steps are tested, 64 at least: later changes (a schedule that ends, decay or
    clipping that sets in) are not detected.

    Args:
        optimizer: any optax transformation.
        params: the weights that it trains. They show whether a mask or label function that looks
            at names treats all of them alike.
        steps: the horizon.

    Returns:
        A `LinearFilter`.

    Raises:
        TypeError: not an optax transformation.
        ValueError: not one linear scalar filter for every coordinate, or no update at all in these
            steps.
        RuntimeError: the same, found at run time when its hyper-parameters are traced.

    Example:
        >>> import optax
        >>> linear_filter(optax.sgd(0.5, momentum=0.9)).weight_decay
        False

    Source:
        MATH: the dual recursion is exact for this class of optimizers (derived).
    """
    check_optimizer(optimizer)
    steps = max(PROBE_STEPS, check_integer("steps", steps, at_least=1))
    dtype = jnp.result_type(float)
    try:
        with values_known(), jax.numpy_dtype_promotion("standard"), jax.enable_x64(True):
            decay, deviation = _probe(optimizer, params, steps)
            decay = jnp.asarray(decay, dtype)
            is_linear = deviation < 1e-3  # in double precision, like the probe
    except (ValueError, TypeError, LookupError, AttributeError) as problem:
        raise ValueError(f"{_REFUSAL} (The probe failed with: {problem})") from problem
    if is_concrete(deviation):
        if not bool(is_linear):
            raise ValueError(_REFUSAL)
        return LinearFilter(decay, bool(np.any(np.asarray(decay) != 0)))
    return LinearFilter(eqx.error_if(decay, ~is_linear, _REFUSAL), None)


def _probe(optimizer: Any, params: Params | None, steps: int) -> tuple[Any, Any]:
    """The decay of a unit weight, and the largest deviation from ONE linear filter.

    Three random sequences of gradients, with random initial weights, drive three weights of the
    leaf "probe"; a fourth one only decays. All other leaves, of several shapes, names and
    magnitudes, get combinations of the same sequences, so their updates must be the same
    combinations, at every step. A second run has other sequences; a third 100 times a combination
    of both: the response of a filter that couples weights (by a norm) is not the same combination.
    The names of `params` are run likewise, with the same sequences.
    """
    rng = np.random.default_rng(0)
    shapes = {"kernel": (4, 3), "bias": (5,), "scale": (3, 2, 2, 2)}
    scales = {"": 1e-4, "_10000": 1e4}
    mixture = np.array([60.0, 80.0])
    sequences = rng.standard_normal((2, 1 + steps, 3))  # first the initial weights
    sequences = np.concatenate([sequences, np.tensordot(mixture, sequences, 1)[None]])
    unit = np.zeros((3, 1 + steps, 1))
    unit[:, 0] = 1.0

    mixes: list[Any] = [
        {
            name + suffix: scale * rng.standard_normal((3, *shape))
            for suffix, scale in scales.items()
            for name, shape in shapes.items()
        }
    ]
    if params is not None:  # as many axes as a leaf has, none longer than 2
        small = lambda leaf: rng.standard_normal((3, *np.minimum(np.shape(leaf), 2)))  # noqa: E731
        mixes.append(jax.tree.map(small, params))
    driven = [jax.tree.map(lambda mix: np.tensordot(sequences, mix, 1), mix) for mix in mixes]
    driven[0]["probe"] = np.concatenate([sequences, unit], axis=2)
    begins = [jax.tree.map(lambda rows: jnp.asarray(rows[:, 0]), rows) for rows in driven]
    likes = [jax.tree.map(lambda rows: rows[0, 0], rows) for rows in driven]
    descent = same_program(optimizer, *likes)
    respond = inlined(_responses, descent)
    updates: list[Any] = [
        respond(descent, jax.tree.map(jnp.asarray, rows), jax.vmap(optimizer.init)(begin))
        for rows, begin in zip(driven, begins, strict=True)
    ]
    xp: Any = jnp
    if all(is_concrete(leaf) for leaf in jax.tree.leaves(updates)):  # small: nothing to compile
        xp, updates = np, jax.tree.map(np.asarray, updates)
    response = updates[0].pop("probe")
    probed, decay = response[..., :3], response[0, :, 3]
    pairs = [(probed[2:], xp.tensordot(mixture, probed[:2], 1)[None])]
    leaves = zip(jax.tree.leaves(updates), jax.tree.leaves(mixes), strict=True)
    pairs += [(update, xp.tensordot(probed, mix, 1)) for update, mix in leaves]
    deviation = xp.where(xp.any(response != 0), 0.0, xp.inf)  # no response proves nothing
    for update, expected in pairs:
        axes = tuple(range(2, expected.ndim))  # every step by itself: a late one may be small
        size = xp.max(xp.abs(expected), axis=axes) + 1e-30
        error = xp.max(xp.abs(update - expected), axis=axes) / size
        deviation = xp.maximum(deviation, xp.max(error))  # NaN stays
    # Less than rounding is no decay. The probe is in float64, as an average of weights hardly
    # moves.
    return xp.where(xp.abs(decay) > 1e-14, decay, 0.0), deviation


@jit
def _responses(optimizer: Optimizer, inputs: Params, states: optax.OptState) -> Params:
    """Updates (R, T, ...) in all runs, from initial weights (the first row) and gradients."""

    def drive(inputs: Params, state: optax.OptState) -> Params:
        def step(carry: tuple, gradient: Params) -> tuple[tuple, Params]:
            params, state = carry
            updates, new = optimizer.update(gradient, state, params)
            return (optax.apply_updates(params, updates), keep_dtypes(new, state)), updates

        first = jax.tree.map(lambda rows: rows[0], inputs)
        gradients = jax.tree.map(lambda rows: rows[1:], inputs)
        return jax.lax.scan(step, (first, state), gradients)[1]

    return jax.vmap(drive)(inputs, states)


def start_fractions(optimizer: optax.GradientTransformation | HeavyBall) -> tuple[float, ...]:
    """The initial values of an optimizer's accumulators, as multiples of the weights.

    A velocity starts at zero, but schedule-free SGD averages a copy of the weights.

    Raises:
        ValueError: a state of other values or shapes.
    """
    if isinstance(optimizer, HeavyBall):
        return () if optimizer.momentum is None else (0.0,)
    weights = np.array([0.7, -1.3, 0.4, 2.1, -0.6], np.float32)
    examples = (weights, -3.0 * weights[:4])  # two lengths reveal a state that mixes weights
    with values_known():
        states = [optimizer.init(jnp.asarray(w)) for w in examples]
        try:
            accumulators = [slots(optimizer, state) for state in states]
            counters = [
                optax.tree_utils.tree_map_params(optimizer, lambda _: None, state)
                for state in states
            ]
        except (ValueError, TypeError, AttributeError) as problem:
            raise ValueError(f"{_HIDDEN} ({problem})") from problem
        shapes = [[jnp.shape(leaf) for leaf in jax.tree.leaves(state)] for state in counters]
        if shapes[0] != shapes[1]:
            raise ValueError(_HIDDEN)
        fractions = []
        for leaves in zip(*accumulators, strict=True):
            fraction = float(leaves[0][0] / weights[0])
            pairs = zip(leaves, examples, strict=True)
            if not all(np.allclose(leaf, fraction * w, rtol=1e-5, atol=1e-7) for leaf, w in pairs):
                raise ValueError(_HIDDEN)
            fractions.append(fraction)
    return tuple(fractions)
