"""Every option is used, or refused by name before the network is looked at."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import Candidate, Online, compare, predict_training_time, sweep, train
from jaxttp.forecast import Hyperparameters, cost, grid
from tests.draws import normal

X = normal(0, (12, 4))
Y = np.arange(12) % 3
W = jnp.zeros((4, 3))
KEY = jax.random.key(1)
SDE = {"dynamics": "sde", "batch_size": 4, "key": KEY}


class Counted:
    """A linear network that counts how often it is called, by tracing too."""

    def __init__(self):
        self.calls = 0

    def __call__(self, params, x):
        self.calls += 1
        return x @ params


def predict(network, **options):
    rate = {} if "optimizer" in options else {"learning_rate": 0.1}
    given = {"relinearize": 0} | rate | options
    return predict_training_time(network, W, X, Y, steps=20, **given)


def result(network, **options):
    settings = options.pop("settings", grid(learning_rate=(0.1, 0.2), steps=20))
    return sweep(network, W, X, Y, settings, relinearize=0, **options)


def compared(network, **options):
    given = {"time_steps": False, "relinearize": 0} | options
    return compare({"one": Candidate(network, W)}, X, Y, steps=20, **given)


def trained(network, **options):
    options = {"loss": "cross_entropy", "optimizer": optax.sgd(0.1)} | options
    return train(network, W, X, Y, steps=2, **options)


def watched(network, **options):
    return Online(network, W, X, Y, Hyperparameters(0.1, steps=20), **options)


READING = {
    "window without plateau": ({"window": 3}, r"window=3 is for rule='plateau'; with rule="),
    "window too long": ({"rule": "plateau", "window": 21}, "window must be an integer between 1"),
    "even smoothing": ({"smooth": 4}, "smooth must be odd"),
    "smoothing longer than the curve": ({"smooth": 23}, "smooth must be an integer between 1"),
    "unknown rule": ({"rule": "soon"}, "rule='soon' is not known; choose one of 'relative'"),
    "unknown metric": ({"metric": "f1"}, "metric='f1' is not known; choose one of 'loss', 'error'"),
}
BATCHES = {
    "protocol of full batches": ({"protocol": "epochs"}, "protocol='epochs' is about mini-batches"),
    "unknown protocol": (
        {"batch_size": 4, "key": KEY, "protocol": "sorted"},
        "protocol='sorted' is not known; choose one of 'epochs'",
    ),
    "batches without a key": ({"batch_size": 4}, "batch_size.* needs key"),
    "more than there are": ({"batch_size": 13, "key": KEY}, "between 1 and 12; got 13. The data"),
}
PREDICT = {
    "noise": ({"noise": "full"}, "noise='full' does nothing here: it is the noise of dynamics="),
    "paths": ({"paths": 8}, "paths=8 does nothing here: it counts the paths of dynamics='sde'"),
    "tolerance": ({"tolerance": 0.1}, "tolerance=0.1 does nothing here: .* relinearize='auto'"),
    "tolerance of another dynamics": (
        {"tolerance": 0.1, "relinearize": "auto", "dynamics": "ode"},
        "tolerance=0.1 does nothing",
    ),
    "tolerance of a number": ({"tolerance": 0.1, "relinearize": 2}, "tolerance=0.1 does nothing"),
    "level": ({"level": 0.5}, "level=0.5 does nothing here: .* dynamics='sde' and"),
    "level of one column": ({"level": 0.5, "sketch_dim": 1, "key": KEY}, "level=0.5 does nothing"),
    "level in weight space": (
        {"level": 0.5, "sketch_dim": 8, "key": KEY, "optimizer": optax.adam(0.1)},
        "level=0.5 does nothing",
    ),
    "max_bytes of a sketch": (
        {"max_bytes": 2**30, "sketch_dim": 8, "key": KEY},
        "max_bytes=1073741824 does nothing here: .* give kernel_batch_size",
    ),
    "level 1": (SDE | {"level": 1.0}, "level must be greater than 0 and less than 1; got 1.0"),
    "unknown loss": ({"loss": "hinge"}, "loss='hinge' is not known"),
    "Lion relinearized": (
        {"optimizer": optax.lion(0.1), "relinearize": 2},
        "relinearize=2 does nothing here: optimizer is neither linear",
    ),
    "momentum twice": ({"optimizer": optax.sgd(0.1), "momentum": 0.9}, "momentum=0.9 goes with"),
}
TWO = grid(learning_rate=0.1, batch_size=(None, 13), steps=20)
CASES = [
    *(pytest.param(predict, *case, id=f"predict, {name}")
      for name, case in (READING | BATCHES | PREDICT).items()),
    *(pytest.param(result, *case, id=f"sweep, {name}") for name, case in READING.items()),
    *(pytest.param(compared, *case, id=f"compare, {name}")
      for name, case in (READING | BATCHES).items()),
    *(pytest.param(trained, *case, id=f"train, {name}") for name, case in BATCHES.items()),
    pytest.param(trained, {"loss": "hinge"}, "loss='hinge' is not known", id="train, loss"),
    pytest.param(result, {"protocol": "epochs"}, "protocol='epochs' is about", id="sweep protocol"),
    pytest.param(result, {"settings": TWO, "key": KEY}, "between 1 and 12; got 13", id="sweep, 13"),
    pytest.param(result, {"settings": TWO}, "between 1 and 12; got 13", id="sweep, 13 without key"),
    pytest.param(result, {"settings": ()}, "settings must hold at least one", id="sweep, nothing"),
    pytest.param(result, {"step_seconds": [1.0]}, "one a setting, 2; got 1", id="sweep, timed"),
    pytest.param(compared, {"momentum": 1.0}, "momentum must be", id="compare, momentum"),
    pytest.param(compared, {"thresholds": (0.0,)}, "thresholds must be", id="compare, thresholds"),
    pytest.param(watched, {"rule": "soon"}, "rule='soon' is not known", id="Online, rule"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "options", "message"), CASES)
def test_refused_before_the_network_is_looked_at(call, options, message):
    network = Counted()
    with pytest.raises((ValueError, TypeError), match=message):
        call(network, **options)
    assert call is trained or network.calls == 0  # which traces it first


@pytest.mark.parametrize(
    "options",
    [
        {"key": KEY},  # a newcomer passes it always
        {"rule": "plateau", "window": 3, "smooth": 3},
        {"momentum": 0.0, "optimizer": optax.sgd(0.1)},
    ],
)
def test_what_is_of_use_or_does_no_harm_is_welcome(options):
    assert predict(lambda w, x: x @ w, **options).stable


def curved(params, x):
    return jnp.tanh(x @ params["a"]) @ params["b"]


BENT = {"a": jnp.asarray(np.eye(4) + 0.1), "b": jnp.asarray(1.0 - np.eye(4)[:, :3])}


@pytest.mark.slow
def test_the_kernel_is_rebuilt_unless_it_was_said_otherwise(monkeypatch):
    """For what is not named otherwise; not where it would cost several trainings."""
    call = functools.partial(predict_training_time, curved, BENT, X, Y, steps=20)
    found = call(learning_rate=0.5, budget=math.inf)
    assert found.cost.kernels > 2
    assert found.loss_uncertainty is not None
    assert call(learning_rate=0.5, relinearize=0).cost.kernels == 1
    assert call(learning_rate=0.5, dynamics="ode").cost.kernels == 1
    few = call(learning_rate=0.5)
    assert few.cost.kernels == 1
    assert few.plan is not None
    assert few.plan.startswith("one kernel")
    assert call(learning_rate=0.5, relinearize=2).cost.kernels == 3
    monkeypatch.setattr(cost, "MODEL", dataclasses.replace(cost.MODEL, fraction=1e6))
    assert call(learning_rate=0.5).cost.kernels > 2


def test_labels_are_looked_at_before_the_kernel(monkeypatch):
    """Those of the test set too, and those of a sweep."""

    def refuse(*args, **options):
        raise AssertionError("a kernel was built")

    monkeypatch.setattr("jaxttp.ntk.estimators.kernel_of", refuse)
    bad = np.full(12, 7)
    with pytest.raises(ValueError, match=r"y_test holds .* 7"):
        predict(Counted(), x_test=X, y_test=bad)
    with pytest.raises(ValueError, match=r"y holds .* 7"):
        sweep(Counted(), W, X, bad, grid(learning_rate=0.1))
    with pytest.raises(ValueError, match=r"y holds .* 7"):
        Online(Counted(), W, X, bad, Hyperparameters(0.1))


def test_an_error_that_does_not_fall_is_never_there():
    network, weights = lambda w, x: x @ w, normal(2, (4, 3))  # no ties
    found = predict_training_time(
        network, weights, X, Y, metric="error", relinearize=0, learning_rate=1e-9, steps=20
    )
    never = dict.fromkeys((0.01, 0.1, 0.4), -1)
    assert float(found.error[0]) == float(found.error[-1]) > 0
    assert found.stable
    assert found.steps == found.read((0.01, 0.1, 0.4), metric="error") == never
    assert "not reached" in str(found)
