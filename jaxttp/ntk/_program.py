"""A network as a flat list of primitive steps, whose inputs and cotangents can be captured.

`trace` turns ``apply_fn`` into the steps of ONE sample, ``(params, x_i) -> outputs (C,)``, without
a batch axis; `jax.vmap` puts the batch back. Equations that only group others (jit, remat) are
inlined (see `jaxttp._core.xla_cpu.steps`).
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxttp._core.traced import constants_of, the_same
from jaxttp._core.types import ApplyFn
from jaxttp._core.xla_cpu.steps import ProgramStep, run_steps, shared_sums, straight_line
from jaxttp.adapters.outputs import TOKENS


@dataclasses.dataclass(frozen=True, eq=False)
class NetworkProgram:
    """A traced single-sample network; the same object for all networks of the same equations.

    Attributes:
        steps: the equations in order, without dead ones.
        parameters: the slot of each parameter leaf.
        inputs: the slot of each leaf of the sample.
        output: the slot of the outputs (C,).
        constants: the slots of the arrays that the network closes over.
        literals: numbers of the equations themselves, by slot.
        avals: shape and dtype of each slot.
        shared: slots that CPUs are to compute once (`jaxttp._core.xla_cpu.steps`).
    """

    steps: tuple[ProgramStep, ...]
    parameters: tuple[int, ...]
    inputs: tuple[int, ...]
    output: int
    constants: tuple[int, ...]
    literals: Mapping[int, Any]
    avals: Mapping[int, Any]
    shared: frozenset[Any]

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
        """The network's outputs, with `probes` added to outputs of steps.

        Args:
            leaves: parameter leaves, then the arrays that the network closes over.
            sample: leaves of one sample.
            probes: step index -> array added to that step's (only) output.
            captured: step index -> input position whose value is returned.

        Returns:
            The outputs (C,) and the captured values by step index.
        """
        values: dict[int, Any] = dict(self.literals)
        values.update(zip((*self.parameters, *self.constants), leaves, strict=True))
        values.update(zip(self.inputs, sample, strict=True))
        weights = leaves[: len(self.parameters)]
        run_steps(self.steps, values, weights, self.shared, probes)
        slots = {index: self.steps[index].inputs[position] for index, position in captured.items()}
        return values[self.output], {i: values[s] for i, s in slots.items() if s is not None}

    def batch(self, leaves: Sequence[Array], samples: Sequence[Array]) -> Array:
        """The network's outputs (N, C) for samples (N, ...)."""
        return jax.vmap(lambda *sample: self.run(leaves, sample, {}, {})[0])(*samples)


class OneSample(NamedTuple):
    """A network traced with one sample.

    Attributes:
        program: its equations.
        constants: the arrays that it closes over.
    """

    program: NetworkProgram
    constants: tuple[Any, ...]


def trace(apply_fn: ApplyFn, params: Any, sample: Any) -> OneSample:
    """The equations of one sample, and the arrays that the network closes over.

    Args:
        apply_fn: ``(params, x (N, ...)) -> (N, C)``.
        params: arrays or `jax.ShapeDtypeStruct`.
        sample: one row of x (a pytree is fine), arrays or `jax.ShapeDtypeStruct`.

    Raises:
        ValueError: a batch of one does not give outputs of shape (1, C).
    """

    def sample_outputs(params: Any, sample: Any) -> Array:
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

    return trace_sample(sample_outputs, params, sample)


def trace_sample(function: Callable[[Any, Any], Array], params: Any, sample: Any) -> OneSample:
    """The same of a function ``(params, sample) -> outputs (C,)``, made for this call alone."""
    closed = jax.make_jaxpr(function)(params, sample)
    line, n_params = straight_line(closed, single_sample=True), len(jax.tree.leaves(params))
    (output,) = line.outputs
    steps = _without_dead_steps(line.steps, output)
    program = NetworkProgram(
        steps=steps,
        parameters=tuple(line.inputs[:n_params]),
        inputs=tuple(line.inputs[n_params:]),
        output=output,
        constants=tuple(line.constants),
        literals=line.literals,
        avals=line.avals,
        shared=shared_sums(steps, line.inputs[n_params:]),
    )
    return OneSample(the_same(program, line, n_params), constants_of(line))


def _without_dead_steps(steps: Sequence[ProgramStep], output: int) -> tuple[ProgramStep, ...]:
    read: set[int | None] = {output}
    kept = []
    for step in reversed(steps):
        if step.equation.effects or not read.isdisjoint(step.outputs):
            kept.append(step)
            read |= {*step.inputs} - {None}
    return tuple(reversed(kept))


_ADDITIVE = frozenset({
    "add", "add_any", "sub", "neg", "reshape", "squeeze", "expand_dims", "transpose", "rev", "copy",
    "broadcast_in_dim", "convert_element_type", "slice", "concatenate", "pad", "reduce_sum",
    "cumsum", "split",
})  # fmt: skip
_PRODUCTS = frozenset({"mul", "dot_general", "conv_general_dilated"})
_IN_THE_FIRST = frozenset({"div", "dynamic_slice", "gather"})


def is_linear(program: NetworkProgram, trainable: Sequence[bool]) -> bool:
    """Whether the outputs are A w + b in the trained leaves w.

    Args:
        program: of one sample.
        trainable: which leaves train.

    Example:
        >>> from jaxttp.ntk._program import trace
        >>> w, x = jnp.ones((3, 2)), jnp.ones(3)
        >>> is_linear(trace(lambda w, x: x @ w + 1.0, w, x).program, (True,))
        True
        >>> is_linear(trace(lambda w, x: jnp.tanh(x @ w), w, x).program, (True,))
        False
    """
    moving: set[Any] = set(itertools.compress(program.parameters, trainable))
    for step in program.steps:
        positions = {i for i, slot in enumerate(step.inputs) if slot in moving}
        if positions and not _is_affine(step, positions):
            return False
        moving.update(step.outputs if positions else ())
    return True


def _is_affine(step: ProgramStep, positions: set[int]) -> bool:
    """Whether a step is affine in the inputs at these positions, together."""
    if not all(jnp.issubdtype(atom.aval.dtype, jnp.inexact) for atom in step.equation.outvars):
        return False
    if step.name == "select_n":
        return 0 not in positions
    alone = step.name in _PRODUCTS and len(positions) == 1
    return step.name in _ADDITIVE or alone or (step.name in _IN_THE_FIRST and positions == {0})
