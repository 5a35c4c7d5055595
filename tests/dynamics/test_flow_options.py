import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp.dynamics import flow_curves, gradient_flow
from jaxttp.losses import cross_entropy
from tests import oracles

TS = np.array([0.0, 5.0, 40.0])


def low_rank(problem, rank=5):
    square = problem.kernel.reshape(21, 21)
    values, vectors = np.linalg.eigh(square)
    return ((vectors[:, -rank:] * values[-rank:]) @ vectors[:, -rank:].T).reshape(7, 3, 7, 3)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])
def test_eigenbasis_agrees_with_the_kernel(problem, loss):
    """On a kernel of rank 5 the motion has 5 coordinates; the outputs are the same."""
    for kernel in (problem.kernel, low_rank(problem)):
        got = gradient_flow(
            kernel, problem.f0, problem.labels, loss=loss, learning_rate=0.1, ts=TS, basis="eigen"
        )
        want, _ = oracles.integrate(kernel, problem.f0, problem.targets, loss, 0.1, TS)
        np.testing.assert_allclose(got.train, want, atol=1e-6)  # the solver's tolerance


def test_eigenbasis_carries_test_outputs(problem):
    options = {
        "loss": "cross_entropy", "learning_rate": 0.1, "ts": TS,
        "kernel_test": problem.kernel_test, "f0_test": problem.f0_test,
    }  # fmt: skip
    paths = [
        gradient_flow(problem.kernel, problem.f0, problem.labels, basis=basis, **options)
        for basis in ("kernel", "eigen")
    ]
    np.testing.assert_allclose(paths[0].test, paths[1].test, atol=1e-5)


def test_curves_are_those_of_the_outputs(problem):
    curves = flow_curves(
        problem.kernel, problem.f0, problem.labels, loss="cross_entropy", learning_rate=0.1, ts=TS
    )
    want, _ = oracles.integrate(
        problem.kernel, problem.f0, problem.targets, "cross_entropy", 0.1, TS
    )
    values = [
        float(cross_entropy.value(jnp.asarray(f), jnp.asarray(problem.targets))) for f in want
    ]
    np.testing.assert_allclose(curves.loss, values, atol=1e-7)
    assert int(curves.accepted_steps) > 3


@pytest.mark.parametrize(
    ("change", "words"),
    [({"solver": "euler"}, "solver"), ({"basis": "fourier"}, "basis")],
)
def test_bad_input_names_the_argument(problem, change, words):
    options = {"loss": "cross_entropy", "learning_rate": 0.1, "ts": [1.0]} | change
    with pytest.raises(ValueError, match=words):
        flow_curves(problem.kernel, problem.f0, problem.labels, **options)
