"""Slow convolutions as products of matrices: against the convolution, and its derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxttp import _convolutions
from jaxttp._convolutions import Quick, convolve, is_slow, quick
from tests.draws import normal, split

CPU = pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere nothing is replaced")


def convolution(kernel, x, **more):
    return jax.lax.conv_general_dilated(x, kernel, **more)


def the_equation(function, *arguments):
    (found,) = jax.make_jaxpr(function)(*arguments).eqns
    return found


def convolutions(function, *arguments):
    text = str(jax.make_jaxpr(function)(*arguments))
    return text.count("conv_general_dilated[")


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
@settings(max_examples=40, deadline=None)
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


def deep(params, x):
    """An image of 4 x 4 pixels that becomes 2 x 2 and 1 x 1, in a jit of its own."""
    numbers = {"padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}

    @jax.jit
    def half(w, x):
        return jax.nn.relu(jax.lax.conv_general_dilated(x, w, (2, 2), **numbers))

    for w in params[:-1]:
        x = half(w, x)
    return x.mean(axis=(1, 2)) @ params[-1]


def deep_parts():
    keys = split(3, 4)
    shapes = ((3, 3, 2, 4), (3, 3, 4, 5), (5, 3))
    return [normal(k, s) for k, s in zip(keys, shapes, strict=False)], normal(keys[3], (6, 4, 4, 2))


def test_outputs_and_derivatives_are_those_of_the_network():
    params, x = deep_parts()

    def value(network, w):
        return jnp.sum(jnp.sin(network(w, x)))

    for one in (lambda f: f(params, x), lambda f: jax.grad(functools.partial(value, f))(params),
                lambda f: jax.jvp(lambda w: f(w, x), (params,), (params,)),
                lambda f: jax.vmap(lambda row: f(params, row[None]))(x)):  # fmt: skip
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12),
            one(quick(deep)), one(deep),
        )  # fmt: skip


@CPU
def test_only_slow_ones_are_replaced():
    params, x = deep_parts()
    assert convolutions(deep, params, x) == 2
    assert convolutions(quick(deep), params, x) == 0
    large = jnp.ones((1, 16, 16, 2))
    assert convolutions(quick(deep), params, large) == 2  # 16 to 8 to 4 pixels: quick as they are
    run = functools.partial(
        convolution, window_strides=(1, 1), padding="SAME", feature_group_count=2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    assert not is_slow(the_equation(run, jnp.ones((3, 3, 1, 4)), jnp.ones((1, 2, 2, 2))))
    plain = functools.partial(convolution, window_strides=(), padding=())
    assert not is_slow(the_equation(plain, jnp.ones((4, 3)), jnp.ones((2, 3))))  # a dense layer


def test_elsewhere_nothing_is_replaced(monkeypatch):
    monkeypatch.setattr(_convolutions.jax, "default_backend", lambda: "tpu")
    params, x = deep_parts()
    assert convolutions(Quick(lambda w, x: deep(w, x)), params, x) == 2


def test_derivatives_of_ones_own_are_kept():
    @jax.custom_jvp
    def odd(x):
        return x

    odd.defjvp(lambda primals, tangents: (odd(*primals), 7 * tangents[0]))
    params, x = deep_parts()

    def network(w, x):
        return odd(deep(w, x))

    found = jax.grad(lambda w: quick(network)(w, x).sum())(params)
    plain = jax.grad(lambda w: deep(w, x).sum())(params)
    for a, b in zip(found, plain, strict=True):
        np.testing.assert_allclose(a, 7 * b, rtol=1e-12)


def test_the_same_network_is_the_same():
    assert quick(deep) is quick(deep)
    assert Quick(deep) == Quick(deep)

    class NoHash:
        __hash__ = None

        def __call__(self, w, x):
            return x @ w

    assert quick(NoHash())(jnp.eye(2), jnp.ones((1, 2))).tolist() == [[1.0, 1.0]]
