"""Sums that XLA's compiler for CPUs is kept from computing anew for each of their readers.

It fuses elementwise operations into whatever reads their result, and repeats them there. The
derivative at a block of a residual network is a sum of what all blocks above hand down, of which
the derivatives of layer norms are elementwise; the whole sum is fused into the products of every
block, so the work grows with the square of the depth: of a gradient through 12 blocks a third is
lost so, through 16 two fifths, and most of the compilation.

So a sum of two branches that several steps read, itself or after an activation, comes out of a
conditional, across which nothing is fused, forwards or backwards. Both of its branches hand the
value on. (`jax.lax.optimization_barrier` is dropped on CPUs before anything is fused.)
This can go once XLA keeps that barrier on CPUs.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxttp._core.xla_cpu.steps import ProgramStep

FEW = 1 << 10
"""Fewer numbers are not worth a conditional."""
_PRODUCTS = ("dot_general", "conv_general_dilated")


def shared_sums(steps: Sequence[ProgramStep], data: Iterable[int]) -> frozenset[int]:
    """The sums of two values of which both depend on the data, and which several steps read.

    Args:
        steps: in order.
        data: slots of what the network is applied to.

    Returns:
        Slots, of the sums or of what an activation makes of them.

    Example:
        >>> from jaxttp._core.xla_cpu.steps import straight_line
        >>> line = straight_line(jax.make_jaxpr(
        ...     lambda x: (r := jax.nn.relu(x + jnp.tanh(x))) * jnp.exp(r))(jnp.ones(4096)))
        >>> [step.name for step in line.steps if step.outputs[0] in shared_sums(line.steps, [0])]
        ['custom_jvp_call']
    """
    readers = collections.Counter(slot for step in steps for slot in {*step.inputs} - {None})
    fed, sums, shared = set[int | None](data), dict[int | None, int](), set[int]()
    for step in steps:
        given = [slot for slot in step.inputs if slot in fed]
        if not given:
            continue
        fed.update(slot for slot in step.outputs if slot is not None)
        out, size = next(iter(step.outputs), None), step.size
        if out is None or size < FEW or step.name in _PRODUCTS:
            continue
        is_sum = step.name == "add" and len(given) == 2
        if is_sum or (len(given) == 1 and sums.get(given[0]) == size):
            if readers[out] > 1:
                shared.add(out)
            else:
                sums[out] = size
    return frozenset(shared)


def at_run_time(leaves: Iterable[Any]) -> Bool[Array, ""] | None:
    """A truth value that the compiler does not know; None if there is nothing to make it of.

    Args:
        leaves: of the parameters.

    Example:
        >>> bool(at_run_time([jnp.arange(3), jnp.ones((2, 2))])), at_run_time([])
        (True, None)
    """
    real = [one for one in leaves if jnp.issubdtype(_dtype(one), jnp.floating) and jnp.size(one)]
    # The smallest, and all of it: a single entry cannot be cut out of what lies on many devices.
    return jnp.min(jnp.asarray(min(real, key=jnp.size))) < jnp.inf if real else None


def _dtype(leaf: Any) -> Any:
    return getattr(leaf, "dtype", type(leaf))


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
    """Put the values of all slots into `values`, which has those of the inputs and the constants.

    Args:
        steps: in order.
        values: by slot; added to.
        leaves: of the parameters.
        shared: of `shared_sums`; of no account but on CPUs.
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
