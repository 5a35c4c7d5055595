"""The names that every module shares: functions, parameters, arrays, models."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from jaxtyping import Array

Params: TypeAlias = Any
"""Any pytree of floating-point arrays."""

ApplyFn: TypeAlias = Callable[[Any, Any], Array]
"""A function ``(params, x) -> outputs`` with x (N, ...) and outputs (N, C).

Row i of the outputs depends on row i of x alone.
"""


class Model(NamedTuple):
    """A network as a pure function and its parameters.

    Unpacks where a function asks for ``apply_fn, params``, so ``empirical_ntk(*model, x)`` works.

    Attributes:
        apply_fn: ``(params, x) -> outputs``, with x (N, ...) and outputs (N, C).
        params: the parameters, a plain pytree of arrays.
    """

    apply_fn: ApplyFn
    params: Params
