"""Forecasts with one kernel whose clock the network sets."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import empirical_ntk, predict_training_time, train
from jaxttp.dynamics import recursion
from jaxttp.forecast import Descent, Paced, Problem, Recursion, forecast_training
from jaxttp.forecast._retiming import LARGEST, MOST, SURE, Sight, look, places_to_look, retime
from jaxttp.forecast._retiming import uncertainty as uncertainty_of
from jaxttp.losses import encode_targets
from jaxttp.ntk import ClassSketched
from tests.draws import normal, split

KEYS = split(0, 4)
X = normal(KEYS[0], (24, 4))
Y = (X[:, 0] + 0.5 * X[:, 1] ** 2 > 0.3).astype(int)


def linear(w, x):
    return x @ w["a"] + w["b"][None]


LINEAR = {"a": jnp.zeros((4, 2)), "b": jnp.zeros(2)}


def mlp(w, x):
    return jnp.tanh(x @ w["first"]) @ w["last"]


MLP = {"first": normal(KEYS[1], (4, 30), 0.5), "last": normal(KEYS[2], (30, 2), 0.2)}


def forecasts(network, weights, ways=None, steps=60, **descent):
    descent.setdefault("learning_rate", 0.5)
    ways = ways or (Recursion(), Paced())
    problem = Problem.of(network, weights, X, Y, x_test=X[:5], y_test=Y[:5])
    training = Descent.of(steps=steps, **descent)
    return [forecast_training(problem, training, dynamics=way) for way in ways]


@pytest.mark.parametrize(
    "descent",
    [
        {},
        {"learning_rate": 0.1, "momentum": 0.9},
        {"batch_size": 6, "key": jax.random.key(3)},
        {"learning_rate": None, "optimizer": optax.sgd(optax.cosine_decay_schedule(0.5, 60))},
        pytest.param(
            {
                "learning_rate": None,
                "optimizer": optax.chain(optax.add_decayed_weights(0.01), optax.sgd(0.3)),
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["descent", "momentum", "batches", "cosine", "decay"],
)
def test_a_linear_network_keeps_its_clock(descent):
    plain, paced = forecasts(linear, LINEAR, **descent)
    # speeds are quotients of two sums, equal to rounding; the clock multiplies 60 of them
    for name in ("loss", "error", "outputs", "test_loss", "test_error"):
        np.testing.assert_allclose(getattr(paced, name), getattr(plain, name), atol=1e-7)
    assert paced.steps == plain.steps
    assert (paced.dynamics, paced.trust, paced.stable) == ("paced", None, True)
    if "batch_size" not in descent:  # whose uncertainty is also that of the draw
        assert max(paced.steps_uncertainty.values()) <= np.ceil(60 * (np.exp(SURE) - 1)) + 1


def test_the_network_is_asked_for_its_loss_and_gradient():
    targets, loss = encode_targets("cross_entropy", Y, mlp(MLP, X))
    kernel = empirical_ntk(mlp, MLP, X)
    path = recursion(
        kernel, mlp(MLP, X), targets, loss=loss, steps=40, optimizer=optax.sgd(0.5)
    )  # fmt: skip
    for size in (None, 7):
        sights = look(mlp, MLP, X, targets, loss, kernel, path, [0, 10, 40], size)
        for sight in sights:
            pull = jax.vjp(lambda w: mlp(w, X), MLP)[1](path.dual[sight.step])[0]
            weights = jax.tree.map(jnp.add, MLP, pull)
            value, slope = jax.value_and_grad(lambda w: loss.value(mlp(w, X), targets))(weights)
            off = loss.gradient(path.train[sight.step], targets)
            first = jax.vjp(lambda w: mlp(w, X), MLP)[1](off)[0]
            squares = [sum(jnp.vdot(a, a) for a in jax.tree.leaves(t)) for t in (slope, first)]
            # the loss is a mean over 24 samples, and so its gradient; float64 rounding
            np.testing.assert_allclose(sight.loss, value, rtol=1e-10)
            np.testing.assert_allclose(sight.speed, 24**2 * squares[0] / squares[1], rtol=1e-8)
        assert sights[0].speed == pytest.approx(1.0)


def test_an_mlp_that_learns_faster_is_foreseen_so():
    """From random weights at a high rate: one kernel alone has it end six times too high."""
    real = train(mlp, MLP, X, Y, loss="cross_entropy", optimizer=optax.sgd(1.0), steps=150).loss
    plain, paced = forecasts(mlp, MLP, steps=150, learning_rate=1.0)
    sketched = predict_training_time(
        mlp, MLP, X, Y, learning_rate=1.0, steps=150, dynamics="paced",
        kernel=ClassSketched(jax.random.key(0)), relinearize=0,
    )  # fmt: skip
    off = [abs(np.log(found.loss[-1] / real[-1])) for found in (plain, paced, sketched)]
    assert off[0] > 1.5
    assert max(off[1:]) < 0.3


FALLING = np.exp(-np.arange(101) / 25.0)


def test_a_slow_network_takes_its_time():
    found = retime(FALLING, [Sight(0, 1.0, 0.5), Sight(100, FALLING[100], 0.5)])
    slow = LARGEST * np.tanh(np.log(0.5) / LARGEST)
    np.testing.assert_allclose(found.places, np.arange(101) * np.exp(slow), rtol=1e-9)
    assert np.all(found.factors == 1)
    assert found.ratios == pytest.approx([0.5, 0.5])


def test_a_fast_one_goes_on_as_fast_as_the_forecast_ended():
    found = retime(FALLING, [Sight(0, 1.0, 2.0), Sight(100, FALLING[100], 2.0)])
    fast = np.exp(LARGEST * np.tanh(np.log(2.0) / LARGEST))
    loss = found.of(FALLING) * found.factors
    # the curve is an exponential, which is interpolated between its steps: convex, 0.02 % at most
    np.testing.assert_allclose(loss, np.exp(-fast * np.arange(101) / 25.0), rtol=1e-3)
    assert found.places[-1] == 100
    assert np.all(np.diff(loss) < 0)


def test_steps_of_a_schedule_count_by_their_rates():
    rates = np.linspace(1.0, 0.0, 100)
    curve = np.exp(-np.concatenate([[0.0], np.cumsum(rates)]) / 10.0)
    found = retime(curve, [Sight(0, 1.0, 0.5), Sight(100, curve[-1], 0.5)], rates)
    slow = np.exp(LARGEST * np.tanh(np.log(0.5) / LARGEST))
    # interpolated between steps of up to a tenth of a unit of the exponent
    np.testing.assert_allclose(found.of(curve), curve**slow, rtol=2e-3)


def test_what_lies_behind_a_rising_loss_is_left_out():
    sights = [Sight(20, FALLING[20], 1.5), Sight(60, 0.9, 40.0), Sight(100, 0.01, 2.0)]
    found = retime(FALLING, sights)
    assert found.used == 1
    np.testing.assert_allclose(found.places, retime(FALLING, sights[:1]).places)
    gone = retime(FALLING, [Sight(20, np.nan, np.nan)])
    assert gone.used == 0
    np.testing.assert_allclose(gone.places, np.arange(101))


def test_large_ratios_are_bounded():
    found = retime(FALLING, [Sight(0, 1.0, 1.0), Sight(100, FALLING[100], 1e9)])
    assert found.ratios[1] == pytest.approx(1e9)
    assert np.all(np.diff(found.places) <= np.exp(LARGEST) + 1e-9)
    assert found.doubt.max() <= MOST


def test_a_curve_is_as_unsure_as_its_times():
    off = uncertainty_of(FALLING, np.full(101, 0.1))
    t = np.arange(101)
    early, late = (np.exp(-t * np.exp(shift) / 25.0) for shift in (-0.1, 0.1))
    want = np.maximum(early - FALLING, FALLING - late)
    np.testing.assert_allclose(off, want, atol=4e-4)  # interpolated between steps, h^2 / 8 f"
    assert np.all(uncertainty_of(FALLING, np.zeros(101)) == 0)


def test_where_the_loss_does_not_fall_nothing_is_asked():
    assert places_to_look(np.linspace(1.0, 2.0, 11)) == []
    assert places_to_look(np.ones(4)) == []
    assert places_to_look(np.array([1.0, 0.2])) == [1]


def test_rates_beyond_the_limit_are_not_stable():
    plain, paced = forecasts(mlp, MLP, learning_rate=50.0, steps=20)
    assert not plain.stable
    assert not paced.stable
    assert np.all(np.isfinite(paced.loss))


def test_doubt_says_how_fast_the_network_is():
    steep = {"first": 0.3 * MLP["first"], "last": 0.02 * MLP["last"]}
    (found,) = forecasts(mlp, steep, (Paced(),), learning_rate=1.5, steps=60)
    assert "times as fast as its kernel before training has it" in found.trust
    assert "a larger budget" in found.trust


def test_optimisers_that_are_not_linear_are_refused():
    with pytest.raises(ValueError, match="not one linear scalar filter"):
        predict_training_time(mlp, MLP, X, Y, optimizer=optax.adam(0.1), dynamics="paced")
