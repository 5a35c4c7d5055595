"""Real training against gradient descent written out in NumPy for a linear model, f = x W.

Tolerances: the same arithmetic in float64 in another order, over a dozen steps of a contracting
map: rtol and atol 1e-12 are a hundred times the rounding.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import time_step, train
from jaxttp.dynamics.batches import PROTOCOLS, batch_indices
from tests.compiled import compilations

STEPS, RATE = 12, 0.2
RNG = np.random.default_rng(0)
X = RNG.normal(size=(7, 4))
LABELS = np.array([1, 2, 2, 0, 1, 2, 0])
ONE_HOT = np.eye(3)[LABELS]
WEIGHTS = RNG.normal(size=(4, 3))


def linear(w, x):
    return x @ w


def assert_close(left, right):
    np.testing.assert_allclose(left, right, rtol=1e-12, atol=1e-12)


def softmax(f):
    e = np.exp(f)
    return e / e.sum(axis=1, keepdims=True)


LINKS = {"squared_error": lambda f: f, "cross_entropy": softmax}


def descend(name, batches, momentum=0.0):
    """Outputs on all samples before every step and after the last; the final weights."""
    w, velocity, history = WEIGHTS.copy(), np.zeros_like(WEIGHTS), [X @ WEIGHTS]
    for rows in batches:
        residual = LINKS[name](X[rows] @ w) - ONE_HOT[rows]
        velocity = momentum * velocity + X[rows].T @ residual / len(rows)
        w = w - RATE * velocity
        history.append(X @ w)
    return np.stack(history), w


def value(name, f):
    if name == "squared_error":
        return 0.5 * np.mean(np.sum((f - ONE_HOT) ** 2, axis=1))
    return -np.mean(np.log(softmax(f)[np.arange(len(f)), LABELS]))


def run(name="cross_entropy", y=LABELS, **options):
    options = {"optimizer": optax.sgd(RATE), "steps": STEPS} | options
    return train(linear, jnp.asarray(WEIGHTS), X, y, loss=name, **options)


def check(done, name, outputs, weights):
    """Outputs and weights are those given; the curves are those of the outputs."""
    assert done.outputs.shape == (STEPS + 1, 7, 3)
    np.testing.assert_array_equal(done.outputs[0], jnp.asarray(X) @ WEIGHTS)  # before training
    assert_close(done.outputs, outputs)
    assert_close(done.params, weights)
    assert_close(done.loss, [value(name, f) for f in outputs])
    assert_close(done.error, np.mean(np.argmax(outputs, axis=2) != LABELS[None], axis=1))
    assert done.loss[-1] < done.loss[0]


@pytest.mark.parametrize(("name", "momentum"), [("squared_error", 0.0), ("cross_entropy", 0.8)])
def test_full_batch(name, momentum):
    done = run(name, optimizer=optax.sgd(RATE, momentum or None))
    check(done, name, *descend(name, [np.arange(7)] * STEPS, momentum))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_batches(protocol, key):
    name = "cross_entropy"
    done = run(name, batch_size=3, key=key, protocol=protocol)
    batches = np.asarray(batch_indices(key, 7, 3, STEPS, protocol=protocol))
    check(done, name, *descend(name, batches))


def test_parameters_given_are_not_touched():
    params = jnp.asarray(WEIGHTS)
    before = np.array(params)
    done = train(
        linear, params, X, LABELS, loss="cross_entropy", optimizer=optax.adam(0.1), steps=3
    )
    time_step(linear, params, X, LABELS, loss="cross_entropy", optimizer=optax.adam(0.1))
    np.testing.assert_array_equal(params, before)  # would raise, had its buffer been donated
    assert not np.allclose(done.params, before)


def test_any_optimizer_with_a_state_and_a_schedule():
    optimizer = optax.adamw(optax.cosine_decay_schedule(0.1, STEPS), weight_decay=0.1)
    tree = {"head": jnp.asarray(WEIGHTS), "bias": [jnp.zeros((1, 3))]}

    def affine(p, x):
        return x @ p["head"] + p["bias"][0]

    done = train(affine, tree, X, LABELS, loss="cross_entropy", optimizer=optimizer, steps=STEPS)
    params, state = tree, optimizer.init(tree)
    for t in range(STEPS):
        assert_close(done.outputs[t], affine(params, X))
        gradient = softmax(np.asarray(affine(params, X))) - ONE_HOT
        pulled = {"head": X.T @ gradient / 7, "bias": [gradient.mean(axis=0, keepdims=True)]}
        updates, state = optimizer.update(pulled, state, params)
        params = optax.apply_updates(params, updates)
    jax.tree.map(assert_close, done.params, params)


def test_a_run_that_diverged_has_no_training_times():
    done = run()
    done = done._replace(loss=done.loss.at[-1].set(jnp.nan))
    assert done.read((0.1, 0.4)) == {0.1: -1, 0.4: -1}
    with pytest.raises(ValueError, match="rule='soon' is not known"):
        done.read(0.1, rule="soon")
    with pytest.raises(ValueError, match="metric='f1' is not known"):
        done.read(0.1, metric="f1")


def test_seconds_and_progress():
    calls = []
    done = run(progress=lambda done, steps: calls.append((done, steps)))
    assert calls == [(t, STEPS) for t in range(1, STEPS + 1)]
    assert done.seconds > 0
    assert done.compile_seconds > 0
    # A step of a 7 x 4 product takes microseconds, compiling it milliseconds: they are apart.
    assert done.seconds / STEPS < done.compile_seconds


def test_optimisers_that_take_more_are_given_the_batch(key):
    """`x`, `y`, the loss and the outputs; what optax's own ask for goes by their names."""
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append(extra)
        rows = jnp.sum(extra["x"]) + jnp.sum(extra["y"] * extra["outputs"]) + extra["value"]
        again = extra["value_fn"](params)
        return jax.tree.map(lambda g: -RATE * g, updates), state + jnp.stack([rows, again])

    optimizer = optax.GradientTransformationExtraArgs(lambda _: jnp.zeros(2), update)
    done = run("cross_entropy", optimizer=optimizer, steps=1, batch_size=3, key=key)
    plain = run("cross_entropy", steps=1, batch_size=3, key=key)
    np.testing.assert_array_equal(done.outputs, plain.outputs)
    rows = np.asarray(batch_indices(key, 7, 3, 1, protocol="epochs"))[0]
    f = X[rows] @ WEIGHTS
    first = -np.mean(np.log(softmax(f)[np.arange(3), LABELS[rows]]))
    assert_close(done.state, [X[rows].sum() + np.sum(ONE_HOT[rows] * f) + first, first])
    assert seen[0]["loss"].name == "cross_entropy"
    assert seen[0]["grad"].shape == WEIGHTS.shape

    def known_gradients_only(updates, state, params=None):
        return jax.tree.map(lambda g: -RATE * g, updates), state

    simple = optax.GradientTransformation(lambda _: (), known_gradients_only)
    np.testing.assert_array_equal(
        run("cross_entropy", optimizer=simple, steps=1, batch_size=3, key=key).outputs,
        plain.outputs,
    )


def test_a_line_search_trains():
    done = run("squared_error", optimizer=optax.lbfgs(), steps=8)
    # Seven samples, twelve weights, a quadratic: least squares is reached but for rounding.
    best = value("squared_error", X @ np.linalg.lstsq(X, ONE_HOT, rcond=None)[0])
    assert float(done.loss[-1]) - best < 1e-2 * (float(done.loss[0]) - best)


def test_a_training_goes_on_from_its_state_and_ends_when_told():
    optimizer = optax.sgd(RATE, momentum=0.8)
    whole = run(optimizer=optimizer)
    ended = run(optimizer=optimizer, callback=lambda step, params, loss: step == 5)
    assert ended.loss.shape == (6,)
    np.testing.assert_array_equal(ended.outputs, whole.outputs[:6])
    with compilations() as compiled:
        train(linear, ended.params, X, LABELS, loss="cross_entropy", optimizer=optimizer,
              steps=STEPS, callback=lambda step, params, loss: np.bool_(step == 5))  # fmt: skip
    assert not compiled  # the same optimiser, network and loss
    rest = train(linear, ended.params, X, LABELS, loss="cross_entropy", optimizer=optimizer,
                 steps=STEPS - 5, state=ended.state, record=lambda s: s[0].trace)  # fmt: skip
    assert_close(rest.outputs, whole.outputs[5:])
    assert rest.recorded.shape == (STEPS - 5, *WEIGHTS.shape)
    assert_close(rest.recorded[-1], whole.state[0].trace)
    assert whole.recorded is None
    none = run(optimizer=optimizer, callback=lambda *_: True)
    assert (none.loss.shape, none.recorded) == ((1,), None)


def test_a_step_that_was_timed_is_not_compiled_again():
    batch_size = 3
    optimizer = optax.sgd(RATE)
    given = (linear, jnp.asarray(WEIGHTS), X, LABELS)
    common = {"loss": "cross_entropy", "optimizer": optimizer, "batch_size": batch_size}
    key = jax.random.key(0)
    time_step(*given, **common, repeats=1)
    with compilations() as seen:
        time_step(*given, **common, repeats=1)
    assert seen == []
    train(*given, **common, key=key, steps=2)
    with compilations() as seen:
        train(*given, **common, key=key, steps=2)
    assert seen == []


BAD = {
    "labels": ({"y": LABELS + 1}, "y holds labels from 1 to 3"),
    "length": ({"y": LABELS[:5]}, r"y has shape \(5,\)"),
    "batch larger": ({"batch_size": 8}, "batch_size must be .* between 1 and 7; got 8.*7 samples"),
    "no key": ({"batch_size": 2, "key": None}, "batch_size needs key"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case, key):
    options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        run(**{"key": key} | options)


def test_what_is_no_floating_point_number_is_refused_by_name():
    """`optax` and `jax.grad` would say so in words of their own, or train in integers."""
    common = {"loss": "cross_entropy", "optimizer": optax.sgd(0.1)}
    given = (lambda p, x: p["scale"] * (x @ p["w"]), {"w": WEIGHTS, "scale": 2}, X, LABELS)
    with pytest.raises(ValueError, match=r"params\['scale'\] holds int.* close over the rest"):
        train(*given, steps=2, **common)
