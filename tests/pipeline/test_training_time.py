"""From names to a result: tasks for every data set, a whole forecast, its JSON, its refusals."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from jaxttp import training_time
from jaxttp.adapters import output_shape
from jaxttp.data import dataset_names
from jaxttp.data.sources import LAYOUTS, SPLITS
from jaxttp.pipeline import Settings, build_task, forecast
from tests import tiny

# --- tasks ----------------------------------------------------------------------------------------

TASKS = {
    # data: shape of x and number of outputs, for three samples a class
    "digits": ((15, 8, 8, 1), 5),
    "wine": ((9, 13), 3),
    "breast_cancer": ((6, 30), 2),
    "diabetes": ((442, 10), 1),
}


def test_every_data_set_is_listed_here():
    # The others are not part of a package: tests/data, and tests/pipeline/test_tasks.py.
    assert {*TASKS, *SPLITS, *LAYOUTS} == set(dataset_names())


@pytest.mark.parametrize("data", TASKS)
def test_task_for_every_data_set(data):
    shape, outputs = TASKS[data]
    per_class = {} if data == "diabetes" else {"samples_per_class": 3}
    task = build_task(Settings(data=data, **per_class))
    assert task.x.shape == shape
    assert output_shape(*task.model, task.x) == (shape[0], outputs)
    if data == "diabetes":
        assert task.loss == "squared_error"
        assert task.y.shape == (442, 1)
    else:
        assert task.loss == "cross_entropy"
        np.testing.assert_array_equal(np.bincount(task.y), [3] * outputs)
    for words in (data, f"{shape[0]} samples", task.loss):
        assert words in task.description


def test_a_binary_loss_has_one_output():
    chosen = Settings(data="breast_cancer", samples_per_class=2, loss="binary_cross_entropy")
    task = build_task(chosen)
    assert output_shape(*task.model, task.x) == (4, 1)


def test_seed_draws_samples_and_weights():
    first, again, other = (
        build_task(dataclasses.replace(tiny.SETTINGS, seed=s)) for s in (0, 0, 1)
    )
    np.testing.assert_array_equal(first.x, again.x)
    jax.tree.map(np.testing.assert_array_equal, first.model.params, again.model.params)
    assert not np.array_equal(first.x, other.x)
    pairs = zip(*map(jax.tree.leaves, (first.model.params, other.model.params)), strict=True)
    assert any(not np.array_equal(a, b) for a, b in pairs)


# --- forecasts ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_forecast_beside_the_real_run():
    result = tiny.verified()
    prediction, run = result.prediction, result.run
    horizon = tiny.SETTINGS.steps
    assert prediction.horizon == horizon
    assert prediction.loss.shape == prediction.error.shape == (horizon + 1,)
    assert run.loss.shape == run.error.shape == (horizon + 1,)
    assert prediction.stable
    assert tiny.SETTINGS.learning_rate < prediction.max_learning_rate
    # Step 0 is the same network on the same samples: equal up to float32.
    np.testing.assert_allclose(prediction.outputs[0], run.outputs[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(prediction.loss[0], run.loss[0], rtol=1e-5)
    # One gradient step is where a network is closest to its linearisation: a twentieth of the drop.
    drop = float(run.loss[0] - run.loss[-1])
    assert drop > 0
    assert abs(float(prediction.loss[1] - run.loss[1])) < drop / 20


def test_training_times_in_steps_and_seconds():
    result = tiny.verified()
    thresholds = tiny.SETTINGS.thresholds
    assert tuple(result.arrivals) == thresholds
    for e, one in result.arrivals.items():
        assert one.steps == training_time(result.prediction.loss, e)
        assert one.real_steps == training_time(result.run.loss, e)
        assert one.seconds == one.steps * result.step_time.seconds
        # The fraction of the run's time; rtol 1e-12 is rounding.
        fraction = one.real_steps / tiny.SETTINGS.steps
        assert math.isclose(one.real_seconds, fraction * result.run.seconds, rel_tol=1e-12)
    assert result.step_time.seconds > 0


@pytest.mark.slow
def test_beyond_stability_nothing_is_trained():
    stages = []
    settings = dataclasses.replace(tiny.SETTINGS, learning_rate=5.0, steps=8)
    result = forecast(settings, verify=True, progress=lambda stage, *_: stages.append(stage))
    assert not result.prediction.stable
    assert result.run is None
    assert "real training" not in stages
    assert {"kernel", "dynamics", "timing a step"} <= set(stages)
    written = strict_json(result)
    assert written["stable"] is False
    assert written["verified"] is None
    assert set(written["steps"].values()) == {-1}
    assert set(written["seconds"]) == {"horizon"}


# --- JSON -----------------------------------------------------------------------------------------

PROMISED = {
    "steps",
    "horizon",
    "loss",
    "error",
    "hyperparameters",
    "max_learning_rate",
    "seconds",
    "cost",
    "verified",
}
BESIDES = {"warnings", "plan", "stable", "rule", "metric", "dynamics", "step_seconds", "task",
           "note", "targets", "versions"}  # fmt: skip


def strict_json(result):
    """Through text and back; NaN and infinity are no JSON."""
    return json.loads(json.dumps(result.to_json(), allow_nan=False))


def test_json_is_complete():
    result = tiny.verified()
    written = strict_json(result)
    assert set(written) == PROMISED | BESIDES
    assert written["horizon"] == 15
    assert written["steps"] == {str(e): t for e, t in result.prediction.steps.items()}
    assert set(written["steps"]) == {"0.01", "0.1", "0.4"}
    assert len(written["error"]) == 16
    assert written["loss"] == result.prediction.loss.tolist()
    assert 0 < written["max_learning_rate"] < math.inf
    assert set(written["seconds"]) == {"0.01", "0.1", "0.4", "horizon"}
    assert written["seconds"]["horizon"] == 15 * written["step_seconds"]
    cost = written["cost"]
    counted = {"kernels", "gradient_evaluations", "operations", "training_operations"}
    timed = {"seconds", "compile_seconds", "training_seconds", "estimated_seconds"}
    assert set(cost) == counted | timed
    assert (cost["kernels"], cost["gradient_evaluations"]) == (1, 2 + 2)


def test_json_of_a_real_run_that_diverged():
    """A forecast need not foresee it; its JSON is valid all the same."""
    result = tiny.real_run_diverged()
    assert {(one.real_steps, one.real_seconds) for one in result.arrivals.values()} == {(-1, None)}
    real = strict_json(result)["verified"]
    assert real["loss"][-3:] == [None, None, None]
    assert set(real["steps"].values()) == {-1}


# --- refusals -------------------------------------------------------------------------------------

BAD = {
    "samples 0": ({"samples_per_class": 0}, "^samples_per_class must be .* at least 1; got 0"),
    "seed": ({"seed": -1}, "^seed must be an integer between 0 and 4294967295; got -1"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_settings_are_refused_by_name(case):
    options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        forecast(dataclasses.replace(tiny.SETTINGS, **options))


# --- the shipped network --------------------------------------------------------------------------


def test_a_batch_is_timed_without_all_samples():
    """A step of a batch does not ask for all of the samples that are said: 10 TB of them here."""
    settings = Settings(data="wine", samples_per_class=4, steps=4, batch_size=4, relinearize=0)
    found = forecast(dataclasses.replace(settings, total_samples=10**11))
    assert found.prediction.hyperparameters["total_samples"] == 10**11
    assert found.step_time.seconds > 0
