"""The four definitions of training time against plain Python, step by step."""

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp.forecast import smooth_curve, training_time
from jaxttp.losses.rule import RULES, Rule
from jaxttp.training import TrainingRun

LENGTHS = (2, 3, 12, 31)  # few lengths, so that few shapes are compiled


def by_hand(curve, threshold, rule, window=None):
    """The definitions read aloud; no NumPy, no JAX."""
    last, drop = len(curve) - 1, abs(curve[0] - curve[-1])
    if rule == "relative" and drop == 0:
        return 0 if curve[-1] == 0 else -1
    for t, value in enumerate(curve):
        gap = abs(value - curve[-1])
        if rule == "relative" and gap < threshold * drop:
            return t
        if rule == "gap" and gap < threshold:
            return t
        if rule == "absolute" and value < threshold:
            return t
        if rule == "plateau":
            back = max(1, last // 10) if window is None else window
            if t >= back and curve[t - back] - value < threshold:
                return t
    return -1


@st.composite
def curves(draw):
    """Eighths between 0 and 4, exact in binary and rich in ties; or losses of any kind."""
    value = draw(st.sampled_from([st.integers(0, 32).map(lambda k: k / 8), st.floats(1e-6, 1e3)]))
    length = draw(st.sampled_from(LENGTHS))
    return draw(st.lists(value, min_size=length, max_size=length))


@pytest.mark.parametrize("rule", RULES)
@hypothesis.given(curve=curves(), threshold=st.sampled_from([1 / 64, 0.1, 0.25, 0.5, 0.99]))
def test_rules_by_hand(rule, curve, threshold):
    expected = by_hand(curve, threshold, rule)
    assert training_time(jnp.array(curve), threshold, rule=rule) == expected


@hypothesis.given(curve=curves(), window=st.sampled_from([1, 2, 5, 30]))
def test_plateau_windows_by_hand(curve, window):
    window = min(window, len(curve) - 1)
    got = training_time(jnp.array(curve), 0.25, rule="plateau", window=window)
    assert got == by_hand(curve, 0.25, "plateau", window)


@pytest.mark.parametrize("rule", RULES)
def test_under_jit_and_vmap(rule):
    rows = [[4.0, 2.0, 1.0, 0.5, 0.25], [1.0, 1.0, 1.0, 1.0, 1.0], [0.1, 3.0, 0.2, 0.1, 0.0]]
    thresholds = [0.01, 0.3]
    expected = [[by_hand(row, e, rule) for e in thresholds] for row in rows]

    def both(curve, threshold):
        return training_time(curve, threshold, rule=rule)

    over_thresholds = jax.vmap(both, in_axes=(None, 0))
    table = jax.jit(jax.vmap(over_thresholds, in_axes=(0, None)))
    np.testing.assert_array_equal(table(jnp.array(rows), jnp.array(thresholds)), expected)
    single = jax.jit(lambda curve: training_time(curve, 0.3, rule=rule))
    assert single(jnp.array(rows[0])) == expected[0][1]


BAD = {
    "threshold 0": (
        ([1.0, 0.0], 0),
        {},
        "threshold must be greater than 0 and less than 1; got 0",
    ),
    "threshold 1": (([1.0, 0.0], 1), {}, "threshold must be .* got 1."),
    "threshold NaN": (([1.0, 0.0], np.nan), {}, "threshold must be finite and greater than 0"),
    "window of another rule": (
        ([1.0, 0.0], 0.1),
        {"window": 1},
        "window=1 is for rule='plateau'; with rule='relative' leave it out",
    ),
    "window too long": (
        ([1.0, 0.5, 0.0], 0.1),
        {"rule": "plateau", "window": 3},
        "window must be an integer between 1 and 2; got 3",
    ),
    "curve with NaN": (([1.0, np.nan, 0.0], 0.1), {}, r"curve holds 1 value\(s\) that are NaN"),
    "curve of 2 axes": ((np.ones((3, 3)), 0.1), {}, r"curve must have 1 axes; .* shape \(3, 3\)"),
    "unknown rule": (([1.0, 0.0], 0.1), {"rule": "best"}, "rule='best' is not known.*'plateau'"),
    "an even smoothing": (([3.0, 2.0, 1.0], 0.1), {"smooth": 2}, "smooth must be odd"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case):
    args, options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        training_time(*args, **options)


def test_a_traced_curve_with_nan_is_an_error_at_run_time():
    # filter_jit, because under jax.jit the same error comes wrapped in a long traceback.
    with pytest.raises(RuntimeError, match="curve holds NaN or infinity"):
        eqx.filter_jit(lambda curve: training_time(curve, 0.1))(jnp.array([1.0, jnp.nan, 0.0]))


@hypothesis.given(curve=curves(), width=st.sampled_from([1, 3, 7, 31]))
def test_smoothing_by_hand(curve, width):
    width = min(width, len(curve) - (len(curve) + 1) % 2)
    half = width // 2
    windows = [curve[max(0, t - half) : t + half + 1] for t in range(len(curve))]
    expected = [curve[0]] + [sum(some) / len(some) for some in windows[1:]]
    # sums of 31 numbers in another order
    np.testing.assert_allclose(smooth_curve(jnp.array(curve), width), expected, rtol=1e-12)
    time = training_time(jnp.array(curve), 0.25, smooth=width)
    assert time == training_time(smooth_curve(curve, width), 0.25)


UP_AND_DOWN = {
    "an error that stands still": ([0.5, 0.5, 0.5], "relative", 1, -1),
    "an error that rises": ([0.25, 0.5, 0.5], "relative", 1, -1),
    "an error that falls and rises again": ([0.25, 0.0, 0.5], "relative", 1, -1),
    "no error at all": ([0.0, 0.0, 0.0], "relative", 1, 0),
    "an error from nothing": ([0.0, 0.0, 0.5], "relative", 1, -1),
    "one that falls": ([0.5, 0.25, 0.0], "relative", 1, 2),
    "one that falls once it is averaged": ([0.5, 0.0, 0.0, 0.25, 0.5], "relative", 3, 4),
    "a gap is no fraction of a drop": ([0.25, 0.5, 0.5], "gap", 1, 1),
}


@pytest.mark.parametrize("name", UP_AND_DOWN)
def test_errors_that_do_not_fall(name):
    """The same by every road: alone, under jit and vmap, of a forecast, of a real training."""
    error, rule, smooth, expected = UP_AND_DOWN[name]
    options = {"rule": rule, "smooth": smooth}
    reading = Rule.of(0.1, metric="error", **options)
    read = jax.jit(jax.vmap(lambda curve: reading.time(curve, 0.1)))
    assert read(jnp.array([error])).tolist() == [expected]
    loss = np.linspace(1.0, 0.0, len(error))
    assert reading.read(loss, error) == {0.1: expected}
    run = TrainingRun(jnp.array(loss), jnp.array(error), None, None, 1.0, 1.0)
    assert run.read(0.1, metric="error", **options) == {0.1: expected}
