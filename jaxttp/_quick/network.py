"""A network with its slow steps put differently, and its shared sums computed once."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend as jex

from jaxttp._quick.equations import is_slow
from jaxttp._quick.fusion import run_steps, shared_sums
from jaxttp._quick.steps import straight_line


@dataclasses.dataclass(frozen=True)
class Quick:
    """A network that XLA for CPUs runs quickly; equal where the network is.

    Loops, rematerialised parts and derivatives of a network's own stay as they are.

    Attributes:
        apply_fn: the network, ``(params, x) -> outputs``.

    Example:
        >>> import jax.numpy as jnp
        >>> double = Quick(lambda w, x: w * x)
        >>> double(2.0, jnp.ones(2)).tolist(), double == Quick(double.apply_fn)
        ([2.0, 2.0], True)
    """

    apply_fn: Callable[..., Any]

    def __call__(self, params: Any, x: Any) -> Any:
        """The network's outputs."""
        if jax.default_backend() != "cpu":
            return self.apply_fn(params, x)
        closed, shape = jax.make_jaxpr(self.apply_fn, return_shape=True)(params, x)
        leaves, data = jax.tree.leaves(params), jax.tree.leaves(x)
        line = straight_line(closed)
        shared = shared_sums(line.steps, line.inputs[len(leaves) :])
        if shared or any(is_slow(step.equation) for step in line.steps):
            values = line.constants | dict(zip(line.inputs, [*leaves, *data], strict=True))
            run_steps(line.steps, values, leaves, shared)
            found = [values[slot] for slot in line.outputs]
        else:
            found = jex.core.jaxpr_as_fun(closed)(*leaves, *data)
        return jax.tree.unflatten(jax.tree.structure(shape), found)


def quick(apply_fn: Callable[..., Any]) -> Callable[..., Any]:
    """`Quick` of a network; the same one for the same network, so that its programs are kept."""
    try:
        return _kept(apply_fn)
    except TypeError:  # a network without a hash
        return Quick(apply_fn)


_kept = functools.lru_cache(maxsize=16)(Quick)
