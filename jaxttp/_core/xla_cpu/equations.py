"""One equation of a traced function, put differently where XLA for CPUs is slow at it."""

from collections.abc import Sequence
from typing import Any

import jax.extend as jex

from jaxttp._core.xla_cpu import convolutions, pooling


def is_slow(equation: Any) -> bool:
    """Whether `run_equation` puts an equation differently, on this backend."""
    return convolutions.is_slow(equation) or pooling.is_slow(equation)


def run_equation(equation: Any, values: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """Some outputs of one equation; what is slow put differently.

    Args:
        equation: of a jaxpr.
        values: of its inputs, without those that are literals.
        outvars: the outputs that are wanted.
    """
    if convolutions.is_slow(equation):
        return [convolutions.convolve(equation, *values)]
    if pooling.is_slow(equation):
        return [pooling.pool(equation, *values)]
    invars = [atom for atom in equation.invars if not isinstance(atom, jex.core.Literal)]
    names = (tuple("" for _ in some) for some in (invars, outvars))
    single = jex.core.Jaxpr(
        constvars=(), invars=invars, outvars=outvars, eqns=[equation], effects=equation.effects,
        debug_info=jex.core.DebugInfo("jaxttp step", "one equation", *names),
    )  # fmt: skip
    return jex.core.jaxpr_as_fun(jex.core.ClosedJaxpr(single, ()))(*values)
