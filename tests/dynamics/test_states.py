"""What optimisers keep beside the weights: how it starts, its dtypes, and re-linearising it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp.dynamics import recursion, relinearized_recursion
from jaxttp.dynamics.optimizers import start_fractions
from jaxttp.ntk import empirical_ntk
from tests import oracles

X = jnp.array([[1.0, 0.5], [-0.3, 0.8], [0.4, -1.1]])
Y = jnp.array([[0.2], [1.0], [-0.7]])
W = jnp.array([[1.5], [-0.5]])


def linear(w, x):
    return x @ w


def pulled_back(strength):
    """SGD that is drawn to where it began, which its state remembers."""

    def update(gradient, state, params):
        pull = lambda g, w, w0: -0.3 * (g + strength * (w - w0))  # noqa: E731
        return jax.tree.map(pull, gradient, params, state.trace), state

    start = lambda params: optax.TraceState(jax.tree.map(jnp.asarray, params))  # noqa: E731
    return optax.GradientTransformation(start, update)


def begun_at_one(decay):
    """A velocity that does not start at rest."""

    def update(gradient, state, params=None):
        trace = jax.tree.map(lambda g, v: g + decay * v, gradient, state.trace)
        return jax.tree.map(lambda v: -0.1 * v, trace), optax.TraceState(trace)

    start = lambda params: optax.TraceState(jax.tree.map(jnp.ones_like, params))  # noqa: E731
    return optax.GradientTransformation(start, update)


COPIES = {
    "schedule-free, decay": optax.contrib.schedule_free_sgd(0.5, weight_decay=0.1),
    "drawn to its start": pulled_back(0.2),
}
WRAPPED = {
    "accumulated": optax.MultiSteps(optax.sgd(0.3, 0.5), 3).gradient_transformation(),
    "accumulated, finite": optax.MultiSteps(
        optax.sgd(0.3), 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    "injected": optax.inject_hyperparams(optax.sgd)(
        optax.cosine_decay_schedule(0.3, 12), momentum=0.5
    ),
    "rate in float64": optax.sgd(np.float64(0.3), np.float64(0.5)),
}


def relinearized(optimizer, dtype, **options):
    w, x, y = (array.astype(dtype) for array in (W, X, Y))
    return relinearized_recursion(
        linear, w, x, y, loss="squared_error", optimizer=optimizer, steps=12,
        rebuilds=(4, 12), kernel_fn=lambda w: empirical_ntk(linear, w, x), **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", COPIES)
def test_a_state_that_begins_as_the_weights_is_carried_along(name):
    """On a linear model both the recursion and the re-linearised one are training itself."""
    want = oracles.train_network(linear, W, X, Y, "squared_error", COPIES[name], 12)
    path = relinearized(COPIES[name], jnp.float64)
    np.testing.assert_allclose(path.train, want, atol=1e-12)  # rounding of float64
    plain = recursion(
        empirical_ntk(linear, W, X), linear(W, X), Y, loss="squared_error", steps=12,
        optimizer=COPIES[name], initial_tangent=linear(W, X),
    )  # fmt: skip
    np.testing.assert_allclose(plain.train, want, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("accumulated, finite", "float64"),
        ("injected", "float64"),
        ("rate in float64", "float64"),
        ("accumulated", "float32"),
    ],
)
def test_states_keep_their_dtypes(name, dtype):
    """Accumulated gradients are float32 in any case, what a rate in float64 touches is not."""
    want = oracles.train_network(linear, W, X, Y, "squared_error", WRAPPED[name], 12)
    path = relinearized(WRAPPED[name], dtype)
    assert path.train.dtype == dtype
    np.testing.assert_allclose(path.train, want, atol=2e-6)  # rounding of float32


def test_starts_as_multiples_of_the_weights():
    assert start_fractions(optax.sgd(0.1)) == ()
    assert start_fractions(optax.sgd(0.1, 0.9)) == (0.0,)
    assert start_fractions(WRAPPED["accumulated"]) == (0.0, 0.0)
    assert start_fractions(COPIES["schedule-free, decay"]) == (1.0,)


@pytest.mark.parametrize(
    "optimizer", [begun_at_one(0.0), optax.flatten(optax.sgd(0.1, 0.9))], ids=["one", "flat"]
)
def test_states_that_cannot_be_followed_are_refused_by_name(optimizer):
    with pytest.raises(ValueError, match=r"optimizer keeps a state that cannot be followed"):
        relinearized(optimizer, jnp.float64)
