"""What a forecast says of itself: how fast the network learns where the forecast ends."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import empirical_ntk, predict_training_time, train
from jaxttp.dynamics import RelinearizedTrajectory
from jaxttp.dynamics.recursion import recursion
from jaxttp.forecast._trust import learning_speed, trust_in_end, trust_in_path
from jaxttp.losses import encode_targets

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((7, 3)), RNG.integers(0, 2, 7)
PARAMS = {"w": jnp.asarray(RNG.standard_normal((3, 4))), "v": jnp.asarray(RNG.normal(size=(4, 2)))}
COMMON = {"loss": "cross_entropy", "steps": 12}


def tanh(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"]


def linear(params, x):
    return x @ params


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_speed_is_that_of_the_dense_jacobians(batch_size, decay):
    x = jnp.asarray(X)
    f0 = tanh(PARAMS, x)
    targets, loss = encode_targets("cross_entropy", Y, f0)
    optimizer = optax.chain(optax.add_decayed_weights(decay), optax.sgd(0.5, 0.5))
    tangent = jax.jvp(lambda w: tanh(w, x), (PARAMS,), (PARAMS,))[1] if decay else None
    options = COMMON | {"optimizer": optimizer, "initial_tangent": tangent}
    theta = empirical_ntk(tanh, PARAMS, x)
    path = recursion(theta, f0, Y, **options)
    np.testing.assert_array_equal(path.train[0], f0)
    flat, unravel = jax.flatten_util.ravel_pytree(PARAMS)
    j = jax.jacobian(lambda w: tanh(unravel(w), x).ravel())
    first = j(flat)
    last = path.end_scale * flat + first.T @ path.end_dual.ravel()
    # The weights at the end are those whose linearised outputs the path ends at.
    moved = np.asarray(f0.ravel() + first @ (last - flat))
    np.testing.assert_allclose(moved, np.ravel(path.train[-1]), rtol=1e-10)
    g = loss.gradient(path.train[-1], targets)
    want = np.sum((j(last).T @ g.ravel()) ** 2) / np.sum((first.T @ g.ravel()) ** 2)
    found = learning_speed(tanh, PARAMS, x, g, path, batch_size)
    assert found == pytest.approx(float(want), rel=1e-9)  # other sums, float64
    assert abs(want - 1) > 0.05


def test_a_linear_network_leaves_no_doubt():
    forecast = predict_training_time(linear, jnp.zeros((3, 2)), X, Y, learning_rate=1.0, steps=30)
    assert forecast.trust is None


def test_a_network_whose_kernel_grows_says_so():
    """Every kernel vanishes where the last layer is zero, but for that layer's own part."""
    y = (X[:, 0] * X[:, 1] > 0).astype(int)
    start = PARAMS | {"v": jnp.zeros((4, 2))}
    forecast = predict_training_time(tanh, start, X, y, learning_rate=0.5, steps=100)
    real = train(tanh, start, X, y, loss="cross_entropy", optimizer=optax.sgd(0.5), steps=100)
    assert forecast.loss[-1] > 2 * real.loss[-1]
    assert forecast.trust is not None
    assert "times as fast" in forecast.trust
    assert forecast.trust in str(forecast)
    assert forecast.cost.gradient_evaluations == 2 + 3
    part = predict_training_time(
        tanh, start, X, y, learning_rate=0.5, steps=100, trainable=lambda path: "v" in str(path)
    )
    assert part.trust is None  # the last layer alone is linear


@pytest.mark.parametrize(
    ("speed", "words"),
    [
        (1.0, None), (1.9, None), (0.6, None), (np.nan, None),
        (2.0, "2 times as fast .* an eighth"), (0.4, "2.5 times as slowly .* an eighth"),
        (7.0, "a third"), (12.0, "half"), (np.inf, "over 100 times as fast"),
        (0.0, "over 100 times as slowly"),
    ],
)  # fmt: skip
def test_words(speed, words):
    found = trust_in_end(speed)
    if words is None:
        assert found is None
    else:
        with pytest.raises(ValueError, match=words):
            raise ValueError(found)


def _path(loss):
    ones = jnp.ones(len(loss))
    values = {
        name: jnp.asarray(-1) for name in RelinearizedTrajectory.__dataclass_fields__
    } | {"loss": jnp.asarray(loss), "ts": ones}  # fmt: skip
    path = object.__new__(RelinearizedTrajectory)
    for name, value in values.items():
        object.__setattr__(path, name, value)
    return path


def test_a_loss_that_rises_again():
    assert trust_in_path(_path([1.0, 0.1, 0.05, 0.04])) is None
    assert trust_in_path(_path([1.0, 0.1, 0.001, 0.003])) is None  # of no account beside the drop
    assert "rises again from step 1 on" in (trust_in_path(_path([1.0, 0.1, 0.15, 0.25])) or "")
    assert "the loss rises on the way" in (trust_in_path(_path([1.0, 9.0, 0.1])) or "")
