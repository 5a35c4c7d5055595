"""Convolutions that XLA compiles badly for CPUs, as products of matrices.

Where a kernel has as many taps as its input has places (3 x 3 on 2 x 2 pixels, in the last block of
a ResNet on small images), the compiler swaps the two and is left with a plain loop, ten to a
hundred times slower than a product of the input's patches with the kernel, which is the same sum.
The same holds of its transpose, by which gradients come back. On other backends nothing changes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

GROUPING = frozenset({"jit", "pjit", "closed_call", "core_call"})
"""Equations that only hold others."""


@dataclasses.dataclass(frozen=True)
class Quick:
    """A network whose slow convolutions are products of matrices; equal where the network is.

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
        run = _run if _any_slow(closed.jaxpr) else _run_as_it_is
        return jax.tree.unflatten(
            jax.tree.structure(shape), run(closed, jax.tree.leaves((params, x)))
        )


def quick(apply_fn: Callable[..., Any]) -> Callable[..., Any]:
    """`Quick` of a network; the same one for the same network, so that its programs are kept."""
    try:
        return _kept(apply_fn)
    except TypeError:  # a network without a hash
        return Quick(apply_fn)


_kept = functools.lru_cache(maxsize=16)(Quick)


def is_slow(equation: Any) -> bool:
    """Whether an equation is a convolution that is quicker as a product, on this backend."""
    if equation.primitive.name != "conv_general_dilated" or jax.default_backend() != "cpu":
        return False
    given = equation.params
    if given["feature_group_count"] != 1 or given["batch_group_count"] != 1:
        return False
    if any(n != 1 for n in given["lhs_dilation"]) or not given["window_strides"]:
        return False
    numbers = given["dimension_numbers"]
    x, kernel = (atom.aval.shape for atom in equation.invars)
    out = equation.outvars[0].aval.shape
    taps = math.prod(kernel[i] for i in numbers.rhs_spec[2:])
    places = math.prod(x[i] for i in numbers.lhs_spec[2:])
    strides = zip(numbers.out_spec[2:], given["window_strides"], strict=True)
    back = math.prod(max(0, out[i] - 1) * stride + 1 for i, stride in strides)
    return taps > 1 and taps >= min(places, back)


def convolve(equation: Any, x: Array, kernel: Array) -> Array:
    """A convolution (neither grouped nor of a dilated input) as patches times kernel."""
    given = equation.params
    numbers, strides = given["dimension_numbers"], given["window_strides"]
    left, right, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    x = jnp.transpose(x, (left[0], *left[2:], left[1]))  # samples, places, features
    kernel = jnp.transpose(kernel, (*right[2:], right[1], right[0]))
    margins = [(0, 0, 0), *((low, high, 0) for low, high in given["padding"]), (0, 0, 0)]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), margins)
    counts = [equation.outvars[0].aval.shape[i] for i in out[2:]]
    patches = []
    for tap in np.ndindex(*kernel.shape[:-2]):
        first = [i * dilation for i, dilation in zip(tap, given["rhs_dilation"], strict=True)]
        ends = [f + (n - 1) * s + 1 for f, n, s in zip(first, counts, strides, strict=True)]
        limits = (x.shape[0], *ends, x.shape[-1])
        patches.append(jax.lax.slice(x, (0, *first, 0), limits, (1, *strides, 1)))
    found = jax.lax.dot_general(
        jnp.concatenate(patches, axis=-1),
        kernel.reshape(-1, kernel.shape[-1]),
        (((x.ndim - 1,), (0,)), ((), ())),
        precision=given["precision"],
        preferred_element_type=given["preferred_element_type"],
    )
    return jnp.transpose(found, tuple(np.argsort((out[0], *out[2:], out[1])).tolist()))


def run_equation(equation: Any, values: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """Some outputs of one equation; slow convolutions as products.

    Args:
        equation: of a jaxpr.
        values: of its inputs, without those that are literals.
        outvars: the outputs that are wanted.
    """
    if is_slow(equation):
        return [convolve(equation, *values)]
    invars = [atom for atom in equation.invars if not isinstance(atom, jex.core.Literal)]
    names = (tuple("" for _ in some) for some in (invars, outvars))
    single = jex.core.Jaxpr(
        constvars=(), invars=invars, outvars=outvars, eqns=[equation], effects=equation.effects,
        debug_info=jex.core.DebugInfo("jaxttp step", "one equation", *names),
    )  # fmt: skip
    return jex.core.jaxpr_as_fun(jex.core.ClosedJaxpr(single, ()))(*values)


def _any_slow(jaxpr: Any) -> bool:
    return any(
        is_slow(equation)
        or (equation.primitive.name in GROUPING and _any_slow(_body(equation).jaxpr))
        for equation in jaxpr.eqns
    )


def _body(equation: Any) -> Any:
    """What a grouping equation holds."""
    body = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    return body if isinstance(body, jex.core.ClosedJaxpr) else jex.core.ClosedJaxpr(body, ())


def _run_as_it_is(closed: Any, arguments: Sequence[Any]) -> list[Any]:
    return jex.core.jaxpr_as_fun(closed)(*arguments)


def _run(closed: Any, arguments: Sequence[Any]) -> list[Any]:
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        kept = equation.outvars
        if equation.primitive.name in GROUPING:
            found = _run(_body(equation), [read(atom) for atom in equation.invars])
        else:
            atoms = equation.invars
            given = [values[one] for one in atoms if not isinstance(one, jex.core.Literal)]
            kept = [one for one in kept if not isinstance(one, jex.core.DropVar)]
            found = run_equation(equation, given, kept)
        values.update(zip(kept, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]
