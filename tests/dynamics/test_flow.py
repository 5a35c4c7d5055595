import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp.dynamics import closed_form, gradient_flow
from jaxttp.losses import Loss
from tests import oracles

TS = np.array([2.0, 10.0, 30.0, 100.0])


@pytest.mark.parametrize("name", ["cross_entropy", "squared_error", "binary_cross_entropy"])
def test_equals_scipy_on_train_and_test(problem, name):
    path = gradient_flow(
        problem.kernel, problem.f0, problem.targets, loss=name, learning_rate=0.2, ts=TS,
        kernel_test=problem.kernel_test, f0_test=problem.f0_test,
    )  # fmt: skip
    train, test = oracles.integrate(
        problem.kernel, problem.f0, problem.targets, name, 0.2, TS,
        problem.kernel_test, problem.f0_test,
    )  # fmt: skip
    # the default tolerances in float64 are 1e-8; the issue asks for 1e-5
    np.testing.assert_allclose(path.train, train, atol=1e-6)
    np.testing.assert_allclose(path.test, test, atol=1e-6)


def test_long_horizons_take_the_implicit_solver(problem):
    """At stiffness 1e6 an explicit solver would need a few hundred thousand steps."""
    path = gradient_flow(
        problem.kernel, problem.f0, problem.labels, loss="squared_error", learning_rate=1.0,
        ts=np.array([1e6]),
    )  # fmt: skip
    want = closed_form(
        problem.kernel, problem.f0, problem.labels, learning_rate=1.0, ts=np.array([1e6])
    )
    assert int(path.accepted_steps) < 5000
    np.testing.assert_allclose(path.train, want.train, atol=1e-6)  # solver tolerance 1e-8


def test_a_loss_of_ones_own(problem):
    def sample_loss(f, y):
        return jnp.sum(jnp.cosh(f - y))

    loss = Loss("cosh", sample_loss, lambda f, y: jnp.mean(jnp.abs(f - y)))
    path = gradient_flow(
        problem.kernel, problem.f0, problem.targets, loss=loss, learning_rate=0.01,
        ts=np.array([0.0, 50.0]),
    )  # fmt: skip
    before, after = (loss.value(f, jnp.asarray(problem.targets)) for f in path.train)
    assert after < before


def test_float32_stays_float32(problem):
    path = gradient_flow(
        problem.kernel, problem.f0.astype(np.float32), problem.labels, loss="cross_entropy",
        learning_rate=0.2, ts=TS,
    )  # fmt: skip
    assert path.train.dtype == jnp.float32
    want = oracles.integrate(problem.kernel, problem.f0, problem.targets, "cross_entropy", 0.2, TS)
    np.testing.assert_allclose(path.train, want[0], atol=1e-3)  # float32 tolerances 1e-5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss": "hinge"}, "loss"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"ts": np.array([2.0, 1.0])}, "ts"),
        ({"ts": np.inf}, "ts"),
    ],
)
def test_bad_input_names_the_argument(problem, change, words):
    options = {"loss": "cross_entropy", "learning_rate": 0.1, "ts": TS} | change
    with pytest.raises(ValueError, match=words):
        gradient_flow(problem.kernel, problem.f0, problem.labels, **options)
