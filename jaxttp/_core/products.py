"""Jᵀu and Jv of a network, for every network that has a reverse mode."""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
from jaxtyping import Array

_PROMISED = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
_DROPPED = jax.lax.GatherScatterMode.FILL_OR_DROP


def with_forward_mode(function: Callable[[Any], Array], params: Any) -> Callable[[Any], Array]:
    """The same function, with a forward mode for `jax.jvp` and `jax.linearize`.

    A function with a `jax.custom_vjp` inside (flash attention, a solver's adjoint) has no forward
    mode; its tangents are then those of `pull_and_push`.

    Args:
        function: ``params -> outputs``.
        params: pytree of floating-point arrays, of which shapes and dtypes matter.

    Example:
        >>> @jax.custom_vjp
        ... def double(w):
        ...     return 2 * w
        >>> double.defvjp(lambda w: (2 * w, None), lambda _, g: (2 * g,))
        >>> w = jnp.ones(1)
        >>> jax.jvp(with_forward_mode(double, w), (w,), (3 * w,))[1].tolist()
        [6.0]
    """
    closed = jax.make_jaxpr(lambda p: function(p))(params)
    if not _any_equation(closed.jaxpr, lambda equation: "custom_vjp" in equation.primitive.name):
        return function
    run = jax.custom_jvp(lambda params: function(params))

    @run.defjvp
    def tangent(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Array, Array]:
        try:
            outputs, _, push = pull_and_push(function, *primals)
        except (TypeError, ValueError) as problem:
            raise ValueError(
                "apply_fn has a layer with a derivative of its own that has no forward mode, and "
                "whose derivative has no reverse mode. Give a layer that has one: jax.custom_jvp "
                "in place of jax.custom_vjp; for a solver of diffrax "
                f"adjoint=diffrax.DirectAdjoint(). ({problem})"
            ) from problem
        return outputs, push(*tangents)

    return run


def pull_and_push(
    function: Callable[[Any], Array], params: Any
) -> tuple[Array, Callable[[Array], Any], Callable[[Any], Array]]:
    """The outputs, ``u -> Jᵀu`` and ``v -> Jv``.

    The forward product is the transpose of the backward one, not a jvp: a `jax.custom_vjp` inside
    the network has no forward mode, and two modes could disagree. Where the backward product has no
    transpose (a loop, as in the default adjoint of diffrax), the rows of the Jacobian are formed,
    one backward product for each output.

    Args:
        function: ``params -> outputs``.
        params: pytree of floating-point arrays.
    """
    outputs, pull_tuple = jax.vjp(function, params)

    def pull(u: Array) -> Any:
        return pull_tuple(u)[0]

    backward = jax.make_jaxpr(pull)(outputs)
    linear = pull
    if _any_equation(backward.jaxpr, _promises):
        leaves = jex.core.jaxpr_as_fun(_dropping(backward))
        treedef = jax.tree.structure(params)
        linear = lambda u: jax.tree.unflatten(treedef, leaves(u))  # noqa: E731
    transposed = jax.linear_transpose(linear, outputs)
    try:
        jax.eval_shape(transposed, params)
    except (NotImplementedError, ValueError, TypeError, AssertionError):
        return outputs, pull, lambda v: _by_rows(pull, outputs, v)
    return outputs, pull, lambda v: transposed(v)[0]


def _by_rows(pull: Callable[[Array], Any], outputs: Array, direction: Any) -> Array:
    """Jv, a row of J at a time."""

    def row(index: Array) -> Array:
        unit = jnp.zeros(outputs.size, outputs.dtype).at[index].set(1).reshape(outputs.shape)
        leaves = zip(jax.tree.leaves(pull(unit)), jax.tree.leaves(direction), strict=True)
        return sum((jnp.vdot(a, b) for a, b in leaves), start=jnp.zeros((), outputs.dtype))

    return jax.lax.map(row, jnp.arange(outputs.size)).reshape(outputs.shape)


def _any_equation(jaxpr: Any, condition: Callable[[Any], bool]) -> bool:
    """Whether a condition holds for an equation of a jaxpr, or of one within it."""
    return any(map(condition, jaxpr.eqns)) or any(
        _any_equation(inner, condition) for inner in jex.core.subjaxprs(jaxpr)
    )


def _promises(equation: Any) -> bool:
    """Whether an equation scatters in the mode that promises indices within bounds."""
    return equation.primitive.name == "scatter-add" and equation.params["mode"] == _PROMISED


def _dropping(jaxpr: Any) -> Any:
    """The same jaxpr, whose scatters of that mode drop indices out of bounds, as they do anyway.

    ``table[tokens]`` promises indices within bounds. For a token out of bounds the outputs hold the
    nearest row. The backward product drops its gradient, but its transpose would add the row again.
    """
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    if inner is not jaxpr:  # from JAX 0.12 on a single class, which is its own `jaxpr`
        return jaxpr.replace(jaxpr=_dropping(inner))

    def replaced(value: Any) -> Any:
        if isinstance(value, jex.core.Jaxpr | jex.core.ClosedJaxpr):
            return _dropping(value)
        return type(value)(map(replaced, value)) if type(value) in (tuple, list) else value

    equations = []
    for equation in jaxpr.eqns:
        params = {name: replaced(value) for name, value in equation.params.items()}
        if _promises(equation):
            params["mode"] = _DROPPED
        equations.append(equation.replace(params=params))
    return jaxpr.replace(eqns=equations)
