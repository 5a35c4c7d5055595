"""Kernels and sketches on four devices are those of one, and each device has its rows."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxttp.dynamics import recursion
from jaxttp.ntk import empirical_ntk, extreme_eigenvalues, ntk_plan, sketch_jacobian
from jaxttp.ntk.gram import kernel_of
from tests import oracles
from tests.meshes import four, labels, need, network, samples, weights

# The same float64 products, summed over other blocks: some roundings of 1e-16.
TOLERANCE = 1e-13


def close(got, wanted, tolerance=TOLERANCE):
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * np.max(np.abs(wanted)))


def reduced(kernel, output):
    """A full kernel as another output has it."""
    diagonal = np.einsum("ncmc->nmc", kernel)
    return {"full": kernel, "diagonal": diagonal, "trace": diagonal.mean(axis=2)}[output]


def shards(array):
    return {shard.data.shape for shard in array.addressable_shards}


@pytest.mark.parametrize(
    ("n1", "n2", "options"),
    [
        (8, None, {}),
        (10, None, {"batch_size": 1}),  # 2 more are filled up; features of a row at a time
        (12, 6, {"output": "diagonal", "method": "jacobian", "batch_size": 2}),
        (3, None, {"output": "trace"}),  # fewer than devices
        (9, 5, {"method": "vector_product"}),
    ],
)
def test_agrees_with_the_brute_force_jacobian(n1, n2, options):
    x1, x2 = samples(n1), None if n2 is None else samples(n2, seed=3)
    wanted = oracles.kernel(network, weights(), x1, x2)
    found = empirical_ntk(network, weights(), x1, x2, mesh=four(), **options)
    close(found, reduced(wanted, options.get("output", "full")))
    rows = n1 // 4 if n1 % 4 == 0 else n1  # JAX has no arrays of unequal fractions
    assert shards(found) == {(rows, *found.shape[1:])}


def test_rows_lie_apart_on_a_mesh_of_two_axes():
    """With parameters that are sharded themselves, as of a network that trains so."""
    need(4)
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    params, x = weights(8), samples(8)
    wanted = empirical_ntk(network, params, x)
    params["w"] = jax.device_put(params["w"], NamedSharding(mesh, PartitionSpec(None, "model")))
    found = empirical_ntk(network, params, x, mesh=mesh)
    close(found, wanted)
    assert shards(found) == {(2, 3, 8, 3)}


def test_float64_sums_of_a_float32_network():
    with jax.enable_x64(False):
        params, x = weights(), samples(6)
        found, wanted = (
            kernel_of(network, params, x, mesh=mesh, sums="float64") for mesh in (four(), None)
        )
    assert found.dtype == wanted.dtype == np.float64
    close(found, wanted, 1e-6)  # cotangents in float32, by other programs


def test_memory_is_bounded_on_each_device():
    x, seen = samples(16), []
    with pytest.raises(ValueError, match="max_bytes=4000 is too little"):
        empirical_ntk(network, weights(), x, mesh=four(), max_bytes=4000)
    progress = lambda done, total: seen.append((done, total))  # noqa: E731
    kernel = empirical_ntk(network, weights(), x, mesh=four(), max_bytes=30_000, progress=progress)
    close(kernel, oracles.kernel(network, weights(), x))
    assert seen[-1] == (256, 256)
    alone, each = (ntk_plan(network, weights(), x, mesh=mesh) for mesh in (None, four()))
    assert each.kernel_bytes == alone.kernel_bytes // 4


def test_under_jit():
    """Samples are traced; the rows lie apart all the same."""
    run = jax.jit(lambda x: empirical_ntk(network, weights(), x, mesh=four()))
    found = run(samples(8))
    close(found, empirical_ntk(network, weights(), samples(8)))
    assert shards(found) == {(2, 3, 8, 3)}


def test_what_is_no_mesh_is_refused():
    with pytest.raises(TypeError, match=r"mesh must be a jax.sharding.Mesh"):
        empirical_ntk(network, weights(), samples(4), mesh=4)


@pytest.mark.parametrize("n", [8, 10])
def test_a_sketch_is_that_of_one_device(n):
    x, options = samples(n), {"key": jax.random.key(5), "dim": 7}
    found = sketch_jacobian(network, weights(), x, batch_size=2, mesh=four(), **options)
    close(found, sketch_jacobian(network, weights(), x, **options))
    assert shards(found) == {(2 if n == 8 else n, 3, 7)}


def test_products_and_dynamics_leave_the_rows_where_they_are():
    """The same float64 sums in another order, over 12 steps."""
    x = samples(12)
    y, f0 = labels(x), network(weights(), x)
    one, spread = (empirical_ntk(network, weights(), x, mesh=mesh) for mesh in (None, four()))
    run = {"loss": "cross_entropy", "optimizer": optax.sgd(0.3, 0.9), "steps": 12}
    batches = {"batch_size": 4, "key": jax.random.key(0)}
    for more in ({}, batches):
        found, wanted = (recursion(k, f0, y, **run, **more).train for k in (spread, one))
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)
    found, wanted = (extreme_eigenvalues(k, key=jax.random.key(1)) for k in (spread, one))
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)
