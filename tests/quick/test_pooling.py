"""Maxima over windows: values and derivatives of the step that they stand for, ties included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxttp._core.xla_cpu.pooling import is_slow, pool
from tests.draws import normal

CPU = pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere nothing is replaced")


def the_equation(function, *arguments):
    (found,) = jax.make_jaxpr(function)(*arguments).eqns
    return found


def maxima(x, window, strides, padding):
    # As `jax.lax.reduce_window` of the largest number: the initial value has to be known.
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, padding)


@CPU
@settings(max_examples=25, deadline=None)
@given(
    size=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    window=st.tuples(st.integers(1, 3), st.integers(2, 3)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    padding=st.tuples(*4 * [st.integers(0, 1)]),
)
def test_values_and_derivatives_of_the_step_itself(size, window, strides, padding):
    """Numbers are rounded to halves, so that windows have several largest: the first counts."""
    pads = ((0, 0), padding[:2], padding[2:], (0, 0))
    if any(n + sum(p) < w for n, p, w in zip(size, pads[1:3], window, strict=True)):
        return  # nothing is left
    x = jnp.round(2 * normal(0, (2, *size, 3))) / 2
    run = functools.partial(maxima, window=(1, *window, 1), strides=(1, *strides, 1), padding=pads)
    equation = the_equation(run, x)
    assert is_slow(equation)
    other = functools.partial(pool, equation)
    wanted, pull = jax.vjp(run, x)
    found, mine = jax.vjp(other, x)
    np.testing.assert_array_equal(found, wanted)
    back = normal(1, wanted.shape)
    # The same numbers are added in another order.
    np.testing.assert_allclose(mine(back)[0], pull(back)[0], rtol=1e-14, atol=1e-14)
    # Forwards XLA takes one of several largest entries or another, as it orders them; here it is
    # the transpose of the way back. Sums of at most 150 products of normal numbers.
    moved = normal(2, x.shape)
    forward = jax.jvp(other, (x,), (moved,))[1]
    np.testing.assert_allclose(jnp.vdot(back, forward), jnp.vdot(mine(back)[0], moved), atol=1e-12)


@CPU
def test_only_maxima_over_few_entries_of_real_numbers_are_replaced():
    x = jnp.ones((1, 8, 8, 1))
    ones = {"window": (1, 2, 2, 1), "strides": (1, 2, 2, 1), "padding": "VALID"}
    assert is_slow(the_equation(functools.partial(maxima, **ones), x))
    wide = {**ones, "window": (1, 8, 8, 1)}
    assert not is_slow(the_equation(functools.partial(maxima, **wide), x))

    def whole(x):
        least = np.int32(np.iinfo(np.int32).min)
        return jax.lax.reduce_window(x, least, jax.lax.max, (2,), (2,), "VALID")

    assert not is_slow(the_equation(whole, jnp.ones(8, jnp.int32)))

    def dilated(x):
        return jax.lax.reduce_window(
            x, -jnp.inf, jax.lax.max, (2,), (1,), "VALID", window_dilation=(2,)
        )

    assert not is_slow(the_equation(dilated, jnp.ones(8)))
    assert not is_slow(the_equation(jnp.sin, x))


@CPU
def test_what_is_no_number_is_seen():
    x = normal(5, (1, 4, 4, 1)).at[0, 1, 1, 0].set(jnp.nan)
    run = functools.partial(maxima, window=(1, 2, 2, 1), strides=(1, 2, 2, 1), padding="VALID")
    found = pool(the_equation(run, x), x)
    assert np.isnan(np.asarray(found)).sum() == 1
