"""A network as a flat list of primitive steps, so that something can be done between two of them.

`trace` turns ``apply_fn`` into the program of ONE sample, ``(params, x_i) -> outputs (C,)``: with
the batch axis gone, what belongs to a sample is explicit, and `jax.vmap` puts the batch back.
Calls that only group steps (jit, remat) are dissolved. Calls that carry their own derivative
(custom_jvp, custom_vjp) or a loop (scan, while, cond) stay one opaque step: dissolving a custom
derivative would change the gradient.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend as jex
import numpy as np
from jaxtyping import Array

from jaxttp._convolutions import GROUPING, run_equation
from jaxttp._types import ApplyFn
from jaxttp.adapters.outputs import TOKENS

_GROUPING = GROUPING | {"remat", "remat2", "checkpoint"}


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


@dataclasses.dataclass(frozen=True, eq=False)
class NetworkProgram:
    """A traced single-sample network.

    Attributes:
        steps: what to do, in order; dead steps are gone.
        parameters: the slot of each parameter leaf.
        inputs: the slot of each leaf of the sample.
        output: the slot of the outputs (C,).
        constants: values known from the start.
        avals: shape and dtype of each slot.
    """

    steps: tuple[ProgramStep, ...]
    parameters: tuple[int, ...]
    inputs: tuple[int, ...]
    output: int
    constants: Mapping[int, Any]
    avals: Mapping[int, Any]

    @property
    def outputs(self) -> int:
        """The number of outputs, C."""
        return self.avals[self.output].shape[0]

    def run(
        self,
        leaves: Sequence[Array],
        sample: Sequence[Array],
        probes: Mapping[int, Array],
        captured: Mapping[int, int],
    ) -> tuple[Array, dict[int, Array]]:
        """The network's outputs, with `probes` added on the way.

        Args:
            leaves: parameter leaves.
            sample: leaves of one sample.
            probes: step index -> array added to that step's (only) output.
            captured: step index -> input position whose value is wanted.

        Returns:
            The outputs (C,) and the captured values by step index.
        """
        values: dict[int, Any] = dict(self.constants)
        values.update(zip(self.parameters, leaves, strict=True))
        values.update(zip(self.inputs, sample, strict=True))
        seen: dict[int, Array] = {}
        for index, step in enumerate(self.steps):
            if index in captured:
                slot = step.inputs[captured[index]]
                assert slot is not None
                seen[index] = values[slot]
            results = step.evaluate(values)
            if index in probes:
                results = [results[0] + probes[index]]
            slots = [slot for slot in step.outputs if slot is not None]
            values.update(zip(slots, results, strict=True))
        return values[self.output], seen


def trace(apply_fn: ApplyFn, params: Any, sample: Any) -> NetworkProgram:
    """The program of one sample.

    Args:
        apply_fn: ``(params, x (N, ...)) -> (N, C)``.
        params: arrays or `jax.ShapeDtypeStruct`.
        sample: one row of x (a pytree is fine), arrays or `jax.ShapeDtypeStruct`.

    Raises:
        ValueError: a batch of one does not give outputs of shape (1, C).
    """

    def one(params: Any, sample: Any) -> Array:
        outputs = apply_fn(params, jax.tree.map(lambda row: row[None], sample))
        shape = getattr(outputs, "shape", None)
        if shape is None or len(shape) != 2 or shape[0] != 1:
            is_tokens = shape is not None and len(shape) == 3 and shape[0] == 1
            raise ValueError(
                "apply_fn must map x (N, ...) to outputs (N, C); for a batch of one sample it gave "
                + (f"shape {shape}." if shape is not None else f"{type(outputs).__name__}.")
                + " Reshape the outputs, and do not squeeze the batch axis."
                + (TOKENS if is_tokens else "")
            )
        return outputs[0]

    closed = jax.make_jaxpr(one)(params, sample)
    return _straight_line(closed, len(jax.tree.leaves(params)))


def _straight_line(closed: Any, n_params: int) -> NetworkProgram:
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
            constants[slot] = np.asarray(atom.val, getattr(atom.aval, "dtype", None))
            return slot
        return env[atom]

    def walk(closed: Any, arguments: list[int]) -> list[int]:
        jaxpr = closed.jaxpr
        env: dict[Any, int] = dict(zip(jaxpr.invars, arguments, strict=True))
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
            env[var] = new_slot(var.aval)
            constants[env[var]] = value
        for equation in jaxpr.eqns:
            body = equation.params.get("jaxpr") if equation.primitive.name in _GROUPING else None
            if body is not None:
                if not isinstance(body, jex.core.ClosedJaxpr):
                    body = jex.core.ClosedJaxpr(body, ())
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

    arguments = [new_slot(var.aval) for var in closed.jaxpr.invars]
    (output,) = walk(closed, arguments)
    return NetworkProgram(
        steps=_without_dead_steps(steps, output),
        parameters=tuple(arguments[:n_params]),
        inputs=tuple(arguments[n_params:]),
        output=output,
        constants=constants,
        avals=avals,
    )


def _without_dead_steps(steps: Sequence[ProgramStep], output: int) -> tuple[ProgramStep, ...]:
    wanted = {output}
    kept = []
    for step in reversed(steps):
        if step.equation.effects or not wanted.isdisjoint(step.outputs):
            kept.append(step)
            wanted.update(slot for slot in step.inputs if slot is not None)
    return tuple(reversed(kept))
