"""A traced function as a flat list of primitive steps, so that something can be done between two.

Equations that only group others (jit) are dissolved, but where they say on which devices arrays
lie, unless the program is of one sample, for which that means nothing. What carries a derivative of
its own (custom_jvp, custom_vjp) or a loop (scan, while, cond) stays one opaque step:
dissolving a custom derivative would change the gradient.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.extend as jex
import jax.numpy as jnp
import numpy as np

from jaxttp._core.xla_cpu import convolutions

_GROUPING = ("jit", "pjit", "closed_call", "core_call")
_REMATERIALISED = ("remat", "remat2", "checkpoint")


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramStep:
    """One primitive equation between numbered slots.

    Attributes:
        equation: the jaxpr equation.
        inputs: a slot for each input, None for a literal.
        outputs: a slot for each output, None for one that nobody reads.
    """

    equation: Any
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.equation.primitive.name

    @property
    def params(self) -> Mapping[str, Any]:
        """The primitive's static parameters."""
        return self.equation.params

    @property
    def size(self) -> int:
        """The size of the output, if it is a single one of real numbers; else 0."""
        avals = [atom.aval for atom in self.equation.outvars]
        if len(avals) != 1 or not jnp.issubdtype(getattr(avals[0], "dtype", bool), jnp.floating):
            return 0
        return avals[0].size

    def literal(self, position: int) -> Any:
        """The value of a literal input, None if the input is not a literal."""
        atom = self.equation.invars[position]
        return atom.val if isinstance(atom, jex.core.Literal) else None

    def shape(self, position: int) -> tuple[int, ...]:
        """The shape of an input."""
        return tuple(self.equation.invars[position].aval.shape)

    def evaluate(self, values: Mapping[int, Any]) -> list[Any]:
        """The outputs that somebody reads, from the values of the slots."""
        given = [values[slot] for slot in self.inputs if slot is not None]
        pairs = zip(self.equation.outvars, self.outputs, strict=True)
        return run_equation(self.equation, given, [one for one, slot in pairs if slot is not None])


def run_equation(equation: Any, values: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """Some outputs of one equation; what is slow put differently.

    Args:
        equation: of a jaxpr.
        values: of its inputs, without those that are literals.
        outvars: the outputs that are wanted.
    """
    if convolutions.is_slow(equation):
        return [convolutions.convolve(equation, *values)]
    invars = [atom for atom in equation.invars if not isinstance(atom, jex.core.Literal)]
    names = (tuple("" for _ in some) for some in (invars, outvars))
    single = jex.core.Jaxpr(
        constvars=(), invars=invars, outvars=outvars, eqns=[equation], effects=equation.effects,
        debug_info=jex.core.DebugInfo("jaxttp step", "one equation", *names),
    )  # fmt: skip
    return jex.core.jaxpr_as_fun(jex.core.ClosedJaxpr(single, ()))(*values)


class StraightLine(NamedTuple):
    """A function as steps.

    Attributes:
        steps: what to do, in order.
        inputs: the slots of the arguments.
        outputs: the slots of what is returned.
        literals: numbers of the program itself, by slot.
        constants: arrays that the function closes over, by slot.
        avals: shape and dtype of each slot.
    """

    steps: list[ProgramStep]
    inputs: list[int]
    outputs: list[int]
    literals: dict[int, np.ndarray]
    constants: dict[int, Any]
    avals: dict[int, Any]


def straight_line(closed: Any, *, of_one_sample: bool = False) -> StraightLine:
    """The steps of a traced function.

    Args:
        closed: a closed jaxpr.
        of_one_sample: whether it is small: what is rematerialised, and what says where arrays lie,
            is dissolved, too.

    Example:
        >>> import jax
        >>> line = straight_line(jax.make_jaxpr(jax.jit(lambda x: jnp.sin(2 * x)))(1.0))
        >>> [step.name for step in line.steps], line.inputs, line.outputs
        (['mul', 'sin'], [0], [2])
    """
    literals: dict[int, np.ndarray] = {}
    constants: dict[int, Any] = {}
    avals: dict[int, Any] = {}
    steps: list[ProgramStep] = []

    def new_slot(aval: Any) -> int:
        slot = len(avals)
        avals[slot] = aval
        return slot

    def read(env: dict[Any, int], atom: Any) -> int:
        if isinstance(atom, jex.core.Literal):
            slot = new_slot(atom.aval)
            literals[slot] = np.asarray(atom.val, getattr(atom.aval, "dtype", None))
            return slot
        return env[atom]

    def walk(closed: Any, arguments: Sequence[int]) -> list[int]:
        jaxpr = closed.jaxpr
        env: dict[Any, int] = dict(zip(jaxpr.invars, arguments, strict=True))
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
            env[var] = new_slot(var.aval)
            constants[env[var]] = value
        for equation in jaxpr.eqns:
            body = _inside(equation, of_one_sample)
            if body is not None:
                results = walk(body, [read(env, atom) for atom in equation.invars])
                env.update(zip(equation.outvars, results, strict=True))
                continue
            inputs = tuple(
                None if isinstance(atom, jex.core.Literal) else env[atom]
                for atom in equation.invars
            )
            outputs: list[int | None] = []
            for var in equation.outvars:
                if isinstance(var, jex.core.DropVar):
                    outputs.append(None)
                else:
                    env[var] = new_slot(var.aval)
                    outputs.append(env[var])
            steps.append(ProgramStep(equation, inputs, tuple(outputs)))
        return [read(env, atom) for atom in jaxpr.outvars]

    inputs = [new_slot(var.aval) for var in closed.jaxpr.invars]
    return StraightLine(steps, inputs, walk(closed, inputs), literals, constants, avals)


def _inside(equation: Any, of_one_sample: bool) -> Any:
    """What an equation holds, where it does nothing but hold it."""
    params = equation.params
    if equation.primitive.name not in _GROUPING + (_REMATERIALISED if of_one_sample else ()):
        return None
    places = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    if not of_one_sample and any(type(one).__name__ != "UnspecifiedValue" for one in places):
        return None
    body = params.get("jaxpr", params.get("call_jaxpr"))
    if body is None or isinstance(body, jex.core.ClosedJaxpr):
        return body
    return jex.core.ClosedJaxpr(body, ())
