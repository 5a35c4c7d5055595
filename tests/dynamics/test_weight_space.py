import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp.dynamics import batch_indices, recursion
from jaxttp.dynamics.weight_space import weight_space
from tests import oracles

ADAPTIVE = {
    "adam": optax.adam(0.02),
    "adamw": optax.adamw(0.02, weight_decay=0.1),
    "lion": optax.lion(0.003),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5, 0.9)),
}


def simulate(problem, optimizer, steps=25, **options):
    return weight_space(
        problem.apply_fn, problem.params, problem.x, problem.labels, loss="cross_entropy",
        optimizer=optimizer, steps=steps, **options,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTIVE)
def test_equals_training_with_an_explicit_jacobian(problem, name):
    path = simulate(problem, ADAPTIVE[name], x_test=problem.x_test)
    train, test = oracles.train_linearised(
        problem.apply_fn, problem.params, problem.x, problem.targets, "cross_entropy",
        ADAPTIVE[name], 25, x_test=problem.x_test,
    )  # fmt: skip
    # float64 rounding; Adam and Lion magnify it where a gradient is near zero
    np.testing.assert_allclose(path.train, train, atol=1e-8)
    np.testing.assert_allclose(path.test, test, atol=1e-8)
    assert not path.linear
    assert "1 %" in path.warnings


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", [optax.sgd(0.1, 0.9), optax.chain(optax.add_decayed_weights(0.02), optax.sgd(0.1))]
)
def test_linear_optimisers_agree_with_the_recursion(problem, optimizer, key):
    options = {"batch_size": 3, "key": key, "protocol": "independent"}
    path = simulate(problem, optimizer, **options)
    push = jax.jvp(lambda w: problem.apply_fn(w, problem.x), (problem.params,), (problem.params,))
    want = recursion(
        problem.kernel, problem.f0, problem.labels, loss="cross_entropy", optimizer=optimizer,
        steps=25, initial_tangent=push[1], **options,
    )  # fmt: skip
    np.testing.assert_allclose(path.train, want.train, atol=1e-9)


@pytest.mark.slow
def test_mini_batches_of_adam_use_the_same_indices(problem, key):
    path = simulate(problem, ADAPTIVE["adam"], batch_size=2, key=key)
    want = oracles.train_linearised(
        problem.apply_fn, problem.params, problem.x, problem.targets, "cross_entropy",
        ADAPTIVE["adam"], 25, batches=batch_indices(key, 7, 2, 25),
    )  # fmt: skip
    np.testing.assert_allclose(path.train, want, atol=1e-8)


@pytest.mark.slow
def test_a_linear_network_confirms_everything(problem):
    linear = problem._replace(apply_fn=lambda w, x: x @ w, params=jnp.zeros((4, 3)))
    path = simulate(linear, ADAPTIVE["adam"])
    assert float(path.mismatch) < 1e-12
    assert path.warnings is None
    assert float(simulate(problem, ADAPTIVE["adam"]).mismatch) > 0.01


def test_gradient_descent_is_doubted_where_the_network_does_not_confirm_it(problem):
    path = simulate(problem, optax.sgd(0.5), steps=8)
    assert path.linear
    missed = f"{100 * float(path.mismatch):.2g} % of their predicted change"
    assert missed in path.warnings
    assert "Adam" not in path.warnings


def test_optimisers_that_need_more_than_gradients_are_refused(problem):
    for optimizer, why in ((optax.lbfgs(), "value_fn"), (optax.polyak_sgd(1.0), "value")):
        with pytest.raises(ValueError, match=f"optimizer cannot step .*{why}"):
            simulate(problem, optimizer)


def test_divergence_is_held(problem):
    path = simulate(problem, optax.sgd(1e200), steps=6)
    assert bool(jnp.all(jnp.isfinite(path.train)))
    assert int(path.diverged_at) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [({"steps": 0}, "steps"), ({"batch_size": 3}, "key"), ({"batch_size": 9}, "batch_size")],
)
def test_bad_input_names_the_argument(problem, change, words):
    with pytest.raises(ValueError, match=words):
        simulate(problem, ADAPTIVE["adam"], **change)
