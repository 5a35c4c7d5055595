"""Kernels and sketches on four devices are those of one, and no device has the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxttp.ntk import RowSharded, empirical_ntk, ntk_plan, sketch_jacobian
from jaxttp.ntk._compiled import compiled
from jaxttp.ntk._sharded import _pieces, shard_rows, sharded_kernel, stay
from jaxttp.ntk.gram import Job
from tests import oracles
from tests.meshes import automatic_four, four, largest, need, network, samples, weights

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


@pytest.mark.parametrize(
    ("n1", "n2", "options"),
    [
        (10, None, {}),  # 2 more are filled up
        (10, None, {"batch_size": 1}),  # features are kept no longer than for a row
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
    assert found.sharding.spec == PartitionSpec("rows")
    assert isinstance(found, RowSharded) is (n1 % 4 != 0)


def test_rows_lie_apart_on_a_mesh_of_two_axes():
    """With parameters that are sharded themselves, as of a network that trains so."""
    need(4)
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    params, x = weights(8), samples(8)
    wanted = empirical_ntk(network, params, x)
    params["w"] = jax.device_put(params["w"], NamedSharding(mesh, PartitionSpec(None, "model")))
    found = empirical_ntk(network, params, x, mesh=mesh)
    close(found, wanted)
    assert {shard.data.shape for shard in found.addressable_shards} == {(2, 3, 8, 3)}
    assert len({shard.index[0].start for shard in found.addressable_shards}) == 4


def test_parameters_stay_sharded():
    """As of fully sharded training: a quarter of them is what programs are given."""
    mesh, x, whole = automatic_four(), samples(8), weights(1000)
    cuts = {
        "b": PartitionSpec("rows"),
        "v": PartitionSpec("rows"),
        "w": PartitionSpec(None, "rows"),
    }
    params = {
        name: jax.device_put(whole[name], NamedSharding(mesh, spec)) for name, spec in cuts.items()
    }
    for method in ("layerwise", "vector_product"):
        options = {"output": "trace", "method": method}
        found = empirical_ntk(network, params, x, mesh=mesh, **options)
        close(found, empirical_ntk(network, whole, x, **options))
    options = {"key": jax.random.key(5), "dim": 8}
    found = sketch_jacobian(network, params, x, mesh=mesh, **options)
    close(found, sketch_jacobian(network, whole, x, **options))
    leaves, specs = stay(list(params.values()), mesh)
    assert specs == tuple(cuts.values())
    job = Job.of(network, params, x, None, "trace", "auto", None, None, False)
    functions = compiled(job.work.program, job.variant(job.on_each(4).plan("auto", None, None)))
    rows, given = [shard_rows(x, mesh)], []
    for some in (leaves, list(whole.values())):
        kept, specs = stay(some, mesh)
        pieces = _pieces(functions, mesh, "trace", specs)
        run = jax.jit(lambda *given: pieces.features(*given, size=2))  # noqa: B023 - called at once
        given.append(run.lower(kept, rows, 0).compile().memory_analysis().argument_size_in_bytes)
    assert given[1] - given[0] == 3 * sum(leaf.nbytes for leaf in whole.values()) // 4


def test_float64_sums_and_layers_of_a_float32_network():
    with jax.enable_x64(False):
        params, x = weights(), samples(6)
        found, wanted = (
            empirical_ntk(
                network, params, x, mesh=mesh, accumulation_dtype="float64", per_layer=True
            )
            for mesh in (four(), None)
        )
    assert set(found) == set(wanted) == {"b", "v", "w"}
    for path, kernel in wanted.items():
        assert found[path].dtype == kernel.dtype == np.float64
        close(found[path], kernel, 1e-6)  # cotangents in float32, by other programs


def test_memory_is_bounded_on_each_device():
    x, seen = samples(16), []
    with pytest.raises(ValueError, match="max_bytes=4000 is too little"):
        empirical_ntk(network, weights(), x, mesh=four(), max_bytes=4000)
    progress = lambda done, total: seen.append((done, total))  # noqa: E731
    kernel = empirical_ntk(network, weights(), x, mesh=four(), max_bytes=30_000, progress=progress)
    close(kernel, oracles.kernel(network, weights(), x))
    assert len(seen) > 1  # in tiles
    assert seen[-1] == (256, 256)


def test_one_device_is_as_without_a_mesh():
    one = jax.make_mesh((1,), ("rows",))
    kernel = empirical_ntk(network, weights(), samples(5), mesh=one)
    np.testing.assert_array_equal(kernel, empirical_ntk(network, weights(), samples(5)))


def test_under_jit():
    """Samples are traced; the rows lie apart all the same."""
    run = jax.jit(lambda x: empirical_ntk(network, weights(), x, mesh=four()))
    found = run(samples(8))
    close(found, empirical_ntk(network, weights(), samples(8)))
    assert {shard.data.shape for shard in found.addressable_shards} == {(2, 3, 8, 3)}


def test_what_is_no_mesh_is_refused():
    with pytest.raises(TypeError, match=r"mesh must be a jax.sharding.Mesh"):
        empirical_ntk(network, weights(), samples(4), mesh=4)


def test_a_sketch_is_that_of_one_device():
    x, options = samples(10), {"key": jax.random.key(5), "dim": 8}
    wanted = sketch_jacobian(network, weights(), x, **options)
    found = sketch_jacobian(network, weights(), x, batch_size=2, mesh=four(), **options)
    close(found, wanted)
    assert {shard.data.shape for shard in found.addressable_shards} == {(10, 3, 2)}  # by columns
    with pytest.raises(ValueError, match="dim=9 must be a multiple of the 4 devices of mesh"):
        sketch_jacobian(network, weights(), x, mesh=four(), **{**options, "dim": 9})


def test_blocks_of_rows_on_every_device():
    """Two blocks of rows a device, each against columns of one sample of every device."""
    x, seen = samples(16), []
    job = Job.of(network, weights(), x, None, "trace", "auto", None, None, False)
    plan = job.on_each(4).plan("auto", 2, None)
    functions = compiled(job.work.program, job.variant(plan))
    found = sharded_kernel(
        functions, plan, automatic_four(), job.leaves, job.rows, None, output="trace",
        dtype=job.dtype, progress=lambda done, total: seen.append(done),
    )  # fmt: skip
    assert seen == sorted(seen)
    assert len(seen) == 2 * 4
    close(found["sum"], reduced(oracles.kernel(network, weights(), x), "trace"))


def test_programs_of_tiles_hold_a_share_of_the_kernel():
    """Features of one sample of every device are all that is gathered, the kernel never."""
    mesh, x = automatic_four(), samples(64)
    job = Job.of(network, weights(), x, None, "full", "auto", None, None, False)
    plan = job.on_each(4).plan("auto", None, None)
    leaves, specs = stay(job.leaves, mesh)
    pieces = _pieces(compiled(job.work.program, job.variant(plan)), mesh, "full", specs)
    rows = [shard_rows(leaf, mesh) for leaf in job.rows]
    held = pieces.features(leaves, rows, 0, size=16)
    others = pieces.some(held, 0, size=1)
    tile = pieces.tiles(leaves, rows, held, others)["sum"]
    kernel = jax.device_put(jnp.zeros((64, 3, 4, 16, 3)), tile.sharding)
    share = 16 * 3 * 64 * 3
    runs = {
        "tiles": (jax.jit(lambda *given: pieces.tiles(*given)), (leaves, rows, held, others)),
        "write": (jax.jit(lambda *given: pieces.write(*given)), (kernel, tile, 0, 0)),
    }
    found = {name: largest(run.lower(*given).compile()) for name, (run, given) in runs.items()}
    assert found["tiles"] < share / 4
    assert found["write"] == share


def test_a_plan_is_that_of_one_device_and_a_bound_names_the_fewest_devices():
    x = samples(4000)
    alone, shared = (ntk_plan(network, weights(), x, mesh=mesh) for mesh in (None, four()))
    assert (alone.devices, shared.devices) == (1, 4)
    assert shared.kernel_bytes == alone.kernel_bytes // 4 == 8 * 1000 * 3 * 4000 * 3
    assert shared.host_bytes == alone.host_bytes
    assert "on each of 4 devices, its part of the kernel 274.7 MiB" in str(shared)
    bound = alone.kernel_bytes // 6
    with pytest.raises(ValueError, match=r"at least (\d+) devices, each with that bound") as said:
        empirical_ntk(network, weights(), x, max_bytes=bound, mesh=four())
    fewest = int(str(said.value).rpartition("a mesh of at least ")[2].split()[0])
    # What the message names fits, and one device less does not.
    job = Job.of(network, weights(), x, None, "full", "auto", None, None, False)
    assert job.on_each(fewest).plan("auto", None, bound).bytes <= bound
    with pytest.raises(ValueError, match="is too little"):
        job.on_each(fewest - 1).plan("auto", None, bound)
    assert 6 < fewest < 20
    with pytest.raises(ValueError, match="is too little") as said:  # no number of devices would do
        ntk_plan(network, weights(), x, max_bytes=1000)
    assert "mesh" not in str(said.value)
