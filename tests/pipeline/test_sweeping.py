"""Sweeps and comparisons from the name of a task."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp import predict_training_time
from jaxttp.forecast.sweep_result import REBUILT, SIMULATED
from jaxttp.pipeline import (
    Choices,
    Settings,
    build_task,
    compare_task,
    pair_networks,
    race_task,
    starting_points,
    sweep_task,
)

SMALL = Settings(data="wine", samples_per_class=5, steps=30, relinearize=0)


@pytest.fixture(scope="module")
def result():
    return sweep_task(SMALL, Choices(batch_sizes=(None, 4)))


@pytest.mark.slow
def test_a_sweep_advises_a_rate(result):
    assert len(result.sweep.settings) == 16 * 2 * 2
    rates = sorted({one.learning_rate for one in result.sweep.settings})
    assert rates[0] == pytest.approx(0.01 * result.max_learning_rate)
    assert rates[-1] == pytest.approx(2 * result.max_learning_rate)
    assert result.sweep.shared
    best = result.fastest
    assert best is not None
    single = predict_training_time(
        *result.task.model, result.task.x, result.task.y, relinearize=0,
        learning_rate=0.5 * result.max_learning_rate, steps=30,
    )  # fmt: skip
    assert single.max_learning_rate == pytest.approx(result.max_learning_rate, rel=1e-6)
    times = result.sweep.times()
    assert times[best] == min(times[times >= 0])
    assert result.sweep.step_seconds is not None
    assert np.all(result.sweep.step_seconds > 0)


def test_nothing_is_fast_enough():
    found = sweep_task(SMALL, Choices((1e3,), (0.0,)), time_steps=False)
    assert found.fastest is None
    assert found.to_json()["pareto"] == []


def test_algorithms_of_a_grid():
    choices = Choices(
        (0.01,), algorithms=("sgd", "nesterov", "adam", "adamw"), weight_decays=(0.0, 0.1)
    )
    found = sweep_task(SMALL, choices)
    assert [str(one) for one in found.sweep.settings] == [
        "rate 0.01, decay 0",
        "rate 0.01, decay 0.1",
        "rate 0.01, momentum 0.9, decay 0",
        "rate 0.01, momentum 0.9, decay 0.1",
        "nesterov, rate 0.01, momentum 0.9, decay 0",
        "nesterov, rate 0.01, momentum 0.9, decay 0.1",
        "adam, rate 0.01",
        "adamw, rate 0.01, decay 0",
        "adamw, rate 0.01, decay 0.1",
    ]
    assert {found.sweep.method(i) for i in (6, 7, 8)} <= {REBUILT, SIMULATED}
    seconds = found.sweep.step_seconds
    assert seconds.shape == (9,)
    assert len(set(seconds.tolist())) <= 4  # one an algorithm
    plain = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert plain["max_learning_rate"] == found.max_learning_rate
    with pytest.raises(ValueError, match="algorithm='lion' is not known; choose one of"):
        sweep_task(SMALL, Choices(algorithms=("lion",)))
    with pytest.raises(ValueError, match="algorithms and weight_decays name several"):
        sweep_task(dataclasses.replace(SMALL, optimizer="adamw"))


def test_starting_points_train_what_they_say():
    task = build_task(SMALL)
    points = starting_points(task)
    adapted = points.pop("lora")
    assert sorted(adapted.params) == ["hidden/0/kernel", "hidden/1/kernel"]
    picked = {
        name: sorted(p for p in PATHS if one.trainable is None or one.trainable(p))
        for name, one in points.items()
    }
    assert picked == {
        "all": sorted(PATHS),
        "head": ["head/bias", "head/kernel"],
        "last": ["head/bias", "head/kernel", "hidden/1/bias", "hidden/1/kernel"],
        "bias": ["head/bias", "hidden/0/bias", "hidden/1/bias"],
    }
    with pytest.raises(ValueError, match="start='tail' is not known"):
        starting_points(task, ("tail",))
    for name, message in (
        ("lora:r=8:beta=2", "must give each of r, alpha"),
        ("lora:r=0", "r must be"),
        ("lora:", "must give each of"),
        ("lora:modules=nose", "'nose' fits no module"),
    ):
        with pytest.raises(ValueError, match=message):
            starting_points(task, (name,))


def test_adapters_by_their_settings():
    task = build_task(Settings(data="wine", samples_per_class=2))
    names = ("lora", "lora:r=4:alpha=8", "lora:r=4:alpha=8:rslora=yes")
    points = starting_points(task, names, rank=4)
    assert tuple(points) == names
    moved = []
    for one in points.values():
        push = {path: {"a": jnp.zeros_like(ab["a"]), "b": jnp.ones_like(ab["b"])}
                for path, ab in one.params.items()}  # fmt: skip
        moved.append(jax.jvp(lambda w, f=one.apply_fn: f(w, task.x), (one.params,), (push,))[1])
    # At B = 0 outputs move with B as s does, which is 1, 2 and 4.
    np.testing.assert_allclose(moved[1], 2 * moved[0], rtol=1e-5)
    np.testing.assert_allclose(moved[2], 4 * moved[0], rtol=1e-5)


PATHS = [f"{layer}/{part}" for layer in ("head", "hidden/0", "hidden/1") for part in
         ("bias", "kernel")]  # fmt: skip


@pytest.mark.slow
def test_a_comparison_of_what_to_train():
    task, found = compare_task(SMALL, ("head", "all"), time_steps=False)
    assert "wine" in task.description
    assert sorted(found.names) == ["all", "head"]
    assert found.sweep.loss.shape == (2, 31)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"relinearize": 3}, "relinearize=3 does nothing here: a race trains"),
        ({"metric": "error"}, "metric='error' does nothing here: a race trains"),
        ({"target_loss": (0.5, 0.3)}, "must be one loss"),
        ({"mesh": 2}, "mesh=2 does nothing here: a race trains"),
    ],
)
def test_what_a_race_does_not_take(change, words):
    asked = dataclasses.replace(SMALL, **({"relinearize": "auto"} | change))
    with pytest.raises(ValueError, match=words):
        race_task(asked)


def test_networks_and_files_are_paired():
    assert pair_networks((), ()) == ((None, None),)
    assert pair_networks(("vgg5",), ("a", "random")) == (("vgg5", "a"), ("vgg5", None))
    assert pair_networks(("vgg5", "resnet20"), ()) == (("vgg5", None), ("resnet20", None))
    assert pair_networks(("vgg5", "resnet20"), ("a", "b")) == (("vgg5", "a"), ("resnet20", "b"))
    with pytest.raises(ValueError, match="2 models need as many, or none"):
        pair_networks(("vgg5", "resnet20"), ("a",))


def test_a_race_of_settings():
    task, found = race_task(
        dataclasses.replace(SMALL, relinearize="auto", target_loss=(0.5,)),
        Choices((0.003, 0.1), (0.9,), algorithms=("sgd", "adamw")),
    )
    assert len(task.y) == 15
    assert [str(one) for one in found.settings] == [
        "rate 0.003, momentum 0.9", "rate 0.1, momentum 0.9", "adamw, rate 0.003",
        "adamw, rate 0.1",
    ]  # fmt: skip
    assert found.target is not None
    assert found.target.value == 0.5
