"""Optimizers as arguments of compiled functions: what is compiled for one serves its siblings.

A fresh `optax.sgd(0.1)` is made of fresh functions, and a compiled function that closes over them
is compiled anew. Two values help. `HeavyBall` is the optimizer whose rate and momentum are numbers
on the leaves of a pytree. `OptaxProgram` is any optax transformation, equal to another one where
the equations of their updates are the same; the numbers that only its INITIAL state holds, such as
those of `optax.inject_hyperparams`, travel in that state and may differ.
"""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxttp._core.checks import check_optimizer
from jaxttp._core.compile import full_precision
from jaxttp._core.traced import Keyed


class Optimizer(eqx.Module):
    """What compiled functions take for an optimiser: a pytree with `init` and `update`."""

    @abc.abstractmethod
    def init(self, params: Any) -> optax.OptState:
        """The state before the first step."""

    @abc.abstractmethod
    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, optax.OptState]:
        """One step."""


class HeavyBall(Optimizer):
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
        if np.ndim(rates) == 1:
            return optax.sgd(lambda count: rates[count], self.momentum, self.nesterov)
        return optax.sgd(rates, self.momentum, self.nesterov)

    def init(self, params: Any) -> optax.OptState:
        """The state before the first step: zeros, made by NumPy, which compiles nothing."""
        shapes = jax.eval_shape(self.optimizer().init, params)
        return jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype)), shapes)

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, optax.OptState]:
        """One step."""
        return self.optimizer().update(updates, state, params)

    def with_velocity(self) -> "HeavyBall":
        """The same steps, with a velocity in the state whatever the momentum: one program."""
        if self.momentum is not None:
            return self
        return HeavyBall(self.rates, 0.0, self.nesterov)


class OptaxProgram(Optimizer):
    """An optax transformation as a static argument, equal to others whose steps are the same.

    Attributes:
        code: the transformation, equal to others of the same equations.
    """

    code: "_KeyedUpdate" = eqx.field(static=True)

    def init(self, params: Any) -> optax.OptState:
        """The initial state of ONE of the transformations that are equal; its numbers may differ.

        Good for telling what in a state is shaped like the parameters.
        """
        return self.code.optimizer.init(params)

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, optax.OptState]:
        """One step."""
        return self.code.optimizer.update(updates, state, params)


def same_program(optimizer: Any, *params: Any) -> Optimizer:
    """An optimizer as an argument of compiled functions.

    Its update is traced for this, so that what it reads (a global, an attribute) is read now.

    Args:
        optimizer: an optax transformation; a `HeavyBall` or `OptaxProgram` is returned as it is.
        params: weights that it is to step, of which shapes and structure matter; none where that
            is one vector.

    Returns:
        A pytree; what is compiled for it serves others equal to it. Call `init` of `optimizer`
        itself outside, as the initial states of equal programs may differ in their numbers.

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

    Such values belong to one trace, and must not be kept with what is compiled.
    """
    if isinstance(descent, OptaxProgram) and descent.code.is_traced:
        return full_precision(function.__wrapped__)
    return function


class _KeyedUpdate(Keyed):
    """An optax transformation, equal to others whose update has the same equations.

    The numbers of a state are arguments of the update: only its structure counts. Where no weights
    are given, those of several shapes stand for them, as an optimizer may look at shapes or names.

    Attributes:
        optimizer: the transformation.
    """

    def __init__(self, optimizer: Any, *params: Any) -> None:
        self.optimizer = optimizer
        likes = [_VECTOR, *(params or [_SEVERAL])]

        def steps(given: list[Any]) -> list[Any]:
            found = [_step(optimizer, *one) for one in given]
            if all(one is None for one in found):
                raise ValueError("optimizer steps none of these weights")
            return found

        with jax.numpy_dtype_promotion("standard"):
            super().__init__(steps, [(like, _state_of(optimizer, like)) for like in likes])


_VECTOR = jax.ShapeDtypeStruct((3,), np.float32)
_SEVERAL = {
    "kernel": jax.ShapeDtypeStruct((4, 3), np.float32),
    "bias": jax.ShapeDtypeStruct((3,), np.float32),
    "scale": jax.ShapeDtypeStruct((), np.float32),
}


def _state_of(optimizer: Any, params: Any) -> Any:
    """The shapes of a fresh state; None where it does not take these weights."""
    try:
        return jax.eval_shape(lambda w: optimizer.init(w), params)
    except Exception:
        return None


def _step(optimizer: Any, params: Any, state: Any) -> Any:
    """An update; None where the optimizer does not step these weights by gradients alone."""
    try:
        return optimizer.update(params, state, params)
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
    """The leaves of an optimiser's state that are shaped like its parameters (accumulators)."""
    found: list[Array] = []
    optax.tree_utils.tree_map_params(optimizer, lambda leaf: found.append(leaf) or leaf, state)
    return found
