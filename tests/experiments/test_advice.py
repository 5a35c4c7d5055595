"""The benchmark of advice: rivals and tables on a grid whose answers are known."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import races
from experiments.bench.advice import (
    PRESETS,
    SEED,
    STEEPEST,
    TENTH,
    AdviceSettings,
    Trainer,
    best_place,
    measure,
    tables,
)
from experiments.bench.advice_rivals import (
    forest,
    is_reached,
    online_times,
    power_law,
    rivals,
    statistics,
    steps_to,
)
from experiments.bench.trust_tasks import Job
from jaxttp import Model, train
from jaxttp.dynamics.batches import batch_indices
from jaxttp.forecast import Hyperparameters

RATES = np.geomspace(0.02, 2.5, 4).tolist()


def row(task="one", chosen=2):
    """Four rates without momentum, losses exp(-rate t) from 1; the fourth ends in NaN."""
    t = np.arange(151.0)
    real = np.exp(-np.outer(RATES, t) / 10)
    real[3, 2:] = np.nan
    return {
        "task": task, "goal": 0.1, "chosen": chosen, "predicted": 46, "trainings": 1.5,
        "race": 2, "race_trainings": 0.5, "race_sure": 0.95, "race_to_horizon": 2,
        "race_to_horizon_trainings": 0.8,
        "one_kernel": 1, "own_drop": 0, "one_kernel_trainings": 0.25,
        "finder": {TENTH: RATES[0], STEEPEST: 10 * RATES[3]}, "rates": RATES,
        "momenta": [0.0] * 4, "real": real.tolist(), "online": [900.0, 300.0, 80.0, np.inf],
        "statistics": {"largest": 0.0, "loss": 1.0},
    }  # fmt: skip


def test_steps_to():
    assert steps_to([1.0, 0.5, 0.1], 0.5) == 1
    assert steps_to([1.0, 0.5], 0.4) == np.inf
    assert steps_to([1.0, np.nan, 0.1], 0.5) == np.inf  # what came after is no training
    assert steps_to([1.0, 0.4, np.nan], 0.5) == 1


def test_a_goal_that_none_gets_to_tells_no_choices_apart():
    assert is_reached(row())
    assert not is_reached(row() | {"goal": 1e-9})
    assert not is_reached(row() | {"goal": None})


def test_power_laws_are_continued():
    t = np.arange(16.0)
    curve = 0.2 + 1.8 * (t + 1) ** -0.5
    exact = ((0.4 - 0.2) / 1.8) ** -2.0  # in t + 1
    assert power_law(curve, 0.4) == pytest.approx(exact, rel=1e-3)
    assert power_law(curve, 0.1) > 1e4  # below its floor, as well as that is known
    assert power_law(curve, 1.2) == np.argmax(curve <= 1.2)
    assert power_law(np.array([1.0, np.inf, np.inf]), 0.1) == np.inf


def test_rivals_choose_by_what_they_see():
    found = rivals(row(), fixed=0)
    limit = RATES[-1] / AdviceSettings.shares[1]
    half = int(np.argmin(np.abs(np.log(np.array(RATES) / (0.5 * limit)))))
    assert found["jaxttp.sweep"] == (2, 1.5)
    assert found["jaxttp.race"] == (2, 0.5)
    assert found["jaxttp.race, to the horizon"] == (2, 0.8)
    assert found["its first kernel alone"] == (1, 0.25)
    assert found["half the largest stable rate, no momentum"] == (half, 0.25)
    assert found["the share and momentum best on other tasks"] == (0, 0.25)
    assert found[f"rate finder, {TENTH}, momentum 0.9"] == (0, 100 / 150)
    assert found[f"rate finder, {STEEPEST}, momentum 0.9"][0] == 3
    assert found["a tenth of every training, the lowest"] == (2, 4 * 15 / 150)
    assert found["a tenth of each, carried on by Online"] == (2, 4 * 15 / 150 + 0.25)
    assert found["a forest on kernel statistics, other tasks"] == (None, 0.25)  # there are none
    place, cost = found["successive halving, by thirds"]
    assert place == 2
    assert cost == pytest.approx((4 * 15 + 1 * 30 + 1 * 90) / 150)


def test_a_forest_learns_from_other_tasks_which_rate_is_first():
    assert forest(row(), [row("two"), row("three")]) == 2
    fast = row("two") | {"real": row()["real"][::-1]}  # there the lowest but one is first
    assert forest(row(), [fast, fast | {"task": "three"}]) == 1


def test_statistics_of_a_linear_network_are_known():
    """With outputs of zero and the kernel K x I_2: margins of zero, half of the gradient each."""
    x = np.diag([1.0, 2.0])
    job = Job(Model(lambda w, x: x @ w, jnp.zeros((2, 2))), x, np.array([0, 1]), "cross_entropy")
    found = statistics(job)
    assert found["trace"] == pytest.approx(np.log(2 * (1 + 4) / 4))
    assert found["largest"] == pytest.approx(np.log(4 / 2))
    assert found["loss"] == pytest.approx(np.log(2))
    assert (found["margin"], found["spread"]) == (0.0, 0.0)
    # g = (-1/2, 1/2) and (1/2, -1/2): g K g = 1/2 (1 + 4), |g|^2 = 1
    assert found["speed"] == pytest.approx(np.log(2.5 / 4))
    assert found["gradient"] == pytest.approx(np.log(1 / 2))


def test_a_linear_network_is_carried_on_exactly_from_its_first_tenth():
    x = np.random.default_rng(1).standard_normal((12, 3))
    y = (x[:, 0] > 0).astype(int)
    job = Job(Model(lambda w, x: x @ w, jnp.zeros((3, 2))), x, y, "cross_entropy")
    choices = [Hyperparameters(rate, momentum=m, steps=40) for rate in (0.1, 1.0) for m in (0, 0.9)]
    curves = np.stack([Trainer(job).run(one) for one in choices])
    goal = float(curves[0, 30])
    wanted = [steps_to(curve, goal) for curve in curves]
    found = online_times(job, choices, curves, goal)
    assert found == pytest.approx(wanted, abs=1)
    broken = curves.copy()
    broken[1, 2] = np.nan
    assert online_times(job, choices, broken, goal)[1] == np.inf


def test_tables_count_what_is_near_the_best():
    rows = [row(), row("two", chosen=1)]
    best = int(np.ceil(10 * np.log(10) / RATES[2]))
    assert steps_to(rows[0]["real"][1], 0.1) == np.inf  # after 230 steps
    words = tables(rows, best_place(rows))
    assert best_place(rows) == 2
    assert f"| one | 0.1 | {best} | 46 | {best} | 0 % | 1.5 |" in words
    assert f"| two | 0.1 | {best} | 46 | inf | never | 1.5 |" in words
    assert "| jaxttp.sweep | 50% | 50% |" in words
    assert "| the share and momentum best on other tasks | 100% | 0% | 0% | 0 % |" in words


@pytest.mark.slow
def test_races_are_held_against_whole_grids():
    row = races.measure("wine, MLP", 20, PRESETS["smoke"])
    assert [one["grid"] for one in row["readings"]] == [
        name for name in ("gradient descent", "AdamW", "both") for _ in races.SHARES
    ]
    for one in row["readings"]:
        assert 0 < one["best"] <= one["real"] <= 20  # somebody gets there: its end says so
        assert one["trainings"] < one["settings"] * 4 / 3  # looks are ways forward
    both = {one["share"]: one["best"] for one in row["readings"] if one["grid"] == "both"}
    assert both[0.3] < both[0.03]
    lines = races.tables([row]).splitlines()
    assert len(lines) == 2 + 3 * 4
    assert lines[-1].startswith("| both | all | 3 |")


def test_a_trainer_trains_like_optax():
    x, y = np.random.default_rng(0).standard_normal((2, 6, 2))
    job = Job(Model(lambda w, x: x @ w, jnp.ones((2, 2)) / 7), x, y, "squared_error")
    for one in (
        Hyperparameters(0.1, momentum=0.9, steps=5, loss="squared_error"),
        Hyperparameters(0.1, algorithm="adamw", steps=5, loss="squared_error"),
    ):
        run = train(*job.model, x, y, loss="squared_error", optimizer=one.optimizer(), steps=5)
        np.testing.assert_allclose(Trainer(job).run(one), run.loss, rtol=1e-6)  # float32 numbers


def test_a_trainer_of_batches_knows_the_loss_on_all_samples():
    x, y = np.random.default_rng(0).standard_normal((2, 6, 2))
    job = Job(Model(lambda w, x: x @ w, jnp.ones((2, 2)) / 7), x, y, "squared_error")
    one = Hyperparameters(0.1, momentum=0.9, steps=5, loss="squared_error", batch_size=2)
    weights, velocity, losses = np.ones((2, 2)) / 7, 0.0, []
    for rows in np.asarray(batch_indices(jax.random.key(SEED), 6, 2, 5)):
        losses.append(np.sum((x @ weights - y) ** 2) / 12)
        velocity = 0.9 * velocity + x[rows].T @ (x[rows] @ weights - y[rows]) / 2
        weights = weights - 0.1 * velocity
    losses.append(np.sum((x @ weights - y) ** 2) / 12)
    np.testing.assert_allclose(Trainer(job).run(one), losses, rtol=1e-5)  # float32 numbers


@pytest.mark.slow
def test_advice_on_batches():
    settings = dataclasses.replace(
        PRESETS["smoke"], batch_size=20, shares=(0.3, 1.0, 2), steps=10
    )  # fmt: skip
    found = measure("wine, MLP", settings)
    real = np.array(found["real"])
    assert real.shape == (2, 11)
    assert found["race"] is not None
    assert steps_to(real[found["race"]], found["goal"]) <= 10
    assert "| wine, MLP |" in tables([found], best_place([found]))
