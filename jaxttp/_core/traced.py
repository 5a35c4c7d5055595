"""User functions, traced once per call of a public function.

A compiled function must not keep values that a user's function read while it was compiled: a
global, an attribute, an array that was changed in place. So every public function traces the user's
functions again, and compiled functions are keyed by the equations:

- A network becomes a `Traced`. The arrays that it closes over are arguments of the compiled
  function. Its equations are a `Program`, one object for all networks of the same equations. A
  network rebuilt by the same code compiles nothing, a changed array is a changed argument, and a
  changed number in the code is another `Program`.
- A loss or an update of an optimizer becomes a `Keyed`: the function itself, equal to others of the
  same equations and constants.

Callables within equations (callbacks, policies of rematerialization) compare by identity, so that a
new one compiles again; those of `equinox.error_if` compare by their messages. Rules of
`jax.custom_jvp` and `jax.custom_vjp` are traced, too.
"""

import contextlib
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np

from jaxttp._core.checks import is_concrete
from jaxttp._core.types import ApplyFn, noted, notes_of
from jaxttp._core.xla_cpu.steps import (
    ProgramStep,
    StraightLine,
    run_equation,
    run_steps,
    shared_sums,
    straight_line,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The equations of a traced network; the same object for all networks of the same equations.

    Attributes:
        steps: the equations, in order.
        inputs: the slots of the leaves of the parameters, then of the samples.
        constants: the slots of the arrays that the network closes over.
        outputs: the slots of the leaves of what it returns.
        literals: numbers of the equations themselves, by slot.
        avals: shape and dtype of each slot.
        shared: slots that CPUs are to compute once (`jaxttp._core.xla_cpu.steps`).
        structures: pytree structures of the parameters, the samples and the outputs.
    """

    steps: tuple[ProgramStep, ...]
    inputs: tuple[int, ...]
    constants: tuple[int, ...]
    outputs: tuple[int, ...]
    literals: Mapping[int, Any]
    avals: Mapping[int, Any]
    shared: frozenset[int]
    structures: tuple[Any, Any, Any]


class Traced(eqx.Module):
    """A network traced with parameters and samples of some shapes, as a pytree.

    Attributes:
        constants: the arrays that the network closes over.
        program: its equations.

    Example:
        >>> scale = jnp.full(2, 3.0)
        >>> network = trace_network(lambda params, x: params * x * scale, jnp.ones(2), jnp.ones(2))
        >>> network(jnp.ones(2), jnp.ones(2)).tolist(), len(network.constants)
        ([3.0, 3.0], 1)
    """

    constants: tuple[Any, ...]
    program: Program = eqx.field(static=True)

    def __call__(self, params: Any, x: Any) -> Any:
        """The network's outputs, for parameters and samples of the shapes it was traced with."""
        program = self.program
        leaves, data = jax.tree.leaves(params), jax.tree.leaves(x)
        values: dict[int, Any] = dict(program.literals)
        values.update(zip(program.constants, self.constants, strict=True))
        values.update(zip(program.inputs, [*leaves, *data], strict=True))
        run_steps(program.steps, values, leaves, program.shared)
        outputs = [values[slot] for slot in program.outputs]
        return jax.tree.unflatten(program.structures[2], outputs)

    @property
    def outputs(self) -> Any:
        """Shapes and dtypes of the network's outputs."""
        avals = [self.program.avals[slot] for slot in self.program.outputs]
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        return jax.tree.unflatten(self.program.structures[2], shapes)


def trace_network(apply_fn: ApplyFn, params: Any, x: Any) -> Traced:
    """A network's equations for these shapes; arrays of its closure are read now.

    Args:
        apply_fn: ``(params, x) -> outputs``.
        params: parameters, arrays or their `jax.ShapeDtypeStruct`.
        x: samples, likewise.
    """
    # A new function: JAX caches traces by the identity of the function.
    closed, shape = jax.make_jaxpr(lambda *args: apply_fn(*args), return_shape=True)(params, x)
    structures = jax.tree.structure(params), jax.tree.structure(x), jax.tree.structure(shape)
    line, count = straight_line(closed), structures[0].num_leaves
    program = Program(
        tuple(line.steps), tuple(line.inputs), tuple(line.constants), tuple(line.outputs),
        line.literals, line.avals, shared_sums(line.steps, line.inputs[count:]), structures,
    )  # fmt: skip
    return Traced(constants_of(line), the_same(program, line, structures))


class Network:
    """A network as the functions of this package call it: each shape is traced once.

    Traces live as long as this object: for one call of a public function, or as long as the user
    holds its result (a `Problem`, an operator).

    Attributes:
        apply_fn: ``(params, x) -> outputs``.
    """

    def __init__(self, apply_fn: ApplyFn) -> None:
        self.apply_fn = apply_fn
        self._traced: dict[Any, Any] = {}
        noted(self, lambda: notes_of(apply_fn))

    def __call__(self, params: Any, x: Any) -> Any:
        """The network's outputs, by the function itself, for callers that trace it."""
        return self.apply_fn(params, x)

    def run(self, params: Any, x: Any) -> Any:
        """The same by its equations, some of which are rewritten on CPUs (`_core.xla_cpu`)."""
        return self.at(params, x)(params, x)

    def __deepcopy__(self, memo: Any) -> "Network":
        return self  # traces are no data

    def at(self, params: Any, x: Any) -> Traced:
        """The network, traced with these shapes."""
        return self.once(trace_network, params, x)

    def precise(self, params: Any, x: Any) -> Traced:
        """The same, with products of float32 matrices in float32 on every device.

        Equations hold the precision that was set when they were traced (see `_core.compile`).
        """
        with jax.default_matmul_precision("highest"):
            return self.at(params, x)

    def once(self, make: Callable[..., Any], *arguments: Any) -> Any:
        """``make(apply_fn, *arguments)``, kept by the shapes of the arguments."""
        leaves, structure = jax.tree.flatten(arguments)
        settings = tuple(getattr(jax.config, name) for name in _SETTINGS)
        key = make, structure, tuple(map(jax.typeof, leaves)), settings
        if key not in self._traced:
            self._traced[key] = make(self.apply_fn, *arguments)
        return self._traced[key]


_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision")
"""Of JAX, under which equations differ."""


def network_of(apply_fn: ApplyFn) -> Network:
    """The network itself, or a function as a network."""
    return apply_fn if isinstance(apply_fn, Network) else Network(apply_fn)


class Keyed:
    """A function that is equal to others of the same equations and constants.

    For static arguments of compiled functions. A function that holds traced values, or that cannot
    be traced with the examples, equals itself alone.

    Attributes:
        function: that is called.
        is_traced: whether it closes over traced values, which no compiled function may keep.

    Example:
        >>> rate = 0.1
        >>> first, same = (Keyed(lambda x: rate * x, jnp.ones(2)) for _ in range(2))
        >>> rate = 0.2
        >>> faster = Keyed(lambda x: rate * x, jnp.ones(2))
        >>> first == same, first == faster
        (True, False)
    """

    def __init__(self, function: Callable[..., Any], *examples: Any) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self.is_traced = False
        self._key: Hashable = object()
        self._shapes: Any = None
        try:
            trace = jax.make_jaxpr(lambda *args: function(*args), return_shape=True)
            closed, shape = trace(*examples)
        except Exception:  # its real call raises
            return
        self._shapes, self._closed, self._results = _shapes_of(examples), closed, shape
        line = straight_line(closed)
        constants = constants_of(line)
        self.is_traced = not all(map(is_concrete, constants))
        with contextlib.suppress(NoKey):
            self._key = line_key(line), tuple(map(_value_key, constants)), str(shape)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's value, by the equations where the arguments look like the examples."""
        if kwargs or self._shapes is None or self._shapes != _shapes_of(args):
            return self.function(*args, **kwargs)
        leaves = jex.core.jaxpr_as_fun(self._closed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(self._results), leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keyed) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _shapes_of(arguments: Any) -> Any:
    """Structure, shapes and dtypes."""
    leaves, structure = jax.tree.flatten(arguments)
    return structure, [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]


def constants_of(line: StraightLine) -> tuple[Any, ...]:
    """The arrays that a traced function closes over; NumPy arrays may change and are copied."""
    constants = line.constants.values()
    return tuple(a if isinstance(a, jax.Array) else np.array(a) for a in constants)


def the_same(program: Any, line: StraightLine, *more: Hashable) -> Any:
    """The first program of these equations that is still referenced, or else this one.

    Args:
        program: made of the equations.
        line: the equations.
        more: further parts of the key.
    """
    try:
        key = type(program), line_key(line), more
    except NoKey:
        return program
    return _programs.setdefault(key, program)


_programs: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()


class NoKey(Exception):
    """A function holds a value that cannot be compared with those of other functions."""


def line_key(line: StraightLine, within: tuple[Any, ...] = ()) -> Hashable:
    """A key that traced functions share where they differ in the values of constants at most.

    Args:
        line: the equations.
        within: the functions with custom derivatives whose rules are being traced.

    Raises:
        NoKey: a value that cannot be compared.
    """
    avals = [line.avals[slot] for slot in (*line.inputs, *line.constants)]
    literals = [(slot, _value_key(value)) for slot, value in line.literals.items()]
    steps = [
        (step.equation.primitive, step.inputs, step.outputs, *_equation_key(step, within))
        for step in line.steps
    ]
    return tuple(avals), tuple(literals), tuple(steps), tuple(line.outputs)


def _equation_key(step: ProgramStep, within: tuple[Any, ...]) -> tuple[Hashable, ...]:
    equation, params = step.equation, step.params
    literals = tuple(
        _value_key(atom.val) for atom in equation.invars if isinstance(atom, jex.core.Literal)
    )
    if step.name.startswith(("custom_jvp_call", "custom_vjp_call")):
        return literals, _rule_key(equation, within)
    return literals, tuple((name, _param_key(params[name], within)) for name in sorted(params))


def _rule_key(equation: Any, within: tuple[Any, ...]) -> Hashable:
    """The equations of a function with a custom derivative, and those of the derivative."""
    params = equation.params
    inside = params.get("call_jaxpr", params.get("fun_jaxpr"))
    function = _param_key(inside, within)
    itself = function, getattr(getattr(inside, "jaxpr", inside).debug_info, "func_src_info", None)
    if itself in within or sum(function == outer for outer, _ in within) > 1:
        return function  # its rule calls the function itself
    if len(within) >= _DEEPEST:
        raise NoKey
    values = [atom for atom in equation.invars if not isinstance(atom, jex.core.Literal)]
    real = [i for i, a in enumerate(values) if jnp.issubdtype(a.aval.dtype, jnp.inexact)]
    choices = [tuple(real)]
    if params.get("symbolic_zeros") and len(real) > 1:
        choices += [(index,) for index in real]  # its rule may see which tangents are zero
    shapes = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in values]
    rules = []
    for moving in choices:
        derivative = functools.partial(_derivative, equation, moving)
        try:
            line = straight_line(jax.make_jaxpr(derivative)(*shapes))
        except Exception as problem:  # its rule cannot be traced
            raise NoKey from problem
        rule = line_key(line, (*within, itself))
        rules.append((rule, tuple(map(_value_key, constants_of(line)))))
    return function, tuple(rules)


def _derivative(equation: Any, moving: tuple[int, ...], *inputs: Any) -> Any:
    """The outputs of an equation, and its backward product with them for some of its inputs."""

    def run(*moved: Any) -> list[Any]:
        mixed = dict(enumerate(inputs)) | dict(zip(moving, moved, strict=True))
        outputs = run_equation(equation, list(mixed.values()), equation.outvars)
        return [a for a in outputs if jnp.issubdtype(a.dtype, jnp.inexact)]

    outputs, pull = jax.vjp(run, *(inputs[index] for index in moving))
    return outputs, pull(outputs)


def _param_key(value: Any, within: tuple[Any, ...]) -> Hashable:
    """A parameter of an equation."""
    if isinstance(value, jex.core.Jaxpr):
        value = jex.core.ClosedJaxpr(value, ())
    if isinstance(value, jex.core.ClosedJaxpr):
        line = straight_line(value)
        return line_key(line, within), tuple(map(_value_key, constants_of(line)))
    if isinstance(value, tuple | list):
        return type(value), tuple(_param_key(item, within) for item in value)
    if isinstance(value, Mapping):
        return tuple((name, _param_key(item, within)) for name, item in value.items())
    is_callback = hasattr(value, "callback_func")
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not is_callback:
        fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return type(value), tuple(_param_key(field, within) for field in fields)
    return _value_key(value)


def _value_key(value: Any) -> Hashable:
    """A key that differs between values, also between 1, 1.0 and True, and 0.0 and -0.0."""
    if not is_concrete(value):
        raise NoKey
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return value.dtype, _value_key(jax.random.key_data(value))
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        return array.dtype, array.shape, array.tobytes()
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return type(value), repr(value)
    function: Any = getattr(value, "callback_func", None)
    if getattr(function, "__module__", None) == "equinox._errors":
        # `equinox.error_if` makes new callbacks at every trace, which only raise.
        messages = inspect.getclosurevars(function).nonlocals.get("msgs", ())
        return function.__qualname__, tuple(messages)
    try:
        hash(value)
    except TypeError:
        raise NoKey from None
    return value


_DEEPEST = 4
"""Depth to which rules of derivatives of rules are traced."""
