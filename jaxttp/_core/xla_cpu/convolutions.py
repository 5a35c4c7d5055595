"""Convolutions that XLA compiles badly for CPUs, as products of matrices.

Where a kernel has as many taps as its input has places (3 x 3 on 2 x 2 pixels, in the last block of
a ResNet on small images), the compiler swaps the two and is left with a plain loop, ten to a
hundred times slower than a product of the input's patches with the kernel, which is the same sum.
The same holds of its transpose, by which gradients come back. On other backends nothing changes.
This can go once XLA lowers such convolutions to products itself.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


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
