"""Whether a network is linear in the parameters that train, by the steps of its program.

J does not depend on the weights then, so that one kernel is the kernel of the whole training. Only
steps are let through that are known to be affine, as they are used: what merely has a constant
derivative somewhere (rounding, `stop_gradient`, a comparison) is not.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxttp._core.xla_cpu.steps import ProgramStep
from jaxttp.ntk._program import NetworkProgram

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
    moved: set[Any] = {
        slot for slot, wanted in zip(program.parameters, trainable, strict=True) if wanted
    }
    for step in program.steps:
        places = {i for i, slot in enumerate(step.inputs) if slot in moved}
        if places and not _is_affine(step, places):
            return False
        moved.update(step.outputs if places else ())
    return True


def _is_affine(step: ProgramStep, places: set[int]) -> bool:
    """Whether a step is affine in the inputs at these places, together."""
    if not all(jnp.issubdtype(atom.aval.dtype, jnp.inexact) for atom in step.equation.outvars):
        return False
    if step.name == "select_n":
        return 0 not in places
    alone = step.name in _PRODUCTS and len(places) == 1
    return step.name in _ADDITIVE or alone or (step.name in _IN_THE_FIRST and places == {0})
