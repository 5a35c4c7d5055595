"""Kernels are built near where the path will be."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp.dynamics import _walk, relinearized_recursion
from jaxttp.dynamics._offsets import Offset, foreseen, offset_of
from jaxttp.ntk import empirical_ntk
from tests.draws import normal, split


def vector(*numbers):
    """A tree of two leaves."""
    first, *rest = (jnp.asarray(n, jnp.float64) for n in numbers)
    return {"a": first[None], "b": jnp.stack(rest)}


def test_the_first_offset_foresees_nothing():
    found = offset_of(vector(3, 1, 0), vector(1, 1, 2), None)
    jax.tree.map(np.testing.assert_array_equal, found.vector, vector(2, 0, -2))
    assert found.share == 0
    point = foreseen(vector(1, 1, 1), found)
    jax.tree.map(np.testing.assert_array_equal, point, vector(1, 1, 1))


@pytest.mark.parametrize(
    ("along", "share"), [(1.0, 0.5**0.5), (2.0, 0.8**0.5), (0.0, 0.0), (-0.7, 0.0), (1e8, 1e-7)]
)
def test_as_much_is_expected_as_came_again(along, share):
    """The cosine between both; where the path turned back nothing, nor where one is rounding."""
    last = Offset(vector(3, 0, 4), jnp.asarray(0.5))
    across = vector(4, 0, -3)  # orthogonal to it, and as long
    wanted = jax.tree.map(lambda u, v: along * u + v, last.vector, across)
    provisional = vector(1, 2, 3)
    weights = jax.tree.map(jnp.add, provisional, wanted)
    found = offset_of(weights, provisional, last)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-14), found.vector, wanted)
    np.testing.assert_allclose(found.share, share, rtol=1e-6)  # a float32


def test_no_offset_says_nothing():
    nothing = Offset(vector(0, 0, 0), jnp.asarray(1.0))
    found = offset_of(vector(1, 1, 1), vector(0, 0, 0), nothing)
    assert found.share == 0
    jax.tree.map(np.testing.assert_array_equal, found.vector, vector(1, 1, 1))


KEYS = split(5, 3)
X = normal(KEYS[0], (10, 3))
Y = jnp.sin(X[:, :1] * X[:, 1:2]) + X[:, 2:]
W = {"in": normal(KEYS[1], (3, 12)), "out": normal(KEYS[2], (12, 1), 0.3)}
STEPS, RATE = 200, 0.3


def network(w, x):
    return jnp.tanh(x @ w["in"]) @ w["out"]


def descend():
    """The losses of gradient descent itself."""

    def loss(w):
        return 0.5 * jnp.mean(jnp.sum((network(w, X) - Y) ** 2, axis=1))

    def step(w, _):
        value, slope = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda a, g: a - RATE * g, w, slope), value

    return np.asarray(jax.lax.scan(step, W, length=STEPS + 1)[1])


def foresee(rebuilds, f=network):
    return relinearized_recursion(
        f, W, X, Y, loss="squared_error", optimizer=optax.sgd(RATE), steps=STEPS,
        kernel_fn=lambda w: empirical_ntk(f, w, X), rebuilds=rebuilds,
    )  # fmt: skip


def test_forecasts_are_nearer_to_the_training_and_of_second_order(monkeypatch):
    """Against gradient descent; with kernels at the provisional ends twice as far away."""
    real = descend()
    off = {k: float(np.max(np.abs(foresee(k).loss - real))) for k in (8, 16)}
    # twice the kernels leave a quarter, in the limit; a first order would leave half
    assert off[16] < 0.4 * off[8]
    monkeypatch.setattr(_walk, "foreseen", lambda point, offset: point)
    before = {16: float(np.max(np.abs(foresee(16).loss - real)))}
    assert off[16] < 0.75 * before[16], (off, before)


def test_a_linear_network_has_none(monkeypatch):
    def linear(w, x):
        return x @ w["in"] @ jnp.ones((12, 1)) / 12

    found = foresee(4, linear)
    monkeypatch.setattr(_walk, "foreseen", lambda point, offset: point)
    # nothing but rounding: the kernel is the same wherever it is built
    np.testing.assert_allclose(found.train, foresee(4, linear).train, rtol=1e-12, atol=1e-14)


def test_no_kernel_more_is_built_and_the_network_is_asked_no_more(monkeypatch):
    found = foresee(6)
    monkeypatch.setattr(_walk, "foreseen", lambda point, offset: point)
    before = foresee(6)
    assert found.kernels == before.kernels == 7
    assert all(a < b for a, b in itertools.pairwise(found.ends))
    assert abs(found.gradient_evaluations - before.gradient_evaluations) <= 4  # other defects
