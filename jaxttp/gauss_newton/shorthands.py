"""Shorthands of modes: the one table of strings, and the options that go with them."""

import dataclasses
from typing import Any, TypeAlias

from jax.typing import ArrayLike
from jaxtyping import Array

from jaxttp._core.checks import check_choice, check_number, check_used, is_concrete
from jaxttp.gauss_newton.modes import (
    ATOL,
    RTOL,
    Damp,
    Exact,
    Mode,
    Noise,
    Tikhonov,
    Truncate,
)

MODES: dict[str, type[Mode]] = {
    mode.name: mode for mode in (Exact, Truncate, Damp, Tikhonov, Noise)
}
"""The modes that have a shorthand."""

PseudoInverse: TypeAlias = str | Mode
"""What is taken where a mode is asked for: its shorthand, or a value."""


def to_mode(
    pseudoinverse: PseudoInverse,
    *,
    rtol: ArrayLike = RTOL,
    atol: ArrayLike = ATOL,
    method: str = "auto",
    noise: ArrayLike | None = None,
    key: Array | None = None,
    usual_rtol: float = RTOL,
) -> Mode:
    """The mode that a shorthand and its options mean; a mode is returned as it is.

    Args:
        pseudoinverse: "exact", "truncate", "damp", "tikhonov", "noise", or a `Mode`.
        rtol: of the filters; like `atol` and `key` it is of no use to other shorthands, which may
            all be called alike.
        atol: of "truncate".
        method: the route.
        noise: of "noise"; None for its usual one.
        key: of "noise".
        usual_rtol: the rtol of a caller who gave none.

    Returns:
        A `Mode`.

    Raises:
        ValueError: an unknown shorthand, options out of range; a noise beside another mode; any
            option beside a mode that is a value, as it holds its own.

    Example:
        >>> to_mode("tikhonov", rtol=0.1)
        Tikhonov(rtol=0.1, method='eigh')
    """
    if isinstance(pseudoinverse, Mode):
        options = {"rtol": (rtol, usual_rtol), "atol": (atol, ATOL), "method": (method, "auto"),
                   "noise": (noise, None)}  # fmt: skip
        for name, (value, usual) in options.items():
            # What is traced cannot be told from the usual: optax.inject_hyperparams traces it all.
            given = value is not usual and is_concrete(value) and value != usual
            check_used(name, value if given else None, False, "the mode holds its own")
        if isinstance(pseudoinverse, Noise):
            return pseudoinverse if key is None else pseudoinverse.fresh(key, 0)
        check_used("key", key, False, "it is that of Noise")
        return pseudoinverse
    remedy = "Or give a value, such as jaxttp.gauss_newton.Truncate(0.01)."
    kind = MODES[check_choice("pseudoinverse", pseudoinverse, MODES, remedy=remedy)]
    check_number("rtol", rtol, at_least=0, below=1)
    check_number("atol", atol, at_least=0)
    if noise is not None:
        check_number("noise", noise, at_least=0)
        check_used("noise", noise, kind is Noise, "it is that of pseudoinverse='noise'")
    options = {"rtol": rtol, "atol": atol, "method": method, "key": key}
    options |= {} if noise is None else {"noise": noise}
    taken = {field.name for field in dataclasses.fields(kind) if field.init}
    return kind(**{name: value for name, value in options.items() if name in taken})


def choose_method(mode: str, rtol: Any, method: str = "auto") -> str:
    """The route that "auto" takes, or the one that was asked for if it can do the mode.

    Args:
        mode: "exact", "truncate", "damp", "tikhonov" or "noise".
        rtol: the relative tolerance (a tracer counts as coarse enough for a Gram).
        method: "auto", "cholesky", "eigh" or "svd".

    Returns:
        "cholesky", "eigh" or "svd".

    Raises:
        ValueError: unknown names, or a Cholesky factorisation for a mode that needs a spectrum.

    Example:
        >>> choose_method("truncate", 0.01), choose_method("truncate", 0.0)
        ('eigh', 'svd')
    """
    check_choice("mode", mode, MODES)
    return to_mode(mode, rtol=rtol, method=method).method
