"""Outputs of all samples from two batches, and what these tell of networks that mix samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxttp.adapters import check_per_sample
from jaxttp.adapters.outputs import InTwo

W = jax.random.normal(jax.random.key(0), (3, 2))


def samples(n: int) -> jax.Array:
    """N different rows."""
    return jax.random.normal(jax.random.key(1), (n, 3))


@given(n=st.integers(1, 90))
def test_the_outputs_are_those_of_one_batch(n):
    network = InTwo(lambda w, x: jnp.tanh(x @ w))
    found, expected = network.evaluate(W, samples(n)), jnp.tanh(samples(n) @ W)
    # The rows of two small products, which a CPU may sum in another order than those of one.
    np.testing.assert_allclose(found.outputs, expected, rtol=1e-13, atol=1e-15)
    np.testing.assert_array_equal(network(W, samples(n)), found.outputs)
    if n == 1:
        assert found.alone is None  # it has no companions
    else:
        assert len(found.alone) >= min(n, 8)
        np.testing.assert_allclose(
            found.alone, jnp.broadcast_to(expected[:1], found.alone.shape), rtol=1e-13, atol=1e-15
        )


def test_each_sample_is_seen_once_and_the_first_as_often_as_there_is_room():
    sizes = []

    def counting(w, x):
        sizes.append(len(x))
        return x @ w

    InTwo(counting).evaluate(W, samples(100))
    assert sizes == [54, 54]  # 101 places for 100 samples and one of them again, and 7 copies


def test_rows_that_are_all_alike_tell_nothing():
    assert InTwo(lambda w, x: x @ w).evaluate(W, jnp.ones((50, 3))).alone is None


MIXING = {
    "batch statistics": lambda w, x: (x - x.mean(0, keepdims=True)) @ w,
    "the last row": lambda w, x: (x + 0.1 * x[-1:]) @ w,
    "neighbours": lambda w, x: (x + 0.1 * jnp.roll(x, -1, 0)) @ w,
    "the other way round": lambda w, x: x[::-1] @ w,
}


@pytest.mark.parametrize("n", [5, 31, 32, 77])
@pytest.mark.parametrize("kind", MIXING)
@pytest.mark.parametrize("repeated", [1, 2])
def test_networks_that_mix_samples_are_found(n, kind, repeated):
    x = jnp.tile(samples(n), (repeated, 1))  # halves that are alike are no excuse
    found = InTwo(MIXING[kind]).evaluate(W, x)
    with pytest.raises(ValueError, match="depends on the other samples of its batch"):
        check_per_sample(MIXING[kind], W, x, evaluated=found)


def test_samples_on_several_devices_stay_where_they_are():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("rows",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    x = jax.device_put(samples(80), rows)
    found = InTwo(jax.jit(lambda w, x: x @ w)).evaluate(W, x)
    assert len(found.outputs.devices()) == 4
    np.testing.assert_allclose(found.outputs, samples(80) @ W, rtol=1e-13, atol=1e-15)
    mixing = MIXING["batch statistics"]
    found = InTwo(jax.jit(mixing)).evaluate(W, x)
    with pytest.raises(ValueError, match="depends on the other samples of its batch"):
        check_per_sample(mixing, W, x, evaluated=found)
