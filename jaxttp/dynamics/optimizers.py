"""Optimisers as arguments of compiled functions: what is compiled for one serves its siblings.

A fresh `optax.sgd(0.1)` is made of fresh functions, and a compiled function that closes over them
is compiled anew. Two values help. `HeavyBall` is the optimiser whose rate and momentum are numbers
on the leaves of a pytree. `OptaxProgram` is any optax transformation, equal to another one where
both are the same code of optax over the same values; the numbers that only its INITIAL state holds,
such as those of `optax.inject_hyperparams`, travel in that state and may differ.
"""

import abc
import functools
import types
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxttp._checks import check_optimizer, is_concrete

LARGE = 1 << 12
"""Arrays of more entries are compared by identity."""
DEPTH = 5
"""How deep traced values are looked for in what is compared by identity."""


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
        """The state before the first step."""
        return self.optimizer().init(params)

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, optax.OptState]:
        """One step."""
        return self.optimizer().update(updates, state, params)

    def with_velocity(self) -> "HeavyBall":
        """The same steps, with a velocity in the state whatever the momentum: one program."""
        if self.momentum is not None:
            return self
        return HeavyBall(self.rates, 0.0, self.nesterov)


class OptaxProgram(Optimizer):
    """An optax transformation as a static argument, equal to others of the same program.

    Attributes:
        code: the transformation, hashable by value.
    """

    code: "_Code" = eqx.field(static=True)

    def init(self, params: Any) -> optax.OptState:
        """The initial state of ONE of the transformations that are equal; its numbers may differ.

        Good for telling what in a state is shaped like the parameters.
        """
        return self.code.optimizer.init(params)

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, optax.OptState]:
        """One step."""
        return self.code.optimizer.update(updates, state, params)


def same_program(optimizer: Any) -> Optimizer:
    """An optimiser as an argument of compiled functions.

    Args:
        optimizer: an optax transformation; a `HeavyBall` or `OptaxProgram` is returned as it is.

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
    return OptaxProgram(_Code(optimizer, exact=False))


def same_optimizer(optimizer: Any) -> "_Code":
    """A hashable value that is equal for optimisers of the same code and ALL the same numbers.

    Raises:
        TracedError: the optimiser holds traced values, so that nothing may be kept for it.
    """
    code = _Code(optimizer, exact=True)
    if code.traced:
        raise TracedError
    return code


class TracedError(Exception):
    """The optimiser holds traced values."""


def inlined(function: Any, descent: Optimizer) -> Any:
    """A compiled function of an optimiser, or its body where the optimiser holds traced values.

    Such values belong to one trace, and must not be kept with what is compiled.
    """
    if isinstance(descent, OptaxProgram) and descent.code.traced:
        return function.__wrapped__
    return function


class _Code:
    """An optax transformation, hashable by what its functions are made of.

    The initial state is passed along (unless `exact`), so of `init` the floating-point numbers do
    not count, only its code: which parts of the state are shaped like the parameters.
    """

    def __init__(self, optimizer: Any, *, exact: bool) -> None:
        self.optimizer = optimizer
        reader = _Reader()
        self._key = (reader.read(optimizer.update), reader.read(optimizer.init, exact=exact))
        self.traced = reader.traced
        self._hash = hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Code) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash


class _Same:
    """A value that equals itself alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _Reader:
    """Functions and what they close over, as nested tuples that can be compared.

    Functions of optax count by their code and contents: what they read beyond that, modules and
    each other, does not change. All other functions may read a global variable that does, and
    objects may change: both count by identity.
    """

    def __init__(self) -> None:
        self.traced = False
        self._inside: set[int] = set()

    def read(self, value: Any, *, exact: bool = True) -> Any:
        """The value as a hashable; without its floating-point numbers unless `exact`."""
        if value is None or isinstance(value, bool | int | str | bytes):
            return type(value), value
        if isinstance(value, float):
            return (type(value), value.hex()) if exact else (type(value),)
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            return self._array(value, exact)
        if id(value) in self._inside:  # a function that closes over itself
            return _Same(value)
        self._inside.add(id(value))
        try:
            return self._compound(value, exact)
        finally:
            self._inside.remove(id(value))

    def _compound(self, value: Any, exact: bool) -> Any:
        read = functools.partial(self.read, exact=exact)
        if isinstance(value, types.FunctionType) and _is_of_optax(value):
            cells = tuple(map(_contents, value.__closure__ or ()))
            parts = tuple(map(read, (*cells, value.__defaults__, value.__kwdefaults__)))
            return value.__module__, value.__code__, parts
        if isinstance(value, types.MethodType):
            return types.MethodType, _Same(value.__func__), read(value.__self__)
        if isinstance(value, functools.partial):
            return functools.partial, read(value.func), read(value.args), read(value.keywords)
        if isinstance(value, tuple) or type(value) is list:
            return type(value), tuple(map(read, value))
        if type(value) is dict:
            return dict, tuple((read(k), read(v)) for k, v in value.items())
        self.traced |= _holds_tracers(value)
        return _Same(value)

    def _array(self, value: Any, exact: bool) -> Any:
        if not is_concrete(value):
            self.traced = True
            return _Same(value)
        if isinstance(value, jax.Array) and not (
            value.is_fully_addressable and jnp.issubdtype(value.dtype, np.number)
        ):
            return _Same(value)
        if value.dtype == object or value.size > LARGE:
            return _Same(value)
        what = type(value), value.dtype, value.shape, getattr(value, "weak_type", False)
        if not exact and np.issubdtype(value.dtype, np.inexact):
            return what
        return *what, np.asarray(value).tobytes()


def _is_of_optax(function: types.FunctionType) -> bool:
    """Whether it is defined there (`functools.wraps` writes other names on functions)."""
    return function.__globals__.get("__name__", "").split(".")[0] == "optax"


def _holds_tracers(value: Any, depth: int = DEPTH) -> bool:
    """Whether a function closes over traced values, or an object has them."""
    if not is_concrete(value):
        return True
    if depth == 0 or isinstance(value, type | types.ModuleType | np.ndarray | jax.Array):
        return False
    if isinstance(value, types.FunctionType):
        parts = [_contents(cell) for cell in value.__closure__ or ()]
    elif isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, tuple | list):
        parts = value
    else:
        parts = getattr(value, "__dict__", {}).values()
    return any(_holds_tracers(part, depth - 1) for part in parts)


class _Empty:
    """Stands for a variable of a closure that has no value yet."""


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _Empty


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
