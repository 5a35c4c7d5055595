"""From names to a result: tasks for every data set, a whole forecast, its JSON, its refusals."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from jaxttp import training_time
from jaxttp.adapters import output_shape
from jaxttp.data import dataset_names
from jaxttp.data.sources import LAYOUTS, SPLITS
from jaxttp.dynamics.stability import max_learning_rate
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


def test_task_for_a_download(stub_tfds):
    task = build_task(Settings(data="cifar10", samples_per_class=1))
    assert task.x.shape == (10, 32, 32, 3)
    assert output_shape(*task.model, task.x) == (10, 10)
    assert "MLP 3072-64-64-10 from random weights on cifar10, 10 samples" in task.description


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


@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error", "binary_cross_entropy"])
def test_every_loss_on_two_classes(loss):
    task = build_task(Settings(data="breast_cancer", samples_per_class=2, loss=loss))
    assert task.loss == loss
    outputs = 1 if loss == "binary_cross_entropy" else 2
    assert output_shape(*task.model, task.x) == (4, outputs)


def test_no_limit_takes_every_sample():
    assert len(build_task(Settings(data="wine", samples_per_class=None)).x) == 178


def test_seed_draws_samples_and_weights():
    first, again, other = (
        build_task(dataclasses.replace(tiny.SETTINGS, seed=s)) for s in (0, 0, 1)
    )
    np.testing.assert_array_equal(first.x, again.x)
    jax.tree.map(np.testing.assert_array_equal, first.model.params, again.model.params)
    assert not np.array_equal(first.x, other.x)
    pairs = zip(*map(jax.tree.leaves, (first.model.params, other.model.params)), strict=True)
    assert any(not np.array_equal(a, b) for a, b in pairs)


@pytest.mark.usefixtures("full_precision")
def test_head_scale_sets_the_size_of_the_first_outputs():
    sizes = []
    for scale in (0.0, 1.0, 3.0):
        task = build_task(dataclasses.replace(tiny.SETTINGS, head_scale=scale))
        sizes.append(np.abs(task.model.apply_fn(task.model.params, task.x)).max())
    assert sizes[0] == 0
    # The same draw, three times as large; weights and data are float32, hence rtol 1e-5.
    np.testing.assert_allclose(sizes[2], 3 * sizes[1], rtol=1e-5)


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


@pytest.mark.slow
def test_limit_of_the_learning_rate_against_a_dense_matrix():
    """2 over the largest eigenvalue of J^T H J / N, all of it written out.

    The Hessian of three classes has rank 2, so Lanczos vectors run out before the matrix does and
    become rounding; a limit that trusts them is off by a factor of two in float32.
    """
    task = tiny.verified().task
    flat, unravel = ravel_pytree(task.model.params)
    jacobian = jax.jit(jax.jacrev(lambda w: task.model.apply_fn(unravel(w), task.x)))(flat)
    jacobian = np.asarray(jacobian, np.float64)  # (N, C, D)
    f = np.asarray(task.model.apply_fn(task.model.params, task.x), np.float64)
    p = np.exp(f) / np.exp(f).sum(axis=1, keepdims=True)
    roots = []
    for i in range(len(f)):
        values, vectors = np.linalg.eigh(np.diag(p[i]) - np.outer(p[i], p[i]))
        roots.append(np.sqrt(values.clip(0))[:, None] * (vectors.T @ jacobian[i]))
    root = np.concatenate(roots)
    largest = np.linalg.eigvalsh(root @ root.T / len(f))[-1]
    # Kernel and network are float32: rtol 1e-4.
    limit = tiny.verified().prediction.max_learning_rate
    np.testing.assert_allclose(limit, 2 / largest, rtol=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("features", [1, 3, 30])
def test_limit_of_a_kernel_of_low_rank(features, dtype):
    """A linear network of few weights: the Krylov space ends after `features` steps of forty."""
    x = np.random.default_rng(0).normal(size=(20, features))
    y = np.arange(20) % 2
    kernel = jnp.asarray(np.einsum("np,mp,cd->ncmd", x, x, np.eye(2)), dtype)
    limit = max_learning_rate(kernel, jnp.zeros((20, 2), dtype), y, loss="cross_entropy")
    # At outputs of zero the Hessian of two classes has the eigenvalues 1/2 and 0.
    largest = np.linalg.eigvalsh(x.T @ x)[-1] / 2 / 20
    np.testing.assert_allclose(limit, 2 / largest, rtol=1e-5 if dtype is np.float32 else 1e-12)


def test_training_times_in_steps_and_seconds():
    result = tiny.verified()
    thresholds = tiny.SETTINGS.thresholds
    assert tuple(result.prediction.steps) == tuple(result.real_steps) == thresholds
    for e in thresholds:
        assert result.prediction.steps[e] == training_time(result.prediction.loss, e)
        assert result.real_steps[e] == training_time(result.run.loss, e)
        assert result.seconds[e] == result.prediction.steps[e] * result.step_time.seconds
    # Less of the drop takes less time.
    for steps in (result.prediction.steps, result.real_steps, result.seconds, result.real_seconds):
        values = [steps[e] for e in thresholds]
        assert values == sorted(values, reverse=True)
        assert 0 < values[0]
    assert result.step_time.seconds > 0
    for e, seconds in result.real_seconds.items():
        # The share of the run's time; rtol 1e-12 is rounding.
        share = result.real_steps[e] / tiny.SETTINGS.steps
        assert math.isclose(seconds, share * result.run.seconds, rel_tol=1e-12)


def test_regression_without_a_real_run():
    result = tiny.regression()
    assert result.run is result.real_steps is result.real_seconds is None
    assert result.prediction.loss[-1] < result.prediction.loss[0]
    assert result.to_json()["verified"] is None


@pytest.mark.slow
def test_same_seed_same_result_with_batches_and_momentum():
    """Batches of the forecast and of the real run are drawn too."""
    settings = dataclasses.replace(
        tiny.SETTINGS, batch_size=5, momentum=0.5, learning_rate=0.02, steps=6, seed=3
    )
    first, second = (forecast(settings, verify=True) for _ in range(2))
    # The same programs on the same numbers: equal to the last bit.
    np.testing.assert_array_equal(first.prediction.outputs, second.prediction.outputs)
    np.testing.assert_array_equal(first.run.outputs, second.run.outputs)
    assert first.prediction.steps == second.prediction.steps
    assert first.real_steps == second.real_steps
    assert first.prediction.max_learning_rate == second.prediction.max_learning_rate


@pytest.mark.slow
def test_rebuilt_kernels_come_closer():
    plain = tiny.verified()
    better = forecast(dataclasses.replace(tiny.SETTINGS, relinearize=2))
    assert better.prediction.cost.kernels > plain.prediction.cost.kernels == 1
    # On average: until the second kernel both forecasts are the same.
    gaps = [np.abs(r.prediction.loss - plain.run.loss).mean() for r in (plain, better)]
    assert gaps[1] < 0.7 * gaps[0]


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
BESIDES = {"trust", "plan", "stable", "rule", "metric", "dynamics", "step_seconds", "task", "note",
           "targets", "versions"}  # fmt: skip


def strict_json(result):
    """Through text and back; NaN and infinity are no JSON."""
    return json.loads(json.dumps(result.to_json(), allow_nan=False))


def is_finite_list(values, length):
    return len(values) == length and all(type(v) is float and math.isfinite(v) for v in values)


def test_json_is_complete():
    result = tiny.verified()
    written = strict_json(result)
    assert set(written) == PROMISED | BESIDES
    assert written["horizon"] == 15
    assert written["steps"] == {str(e): t for e, t in result.prediction.steps.items()}
    assert set(written["steps"]) == {"0.01", "0.1", "0.4"}
    assert {type(t) for t in written["steps"].values()} == {int}
    assert is_finite_list(written["loss"], 16)
    assert is_finite_list(written["error"], 16)
    assert written["loss"] == result.prediction.loss.tolist()
    assert 0 < written["max_learning_rate"] < math.inf
    assert set(written["seconds"]) == {"0.01", "0.1", "0.4", "horizon"}
    assert is_finite_list(list(written["seconds"].values()), 4)
    assert written["seconds"]["horizon"] == 15 * written["step_seconds"]
    cost = written["cost"]
    counted = {"kernels", "gradient_evaluations", "operations", "training_operations"}
    assert set(cost) == counted | {"seconds", "compile_seconds"}
    assert (cost["kernels"], cost["gradient_evaluations"]) == (1, 2 + 2)


def test_json_repeats_what_was_asked_for():
    given = strict_json(tiny.verified())["hyperparameters"]
    asked = dataclasses.asdict(tiny.SETTINGS)
    for name in ("thresholds", "target_loss", "target_error", "drop"):
        asked[name] = list(asked[name])
    assert given | asked | {"loss": "cross_entropy"} == given
    assert set(given) - set(asked) == {"protocol"}


def test_json_of_the_real_run():
    result = tiny.verified()
    real = strict_json(result)["verified"]
    assert set(real) == {"steps", "loss", "error", "seconds"}
    assert real["steps"] == {str(e): t for e, t in result.real_steps.items()}
    assert is_finite_list(real["loss"], 16)
    assert is_finite_list(real["error"], 16)
    assert set(real["seconds"]) == {"0.01", "0.1", "0.4", "horizon"}
    assert real["seconds"]["horizon"] == result.run.seconds > 0


def test_json_of_a_real_run_that_diverged():
    """A forecast need not foresee it; its JSON is valid all the same."""
    result = tiny.real_run_diverged()
    assert set(result.real_steps.values()) == {-1}
    assert result.real_seconds == {}
    real = strict_json(result)["verified"]
    assert real["loss"][-3:] == [None, None, None]
    assert is_finite_list(real["loss"][:-3], 13)
    assert set(real["steps"].values()) == {-1}


def test_json_keeps_thresholds_apart():
    """Two thresholds that differ in the seventh digit are two keys."""
    result = tiny.verified()
    steps = {0.1: 3, 0.1000001: 2, 1e-5: 9}
    prediction = dataclasses.replace(result.prediction, steps=steps)
    written = strict_json(dataclasses.replace(result, prediction=prediction))
    assert {float(e): t for e, t in written["steps"].items()} == steps


# --- refusals -------------------------------------------------------------------------------------

BAD = {
    "data": ({"data": "svhn"}, "^data='svhn' is not known; choose one of 'digits', 'wine'"),
    "loss": ({"loss": "hinge"}, "^loss='hinge' is not known"),
    "loss of a regression": (
        {"data": "diabetes", "loss": "cross_entropy"},
        "^loss='cross_entropy' needs classes",
    ),
    "loss of three classes": (
        {"loss": "binary_cross_entropy"},
        "^loss='binary_cross_entropy' needs two classes; wine has 3",
    ),
    "samples 0": ({"samples_per_class": 0}, "^samples_per_class must be .* 1 and 48; got 0"),
    "samples too many": (
        {"samples_per_class": 49},
        "^samples_per_class must be .* got 49. The rarest class of wine has 48",
    ),
    "samples too many, digits": (
        {"data": "digits", "samples_per_class": 175},
        "^samples_per_class .* got 175. The rarest class of digits has 174",
    ),
    "seed": ({"seed": -1}, "^seed must be an integer between 0 and 4294967295; got -1"),
    "seed too large": ({"seed": 2**64}, "^seed must be an integer between"),
    "head scale": ({"head_scale": -1.0}, "^head_scale must be at least 0; got -1"),
    "rate 0": ({"learning_rate": 0.0}, "^learning_rate must be greater than 0; got 0"),
    "rate negative": ({"learning_rate": -1.0}, "^learning_rate must be greater than 0"),
    "rate NaN": ({"learning_rate": math.nan}, "^learning_rate must be finite"),
    "momentum 1": ({"momentum": 1.0}, "^momentum must be at least 0 and less than 1; got 1"),
    "momentum negative": ({"momentum": -0.1}, "^momentum must be at least 0"),
    "batch too large": ({"batch_size": 13}, "^batch_size must be .* 1 and 12; got 13"),
    "batch 0": ({"batch_size": 0}, "^batch_size must be an integer of at least 1; got 0"),
    "steps 0": ({"steps": 0}, "^steps must be an integer of at least 1; got 0"),
    "threshold 0": ({"thresholds": (0.1, 0.0)}, "^thresholds must be greater than 0 .* got 0.0"),
    "threshold 1.5": ({"thresholds": (1.5,)}, "^thresholds must be .* less than 1; got 1.5"),
    "no threshold": ({"thresholds": ()}, "^thresholds must hold at least one number"),
    "relinearize": ({"relinearize": -1}, "^relinearize must be an integer of at least 0; got -1"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_settings_are_refused_by_name(case):
    options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        forecast(dataclasses.replace(tiny.SETTINGS, **options))


# --- the shipped network --------------------------------------------------------------------------


@pytest.mark.slow
def test_digits_end_to_end():
    """All weights of the pre-trained ResNet on unseen digits: the forecast finds the real curve."""
    settings = Settings(samples_per_class=5, steps=40, learning_rate=0.005)
    result = forecast(settings, verify=True)
    assert result.prediction.stable
    real, predicted = np.asarray(result.run.loss), np.asarray(result.prediction.loss)
    drop = real[0] - real[-1]
    assert drop > 0.3
    # The network is small and moves: a tenth of the drop at most, a constant curve would miss by 1.
    assert np.abs(predicted - real).max() < 0.1 * drop
    for e, step in result.prediction.steps.items():
        assert abs(step - result.real_steps[e]) <= 6, e
    assert strict_json(result)["verified"] is not None


def test_a_batch_is_timed_without_all_samples():
    """A step of a batch does not ask for all of the samples that are said: 10 TB of them here."""
    settings = Settings(data="wine", samples_per_class=4, steps=4, batch_size=4, relinearize=0)
    found = forecast(dataclasses.replace(settings, total_samples=10**11))
    assert found.prediction.hyperparameters["total_samples"] == 10**11
    assert found.step_time.seconds > 0
