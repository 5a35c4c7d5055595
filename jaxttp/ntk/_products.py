"""Jᵀu and Jv of a network, for every network that has a reverse mode."""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend as jex
from jaxtyping import Array

_PROMISED = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
_DROPPED = jax.lax.GatherScatterMode.FILL_OR_DROP


def pull_and_push(
    function: Callable[[Any], Array], params: Any
) -> tuple[Array, Callable[[Array], Any], Callable[[Any], Array]]:
    """The outputs, ``u -> Jᵀu`` and ``v -> Jv``.

    The forward product is the transpose of the backward one, not a jvp: a `jax.custom_vjp` inside
    the network has no forward mode, and two modes could disagree.

    Args:
        function: ``params -> outputs``.
        params: pytree of floating-point arrays.
    """
    outputs, pull = jax.vjp(function, params)
    backward = jax.make_jaxpr(lambda u: pull(u)[0])(outputs)
    if _promises(backward.jaxpr):
        leaves = jex.core.jaxpr_as_fun(_dropping(backward))
        treedef = jax.tree.structure(params)

        def dropping(u: Array) -> Any:
            return jax.tree.unflatten(treedef, leaves(u))

        transposed = jax.linear_transpose(dropping, outputs)
    else:
        transposed = jax.linear_transpose(lambda u: pull(u)[0], outputs)
    return outputs, lambda u: pull(u)[0], lambda v: transposed(v)[0]


def _inner_programs(value: Any) -> list[Any]:
    """The programs among the parameters of an equation."""
    many = value if isinstance(value, tuple | list) else (value,)
    return [one for one in many if isinstance(one, jex.core.Jaxpr | jex.core.ClosedJaxpr)]


def _promises(jaxpr: Any) -> bool:
    """Whether a program scatters where it was promised that every index is within bounds."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scatter-add" and equation.params["mode"] == _PROMISED:
            return True
        for value in equation.params.values():
            if any(_promises(getattr(one, "jaxpr", one)) for one in _inner_programs(value)):
                return True
    return False


def _dropping(program: Any) -> Any:
    """The same program with such scatters told to drop what is out of bounds, as they do anyway.

    ``table[tokens]`` makes that promise. For a token that breaks it the outputs hold the nearest
    row, whose gradient the backward product drops; its transpose would add the row again.
    """
    inside = getattr(program, "jaxpr", program)
    if inside is not program:  # from JAX 0.12 on there is one class, which is its own inside
        return program.replace(jaxpr=_dropping(inside))

    def mended(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(mended(one) for one in value) if _inner_programs(value) else value
        return _dropping(value) if _inner_programs(value) else value

    equations = []
    for equation in program.eqns:
        params = {name: mended(value) for name, value in equation.params.items()}
        if equation.primitive.name == "scatter-add" and params["mode"] == _PROMISED:
            params["mode"] = _DROPPED
        equations.append(equation.replace(params=params))
    return program.replace(eqns=equations)
