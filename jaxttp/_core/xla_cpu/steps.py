"""A traced function as a flat list of primitive steps, some of which CPUs compute differently.

Equations that only group others (jit) are inlined. One with shardings of its arrays is inlined only
in a function of one sample, where shardings mean nothing. Custom derivatives (custom_jvp,
custom_vjp) and loops (scan, while, cond) stay one opaque step: inlining a custom derivative would
change the gradient.

Two things are rewritten, on CPUs only.

**Convolutions** that XLA compiles badly become products of matrices. Where a kernel has as many
taps as its input has pixels (3 x 3 on 2 x 2 pixels, in the last block of a ResNet on small images),
the compiler swaps the two and emits a plain loop, 10 to 100 times slower than the same sum as a
product of the input's patches with the kernel. The same holds for its transpose in a backward pass.
This can go once XLA lowers such convolutions to products itself.

**Sums** are not recomputed for each of their readers. XLA's compiler for CPUs fuses elementwise
operations into each reader of their result, and repeats them there. The cotangent at a block of a
residual network is a sum over all blocks above it, and the derivatives of layer norms in it are
elementwise. The whole sum is fused into the products of every block, so the work grows with the
square of the depth. A gradient through a ViT of 12 blocks takes 1.6 times as long, through 16
blocks twice as long, and compiles 2.6 and 5.7 times as long (width 192, two cores, jaxlib 0.10.1).

So a sum of two branches that several steps read, itself or after an activation, is passed through a
conditional, across which nothing is fused, forwards or backwards. Both branches return the value.
(`jax.lax.optimization_barrier` is dropped on CPUs before anything is fused.) This can go once XLA
keeps that barrier on CPUs.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jaxttp._core.xla_cpu import pooling

_GROUPING = ("jit", "pjit", "closed_call", "core_call")
_REMATERIALIZED = ("remat", "remat2", "checkpoint")
_PRODUCTS = ("dot_general", "conv_general_dilated")
FEW = 1 << 10
"""A sum of fewer numbers is not worth a conditional."""


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
        """The outputs that later steps read, from the values of the slots."""
        arguments = [values[slot] for slot in self.inputs if slot is not None]
        outvars = zip(self.equation.outvars, self.outputs, strict=True)
        read = [var for var, slot in outvars if slot is not None]
        return run_equation(self.equation, arguments, read)


def run_equation(equation: Any, values: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """Some outputs of one equation; slow convolutions and maxima are computed differently.

    Args:
        equation: of a jaxpr.
        values: of its inputs, without those that are literals.
        outvars: the outputs to compute.
    """
    if is_slow(equation):
        return [convolve(equation, *values)]
    if pooling.is_slow(equation):
        return [pooling.pool(equation, *values)]
    invars = [atom for atom in equation.invars if not isinstance(atom, jex.core.Literal)]
    names = ("",) * len(invars), ("",) * len(outvars)
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
        literals: numbers of the equations themselves, by slot.
        constants: arrays that the function closes over, by slot.
        avals: shape and dtype of each slot.
    """

    steps: list[ProgramStep]
    inputs: list[int]
    outputs: list[int]
    literals: dict[int, np.ndarray]
    constants: dict[int, Any]
    avals: dict[int, Any]


def straight_line(closed: Any, *, single_sample: bool = False) -> StraightLine:
    """The steps of a traced function.

    Args:
        closed: a closed jaxpr.
        single_sample: whether it is a network of one sample. Rematerialization and equations with
            shardings are then inlined, too.

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
            body = _inside(equation, single_sample)
            if body is not None:
                results = walk(body, [read(env, atom) for atom in equation.invars])
                env.update(zip(equation.outvars, results, strict=True))
                continue
            inputs = tuple(
                None if isinstance(atom, jex.core.Literal) else env[atom]
                for atom in equation.invars
            )
            read_vars = [v for v in equation.outvars if not isinstance(v, jex.core.DropVar)]
            env.update({var: new_slot(var.aval) for var in read_vars})
            outputs = tuple(env.get(var) for var in equation.outvars)
            steps.append(ProgramStep(equation, inputs, outputs))
        return [read(env, atom) for atom in jaxpr.outvars]

    inputs = [new_slot(var.aval) for var in closed.jaxpr.invars]
    return StraightLine(steps, inputs, walk(closed, inputs), literals, constants, avals)


def _inside(equation: Any, single_sample: bool) -> Any:
    """The jaxpr that an equation only groups, None for other equations."""
    params = equation.params
    if equation.primitive.name not in _GROUPING + (_REMATERIALIZED if single_sample else ()):
        return None
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    is_placed = any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings)
    if is_placed and not single_sample:
        return None
    body = params.get("jaxpr", params.get("call_jaxpr"))
    if body is None or isinstance(body, jex.core.ClosedJaxpr):
        return body
    return jex.core.ClosedJaxpr(body, ())


def is_slow(equation: Any) -> bool:
    """Whether an equation is a convolution that is quicker as a product, on this backend."""
    if equation.primitive.name != "conv_general_dilated" or jax.default_backend() != "cpu":
        return False
    params = equation.params
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return False
    if any(n != 1 for n in params["lhs_dilation"]) or not params["window_strides"]:
        return False
    axes = params["dimension_numbers"]
    x, kernel = (atom.aval.shape for atom in equation.invars)
    out = equation.outvars[0].aval.shape
    taps = math.prod(kernel[i] for i in axes.rhs_spec[2:])
    pixels = math.prod(x[i] for i in axes.lhs_spec[2:])
    strides = zip(axes.out_spec[2:], params["window_strides"], strict=True)
    cotangents = math.prod(max(0, out[i] - 1) * stride + 1 for i, stride in strides)
    return taps > 1 and taps >= min(pixels, cotangents)


def patches(
    x: Array, window: Sequence[int], counts: Sequence[int], params: Mapping[str, Any]
) -> list[Array]:
    """The entries under each tap of a convolution's window, (samples, *counts, features) each.

    Args:
        x: inputs (samples, pixels ..., features).
        window: taps along each axis of pixels.
        counts: outputs along each.
        params: of the convolution's equation.
    """
    dilated = zip(params["padding"], params["lhs_dilation"], strict=True)
    margins = [(0, 0, 0), *((low, high, d - 1) for (low, high), d in dilated), (0, 0, 0)]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), margins)
    strides, slices = params["window_strides"], []
    for tap in np.ndindex(*window):
        first = [i * dilation for i, dilation in zip(tap, params["rhs_dilation"], strict=True)]
        ends = [f + max(0, (n - 1) * s + 1) for f, n, s in zip(first, counts, strides, strict=True)]
        limits = (x.shape[0], *ends, x.shape[-1])
        slices.append(jax.lax.slice(x, (0, *first, 0), limits, (1, *strides, 1)))
    return slices


def convolve(equation: Any, x: Array, kernel: Array) -> Array:
    """A convolution (neither grouped nor of a dilated input) as patches times kernel."""
    params = equation.params
    left, right, out = params["dimension_numbers"]
    x = jnp.transpose(x, (left[0], *left[2:], left[1]))  # samples, pixels, features
    kernel = jnp.transpose(kernel, (*right[2:], right[1], right[0]))
    counts = [equation.outvars[0].aval.shape[i] for i in out[2:]]
    product = jax.lax.dot_general(
        jnp.concatenate(patches(x, kernel.shape[:-2], counts, params), axis=-1),
        kernel.reshape(-1, kernel.shape[-1]),
        (((x.ndim - 1,), (0,)), ((), ())),
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )
    return jnp.transpose(product, tuple(np.argsort((out[0], *out[2:], out[1])).tolist()))


def shared_sums(steps: Sequence[ProgramStep], data: Iterable[int]) -> frozenset[int]:
    """The sums of two values that depend on the data, where several steps read the sum.

    Args:
        steps: in order.
        data: slots of what the network is applied to.

    Returns:
        Slots, of the sums or of their activations.

    Example:
        >>> line = straight_line(jax.make_jaxpr(
        ...     lambda x: (r := jax.nn.relu(x + jnp.tanh(x))) * jnp.exp(r))(jnp.ones(4096)))
        >>> [step.name for step in line.steps if step.outputs[0] in shared_sums(line.steps, [0])]
        ['custom_jvp_call']
    """
    readers = collections.Counter(slot for step in steps for slot in {*step.inputs} - {None})
    fed, sums, shared = set[int | None](data), dict[int | None, int](), set[int]()
    for step in steps:
        data_inputs = [slot for slot in step.inputs if slot in fed]
        if not data_inputs:
            continue
        fed.update(slot for slot in step.outputs if slot is not None)
        out, size = next(iter(step.outputs), None), step.size
        if out is None or size < FEW or step.name in _PRODUCTS:
            continue
        is_sum = step.name == "add" and len(data_inputs) == 2
        if is_sum or (len(data_inputs) == 1 and sums.get(data_inputs[0]) == size):
            if readers[out] > 1:
                shared.add(out)
            else:
                sums[out] = size
    return frozenset(shared)


def at_run_time(leaves: Iterable[Any]) -> Bool[Array, ""] | None:
    """A truth value that is unknown at compile time; None without a floating-point leaf.

    Args:
        leaves: of the parameters.

    Example:
        >>> bool(at_run_time([jnp.arange(3), jnp.ones((2, 2))])), at_run_time([])
        (True, None)
    """
    real = [a for a in leaves if jnp.issubdtype(jnp.result_type(a), jnp.floating) and jnp.size(a)]
    # The whole smallest leaf: a single entry of a sharded array cannot be read.
    return jnp.min(jnp.asarray(min(real, key=jnp.size))) < jnp.inf if real else None


def keep(value: Array, flag: Bool[Array, ""]) -> Array:
    """The same value, computed once, whatever `flag` is.

    Args:
        value: any real numbers.
        flag: of `at_run_time`.

    Example:
        >>> keep(jnp.ones(2), jnp.asarray(False)).tolist()
        [1.0, 1.0]
    """
    return jax.lax.cond(flag, lambda v: v, lambda v: v * 1.0, value)


def run_steps(
    steps: Sequence[ProgramStep],
    values: dict[int, Any],
    leaves: Sequence[Any],
    shared: frozenset[int],
    probes: Mapping[int, Array] | None = None,
) -> None:
    """Add the values of all slots to `values`, which has those of the inputs and the constants.

    Args:
        steps: in order.
        values: by slot; added to.
        leaves: of the parameters.
        shared: of `shared_sums`; used on CPUs only.
        probes: index of a step -> array added to its (only) output.
    """
    flag = at_run_time(leaves) if shared and jax.default_backend() == "cpu" else None
    for index, step in enumerate(steps):
        results = step.evaluate(values)
        if probes and index in probes:
            results = [results[0] + probes[index]]
        slots = [slot for slot in step.outputs if slot is not None]
        if flag is not None and slots and slots[0] in shared:
            results = [keep(results[0], flag)]
        values.update(zip(slots, results, strict=True))
