"""From some samples to all of them by how much later the whole is than its halves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from jaxttp.forecast import (
    Descent,
    Problem,
    Recursion,
    Relinearized,
    Scaled,
    forecast_training,
    predict_training_time,
)
from jaxttp.forecast.methods.base import Linearizer
from jaxttp.forecast.methods.scaled import time_scale
from jaxttp.ntk import ClassSketched

STEPS = 200
T = np.arange(STEPS + 1.0)


def memorised(samples, spent=T):
    """What every sample is seen so often counts for: a loss by epochs."""
    return np.exp(-3 * spent / samples)


def halves_of(curve):
    return np.stack([curve, curve])


@pytest.mark.parametrize("ratio", [1.5, 4.0])
def test_what_is_memorised_takes_a_number_of_epochs(ratio):
    found = time_scale(memorised(100), halves_of(memorised(50)), ratio)
    want = memorised(100 * ratio)
    # Curves are averaged over a tenth of a time, and read between 24 times: a hundredth of the
    # logarithm, but for the first step, which has no such average.
    np.testing.assert_allclose(np.log(found.of(memorised(100)))[2:], np.log(want)[2:], rtol=0.03)
    assert found.slower == pytest.approx(ratio, rel=0.02)
    # Both halves are alike, so nothing was drawn: what is left is the law's own doubt.
    assert found.unsure[100] == pytest.approx(0.5 * np.log(ratio), rel=0.05)


def test_what_is_not_memorised_takes_a_number_of_steps():
    curve = 1 / (1 + 0.1 * T)
    found = time_scale(curve, halves_of(curve), 50.0)
    np.testing.assert_allclose(found.of(curve), curve, rtol=1e-9)
    assert found.slower == pytest.approx(1.0)
    assert not np.any(found.unsure > 1e-9)
    # Halves that are slower than the whole are a draw: many samples are no faster than few.
    slow = 1 / (1 + 0.08 * T)
    np.testing.assert_allclose(time_scale(curve, halves_of(slow), 50.0).of(curve), curve, rtol=1e-9)


def test_a_schedule_stays_that_of_the_whole():
    """Times are learning rate spent: a subset whose loss is reached late has a small rate left."""
    rates = np.asarray(jax.vmap(optax.cosine_decay_schedule(1.0, STEPS))(np.arange(STEPS)))
    spent = np.concatenate([[0.0], np.cumsum(rates)])
    one, two = memorised(100, spent), memorised(50, spent)
    found = time_scale(one, halves_of(two), 3.0, rates)
    np.testing.assert_allclose(
        np.log(found.of(one))[2:], np.log(memorised(300, spent))[2:], rtol=0.05
    )
    # By steps it would be too fast where the rate is small.
    assert time_scale(one, halves_of(two), 3.0).of(one)[-1] < 0.7 * found.of(one)[-1]


def test_growth_is_read_off_full_batches():
    """A path by mini-batches is scaled by what full batches of the same loss say."""
    rough = memorised(120) * np.exp(0.1 * np.random.default_rng(0).standard_normal(STEPS + 1))
    found = time_scale(memorised(100), halves_of(memorised(50)), 2.0, path=rough)
    late = np.log(found.of(rough))[50:] / np.log(memorised(240))[50:]
    assert abs(np.median(late) - 1) < 0.05  # noise of 0.1 on logarithms of 0.6 to 2.5


def test_how_far_halves_are_apart_is_in_the_doubt():
    apart = np.stack([memorised(50), memorised(80)])  # times apart by log 1.6
    found = time_scale(memorised(100), apart, 4.0)
    drawn = 0.7 * np.log(1.6) * np.sqrt(1 - 1 / 4)
    rho = 100 / (2 / (1 / 50 + 1 / 80))
    law = -0.5 * np.log((2 - rho) + (rho - 1) / 4)
    assert found.unsure[120] == pytest.approx(np.hypot(drawn, law), rel=0.1)
    loss = found.of(memorised(100))
    off = found.off(loss)
    assert off[100] > 0.5 * found.unsure[100] * 100 * abs(loss[101] - loss[99]) / 2


def test_n_samples_are_no_later_than_halves_on_what_they_have_not_seen():
    """What they learn of others is there for samples that N train on, too: a bound on times."""
    memorising, unseen = 2.0 * memorised(100), np.exp(-3 * T / 150)
    halves = halves_of(2.0 * memorised(50))
    plain = time_scale(memorising, halves, 8.0)
    bounded = time_scale(memorising, halves, 8.0, unseen=halves_of(unseen))
    assert plain.slower == pytest.approx(8.0, rel=0.02)
    for level in (1.0, 0.5, 0.1):
        time, bound = (int(np.argmax(curve <= level)) for curve in (bounded.of(memorising), unseen))
        alone = int(np.argmax(memorising <= level))
        # Curves are averaged over a tenth of a time before they are read.
        assert alone <= time <= max(1.12 * bound, alone) + 2
    # Where halves never learn anything of others there is no bound.
    nothing = time_scale(memorising, halves, 8.0, unseen=halves_of(np.full(STEPS + 1, 2.0)))
    np.testing.assert_array_equal(nothing.at, plain.at)


CURVES = arrays.arrays(np.float64, (5, 31), elements=st.floats(1e-6, 10.0))


@settings(max_examples=60, deadline=None)
@given(curves=CURVES, ratio=st.floats(1.0, 100.0))
def test_whatever_the_curves_the_whole_is_behind(curves, ratio):
    found = time_scale(curves[0], curves[1:3], ratio, unseen=curves[3:])
    assert found.slower <= time_scale(curves[0], curves[1:3], ratio).slower + 1e-9
    alone = time_scale(curves[0], curves[1:3], 1.0)
    np.testing.assert_array_equal(alone.at, np.arange(31))  # all samples are what they are
    assert np.all(np.isfinite(found.at)) and np.all(np.isfinite(found.unsure))  # noqa: PT018
    assert found.at[0] == 0
    assert np.all(np.diff(found.at) >= -1e-9)
    assert np.all(found.at <= np.arange(31) + 1e-9)
    assert found.slower >= 1 - 1e-9
    loss = found.of(curves[0])
    assert np.all((loss >= curves[0].min() - 1e-12) & (loss <= curves[0].max() + 1e-12))


# --- as a dynamics --------------------------------------------------------------------------------

MANY = 240
WIDE = np.random.default_rng(1).standard_normal((40, MANY)) / 6
SPREAD = np.arange(1, 41) ** -0.7


def samples(seed):
    """Noisy labels of features whose spectrum falls: there is much to memorise."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((MANY, 40)) * SPREAD
    y = (x[:, 0] + 0.8 * x[:, 1] + 0.5 * rng.standard_normal(MANY) > 0).astype(int)
    return x, y


def network(w, x):
    return jnp.tanh(x @ WIDE) @ w


PARAMS = jnp.zeros((MANY, 2))
DESCENT = Descent.of(learning_rate=0.5, momentum=0.5, steps=150)


def final(x, y, way):
    return float(np.log(forecast_training(Problem.of(network, PARAMS, x, y), DESCENT,
                                          dynamics=way).loss[-1]))  # fmt: skip


@pytest.mark.slow
def test_four_times_the_samples_against_the_network_itself():
    """The network is linear in its weights, so that the forecast of all samples is the truth."""
    alone, scaled = [], []
    for seed in range(4):
        x, y = samples(seed)
        true = final(x, y, Recursion())
        few = slice(0, MANY // 4)
        alone.append(final(x[few], y[few], Recursion()) - true)
        scaled.append(final(x[few], y[few], Scaled(MANY, Recursion())) - true)
    assert np.mean(alone) < -0.3  # the subset's own end is too low by that
    assert abs(np.mean(scaled)) < 0.35 * abs(np.mean(alone))
    assert np.mean(np.abs(scaled)) < 0.6 * np.mean(np.abs(alone))


def test_as_many_as_are_at_hand_are_the_plain_forecast():
    x, y = samples(0)
    options = {"learning_rate": 0.5, "steps": 20, "relinearize": 0, "batch_size": 16}
    key = jax.random.key(3)
    plain = predict_training_time(network, PARAMS, x, y, key=key, **options)
    same = predict_training_time(network, PARAMS, x, y, key=key, total_samples=MANY, **options)
    np.testing.assert_allclose(same.loss, plain.loss, rtol=1e-12)
    np.testing.assert_allclose(same.error, plain.error, rtol=1e-12)


def test_the_forecast_says_what_it_is_of_and_what_it_cost():
    x, y = samples(1)
    options = {"learning_rate": 2.0, "momentum": 0.9, "steps": 150, "relinearize": 0}
    found = predict_training_time(network, PARAMS, x[:40], y[:40], total_samples=4000, **options)
    plain = predict_training_time(network, PARAMS, x[:40], y[:40], **options)
    assert "for 4,000 samples" in str(found)
    assert "times the steps of the 40 given samples" in found.warnings
    assert found.hyperparameters["total_samples"] == 4000
    assert found.cost.training_operations == pytest.approx(100 * plain.cost.training_operations)
    assert found.cost.kernels == 1  # those of the halves are blocks of it
    # Of the whole path alone the network is asked what it says.
    assert found.cost.gradient_evaluations == plain.cost.gradient_evaluations
    assert np.all(np.isfinite(found.loss_uncertainty))
    assert found.loss[-1] > plain.loss[-1]


@pytest.mark.parametrize(
    "estimator",
    [None, ClassSketched(jax.random.key(1))],
    ids=["exact", "class sketch"],
)
def test_parts_of_a_kernel_are_kernels_of_parts(estimator):
    """What halves begin with, and with what they foresee each other's samples: nothing is built."""
    x, y = samples(3)
    problem = Problem.of(network, PARAMS, x[:20], y[:20])
    lines = Linearizer(problem, estimator)
    rows, others = np.array([3, 1, 7, 12]), np.array([0, 19, 5])
    unknown = lines.take(rows, others)
    assert unknown.problem.x_test is None  # a cross kernel would have to be built
    whole = np.asarray(lines.first)
    part = lines.take(rows, others)
    axes = (rows, others)
    for found, (left, right) in (
        (part.first, (rows, rows)), (part.cross["kernel_test"], axes[::-1])
    ):  # fmt: skip
        want = np.take(np.take(whole, left, axis=0), right, axis=whole.ndim // 2)
        np.testing.assert_allclose(found, want, rtol=1e-12)
    assert part.cross_at(None) is part.cross["kernel_test"]
    assert part.kernels == 0
    np.testing.assert_array_equal(part.problem.x_test, x[others])
    np.testing.assert_array_equal(part.problem.targets_test, problem.targets[others])


def test_halves_take_their_steps_with_the_kernels_of_the_path():
    """Nothing is built for them, and the network is not asked of them; nor of batches twice."""
    x, y = samples(4)
    problem = Problem.of(network, PARAMS, x[:40], y[:40])
    for more in ({}, {"batch_size": 8, "key": jax.random.key(0)}):
        descent = Descent.of(learning_rate=0.5, steps=30, **more)
        few, many = (
            forecast_training(problem, descent, dynamics=way)
            for way in (Relinearized(most=2), Scaled(80, Relinearized(most=2)))
        )
        assert np.all(np.isfinite(many.loss))
        assert many.loss[-1] > few.loss[-1]
        for name in ("kernels", "gradient_evaluations"):
            assert getattr(many.cost, name) == getattr(few.cost, name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"total_samples": 30}, "total_samples must be an integer of at least 40"),
        ({"total_samples": 80, "batch_size": 32, "key": jax.random.key(0)}, "fill a batch"),
        ({"total_samples": 80, "dynamics": "sde", "batch_size": 4, "key": jax.random.key(0)},
         "total_samples"),
        ({"total_samples": 80, "x_test": np.ones((2, 40)), "y_test": np.zeros(2, int)}, "x_test"),
    ],
)  # fmt: skip
def test_bad_input(options, words):
    x, y = samples(0)
    with pytest.raises(ValueError, match=words):
        predict_training_time(network, PARAMS, x[:40], y[:40], learning_rate=0.1, **options)
