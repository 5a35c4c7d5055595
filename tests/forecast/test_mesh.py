"""Forecasts and sweeps with kernels on four devices are those with kernels on one."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jaxttp import predict_training_time, sweep
from jaxttp.forecast import Candidate, Problem, compare, grid
from jaxttp.ntk import (
    ClassSketched,
    Exact,
    Sketched,
    sharded,
)
from tests.meshes import four, labels, network, samples, weights

X = samples(88)
KEY = jax.random.key(4)
BATCHES = {"batch_size": 16, "key": KEY}
ESTIMATORS = {
    "exact": Exact(),
    "sketched": Sketched(16, KEY),
    "wide": Sketched(160, KEY),  # formed on one device, never on many
    "class": ClassSketched(KEY),
}


def both(name):
    """An estimator on one device and on four."""
    one = ESTIMATORS[name]
    return one, dataclasses.replace(one, mesh=four())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("exact", {"relinearize": 0, "x_test": X[:5], "y_test": labels(X[:5])}),
        pytest.param("sketched", {"relinearize": 1, **BATCHES}, marks=pytest.mark.slow),
        pytest.param("class", {"relinearize": 0, **BATCHES}, marks=pytest.mark.slow),
    ],
)
def test_forecasts_agree(name, options):
    one, four = (
        predict_training_time(
            network, weights(), X, labels(X), learning_rate=0.3, steps=12, kernel=kernel, **options
        )
        for kernel in both(name)
    )
    # The same float64 sums in another order, along 12 steps.
    for curve in ("loss", "error", "test_loss", "loss_uncertainty"):
        wanted, found = (getattr(each, curve) for each in (one, four))
        assert (found is None) is (wanted is None)
        if wanted is not None:
            np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)
    assert four.steps == one.steps
    assert four.max_learning_rate == pytest.approx(one.max_learning_rate, rel=1e-10)
    assert four.warnings == one.warnings


SETTINGS = grid(learning_rate=(0.1, 0.3), steps=10) + grid(
    learning_rate=(0.1,), momentum=(0.9,), batch_size=(16,), steps=10
)


@pytest.mark.slow
def test_sweeps_agree():
    one, four = (
        sweep(network, weights(), X, labels(X), SETTINGS, kernel=kernel, key=KEY, relinearize=0)
        for kernel in both("exact")
    )
    np.testing.assert_allclose(four.loss, one.loss, rtol=1e-10)
    np.testing.assert_allclose(four.max_learning_rate, one.max_learning_rate, rtol=1e-10)
    np.testing.assert_array_equal(four.steps, one.steps)


def test_kernels_stay_where_they_are():
    """What a forecast multiplies by lies on four devices, a quarter on each."""
    problem = Problem.of(network, weights(), X, labels(X))
    for name in ("exact", "wide", "class"):
        _, estimator = both(name)
        kernel = estimator.estimate(problem, problem.weights).kernel
        for leaf in jax.tree.leaves(kernel):
            shards = [shard.data.size for shard in leaf.addressable_shards]
            assert shards == [leaf.size // 4] * 4
    assert Exact(max_bytes=500_000, mesh=four()).operations(problem) > 0  # of one device
    with pytest.raises(ValueError, match="max_bytes=500000 is too little"):
        Exact(max_bytes=500_000).operations(problem)
    assert estimator.product(problem) < both("exact")[1].product(problem)
    many, few = (both(name)[i].product(problem) for name, i in (("wide", 1), ("wide", 0)))
    assert many == 4.0 * problem.f0.size * 160
    assert few == 2.0 * problem.f0.size**2


def test_what_decomposes_the_whole_is_refused_before_any_work():
    def never(params, x):
        raise AssertionError("the network was evaluated")

    y = labels(X)
    kernel = Exact(mesh=four())
    common = {"learning_rate": 0.1, "kernel": kernel}
    calls = [
        lambda: predict_training_time(
            never, weights(), X, X[:, :3], dynamics="closed_form", loss="squared_error", **common
        ),
        lambda: predict_training_time(
            never, weights(), X, y, dynamics="sde", batch_size=8, key=KEY, relinearize=0, **common
        ),
        lambda: compare({"one": Candidate(never, weights())}, X, y, kernel=kernel),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"kernel=Exact\(mesh=...\) lies on 4 devices, and"):
            call()


@pytest.mark.slow
def test_the_kernel_that_keywords_name_lies_on_the_mesh(monkeypatch):
    seen, estimate = [], Sketched.estimate
    monkeypatch.setattr(
        Sketched, "estimate", lambda self, *rest: seen.append(self.mesh) or estimate(self, *rest)
    )
    predict_training_time(
        network, weights(), X, labels(X), learning_rate=0.3, steps=8, mesh=four(), sketch_dim=16,
        key=KEY, relinearize=0,
    )  # fmt: skip
    assert [mesh.size for mesh in seen] == [4]


def test_a_mesh_that_would_do_nothing_is_refused():
    common = {"mesh": four(), "steps": 8}
    for options in ({"dynamics": "weight_space", "learning_rate": 0.1},
                    {"optimizer": optax.lion(0.1)}):  # fmt: skip
        with pytest.raises(ValueError, match=r"mesh=.* does nothing here: dynamics='weight_space'"):
            predict_training_time(network, weights(), X, labels(X), **common, **options)
    with pytest.raises(ValueError, match=r"mesh=.* does nothing here: kernel is a value"):
        predict_training_time(
            network, weights(), X, labels(X), learning_rate=0.1, kernel=Exact(), **common
        )
    with pytest.raises(TypeError, match=r"mesh must be a jax.sharding.Mesh"):
        predict_training_time(network, weights(), X, labels(X), learning_rate=0.1, mesh=4)


def test_samples_of_several_processes(monkeypatch):
    """Rows on four devices, taken for those of processes."""
    rows = NamedSharding(four(), PartitionSpec("rows"))
    x, y = samples(24), labels(samples(24))
    spread = jax.device_put(x, rows)
    monkeypatch.setattr(
        sharded, "is_by_process", lambda a: isinstance(a, jax.Array) and len(a.devices()) > 1
    )
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda a, tiled: np.asarray(a))
    problem = Problem.of(network, weights(), spread, y)
    np.testing.assert_allclose(problem.f0, network(weights(), x), rtol=1e-12)
    assert len(problem.f0.devices()) == 1
    assert {shard.data.shape for shard in problem.x.addressable_shards} == {(6, 4)}
    common = {"learning_rate": 0.3, "steps": 6, "relinearize": 1}
    one = predict_training_time(network, weights(), x, y, kernel=Exact(), **common)
    found = predict_training_time(
        network, weights(), spread, y, kernel=Exact(mesh=four()), **common
    )
    np.testing.assert_allclose(found.loss, one.loss, rtol=1e-10)
    monkeypatch.setattr("jaxttp.forecast.options.is_by_process", sharded.is_by_process)
    for call in (
        lambda: predict_training_time(network, weights(), spread, y, learning_rate=0.3, steps=6),
        lambda: sweep(network, weights(), spread, y, SETTINGS[:1]),
    ):
        with pytest.raises(ValueError, match="x has rows that this process has not, and a kernel"):
            call()
