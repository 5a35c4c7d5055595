"""What is compiled ahead is what is needed, once, and a forecast does not depend on it."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp import predict_training_time
from jaxttp.forecast import _ahead
from tests.compilations import counted

X = jax.random.normal(jax.random.key(0), (9, 3))
Y = np.asarray(X[:, 0] > 0).astype(int)


def forecast(network):
    return predict_training_time(network, jnp.ones((3, 2)) / 3, X, Y, learning_rate=0.5, steps=6)


@pytest.mark.parametrize("cores", [1, 2])
def test_every_program_is_compiled_once(monkeypatch, cores):
    """As many as without a second thread, and the forecast is the same to the bit."""
    monkeypatch.setattr(_ahead, "_cores", lambda: cores)
    jax.clear_caches()
    with counted() as seen:
        found = forecast(lambda w, x: jnp.tanh(x @ w))
    monkeypatch.setattr(_ahead, "_cores", lambda: 1)
    jax.clear_caches()
    with counted() as alone:
        other = forecast(lambda w, x: jnp.tanh(x @ w))
    assert len(seen) == len(alone) > 5
    np.testing.assert_array_equal(found.loss, other.loss)


def test_a_thread_is_started_once_for_what_is_alike(monkeypatch):
    monkeypatch.setattr(_ahead, "_cores", lambda: 2)
    started, start = [], threading.Thread.start

    def noted(self):
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", noted)
    network = lambda w, x: jnp.sin(x @ w)  # noqa: E731
    for _ in range(2):
        forecast(network)
    assert len(started) == 1
    assert not started[0].is_alive()


def test_what_cannot_be_compiled_ahead_is_compiled_when_it_is_needed(monkeypatch):
    monkeypatch.setattr(_ahead, "_cores", lambda: 2)

    def broken(*_):
        raise RuntimeError("no such program")

    monkeypatch.setattr(_ahead, "compile_limit", broken)
    monkeypatch.setattr(_ahead, "compile_recursion", broken)
    assert forecast(lambda w, x: jnp.cos(x @ w)).loss.shape == (7,)
