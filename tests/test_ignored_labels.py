"""Labels of -100: those samples are there, and their loss is not."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp import (
    predict_training_time,
    weighted,
)
from jaxttp.losses import encode_targets

RANDOM = np.random.default_rng(3)
N, C = 10, 3
X = jnp.asarray(RANDOM.normal(size=(N, 4)))
W = jnp.asarray(RANDOM.normal(size=(4, C)) / 2)
Y = np.array([0, 1, 2, -100, 1, 0, -100, 2, 0, 1])
COUNTS = Y != -100


def network(params, x):
    return jnp.tanh(x @ params)


@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])
@pytest.mark.parametrize("kind", [np.asarray, list, jnp.asarray, lambda y: y.astype(np.int8)])
def test_the_mean_is_over_the_others(loss, kind):
    """Value, gradient and error of the other samples alone; NumPy's sums in another order."""
    f = network(W, X)
    targets, exact = encode_targets(loss, kind(Y), f)
    alone, plain = encode_targets(loss, Y[COUNTS], f[COUNTS])
    np.testing.assert_allclose(exact.value(f, targets), plain.value(f[COUNTS], alone), rtol=1e-12)
    np.testing.assert_allclose(exact.error(f, targets), plain.error(f[COUNTS], alone), rtol=1e-12)
    gradient = exact.gradient(f, targets)
    assert not np.any(gradient[~COUNTS])
    scale = N / COUNTS.sum()  # the dynamics divide by N, the mean by the others
    np.testing.assert_allclose(gradient[COUNTS], scale * plain.gradient(f[COUNTS], alone))


def test_a_forecast_is_that_of_the_others():
    """Full batches: the same as without these samples. The curves agree to rounding."""
    given = {"learning_rate": 0.5, "steps": 4, "relinearize": 0}
    found = predict_training_time(network, W, X, Y, **given, x_test=X, y_test=Y)
    alone = predict_training_time(network, W, X[COUNTS], Y[COUNTS], **given)
    np.testing.assert_allclose(found.loss, alone.loss, rtol=1e-10)
    np.testing.assert_allclose(found.error, alone.error, rtol=1e-10)
    np.testing.assert_allclose(found.test_loss, alone.loss, rtol=1e-10)
    assert found.steps == alone.steps
    np.testing.assert_allclose(found.max_learning_rate, alone.max_learning_rate, rtol=1e-8)


def test_what_is_refused():
    f = network(W, X)
    with pytest.raises(ValueError, match="y holds nothing but -100"):
        encode_targets("cross_entropy", np.full(N, -100), f)
    with pytest.raises(ValueError, match=r"labels from -1 to 2.*does not count has the label -100"):
        encode_targets("cross_entropy", np.where(Y < 0, -1, Y), f)
    balanced = weighted(Y, class_weight="balanced")
    assert balanced.weight[3] == balanced.weight[6] == 0
    expected = weighted(Y[COUNTS], class_weight="balanced").weight
    np.testing.assert_allclose(balanced.weight[COUNTS], expected)
    with pytest.raises(ValueError, match="leave no sample"):
        weighted(Y, mask=~COUNTS)
    # A target of -100 is a number like any other.
    targets, _ = encode_targets("squared_error", jnp.full((N, C), -100.0), f)
    assert targets.shape == (N, C)
