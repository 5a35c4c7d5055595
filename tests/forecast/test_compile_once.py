"""A forecast that differs from the last one in its numbers alone compiles nothing.

Counted by JAX's own events, for every dynamics, for re-linearised paths with as many kernels, and
for sweeps: rates, momenta, seeds, noise and thresholds are data, not code.
"""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import predict_training_time, sweep
from jaxttp.forecast import grid
from tests import shortcuts
from tests.compiled import compilations
from tests.draws import normal

X = normal(0, (9, 3))
Y = np.asarray(X[:, 0] > 0).astype(int)
W = normal(1, (3, 2), 1 / 2)


@pytest.fixture(scope="module", autouse=True)
def room_for_programs():
    """Programs are dropped where a process holds too many (`bound_programs`): not in between."""
    shortcuts.forget()  # which hold them, too
    jax.clear_caches()
    gc.collect()


def network(w, x):
    return jnp.tanh(x @ w)


def injected(rate):
    return optax.inject_hyperparams(optax.sgd)(learning_rate=rate, momentum=0.5)


def by_keys(seed, **options):
    return {"key": jax.random.key(seed), "batch_size": 3, **options}


PAIRS = {
    "recursion": ({"learning_rate": 0.5}, {"learning_rate": 0.7, "momentum": 0.6}),
    "flow": (
        {"learning_rate": 0.5, "dynamics": "ode"},
        {"learning_rate": 0.7, "momentum": 0.6, "dynamics": "ode"},
    ),
    "batches": (
        by_keys(1, learning_rate=0.5, momentum=0.1), by_keys(2, learning_rate=0.3, momentum=0.2)
    ),
    "noisy": (
        by_keys(1, learning_rate=0.5, dynamics="sde", paths=3),
        by_keys(2, learning_rate=0.3, momentum=0.2, dynamics="sde", paths=3),
    ),
    "rebuilt": (
        {"learning_rate": 0.5, "relinearize": 2}, {"learning_rate": 0.7, "relinearize": 2}
    ),
    "sketched": (
        {"learning_rate": 0.5, "sketch_dim": 16, "key": jax.random.key(3)},
        {"learning_rate": 0.7, "sketch_dim": 16, "key": jax.random.key(4)},
    ),
    "injected": ({"optimizer": injected(0.5)}, {"optimizer": injected(0.7)}),
    "weight space": (
        {"learning_rate": 0.5, "dynamics": "weight_space"},
        {"learning_rate": 0.7, "momentum": 0.2, "dynamics": "weight_space"},
    ),
    "closed form": (
        {"learning_rate": 0.1, "dynamics": "closed_form", "loss": "squared_error"},
        {"learning_rate": 0.2, "dynamics": "closed_form", "loss": "squared_error"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_the_second_forecast_compiles_nothing(name):
    first, second = ({"relinearize": 0} | options for options in PAIRS[name])
    one = predict_training_time(network, W, X, Y, steps=7, **first)
    with compilations() as seen:  # of the same code, made anew as in a notebook's cell
        other = predict_training_time(lambda w, x: network(w, x), W, X, Y, steps=7, **second)
    assert not np.array_equal(one.loss, other.loss)  # the numbers did arrive
    assert len(seen) == 0


def test_the_second_sweep_compiles_nothing():
    def some(rates):
        return grid(learning_rate=rates, momentum=(0.0, 0.9), steps=7)

    sweep(network, W, X, Y, some((0.1, 0.5)), relinearize=0)
    with compilations() as seen:
        sweep(network, W, X, Y, some((0.2, 0.3)), thresholds=(0.2, 0.5, 0.6), relinearize=0)
    assert len(seen) == 0


@pytest.mark.parametrize(("relinearize", "most"), [(0, 16), ("auto", 25)])
def test_the_first_forecast_compiles_few_programs(relinearize, most):
    """README's first example, in a process that has compiled nothing of it."""
    jax.clear_caches()
    params = {"w": normal(1, (3, 8)), "v": jnp.zeros((8, 2))}
    with compilations() as seen:
        predict_training_time(
            lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"], params, X, Y, relinearize=relinearize,
            learning_rate=0.5, momentum=0.9, steps=7,
        )  # fmt: skip
    assert len(seen) <= most
