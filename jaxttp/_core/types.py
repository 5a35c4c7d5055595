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

Progress: TypeAlias = Callable[[str, int, int], None]
"""Is called with (stage, done, total)."""

_NOTES = "jaxttp_notes"


def noted(apply_fn: ApplyFn, notes: Callable[[], tuple[str, ...]]) -> ApplyFn:
    """The same function, which from now on can say how the network is evaluated.

    Args:
        apply_fn: a function of ours, ``(params, x) -> outputs``.
        notes: gives lines such as "2 BatchNorm on running averages"; asked after `apply_fn` was
            traced, as some networks are known by then only.

    Returns:
        `apply_fn` itself, with an attribute: identity and hash, by which its programs are found,
        stay.
    """
    setattr(apply_fn, _NOTES, notes)
    return apply_fn


def notes_of(apply_fn: ApplyFn) -> tuple[str, ...]:
    """How a network is evaluated, as far as whoever made the function has said so.

    Args:
        apply_fn: any function.

    Example:
        >>> notes_of(noted(lambda params, x: x, lambda: ("1 dropout (0.5) off",)))
        ('1 dropout (0.5) off',)
        >>> notes_of(abs)
        ()
    """
    notes: Callable[[], tuple[str, ...]] | None = getattr(apply_fn, _NOTES, None)
    return () if notes is None else notes()


class Model(NamedTuple):
    """A network as a pure function and its parameters.

    Unpacks where a function asks for ``apply_fn, params``, so ``empirical_ntk(*model, x)`` works.

    Attributes:
        apply_fn: ``(params, x) -> outputs``, with x (N, ...) and outputs (N, C).
        params: the parameters, a plain pytree of arrays.
    """

    apply_fn: ApplyFn
    params: Params
