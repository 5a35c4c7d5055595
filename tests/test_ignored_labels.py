"""Labels of -100: those samples are there, and their loss is not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import (
    Candidate,
    compare,
    empirical_ntk,
    predict_training_time,
    sweep,
    train,
    weighted,
)
from jaxttp.adapters import check_per_sample
from jaxttp.dynamics import batch_indices, recursion
from jaxttp.forecast import grid
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


def test_binary_labels():
    f, y = network(W, X)[:, :1], np.where(COUNTS, Y % 2, Y)
    targets, exact = encode_targets("binary_cross_entropy", y, f)
    alone, plain = encode_targets("binary_cross_entropy", y[COUNTS], f[COUNTS])
    np.testing.assert_allclose(exact.value(f, targets), plain.value(f[COUNTS], alone), rtol=1e-12)


def test_a_forecast_and_a_training_are_those_of_the_others():
    """Full batches: the same as without these samples. The curves agree to rounding."""
    given = {"learning_rate": 0.5, "steps": 8, "relinearize": 0}
    found = predict_training_time(network, W, X, Y, **given, x_test=X, y_test=Y)
    alone = predict_training_time(network, W, X[COUNTS], Y[COUNTS], **given)
    np.testing.assert_allclose(found.loss, alone.loss, rtol=1e-10)
    np.testing.assert_allclose(found.error, alone.error, rtol=1e-10)
    np.testing.assert_allclose(found.test_loss, alone.loss, rtol=1e-10)
    assert found.steps == alone.steps
    np.testing.assert_allclose(found.max_learning_rate, alone.max_learning_rate, rtol=1e-8)
    real = {"loss": "cross_entropy", "optimizer": optax.sgd(0.5), "steps": 3}
    run, others = train(network, W, X, Y, **real), train(network, W, X[COUNTS], Y[COUNTS], **real)
    np.testing.assert_allclose(run.loss, others.loss, rtol=1e-10)
    np.testing.assert_allclose(run.params, others.params, rtol=1e-10)


def test_batches_divide_by_the_share_of_the_others_in_all():
    """Step for step: the gradient of a batch is its sum over the others / (B * share)."""
    real = {"loss": "cross_entropy", "optimizer": optax.sgd(0.5), "steps": 2, "batch_size": 4,
            "key": jax.random.key(0), "protocol": "independent"}  # fmt: skip
    run = train(network, W, X, Y, **real)
    same = train(network, W, X, weighted(np.where(COUNTS, Y, 0), mask=COUNTS), **real)
    np.testing.assert_array_equal(run.outputs, same.outputs)
    linear = lambda w, x: x @ w  # noqa: E731
    run = train(linear, W, X, Y, **real)
    path = recursion(
        empirical_ntk(linear, W, X), linear(W, X), Y, loss="cross_entropy",
        optimizer=optax.sgd(0.5), steps=2, batch_size=4, key=jax.random.key(0),
        protocol="independent",
    )  # fmt: skip
    np.testing.assert_allclose(run.outputs, path.train, rtol=1e-10)  # a linear network: exact
    share = COUNTS.mean()
    batch = np.asarray(batch_indices(jax.random.key(0), N, 4, 2, protocol="independent"))[0]
    f = np.asarray(linear(W, X))
    p = np.exp(f) / np.exp(f).sum(1, keepdims=True)
    g = np.where(COUNTS[:, None], p - np.eye(C)[np.where(COUNTS, Y, 0)], 0.0)[batch]
    first = W - 0.5 * np.asarray(X)[batch].T @ g / (4 * share)
    np.testing.assert_allclose(run.outputs[1], X @ first, rtol=1e-10)


def test_sweeps_comparisons_and_class_weights():
    settings = grid(learning_rate=(0.1, 0.5), steps=5)
    found = sweep(network, W, X, Y, settings, relinearize=0)
    alone = sweep(network, W, X[COUNTS], Y[COUNTS], settings, relinearize=0)
    np.testing.assert_allclose(found.loss, alone.loss, rtol=1e-10)
    found = compare({"a": Candidate(network, W)}, X, Y, learning_rate=0.5, steps=5, relinearize=0,
                    time_steps=False)  # fmt: skip
    np.testing.assert_allclose(found.loss[0], alone.loss[1], rtol=1e-10)
    balanced = weighted(Y, class_weight="balanced")
    assert balanced.weight[3] == balanced.weight[6] == 0
    expected = weighted(Y[COUNTS], class_weight="balanced").weight
    np.testing.assert_allclose(balanced.weight[COUNTS], expected)
    both = weighted(Y, mask=np.arange(N) > 0)
    assert both.weight.tolist() == (COUNTS & (np.arange(N) > 0)).astype(float).tolist()
    by_hand = type(both)(Y, np.ones(N))
    f = network(W, X)
    np.testing.assert_array_equal(
        encode_targets("cross_entropy", by_hand, f)[0], encode_targets("cross_entropy", Y, f)[0]
    )


def test_what_is_refused():
    f = network(W, X)
    with pytest.raises(ValueError, match="y holds nothing but -100"):
        encode_targets("cross_entropy", np.full(N, -100), f)
    with pytest.raises(ValueError, match=r"labels from -1 to 2.*does not count has the label -100"):
        encode_targets("cross_entropy", np.where(Y < 0, -1, Y), f)
    with pytest.raises(ValueError, match="labels from -1 to 2"):
        encode_targets("cross_entropy", np.where(np.arange(N) == 0, -1, Y), f)
    with pytest.raises(ValueError, match="leave no sample"):
        weighted(Y, mask=~COUNTS)
    # A target of -100 is a number like any other.
    targets, _ = encode_targets("squared_error", jnp.full((N, C), -100.0), f)
    assert targets.shape == (N, C)


def test_outputs_and_labels_of_tokens_say_what_to_do():
    def language(params, x):
        return jnp.tanh(x @ params)[:, None].repeat(6, 1)

    for call in (
        lambda: predict_training_time(language, W, X, Y, learning_rate=0.1, relinearize=0),
        lambda: train(language, W, X, Y, loss="cross_entropy", optimizer=optax.sgd(0.1), steps=1),
    ):
        with pytest.raises(
            ValueError, match=r"labels of tokens \(10, 6\).*got int64 \(10,\).*words"
        ):
            call()
    with pytest.raises(ValueError, match=r"returned \(10, 6, 3\)\. .*flatten_tokens\(apply_fn\)"):
        check_per_sample(language, W, X)
    with pytest.raises(ValueError, match=r"y has shape \(10, 6\).* \(N, T\) go with \(N, T, V\)"):
        encode_targets("cross_entropy", np.zeros((N, 6), int), network(W, X))
