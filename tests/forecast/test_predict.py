import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import predict_training_time, train
from jaxttp.forecast import Descent, Recursion, WeightSpace, training_time
from jaxttp.forecast.options import Keywords
from tests import oracles
from tests.draws import normal, split

KEYS = split(3, 4)
X = normal(KEYS[0], (12, 4))
Y = np.asarray(jax.random.randint(KEYS[1], (12,), 0, 3))
TARGETS = np.eye(3)[Y]
PARAMS = {
    "a": normal(KEYS[2], (4, 10), 1 / 2),
    "b": normal(KEYS[3], (10, 3), 1 / 3),
}


def network(params, x):
    return jnp.tanh(x @ params["a"]) @ params["b"]


def linear(params, x):
    return x @ params


def without_drift(outputs):
    """Logits whose means over the classes stay those before training: a softmax sees no more."""
    means = jnp.mean(outputs, axis=-1, keepdims=True)
    return outputs - means + means[:1]


def predict(apply_fn=network, params=PARAMS, x=X, y=Y, **options):
    options = {"learning_rate": 0.1, "steps": 20, "relinearize": 0} | options
    return predict_training_time(apply_fn, params, x, y, **options)


def test_linear_network_is_forecast_exactly():
    """Its linearisation is itself, so forecast and real training agree to rounding."""
    weights = jnp.zeros((4, 3))
    for optimizer in (optax.sgd(0.5), optax.sgd(0.2, 0.9, nesterov=True)):
        forecast = predict(linear, weights, learning_rate=None, optimizer=optimizer, steps=60)
        run = train(linear, weights, X, Y, loss="cross_entropy", optimizer=optimizer, steps=60)
        np.testing.assert_allclose(forecast.loss, run.loss, atol=1e-12)
        np.testing.assert_allclose(forecast.error, run.error, atol=1e-12)
        for threshold, steps in forecast.steps.items():
            assert steps == int(training_time(run.loss, threshold))


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.05),
        optax.sgd(0.05, 0.9),
        optax.chain(optax.add_decayed_weights(0.05), optax.sgd(0.1, 0.9)),
    ],
    ids=["plain", "momentum", "decay"],
)
def test_recursion_is_training_of_the_linearised_network(optimizer):
    forecast = predict(learning_rate=None, optimizer=optimizer)
    want = oracles.train_linearised(network, PARAMS, X, TARGETS, "cross_entropy", optimizer, 20)
    np.testing.assert_allclose(forecast.outputs, without_drift(want), atol=1e-9)


@pytest.mark.slow
def test_relinearised_forecast_is_nearer_to_the_truth():
    run = train(network, PARAMS, X, Y, loss="cross_entropy", optimizer=optax.sgd(0.2), steps=60)
    errors = []
    for rebuilds in (0, 3, 8):
        forecast = predict(learning_rate=0.2, steps=60, relinearize=rebuilds)
        errors.append(float(jnp.max(jnp.abs(forecast.loss - run.loss))))
        assert forecast.cost.kernels == 1 + rebuilds
        assert (forecast.loss_uncertainty is None) == (rebuilds == 0)
    assert errors[0] > 3 * errors[1] > 9 * errors[2]  # measured: 0.047, 0.012, 0.003


def test_frozen_parameters_do_not_move_the_forecast():
    head = predict(trainable={"a": False, "b": True})
    features = jnp.tanh(X @ PARAMS["a"])
    alone = predict(linear, PARAMS["b"], features)
    np.testing.assert_allclose(head.outputs, alone.outputs, atol=1e-12)


@pytest.mark.parametrize(
    ("params", "words"),
    [(None, "it is empty"), ({"w": np.ones((4, 3), np.int32)}, "it holds int32 alone: convert")],
)
def test_parameters_that_do_not_train(params, words):
    with pytest.raises(ValueError, match=f"^params has no floating-point leaf.*{words}"):
        predict(linear, params)


def test_no_training_happens(monkeypatch):
    """No optimiser ever sees the network's weights, and the weights given stay as they are."""
    before = jax.tree.map(np.array, PARAMS)
    seen = []
    inner = optax.sgd(0.1)

    def update(grads, state, params=None):
        seen.extend(leaf.shape for leaf in jax.tree.leaves(grads))
        return inner.update(grads, state, params)

    predict(learning_rate=None, optimizer=optax.GradientTransformation(inner.init, update))
    shapes = {leaf.shape for leaf in jax.tree.leaves(PARAMS)}
    assert seen
    assert not shapes & set(seen)
    jax.tree.map(np.testing.assert_array_equal, before, PARAMS)


def test_small_batches_can_diverge_below_the_full_batch_limit():
    """One sample at a time: its own curvature, not the mean's, limits the rate."""
    x = jnp.diag(jnp.array([10.0, 0.1, 0.1, 0.1]))
    y = np.ones((4, 1))
    common = {"loss": "squared_error", "steps": 60, "learning_rate": 0.04}
    weights = jnp.zeros((4, 1))
    assert predict(linear, weights, x, y, **common).stable
    forecast = predict(linear, weights, x, y, batch_size=1, key=jax.random.key(0), **common)
    assert 0.04 < forecast.max_learning_rate
    assert not forecast.stable
    assert "batches of 1" in forecast.message


class BatchNormalised(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        h = x @ self.weight
        return (h - jnp.mean(h, 0, keepdims=True)) / (jnp.std(h, 0, keepdims=True) + 1e-3)


NAN = float("nan")
BAD = {
    "no threshold": ({"thresholds": ()}, "thresholds"),
    "unknown dynamics": ({"dynamics": "magic"}, "dynamics"),
    "ode relinearised": ({"dynamics": "ode", "relinearize": 2}, "relinearize"),
    "label too large": ({"y": np.full(12, 3)}, "y"),
    "nan data": ({"x": X.at[0, 0].set(NAN)}, "x"),
    "nan parameters": ({"params": {**PARAMS, "b": PARAMS["b"].at[0, 0].set(NAN)}}, "params"),
    "wrong rank": ({"apply_fn": lambda p, x: network(p, x)[:, 0]}, "apply_fn"),
    "rows lost": ({"apply_fn": lambda p, x: network(p, x)[1:]}, "apply_fn"),
    "nan outputs": ({"apply_fn": lambda p, x: jnp.log(network(p, x) - 100.0)}, "apply_fn"),
    "batch statistics": (
        {"apply_fn": lambda m, x: m(x), "params": BatchNormalised(jnp.eye(4)[:, :3])},
        "apply_fn",
    ),
    "nothing trains": ({"trainable": lambda path: False}, "trainable"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_the_argument(name):
    change, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        predict(**change)


def test_what_an_optimizer_begins_after_64_steps_is_forecast():
    def late(t):
        return jnp.where(t >= 66, 0.5, 0.0)

    optimizer = optax.chain(optax.add_decayed_weights(late), optax.sgd(0.1))
    start = jnp.ones((4, 3))
    forecast = predict(linear, start, learning_rate=None, optimizer=optimizer, steps=75)
    real = train(linear, start, X, Y, loss="cross_entropy", optimizer=optimizer, steps=75)
    assert forecast.dynamics == "recursion"
    np.testing.assert_allclose(forecast.loss, real.loss, rtol=1e-6)  # the model is linear
    clipped = optax.conditionally_transform(optax.clip(0.01), lambda t: t >= 66)
    for steps, way in ((75, WeightSpace()), (64, Recursion())):
        assert (
            Keywords(relinearize=0).choose(Descent.of(optimizer=clipped, steps=steps), start) == way
        )


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([0, 7], "y_test holds labels from 0 to 7"),
        ([0], r"y_test has shape \(1,\)"),
        (["a", "b"], r"y_test must hold .*np.unique\(y_test, "),
        ([-100, -100], "y_test holds nothing"),
    ],
)
def test_labels_of_test_samples_are_called_so(labels, words):
    x = jnp.eye(2)
    with pytest.raises(ValueError, match=words):
        predict_training_time(
            lambda w, x: x @ w, jnp.zeros((2, 2)), x, [0, 1], learning_rate=0.1, steps=3,
            x_test=x, y_test=labels,
        )  # fmt: skip
