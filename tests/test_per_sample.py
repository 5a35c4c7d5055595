"""Whether outputs mix samples, seen by the compiled network for all samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp.adapters import check_per_sample
from jaxttp.dynamics._network import evaluation

W = jax.random.normal(jax.random.key(0), (3, 2))


def samples(n: int) -> jax.Array:
    """N different rows."""
    return jax.random.normal(jax.random.key(1), (n, 3))


def checked(network, x):
    evaluate = evaluation(network)
    outputs = evaluate(W, x)
    check_per_sample(network, W, x, evaluate=evaluate, outputs=outputs)
    return outputs


MIXING = {
    "batch statistics": lambda w, x: (x - x.mean(0, keepdims=True)) @ w,
    "the last row": lambda w, x: (x + 0.1 * x[-1:]) @ w,
    "neighbours": lambda w, x: (x + 0.1 * jnp.roll(x, -1, 0)) @ w,
    "the other way round": lambda w, x: x[::-1] @ w,
}


@pytest.mark.parametrize("n", [5, 77])
@pytest.mark.parametrize("kind", MIXING)
def test_networks_that_mix_samples_are_found(n, kind):
    with pytest.raises(ValueError, match="depends on the other samples of its batch"):
        checked(MIXING[kind], samples(n))
    checked(MIXING[kind], jnp.ones((n, 3)))  # equal rows: nothing to tell


def test_samples_on_several_devices_stay_where_they_are():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("rows",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    x = jax.device_put(samples(80), rows)
    outputs = checked(lambda w, x: x @ w, x)
    assert len(outputs.devices()) == 4
    np.testing.assert_allclose(outputs, samples(80) @ W, rtol=1e-13, atol=1e-15)
    with pytest.raises(ValueError, match="depends on the other samples of its batch"):
        checked(MIXING["batch statistics"], x)
