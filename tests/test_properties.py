"""What holds of kernels and forecasts whatever the numbers are: orders, scales, sums, signs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxttp import predict_training_time, training_time
from jaxttp.ntk import empirical_ntk

N, C = 5, 2


def network(params, x):
    return jnp.tanh(x @ params["w"] + params["b"][None]) @ params["v"]


def drawn(seed):
    rng = np.random.default_rng(seed)
    shapes = {"w": (3, 4), "b": (4,), "v": (4, C)}
    params = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}
    return params, jnp.asarray(rng.normal(size=(N, 3))), jnp.asarray(rng.normal(size=(N, C)))


@jax.jit
def kernel(params, x):
    return empirical_ntk(network, params, x)


OF_LAYERS = {
    name: jax.jit(
        lambda p, x, name=name: empirical_ntk(network, p, x, trainable=lambda q: q == name)
    )
    for name in ("w", "b", "v")
}
# One rounding of sums of some ten terms, in float64.
CLOSE = {"rtol": 1e-11, "atol": 1e-11}


@given(st.integers(0, 10**6))
@settings(max_examples=6)
def test_kernels_follow_the_order_add_over_layers_and_are_psd(seed):
    params, x, _ = drawn(seed)
    theta = kernel(params, x)
    order = np.random.default_rng(seed).permutation(N)
    moved = np.asarray(theta)[order][:, :, order]
    np.testing.assert_allclose(kernel(params, x[order]), moved, **CLOSE)
    parts = sum(one(params, x) for one in OF_LAYERS.values())
    np.testing.assert_allclose(parts, theta, **CLOSE)
    values = np.linalg.eigvalsh(np.asarray(theta).reshape(N * C, N * C))
    assert values[0] > -1e-12 * values[-1]


@given(st.integers(0, 10**6), st.floats(0.1, 10.0))
@settings(max_examples=6)
def test_kernels_of_scaled_outputs_scale_with_the_square(seed, scale):
    params, x, _ = drawn(seed)
    scaled = params | {"v": scale * params["v"]}
    below = sum(OF_LAYERS[name](scaled, x) for name in ("w", "b"))  # these see the factor alone
    expected = scale**2 * sum(OF_LAYERS[name](params, x) for name in ("w", "b"))
    np.testing.assert_allclose(below, expected, rtol=1e-9, atol=1e-11)


def forecast(params, x, y, rate=0.02, **options):
    options = {"loss": "squared_error", "relinearize": 0, "steps": 40} | options
    return predict_training_time(network, params, x, y, learning_rate=rate, **options)


@pytest.mark.parametrize("seed", range(1))
def test_forecasts_follow_the_order_of_samples_and_outputs(seed):
    params, x, y = drawn(seed)
    loss = forecast(params, x, y).loss
    order = np.random.default_rng(seed).permutation(N)
    np.testing.assert_allclose(forecast(params, x[order], y[order]).loss, loss, rtol=1e-10)
    turned = forecast(params | {"v": params["v"][:, ::-1]}, x, y[:, ::-1]).loss
    np.testing.assert_allclose(turned, loss, rtol=1e-10)


@pytest.mark.parametrize("seed", range(2))
def test_a_stable_loss_falls_and_smaller_fractions_take_longer(seed):
    """Full batches, a loss of squares, a rate below the limit: every mode decays."""
    params, x, y = drawn(seed)
    fractions = (0.5, 0.3, 0.1, 0.03, 0.01)
    found = forecast(params, x, y, thresholds=fractions)
    assert found.stable
    loss = np.asarray(found.loss)
    assert np.all(np.diff(loss) <= 1e-14 * loss[0])
    times = [found.steps[fraction] for fraction in fractions]
    assert times == sorted(times)
    assert times == [int(training_time(found.loss, fraction)) for fraction in fractions]
