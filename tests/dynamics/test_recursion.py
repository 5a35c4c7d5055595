import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp.dynamics import batch_indices, recursion
from tests import oracles

COSINE = optax.warmup_cosine_decay_schedule(0.0, 0.3, 5, 30)
CHAINS = {
    "sgd": optax.sgd(0.3),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "warm-up, cosine, momentum": optax.sgd(COSINE, momentum=0.8),
    "ema": optax.chain(optax.ema(0.9), optax.scale(-0.3)),
    "injected": optax.inject_hyperparams(optax.sgd)(learning_rate=0.2, momentum=0.5),
    "accumulated": optax.MultiSteps(optax.sgd(0.3), 3).gradient_transformation(),
}
DECAYS = {
    "decay, sgd": optax.chain(optax.add_decayed_weights(0.05), optax.sgd(0.3)),
    "decay, momentum": optax.chain(optax.add_decayed_weights(0.02), optax.sgd(0.1, 0.9)),
    "decoupled": optax.chain(optax.trace(0.9), optax.add_decayed_weights(0.05), optax.scale(-0.1)),
}


def tangents(problem):
    def push(x):
        f = lambda w: problem.apply_fn(w, x)  # noqa: E731
        return jax.jvp(f, (problem.params,), (problem.params,))[1]

    return {
        "initial_tangent": push(problem.x),
        "initial_tangent_test": push(problem.x_test),
    }


# The loss and the optimiser meet in the gradient alone: a few of each kind with the other loss.
@pytest.mark.parametrize(
    ("name", "loss"),
    [
        *((name, "cross_entropy") for name in (*CHAINS, *DECAYS)),
        *((name, "squared_error") for name in ("sgd", "decoupled")),
    ],
)
def test_equals_weight_space_training_of_the_linearised_network(problem, name, loss):
    optimizer = (CHAINS | DECAYS)[name]
    path = recursion(
        problem.kernel, problem.f0, problem.labels, loss=loss, optimizer=optimizer, steps=30,
        kernel_test=problem.kernel_test, f0_test=problem.f0_test,
        **(tangents(problem) if name in DECAYS else {}),
    )  # fmt: skip
    train, test = oracles.train_linearised(
        problem.apply_fn, problem.params, problem.x, problem.targets, loss, optimizer, 30,
        x_test=problem.x_test,
    )  # fmt: skip
    # float64: the same up to rounding; MultiSteps itself averages in float32
    atol = 1e-6 if name == "accumulated" else 1e-9
    np.testing.assert_allclose(path.train, train, atol=atol)
    np.testing.assert_allclose(path.test, test, atol=atol)
    assert int(path.diverged_at) == -1


@pytest.mark.parametrize(
    ("protocol", "name"),
    [
        ("epochs", "momentum"), ("independent", "decay, momentum"),
        ("replacement", "decay, momentum"),
    ],
)  # fmt: skip
def test_mini_batches_with_the_same_indices(problem, protocol, name, key):
    optimizer = (CHAINS | DECAYS)[name]
    path = recursion(
        problem.kernel, problem.f0, problem.labels, loss="cross_entropy", optimizer=optimizer,
        steps=25, batch_size=3, key=key, protocol=protocol, **tangents(problem),
    )  # fmt: skip
    want = oracles.train_linearised(
        problem.apply_fn, problem.params, problem.x, problem.targets, "cross_entropy", optimizer,
        25, batches=batch_indices(key, 7, 3, 25, protocol=protocol),
    )  # fmt: skip
    np.testing.assert_allclose(path.train, want, atol=1e-9)


def test_scalar_kernel_is_the_kronecker_product(problem):
    scalar = problem.kernel[:, 0, :, 0]
    full = np.einsum("nm,cd->ncmd", scalar, np.eye(3))
    common = {"loss": "cross_entropy", "optimizer": optax.sgd(0.1), "steps": 10}
    a = recursion(scalar, problem.f0, problem.labels, **common)
    b = recursion(full, problem.f0, problem.labels, **common)
    np.testing.assert_allclose(a.train, b.train, atol=1e-12)


def test_divergence_is_held_and_reported_never_nan(problem):
    common = {"loss": "squared_error", "optimizer": optax.sgd(1e4), "steps": 200}
    path = recursion(problem.kernel, problem.f0, problem.labels, **common)
    at = int(path.diverged_at)
    assert 0 < at < 200
    assert bool(jnp.all(jnp.isfinite(path.train)))
    np.testing.assert_array_equal(path.train[at], path.train[at - 1])
    np.testing.assert_array_equal(path.train[-1], path.train[at])


def test_works_under_jit_and_vmap_over_hyper_parameters(problem):
    def last(rate, momentum):
        return recursion(
            problem.kernel, problem.f0, problem.labels, loss="cross_entropy",
            optimizer=optax.sgd(rate, momentum), steps=12,
        ).train[-1]  # fmt: skip

    rates, momenta = jnp.array([0.05, 0.2]), jnp.array([0.0, 0.9])
    together = jax.jit(jax.vmap(last))(rates, momenta)
    for got, rate, momentum in zip(together, rates, momenta, strict=True):
        np.testing.assert_allclose(got, last(float(rate), float(momentum)), atol=1e-12)


def test_decay_under_vmap_without_the_tangent_fails_at_run_time(problem):
    def last(decay):
        optimizer = optax.chain(optax.add_decayed_weights(decay), optax.sgd(0.1))
        return recursion(
            problem.kernel, problem.f0, problem.labels, loss="cross_entropy", optimizer=optimizer,
            steps=3,
        ).train[-1]  # fmt: skip

    with pytest.raises(Exception, match="initial_tangent"):
        jax.block_until_ready(jax.jit(last)(0.1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimizer": optax.adam(0.1)}, "optimizer"),
        ({"optimizer": DECAYS["decay, sgd"]}, "initial_tangent"),
        ({"steps": 0}, "steps"),
        ({"batch_size": 3}, "key"),
        ({"batch_size": 8, "key": jax.random.key(0)}, "batch_size"),
        ({"batch_size": 3, "key": jax.random.key(0), "protocol": "cyclic"}, "protocol"),
        ({"kernel_test": np.zeros((3, 3, 7, 3))}, "f0_test"),
        (
            {"optimizer": DECAYS["decay, sgd"], "initial_tangent": np.zeros((2, 3))},
            "initial_tangent",
        ),
    ],
)
def test_bad_input_names_the_argument(problem, change, words):
    options = {"loss": "cross_entropy", "optimizer": optax.sgd(0.1), "steps": 5} | change
    with pytest.raises(ValueError, match=words):
        recursion(problem.kernel, problem.f0, problem.labels, **options)
