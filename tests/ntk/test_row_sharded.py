"""What is asked of a kernel on four devices, against NumPy; and what its programs hold."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxttp.conditioning import _krylov, condition_number
from jaxttp.conditioning._krylov import ends_by_products
from jaxttp.conditioning.condition_number import _by_products
from jaxttp.dynamics import closed_form, gradient_flow, recursion
from jaxttp.dynamics._features import run_batches
from jaxttp.dynamics._heavy_ball import heavy_ball
from jaxttp.dynamics._segment import Knot, Start, gram
from jaxttp.dynamics.batches import batch_indices
from jaxttp.dynamics.optimizers import same_program
from jaxttp.losses import encode_targets
from jaxttp.ntk import (
    Factored,
    RowSharded,
    eigendecomposition,
    empirical_ntk,
    extreme_eigenvalues,
    psd_report,
    sketch_jacobian,
    spectral_density,
    top_eigenpairs,
)
from jaxttp.ntk.row_sharded import on_many_devices, recognised
from tests import oracles
from tests.meshes import automatic_four, four, labels, largest, network, samples, weights

N, C = 90, 3  # 92 rows with those filled up, 270 outputs: more than are put together on one device


@pytest.fixture(scope="module")
def kernels():
    """On four devices, and on one."""
    found, whole = (empirical_ntk(network, weights(90), samples(N), mesh=m) for m in (four(), None))
    return found, whole


def test_products_are_those_of_the_matrix(kernels):
    found, whole = kernels
    vectors = np.random.default_rng(0).normal(size=(2, N, C))
    wanted = np.einsum("ncmd,tmd->tnc", np.asarray(whole), vectors)
    got = found.apply(jnp.asarray(vectors))
    np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12 * np.abs(wanted).max())
    batch = jnp.array([88, 3, 3])
    some = found.some_columns(batch).apply(jnp.asarray(vectors[:, :3]))
    wanted = np.einsum("ncmd,tmd->tnc", np.asarray(whole)[:, :, batch], vectors[:, :3])
    np.testing.assert_allclose(some, wanted, rtol=1e-12, atol=1e-12 * np.abs(wanted).max())
    assert got.sharding.is_fully_replicated
    assert not some.sharding.device_set.isdisjoint(jax.devices()[:4])


def test_scalar_kernels_multiply_every_output_alike():
    whole = jnp.asarray(np.random.default_rng(1).normal(size=(5, 6)))
    rows = jnp.pad(whole, ((0, 3), (0, 2)))
    mesh = automatic_four()
    rows = jax.device_put(rows, NamedSharding(mesh, PartitionSpec("rows")))
    kernel = RowSharded(rows, (5, 6), mesh)
    vector = np.random.default_rng(2).normal(size=(6, 2))
    np.testing.assert_allclose(kernel.apply(jnp.asarray(vector)), whole @ vector, rtol=1e-12)
    np.testing.assert_array_equal(np.asarray(kernel), whole)
    np.testing.assert_array_equal(kernel.on_one_device(), whole)
    assert kernel.astype(jnp.float32).dtype == jnp.float32
    assert (kernel.shape, kernel.ndim) == ((5, 6), 2)
    assert on_many_devices(kernel)
    assert not on_many_devices(whole)


def test_arrays_with_rows_on_many_devices_are_recognised():
    mesh = automatic_four()
    whole = jnp.ones((8, 3, 8, 3))
    for spec, is_by_rows in (("rows", True), (None, False)):
        array = jax.device_put(whole, NamedSharding(mesh, PartitionSpec(spec)))
        assert isinstance(recognised(array), RowSharded) is is_by_rows
    assert recognised(whole) is whole
    columns = jax.device_put(whole, NamedSharding(mesh, PartitionSpec(None, None, "rows")))
    assert recognised(columns) is columns


def test_gradients_pass_through_products(kernels):
    found, whole = kernels
    weight = jax.random.normal(jax.random.key(0), (N, C))
    slope = jax.grad(lambda v: jnp.sum(weight * found.apply(v)))(weight)
    wanted = np.einsum("ncmd,nc->md", np.asarray(whole), weight)
    np.testing.assert_allclose(slope, wanted, rtol=1e-12, atol=1e-12 * np.abs(wanted).max())


def test_spectrum(kernels):
    found, whole = kernels
    values = np.linalg.eigvalsh(np.asarray(whole).reshape(N * C, N * C))
    key = jax.random.key(0)
    _, largest_value = extreme_eigenvalues(found, key=key)
    np.testing.assert_allclose(largest_value, values[-1], rtol=1e-10)  # isolated: it converges
    top, vectors = top_eigenpairs(found, 3, key=key)
    np.testing.assert_allclose(top, values[:-4:-1], rtol=1e-10)
    assert vectors.shape == (3, N, C)
    density, alone = (spectral_density(k, key=key, depth=6, probes=2) for k in kernels)
    np.testing.assert_allclose(density.nodes, alone.nodes, rtol=1e-10)
    np.testing.assert_allclose(density.weights, alone.weights, rtol=1e-8)
    result = condition_number(found)
    np.testing.assert_allclose(result.value, values[-1] / values[0], rtol=1e-6)
    assert int(result.rank) == N * C


def test_dynamics(kernels):
    found, whole = kernels[0], np.asarray(kernels[1])
    x = samples(N)
    f0, y = network(weights(90), x), labels(x)
    hot, key = np.eye(C)[np.asarray(y)], jax.random.key(1)
    batches = np.asarray(batch_indices(key, N, 16, 8))
    path = recursion(
        found, f0, y, loss="cross_entropy", optimizer=optax.sgd(0.02, 0.9), steps=8, batch_size=16,
        key=key,
    ).train  # fmt: skip
    f, velocity = np.asarray(f0), np.zeros((N, C))
    for step, batch in enumerate(batches):
        pull = np.zeros((N, C))
        pull[batch] = oracles.gradient("cross_entropy", f[batch], hot[batch]) / 16
        velocity = 0.9 * velocity + np.einsum("ncmd,md->nc", whole, pull)
        f = f - 0.02 * velocity
        np.testing.assert_allclose(path[step + 1], f, rtol=0, atol=1e-11 * np.abs(f).max())
    ts = np.arange(3.0)
    path = gradient_flow(found, f0, y, loss="cross_entropy", learning_rate=0.02, ts=ts).train
    wanted, _ = oracles.integrate(whole, np.asarray(f0), hot, "cross_entropy", 0.02, ts)
    np.testing.assert_allclose(path, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())  # solvers'


def test_programs_hold_a_share_of_the_kernel(kernels):
    """No array of a compiled program is larger than a device's rows (92 / 4 x 3 x 92 x 3)."""
    found, _ = kernels
    share = found.padded.size // 4
    x = samples(N)
    f0, y = network(weights(90), x), labels(x)
    targets, loss = encode_targets("cross_entropy", y, f0)
    rates, momenta, batches = jnp.full((4, 2), 0.01), jnp.zeros(2), jnp.zeros((4, 16), int)
    descent = {"loss": "cross_entropy", "optimizer": optax.sgd(0.1), "steps": 4}
    flow = {"loss": "cross_entropy", "learning_rate": 0.1, "ts": jnp.arange(3.0)}
    key = jax.random.key(0)
    asked = {
        "recursion": lambda kernel: recursion(kernel, f0, y, **descent),
        "flow": lambda kernel: gradient_flow(kernel, f0, y, solver="tsit5", **flow),
        "lanczos": lambda kernel: extreme_eigenvalues(kernel, key=key, depth=8),
        "sweep": lambda k: heavy_ball(k, f0, targets, rates, momenta, batches, loss),
    }
    for name, function in asked.items():
        compiled = jax.jit(function).lower(found).compile()
        assert largest(compiled) == share, name
        memory = compiled.memory_analysis()
        held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        assert held < 2.5 * 8 * share, name  # of 4 shares; batches copy their columns


def test_a_condition_number_by_products(kernels):
    """What kernels of more than 1,024 outputs take; no array is larger than a device's rows."""
    found, whole = kernels
    share = found.padded.size // 4
    program = jax.jit(lambda kernel: ends_by_products(_by_products(kernel), N * C, 1e-16, None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_krylov, "LANCZOS_STEPS", 24)
        compiled = program.lower(found).compile()
        ends = compiled(found)
    values = np.linalg.eigvalsh(np.asarray(whole).reshape(N * C, N * C))
    np.testing.assert_allclose(ends.largest, values[-1], rtol=1e-10)  # isolated: it converges
    assert values[0] < ends.smallest < values[-1]  # a bound: 24 products do not meet all of 270
    assert largest(compiled) == share


@pytest.mark.parametrize("rows", [8, 5], ids=["divided by the devices", "filled up"])
@pytest.mark.parametrize("output", ["full", "trace"])
def test_a_block_is_the_kernel_of_some_samples(rows, output):
    x, params = samples(N), weights(8)
    whole = np.asarray(empirical_ntk(network, params, x, output=output))
    spread = RowSharded.of(empirical_ntk(network, params, x, output=output, mesh=four()), four())
    chosen, others = np.arange(N)[::-1][:rows], np.arange(N)[1 : rows + 2]
    block = spread.block(chosen, others)
    want = np.take(np.take(whole, chosen, axis=0), others, axis=whole.ndim // 2)
    assert block.shape == want.shape
    np.testing.assert_allclose(np.asarray(block), want, rtol=1e-10, atol=1e-12)
    assert largest_share(block) <= -(-rows // 4)
    vectors = jax.random.normal(jax.random.key(2), (len(others), C))
    flat = want if want.ndim == 4 else np.einsum("nm,cd->ncmd", want, np.eye(C))
    moved = np.einsum("ncmd,md->nc", flat, np.asarray(vectors))
    np.testing.assert_allclose(block.apply(vectors), moved, rtol=1e-9, atol=1e-10)


def largest_share(kernel):
    """Rows on one device, at most."""
    return max(shard.data.shape[0] for shard in kernel.padded.addressable_shards)


def test_mini_batches_on_a_sketch():
    """The primal dynamics: a quarter of the columns on every device, and never a kernel."""
    x, key, width, steps = samples(N), jax.random.key(1), 160, 7
    params = weights(90)
    f0, y = network(params, x), labels(x)
    targets, loss = encode_targets("cross_entropy", y, f0)
    batches = batch_indices(key, N, 16, steps)
    descent, state = same_program(optax.sgd(0.05)), optax.sgd(0.05).init(params)
    pushed = jax.jvp(lambda p: network(p, x), (params,), (params,))[1][None]

    def follow(sketch):
        kernel = Factored.of(sketch, sketch)
        train = jnp.zeros((steps + 1, N, C)).at[0].set(f0)
        return run_batches(
            descent, loss, [Knot(kernel, pushed)], Start(
                params, kernel, [params], f0, state, [], jnp.zeros(0)
            ),
            gram([params], (True,), f0.dtype), None, jnp.asarray(0), jnp.asarray(steps), train,
            targets, batches, jnp.zeros_like(f0),
        ).train  # fmt: skip

    sketch, alone = (
        sketch_jacobian(network, params, x, key=key, dim=width, mesh=m) for m in (four(), None)
    )
    compiled = jax.jit(follow).lower(sketch).compile()
    assert compiled(sketch).shape == (steps + 1, N, C)
    rows, f = np.asarray(alone).reshape(N * C, width), np.asarray(f0)
    for step, batch in enumerate(np.asarray(batches)):
        pull = np.zeros((N, C))
        pull[batch] = oracles.gradient("cross_entropy", f[batch], np.eye(C)[np.asarray(y)[batch]])
        f = f - 0.05 * (rows @ (rows.T @ pull.reshape(-1) / 16)).reshape(N, C)
        np.testing.assert_allclose(compiled(sketch)[step + 1], f, rtol=0, atol=1e-11)
    assert largest(compiled) < N * C * width // 2  # nobody has all of the sketch


def test_what_needs_the_whole_is_refused(kernels):
    found, _ = kernels
    x = samples(N)
    f0 = network(weights(90), x)
    flow = {"learning_rate": 0.1, "ts": jnp.arange(3.0)}
    array = empirical_ntk(network, weights(), samples(100), mesh=four())  # an array, by rows
    refused = [
        lambda: eigendecomposition(found),
        lambda: psd_report(array),
        lambda: closed_form(found, f0, 0 * f0, **flow),
        lambda: gradient_flow(found, f0, 0 * f0, loss="squared_error", basis="eigen", **flow),
    ]
    for call in refused:
        with pytest.raises(ValueError, match=r"lies on 4 devices, and what needs all of it on one"):
            call()
    with pytest.raises(ValueError, match="must be a kernel"):
        condition_number(empirical_ntk(network, weights(), samples(10), samples(6, 3), mesh=four()))
    small = empirical_ntk(network, weights(), samples(10), mesh=four())
    values = eigendecomposition(small).values  # 30 outputs are put together
    np.testing.assert_allclose(values.sum(), np.einsum("ncnc->", np.asarray(small)), rtol=1e-10)
