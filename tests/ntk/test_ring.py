"""Symmetric kernels that go around a ring of devices: each block once, its transpose sent."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp.ntk import empirical_ntk
from jaxttp.ntk._compiled import compiled
from jaxttp.ntk._ring import _moves, _products
from jaxttp.ntk._sharded import shard_rows, sharded_kernel, stay
from jaxttp.ntk.gram import Job
from jaxttp.ntk.row_sharded import automatic
from tests import oracles
from tests.meshes import automatic_four, largest, need, network, samples, weights
from tests.ntk.test_sharded import close, reduced


def mesh_of(devices):
    need(devices)
    return jax.make_mesh((devices,), ("rows",), devices=jax.devices()[:devices])


@pytest.mark.parametrize("output", ["full", "diagonal", "trace"])
@pytest.mark.parametrize(("devices", "n"), [(2, 2), (2, 9), (3, 9), (3, 4), (4, 12), (4, 9)])
def test_agrees_with_the_brute_force_jacobian(devices, n, output):
    """Even and odd numbers of devices, and of samples of each, some of them filled up."""
    x = samples(n)
    found = empirical_ntk(network, weights(), x, mesh=mesh_of(devices), output=output)
    close(found, reduced(oracles.kernel(network, weights(), x), output))


@pytest.mark.parametrize("method", ["jacobian", "vector_product"])
def test_every_method(method):
    x = samples(10)
    found = empirical_ntk(network, weights(), x, mesh=mesh_of(4), method=method)
    close(found, oracles.kernel(network, weights(), x))


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_exactly_symmetric(devices):
    """In float32, where sums in another order differ: the other triangle is the same numbers."""
    with jax.enable_x64(False):
        params = jax.tree.map(lambda a: a.astype(jnp.float32), weights(40))
        x = samples(12).astype(jnp.float32)
        kernel = np.asarray(empirical_ntk(network, params, x, mesh=mesh_of(devices)))
    flat = kernel.reshape(36, 36)
    # Every number is computed once but those where parts overlap, which are written on both.
    np.testing.assert_array_equal(flat, flat.T)


@pytest.mark.parametrize(("devices", "n"), [(2, 14), (3, 19), (4, 27)])
@pytest.mark.parametrize("columns", [1, 3, 5])
def test_some_columns_at_a_time(devices, n, columns):
    """Blocks of seven samples in parts of one, three and five, the last of which reach back."""
    x = samples(n)
    job = Job.of(network, weights(), x, None, "full", "auto", None, None, False)
    plan = job.on_each(devices).plan("auto", None, None)
    plan, told = dataclasses.replace(plan, columns=columns), []
    found = sharded_kernel(
        compiled(job.work.program, job.variant(plan)), plan, automatic(mesh_of(devices)),
        job.leaves, job.rows, None, output="full", dtype=job.dtype,
        progress=lambda *done: told.append(done),
    )  # fmt: skip
    close(found["sum"], oracles.kernel(network, weights(), x))
    assert len(told) == devices // 2 + 1  # it went around
    assert told[-1] == (n * n, n * n)


def test_the_ring_needs_room():
    """A bound that holds no features beside those planned: columns of all devices, both halves."""
    x, told = samples(16), []
    job = Job.of(network, weights(100), x, None, "full", "auto", None, None, False)
    plan = job.on_each(4).plan("auto", None, None)
    for max_bytes, turns in ((None, 3), (plan.bytes + 100, 4)):
        plan = dataclasses.replace(plan, max_bytes=max_bytes, columns=4)
        told.clear()
        found = sharded_kernel(
            compiled(job.work.program, job.variant(plan)), plan, automatic_four(), job.leaves,
            job.rows, None, output="full", dtype=job.dtype,
            progress=lambda *done: told.append(done),
        )  # fmt: skip
        close(found["sum"], oracles.kernel(network, weights(100), x))
        assert len(told) == turns
        assert told[-1] == (256, 256)


def test_no_program_holds_more_than_a_share_of_the_kernel():
    mesh, x = automatic(mesh_of(4)), samples(64)
    job = Job.of(network, weights(), x, None, "full", "auto", None, None, False)
    plan = job.on_each(4).plan("auto", None, None)
    leaves, specs = stay(job.leaves, mesh)
    functions = compiled(job.work.program, job.variant(plan))
    products = _products(functions, mesh, specs)
    moves = _moves(mesh, "full")
    rows = [shard_rows(leaf, mesh) for leaf in job.rows]

    @jax.jit
    def all_features(leaves, rows):
        def own(leaves, rows):
            return functions.features(leaves, rows, 0, size=16)

        spec = jax.sharding.PartitionSpec("rows")
        return jax.shard_map(
            own, mesh=mesh, in_specs=(jax.sharding.PartitionSpec(), spec), out_specs=spec,
            check_vma=False,
        )(leaves, rows)  # fmt: skip

    held = all_features(leaves, rows)
    block = products.pair(leaves, rows, held, held, 0, 0, rows=16, size=16)["sum"]
    part = products.shared(leaves, rows, held, held, 0, 0, size=8)["sum"]
    kernel = jax.device_put(jnp.zeros((64, 3, 4, 16, 3)), block.sharding)
    found = {
        name: largest(jax.jit(program).lower(*given).compile())
        for name, program, given in (
            ("on", lambda a: moves.on(a, 0, size=4), (held,)),
            (
                "pair",
                lambda *a: products.pair(*a, 0, 0, rows=16, size=16),
                (leaves, rows, held, held),
            ),
            ("back", lambda a: moves.back(a, turn=1), (block,)),
            (
                "shared",
                lambda *given: products.shared(*given, 0, 0, size=8),
                (leaves, rows, held, held),
            ),
            ("write", lambda *given: moves.write(*given, 0, 0, 1), (kernel, block)),
            ("meet", lambda *given: moves.meet(*given, 0, 0), (kernel, part)),
        )
    }
    size = 16 * 3 * 16 * 3
    assert found["on"] < size
    assert found["shared"] == size // 4
    assert found["pair"] == found["back"] == size
    assert found["write"] == found["meet"] == 4 * size  # a device's share
