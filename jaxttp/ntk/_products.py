"""Jᵀu and Jv of a network, for every network that has a reverse mode."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array


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
    transposed = jax.linear_transpose(lambda u: pull(u)[0], outputs)
    return outputs, lambda u: pull(u)[0], lambda v: transposed(v)[0]
