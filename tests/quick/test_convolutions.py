"""Slow convolutions as products of matrices: against the convolution."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxttp._core.xla_cpu.steps import convolve, is_slow
from tests.draws import normal, split


def convolution(kernel, x, **more):
    return jax.lax.conv_general_dilated(x, kernel, **more)


def the_equation(function, *arguments):
    (found,) = jax.make_jaxpr(function)(*arguments).eqns
    return found


@pytest.mark.slow
@given(
    taps=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    size=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    margins=st.tuples(*4 * [st.integers(0, 3)]),
    order=st.sampled_from([("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"),
                           ("NHWC", "OIHW", "NCHW"), ("CWNH", "WOIH", "HCNW")]),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_any_convolution_is_patches_times_kernel(taps, size, strides, dilation, margins, order):
    axes = (
        dict(zip("NHWC", (2, *size, 3), strict=True)),
        dict(zip("HWIO", (*taps, 3, 4), strict=True)),
    )
    x = normal(split(0, 1)[0], tuple(axes[0][a] for a in order[0]))
    kernel = normal(split(1, 1)[0], tuple(axes[1][a] for a in order[1]))
    pads = (margins[:2], margins[2:])
    reach = [(k - 1) * d + 1 for k, d in zip(taps, dilation, strict=True)]
    if any(n + sum(p) < r for n, p, r in zip(size, pads, reach, strict=True)):
        return  # nothing is left of the image
    run = functools.partial(
        convolution, window_strides=strides, padding=pads, rhs_dilation=dilation,
        dimension_numbers=order,
    )  # fmt: skip
    expected = run(kernel, x)
    found = convolve(the_equation(run, kernel, x), x, kernel)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_what_is_grouped_or_dense_is_not_slow():
    run = functools.partial(
        convolution, window_strides=(1, 1), padding="SAME", feature_group_count=2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    assert not is_slow(the_equation(run, jnp.ones((3, 3, 1, 4)), jnp.ones((1, 2, 2, 2))))
    plain = functools.partial(convolution, window_strides=(), padding=())
    assert not is_slow(the_equation(plain, jnp.ones((4, 3)), jnp.ones((2, 3))))  # a dense layer
