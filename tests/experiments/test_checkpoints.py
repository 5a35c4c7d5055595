"""The benchmark of checkpoints: its tasks, its tables on rows whose answers are known, one run."""

import json

import numpy as np
import pytest

from experiments.bench import checkpoints
from experiments.bench.advice import steps_to
from experiments.bench.checkpoints import train, with_race
from experiments.bench.checkpoints_tables import judged, methods, tables, truth
from experiments.bench.checkpoints_tasks import (
    TARGETS,
    Target,
    draw,
    half_of_digits,
    half_of_photographs,
)

NAMES = ("slow", "fast", "never")


def run(speed, accuracy):
    loss = np.exp(-speed * np.arange(101.0))
    return {"loss": loss.tolist(), "test_loss": 1 - accuracy, "test_accuracy": accuracy}


def row(order=("fast", "slow", "never"), target="one"):
    """Three checkpoints at two rates: at 0.5 after 14, 7 steps and never, at the second rate."""
    steps = {"slow": 15, "fast": 7, "never": -1}
    found = {
        "order": list(order), "steps": steps, "rates": dict.fromkeys(NAMES, 0.1), "trainings": 6.0,
        "final_loss": {"slow": 0.2, "fast": float("nan"), "never": 0.9},
        "speed": {"slow": 0.2, "fast": 0.3, "never": 0.1},
        "trust": {"slow": None, "fast": None, "never": "held"},
    }  # fmt: skip
    diverged = {"loss": [1.0, *[float("nan")] * 100], "test_loss": 9.0, "test_accuracy": 0.0}
    return {
        "target": target, "goal": 0.5, "rates": [0.1, 0.2],
        "forecasts": {"followed": found, "first": found | {"trainings": 1.5}},
        "real": {
            "slow": [run(0.01, 0.7), run(0.05, 0.8)],
            "fast": [run(0.05, 0.5), run(0.1, 0.7)],
            "never": [run(0.001, 0.9), diverged],
        },
        "at_advised": {"slow": 10, "fast": 7, "never": -1},
        "race": {"order": ["fast", "slow", "never"], "trainings": 0.5, "steps": 7, "seconds": 1.0},
    }  # fmt: skip


def test_halves_share_no_digit():
    first, second = (half_of_digits(which, tuple(range(10))).x for which in range(2))
    assert len(first) + len(second) == 1797
    rows = {one.tobytes() for one in first}
    assert not any(one.tobytes() in rows for one in second)


def test_coarse_patches_are_means_of_fine_ones():
    fine, coarse = half_of_photographs(1), half_of_photographs(1, 16)
    wide = 320 // 8
    block = np.block(
        [[fine.x[0, :, :, 0], fine.x[1, :, :, 0]],
         [fine.x[wide, :, :, 0], fine.x[wide + 1, :, :, 0]]]
    )  # fmt: skip
    assert coarse.x[0, :, :, 0] == pytest.approx(block.reshape(8, 2, 8, 2).mean((1, 3)), abs=1e-6)
    assert len(coarse.x) == 2 * 26 * 20


@pytest.mark.parametrize("name", TARGETS)
def test_samples_to_test_on_are_others(name):
    task = draw(name, 150, 500)
    assert len(task.x) == 150
    assert len(task.x_test) >= 120
    seen = {one.tobytes() for one in task.x}
    assert sum(one.tobytes() in seen for one in task.x_test) == 0
    assert set(np.unique(task.y)) == set(range(task.classes))


@pytest.mark.usefixtures("full_precision")
def test_training_is_heavy_ball_descent():
    x, y = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32), np.array([0, 1])
    task = Target(x, y, x[:1], y[:1])
    found = train(linear, np.zeros((2, 2), np.float32), task, 0.5, 3)
    w, v, losses = np.zeros((2, 2)), np.zeros((2, 2)), []
    last = w
    for _ in range(4):
        p = np.exp(x @ w) / np.exp(x @ w).sum(axis=1, keepdims=True)
        losses.append(-np.mean(np.log(p[[0, 1], y])))
        last = w
        v = 0.9 * v + x.T @ (p - np.eye(2)) / 2
        w = w - 0.5 * v
    assert found["loss"] == pytest.approx(losses, rel=1e-4)
    assert found["test_accuracy"] == 1.0
    assert found["test_loss"] == pytest.approx(-np.log(1 / (1 + np.exp(last[0, 1] - last[0, 0]))))


def linear(params, x):
    return x @ params


def test_truth_is_by_the_rate_that_is_at_the_goal_first_and_the_end_by_the_lowest():
    found = truth(row())
    assert found["steps"].tolist() == [14, 7, np.inf]
    assert found["accuracy"].tolist() == [0.8, 0.7, 0.9]
    assert found["rate"].tolist() == [0.2, 0.2, 0.1]
    later = row()
    later["real"]["fast"][1]["loss"][-1] = float("nan")  # after the goal it is thrown back
    found = truth(later)
    assert found["steps"].tolist() == [14, 7, np.inf]
    assert found["accuracy"].tolist() == [0.8, 0.5, 0.9]


def test_methods_rank_by_what_they_know():
    found = methods(row())
    order, cost = found["jaxttp.compare"]
    assert order.tolist() == [-1, 0, -2]
    assert cost == 6.0
    assert found["its forecast of the last loss"][0].argsort().tolist() == [1, 2, 0]
    assert found["its first kernels alone"][1] == 1.5
    assert found["a tenth of a training each, at the middle rate"][1] == pytest.approx(0.3)
    tenth, cost = found["a tenth of a training each, at every rate"]
    assert tenth.argsort().tolist() == [2, 0, 1]
    assert cost == pytest.approx(0.6)


def test_judgement_has_a_direction():
    found = judged(row())
    right = found["jaxttp.compare"]
    assert right["tau_steps"] == pytest.approx(1)
    assert right["tau_accuracy"] == pytest.approx(-1)  # the slowest is the most accurate here
    assert right["excess"] == 0
    assert right["lost"] == pytest.approx(0.2)
    assert judged(row(("never", "slow", "fast")))["jaxttp.compare"]["tau_steps"] == pytest.approx(
        -1
    )
    assert found["any of them, in the mean"]["excess"] == pytest.approx((2 + 1 + 10) / 3 - 1)
    assert found["any of them, in the mean"]["tau_steps"] == 0


def test_tables():
    words = tables([row(), row(("slow", "fast", "never"), "two")])
    assert "| slow | 14 (15), 80.0% | 14 (15), 80.0% |" in words
    assert "| never | never (never), 90.0% | never (never), 90.0% |" in words
    assert "| one | 0.5 | fast | 7 | fast | 7 | 7 | 7 | 1 of 3 | 6 | 25% |" in words
    assert "| two | 0.5 | fast | 7 | slow | 14 | 10 | 15 | 1 of 3 | 6 | 25% |" in words
    line = next(one for one in words.splitlines() if one.startswith("| jaxttp.compare |"))
    assert line.endswith("| 50 % | 15.0 | 6 |")
    assert "steps over the best | one | two |" in words
    hard = row() | {"goal": 1e-9}
    assert tables([hard]) == "No checkpoint gets to the goal of any target."


def test_smoke():
    settings = checkpoints.PRESETS["smoke"]
    found = json.loads(json.dumps(checkpoints.measure("digits 5-9", settings)))
    assert set(found["real"]) == set(settings.checkpoints)
    assert all(len(runs) == 2 for runs in found["real"].values())
    assert found["forecasts"]["followed"]["trainings"] > 0
    assert sorted(found["race"]["order"]) == sorted(settings.checkpoints)
    assert 0 < found["race"]["trainings"] < 2 * len(settings.checkpoints)  # rates: 2
    # What the race saw of the first is what the whole grid saw, to rounding of float32.
    times = [
        steps_to(one["loss"], found["goal"]) for runs in found["real"].values() for one in runs
    ]
    seen = found["race"]["steps"]
    assert seen == -1 or any(abs(time - seen) <= 1 for time in times)
    assert with_race(found, settings) is found
    assert "jaxttp.compare" in tables([found])
