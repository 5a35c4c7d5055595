"""Sweeps: every setting equals its own exact recursion, and the table says what is in it."""

import csv
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxttp.dynamics import recursion
from jaxttp.forecast import Hyperparameters, grid, predict_training_time, sweep, sweep_kernel
from jaxttp.losses.rule import training_time

module = importlib.import_module("jaxttp.forecast.sweep")  # its function has the same name

N, C = 6, 3


def problem(seed=0):
    rng = np.random.default_rng(seed)
    j = rng.standard_normal((N * C, 30)) / 5
    return (j @ j.T).reshape(N, C, N, C), rng.standard_normal((N, C)), rng.integers(0, C, N)


MIXED = (
    Hyperparameters(0.2, momentum=0.9, steps=12),
    Hyperparameters(0.4, schedule="warmup_cosine", steps=12, batch_size=2),
    Hyperparameters(0.1, momentum=0.8, batch_size=2, steps=9),
    Hyperparameters(0.3, schedule=optax.exponential_decay(1.0, 5, 0.5), steps=12),
)


@pytest.mark.slow
@pytest.mark.usefixtures("strict_dtypes")
def test_every_setting_is_its_own_recursion(monkeypatch):
    theta, f0, y = problem()
    key = jax.random.key(3)
    # One setting a chunk, so that chunks are put together too.
    monkeypatch.setattr(module, "_CHUNK_BYTES", 5 * f0.size * 8)
    found = sweep_kernel(theta, f0, y, MIXED, key=key)
    assert found.loss.shape == found.error.shape == (len(MIXED), 13)
    for i, one in enumerate(MIXED):
        with jax.numpy_dtype_promotion("standard"):
            path = recursion(
                theta, f0, y, loss=one.loss, optimizer=one.optimizer(), steps=one.steps,
                batch_size=one.batch_size, key=None if one.batch_size is None else key,
            )  # fmt: skip
        loss = module.get_loss(one.loss)
        targets = jax.nn.one_hot(y, C)
        want = np.asarray([loss.value(f, targets) for f in path.train])
        wrong = np.mean(np.argmax(np.asarray(path.train), axis=2) != y, axis=1)
        # The same sums in another order, over 12 steps.
        np.testing.assert_allclose(found.loss[i, : one.steps + 1], want, rtol=1e-11)
        np.testing.assert_array_equal(found.loss[i, one.steps :], found.loss[i, one.steps])
        np.testing.assert_allclose(found.error[i, : one.steps + 1], wrong)
        assert found.stable[i]
        assert found.steps[i].tolist() == [int(training_time(want, e)) for e in found.thresholds]
        assert found.final_error[i] == wrong[-1]


@pytest.mark.slow
def test_it_says_the_same_as_a_single_forecast():
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((10, 4)), rng.integers(0, 3, 10)
    params = {"w": jnp.asarray(rng.standard_normal((4, 8))), "v": jnp.zeros((8, 3))}
    apply_fn = lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"]  # noqa: E731
    settings = [Hyperparameters(0.5, 0.9, steps=25), Hyperparameters(500.0, steps=25)]
    found = sweep(apply_fn, params, x, y, settings, relinearize=0)
    for i, one in enumerate(settings):
        single = predict_training_time(
            apply_fn, params, x, y, relinearize=0, learning_rate=one.learning_rate,
            momentum=one.momentum, steps=25,
        )  # fmt: skip
        assert found.stable[i] == single.stable == (i == 0)
        assert found.steps[i].tolist() == list(single.steps.values())
        assert found.max_learning_rate[i] == pytest.approx(single.max_learning_rate, rel=1e-9)
        if single.stable:
            np.testing.assert_allclose(found.loss[i], single.loss, rtol=1e-10)
    assert np.all(np.isfinite(found.loss))  # a diverging setting is held, no NaN travels


def test_error_rates_and_other_definitions():
    theta, f0, y = problem(4)
    settings = (*grid(learning_rate=(1e-9, 0.4), steps=25), Hyperparameters(0.2, steps=12))
    plateau = {"rule": "plateau", "window": 4, "smooth": 3}
    found = sweep_kernel(theta, f0, y, settings, metric="error")
    flat = sweep_kernel(theta, f0, y, settings, thresholds=(0.05,), **plateau)
    for i, one in enumerate(settings):
        wrong, loss = (curve[i, : one.steps + 1] for curve in (found.error, flat.loss))
        times = [int(training_time(wrong, e)) for e in found.thresholds]
        # An error that does not fall gets nowhere.
        assert found.steps[i].tolist() == ([-1] * 3 if i == 0 else times)
        assert flat.steps[i, 0] == training_time(loss, 0.05, **plateau)
    assert found.error[0, 0] == found.error[0, -1] > 0
    assert 0 not in found.ranking(0.1)
    assert "10 % of the error" in str(found)


def test_best_pareto_cost_and_rows(tmp_path):
    theta, f0, y = problem()
    settings = grid(learning_rate=(0.05, 0.2, 0.8), batch_size=(None, 2), steps=30)
    key = jax.random.key(0)
    each = np.array([3.0, 1.0] * 3)
    found = sweep_kernel(theta, f0, y, settings, key=key, step_seconds=each)
    times = found.steps[:, 1]
    assert times[found.best(0.1)] == times.min()
    np.testing.assert_array_equal(found.cost(0.1), times * each)
    samples = sweep_kernel(theta, f0, y, settings, key=key).cost(0.1)
    np.testing.assert_array_equal(samples, times * np.where(each == 3.0, N, 2))
    front, cost = found.pareto(0.1), found.cost(0.1)
    for i in range(len(settings)):  # beaten by a member of the front, or in it
        assert any(cost[j] <= cost[i] and found.final_loss[j] <= found.final_loss[i] for j in front)
    for i in front:
        assert not np.any((cost < cost[i]) & (found.final_loss < found.final_loss[i]))
    for by_cost, spent in ((False, times), (True, cost)):
        ranking = found.ranking(0.1, by_cost=by_cost)
        keys = [(spent[i], found.final_loss[i]) for i in ranking]
        assert keys == sorted(keys)
        assert set(ranking) == set(np.flatnonzero(np.isfinite(cost)))
    assert found.ranking(0.1)[0] == found.best(0.1)
    rows = found.rows()
    assert rows[1]["steps_0.1"] == times[1]
    assert rows[1]["seconds_0.1"] == times[1] * 1.0
    found.to_csv(tmp_path / "sweep.csv")
    with open(tmp_path / "sweep.csv") as file:
        read = list(csv.DictReader(file))
    assert [float(row["learning_rate"]) for row in read] == [0.05, 0.05, 0.2, 0.2, 0.8, 0.8]
    assert "Sweep of 6 settings" in str(found)
    assert str(settings[found.best(0.1)]) in str(found)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 10))
def test_order_and_company_change_nothing(first, second, seed):
    theta, f0, y = problem(seed)
    settings = grid(learning_rate=(0.1, 0.3), momentum=(0.0, 0.7), steps=5)
    whole = sweep_kernel(theta, f0, y, settings)
    order = [first % 4, second % 4]
    part = sweep_kernel(theta, f0, y, [settings[i] for i in order])
    np.testing.assert_allclose(part.loss, whole.loss[order], rtol=1e-12)


def test_grid_is_a_product_in_order():
    settings = grid(learning_rate=np.array([0.1, 0.2]), batch_size=(None, 4), schedule="cosine")
    assert [(s.learning_rate, s.batch_size) for s in settings] == [
        (0.1, None), (0.1, 4), (0.2, None), (0.2, 4),
    ]  # fmt: skip
    assert str(settings[1]) == "rate 0.1, batch 4, cosine"


def test_a_loss_for_all_settings_is_that_of_a_grid():
    x, y = np.eye(4), np.ones((4, 1))
    net, w = lambda w, x: x @ w, jnp.zeros((4, 1))
    rates = {"learning_rate": (0.1, 1.0), "steps": 5}
    named = grid(**rates, loss="squared_error")
    one = sweep(net, w, x, y, grid(**rates), loss="squared_error", relinearize=0)
    other = sweep(net, w, x, y, named, relinearize=0)
    np.testing.assert_array_equal(one.loss, other.loss)
    assert one.settings == other.settings == named
    with pytest.raises(ValueError, match=r"one place, loss= or grid\(loss=\)"):
        sweep(net, w, x, y, named, loss="binary_cross_entropy")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate must be"),
        ({"learning_rate": 0.1, "momentum": 1.0}, "momentum must be"),
        ({"learning_rate": 0.1, "batch_size": 0}, "batch_size must be"),
        ({"learning_rate": 0.1, "schedule": "cosin"}, "schedule='cosin' is not known"),
        ({"learning_rate": 0.1, "steps": 0}, "steps must be"),
        ({"learning_rate": 0.1, "loss": "hinge"}, "loss='hinge' is not known"),
        ({"learning_rate": ()}, "learning_rate must have at least one value"),
    ],
)
def test_bad_hyperparameters(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        grid(**options)


def test_bad_calls():
    theta, f0, y = problem()
    one = grid(learning_rate=0.1)
    with pytest.raises(TypeError, match="learning_rate is missing"):
        grid(momentum=0.9)
    with pytest.raises(TypeError, match="unknown: rate"):
        grid(learning_rate=0.1, rate=0.1)
    with pytest.raises(TypeError, match="schedule must be a name"):
        Hyperparameters(0.1, schedule=3)
    with pytest.raises(ValueError, match="one finite factor"):
        Hyperparameters(0.1, schedule=lambda t: -t).rates()
    with pytest.raises(TypeError, match="Hyperparameters"):
        sweep_kernel(theta, f0, y, (0.1,))
    with pytest.raises(ValueError, match="key must be a jax"):
        sweep_kernel(theta, f0, y, one, key=jnp.zeros(3))
    with pytest.raises(ValueError, match=r"step_seconds\[0\]"):
        sweep_kernel(theta, f0, y, one, step_seconds=-2.0)
    with pytest.raises(ValueError, match="threshold"):
        sweep_kernel(theta, f0, y, one).best(0.2)


def test_a_schedule_without_a_rate_is_refused():
    settings = grid(learning_rate=(0.1, 0.2), schedule="warmup_cosine", steps=1)
    with pytest.raises(ValueError, match=r"has no rate above 0 in 1 step\(s\)"):
        sweep_kernel(jnp.eye(2), jnp.zeros((2, 2)), jnp.array([0, 1]), settings)
