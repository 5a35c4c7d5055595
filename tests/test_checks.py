"""Errors name the argument and what was given; tracers pass, because their values are not known."""

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp._core.checks import (
    check_array,
    check_choice,
    check_finite,
    check_finite_value,
    check_integer,
    check_key,
    check_known,
    check_number,
    is_concrete,
)


def test_choice_returns_the_value_or_lists_what_would_do():
    assert check_choice("rule", "gap", iter(["relative", "gap"])) == "gap"
    with pytest.raises(ValueError, match=r"^rule='best' is not known; choose one of 'a', 'b'\.$"):
        check_choice("rule", "best", ("a", "b"))
    with pytest.raises(ValueError, match=r"choose one of 'a'\. Or none\.$"):
        check_choice("rule", "best", ("a",), hint="Or none.")


RANGES = {
    "above": ({"above": 0.0}, "greater than 0", lambda v: v > 0),
    "at least": ({"at_least": 0.0}, "at least 0", lambda v: v >= 0),
    "below": ({"below": 1.0}, "less than 1", lambda v: v < 1),
    "open": (
        {"above": 0.0, "below": 1.0},
        "greater than 0 and less than 1",
        lambda v: 0 < v < 1,
    ),
}


@pytest.mark.parametrize("case", RANGES)
@hypothesis.given(value=st.sampled_from([0.0, 1.0]) | st.floats(-2, 2))
def test_number_is_returned_inside_its_range_and_refused_outside(case, value):
    limits, words, is_inside = RANGES[case]
    if is_inside(value):
        assert check_number("rate", value, **limits) is value
    else:
        with pytest.raises(ValueError, match=f"^rate must be {words}; got {value!r}. Halve it.$"):
            check_number("rate", value, **limits, hint="Halve it.")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_number_must_be_finite(value):
    # An infinite number is greater than 0: the message must not say only that.
    with pytest.raises(ValueError, match=r"^rate must be finite and greater than 0; got"):
        check_number("rate", value, above=0.0)


# Text that float() would read is text nevertheless: the caller computes with what it gave.
@pytest.mark.parametrize("value", ["fast", "0.5", b"1", None, [0.5, 1.0], 1j, np.ones(2), 10**400])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match=r"^rate must be a number; got"):
        check_number("rate", value, above=0.0)


@pytest.mark.parametrize("value", [0, 8, -1, 2.0, True, "2", None, np.float64(2), np.ones(1, int)])
def test_integer_outside_its_range_is_refused(value):
    with pytest.raises(ValueError, match=r"^steps must be an integer between 1 and 7; got .*Few\."):
        check_integer("steps", value, at_least=1, at_most=7, hint="Few.")


@pytest.mark.parametrize(
    ("key", "given"),
    [
        (0, "0"),
        (0.5, "0.5"),
        ("seed", "'seed'"),
        (np.zeros(3), r"an array of shape \(3,\)"),
        (jnp.zeros(2), r"an array of shape \(2,\)"),
        (jax.random.split(jax.random.key(0), 2), r"an array of shape \(2,\)"),
    ],
)
def test_what_is_no_key_is_refused(key, given):
    expected = rf"^key must be a jax.random.key, such as jax.random.key\(0\); got {given}\.$"
    with pytest.raises(ValueError, match=expected):
        check_key(key)
    with pytest.raises(ValueError, match="got None"):
        check_key(None, optional=False)


def test_finite_counts_and_says_where():
    tree = {"layer": [np.zeros(3), np.array([np.nan, 1.0, np.inf])]}
    with pytest.raises(ValueError, match=r"^params\['layer'\]\[1\] holds 2 value.*, of 3; remove"):
        check_finite("params", tree)
    with pytest.raises(ValueError, match=r"^x holds 1 value\(s\) that are NaN or infinite, of 2"):
        check_finite("x", jnp.array([1.0, -jnp.inf], jnp.bfloat16))


def test_tracers_pass_and_known_values_inside_jit_do_not():
    @jax.jit
    def traced(value):
        assert not is_concrete(value)
        check_finite("x", value)
        return check_number("rate", value, above=0.0)

    # Out of range, but not known before it runs.
    assert traced(-1.0) == -1.0
    assert is_concrete(1.0)
    assert is_concrete(jnp.ones(2))
    known = jnp.full(2, jnp.nan)

    @jax.jit
    def closes_over(value):
        check_finite("x", known)
        return value

    with pytest.raises(ValueError, match="x holds 2"):
        closes_over(1.0)


def test_finite_value_is_checked_now_or_at_run_time():
    good, bad = jnp.ones(2), jnp.array([1.0, jnp.nan])
    assert check_finite_value("y", good) is good
    with pytest.raises(ValueError, match=r"^y holds 1 value"):
        check_finite_value("y", bad)
    # filter_jit, because under jax.jit the same error comes wrapped in a long traceback.
    checked = eqx.filter_jit(lambda value: check_finite_value("y", value))
    np.testing.assert_array_equal(checked(good), good)
    with pytest.raises(RuntimeError, match="y holds NaN or infinity"):
        checked(bad)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("falling", "text"),
        (np.array(["a"]), "text"),
        (object(), "object"),
        (None, "NoneType"),
        (np.ones(2, complex), "complex128"),
        (jax.random.key(0), r"key<fry>"),
    ],
)
def test_what_is_no_array_of_real_numbers_is_refused(value, what):
    with pytest.raises(ValueError, match=rf"^x must hold real numbers; got {what}\.$"):
        check_array("x", value)
    with pytest.raises(ValueError, match=r"^x must be one array of numbers"):
        check_array("x", [[1.0], [1.0, 2.0]])


def test_arrays_have_their_axes_and_become_floats_where_these_are_needed():
    assert check_array("x", [1, 2], ndim=(0, 1)).dtype == jnp.int64
    assert check_array("x", [1, 2], floating=True).dtype == jnp.float64
    assert check_array("x", jnp.ones(2, jnp.bfloat16), floating=True).dtype == jnp.float32
    assert check_array("x", jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16
    assert jax.jit(lambda x: check_array("x", [x, x], ndim=1))(1.0).shape == (2,)
    with pytest.raises(ValueError, match=r"^x must have 1 or 2 axes; got shape \(\)\.$"):
        check_array("x", 1.0, ndim=(1, 2))


def test_what_is_traced_is_refused_where_values_are_looked_at():
    check_known(x={"a": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"^x is traced, and its values are looked at"):
        jax.jit(lambda x: check_known(x=[x]))(1.0)
