"""`mesh` of the settings: the same numbers from four devices, and what is refused before work."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxttp.conditioning import curvature_matrix
from jaxttp.ntk.sharded import mesh_of
from jaxttp.pipeline import (
    Choices,
    ConditionSettings,
    Settings,
    compare_task,
    condition,
    forecast,
    sweep_task,
    task_spectrum,
)
from tests.meshes import four, labels, network, samples, weights

SMALL = Settings(data="wine", samples_per_class=7, steps=12, learning_rate=0.1, relinearize=0)
SPREAD = dataclasses.replace(SMALL, mesh=4)


def close(got, wanted):
    # Data and network are float32; float64 would be 1e-10. Sums in another order.
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6 * np.max(np.abs(wanted)))


def test_a_number_of_devices_is_a_mesh_of_them():
    assert mesh_of(None) is None is mesh_of(1)
    assert mesh_of("all").size == jax.device_count() == 4
    assert [one.id for one in mesh_of(2).devices] == [one.id for one in jax.devices()[:2]]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (0, r"mesh must be an integer of at least 1; got 0\. Or 'all'"),
        (5, r"mesh=5 asks for 5 devices, and JAX sees 4 \(cpu\); give at most 4, or 'all'\. "
            r".*XLA_FLAGS=--xla_force_host_platform_device_count=5"),
    ],
)  # fmt: skip
def test_what_is_no_such_number_is_refused(wanted, words):
    with pytest.raises(ValueError, match=words):
        mesh_of(wanted)
    with pytest.raises(ValueError, match=words):
        forecast(dataclasses.replace(SMALL, data="nowhere.csv", mesh=wanted))


def test_what_a_mesh_does_nothing_for_is_refused_before_any_work():
    """By name, and before the data are looked for, which are not there."""
    spread = dataclasses.replace(SPREAD, data="wine")
    calls = {
        "optimizer='adamw' is followed in the weights": lambda: forecast(
            dataclasses.replace(spread, optimizer="adamw")
        ),
        "kernels are compared by decomposing them": lambda: compare_task(spread),
        "network='linear' has none": lambda: ConditionSettings(mesh=4),
    }
    for words, call in calls.items():
        with pytest.raises(ValueError, match=f"mesh=4 does nothing here: .*{words}"):
            call()


@pytest.mark.slow
def test_a_forecast_is_the_same():
    """With rebuilt kernels and batches."""
    options = {"relinearize": 1, "momentum": 0.9, "batch_size": 8}
    one, spread = (
        forecast(dataclasses.replace(each, **options)).prediction for each in (SMALL, SPREAD)
    )
    close(spread.loss, one.loss)
    assert spread.steps == one.steps
    assert spread.plan == one.plan
    for name in ("sketch_dim", "relinearize"):
        assert spread.hyperparameters[name] == one.hyperparameters[name]


def test_a_spectrum_is_the_same():
    one, spread = task_spectrum(SMALL), task_spectrum(SPREAD)
    close(spread.values, one.values)
    assert spread.rank == one.rank


def test_a_condition_number_is_the_same():
    settings = ConditionSettings(data="wine", network="mlp", samples=9, width=8)
    one, spread = (condition(dataclasses.replace(settings, mesh=mesh)) for mesh in (None, 4))
    # In float64: a condition number of 1e4 leaves 1e-12 of it.
    np.testing.assert_allclose(spread.condition.eigenvalues, one.condition.eigenvalues, rtol=1e-9)
    assert spread.condition.rank == one.condition.rank


def test_rows_of_a_curvature_matrix_are_computed_on_all_devices():
    x = samples(10)
    for kind, more in (
        ("gauss_newton", {}),
        ("generalized", {"y": labels(x), "loss": "cross_entropy"}),
    ):
        one, spread = (
            curvature_matrix(network, weights(), x, kind=kind, form="outputs", mesh=mesh, **more)
            for mesh in (None, four())
        )
        np.testing.assert_allclose(spread, one, atol=1e-13 * np.max(np.abs(one)))
        assert len(spread.devices()) == 1
    for options in ({"form": "parameters"}, {"kind": "hessian", **more}):
        with pytest.raises(ValueError, match=r"mesh=.* does nothing here: .* on one device"):
            curvature_matrix(network, weights(), x, mesh=four(), **options)


@pytest.mark.slow
def test_sweeps_are_the_same():
    choices = Choices((0.05, 0.2), (0.0,))
    one, spread = (sweep_task(each, choices, time_steps=False).sweep for each in (SMALL, SPREAD))
    close(spread.loss, one.loss)
    np.testing.assert_array_equal(spread.steps, one.steps)
