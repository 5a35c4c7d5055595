import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp.dynamics.stability import max_learning_rate, rate_limit
from tests import oracles


def brute_force(problem, name):
    n, c = problem.f0.shape
    hessian = np.zeros((n * c, n * c))
    for i in range(n):
        p = oracles.softmax(problem.f0)[i]
        block = np.eye(c) if name == "squared_error" else np.diag(p) - np.outer(p, p)
        hessian[i * c : (i + 1) * c, i * c : (i + 1) * c] = block
    theta = problem.kernel.reshape(n * c, n * c)
    return np.linalg.eigvals(theta @ hessian).real.max() / n


@pytest.mark.parametrize("name", ["squared_error", "cross_entropy"])
def test_curvature_equals_brute_force(problem, name):
    limit = max_learning_rate(problem.kernel, problem.f0, problem.labels, loss=name)
    assert 2 / float(limit) == pytest.approx(brute_force(problem, name), rel=1e-9)  # rounding


def test_zero_kernel_has_the_largest_float_as_limit():
    limit = max_learning_rate(
        np.zeros((2, 1, 2, 1)), np.zeros((2, 1)), np.ones((2, 1)), loss="squared_error"
    )
    assert float(limit) == np.finfo(np.float64).max


def test_momentum_out_of_range(problem):
    with pytest.raises(ValueError, match="momentum"):
        max_learning_rate(
            problem.kernel, problem.f0, problem.labels, loss="squared_error", momentum=1.0
        )


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_a_parabola_is_descended_below_the_limit_and_left_above_it(momentum, nesterov):
    """By steps in plain Python, one curvature."""
    curvature = jnp.asarray([3.0])
    limit = float(rate_limit(curvature, momentum, nesterov))
    for fraction, falls in ((0.99, True), (1.01, False)):
        at, velocity = 1.0, 0.0
        for _ in range(2000):
            slope = 3.0 * at
            velocity = momentum * velocity + slope
            at -= fraction * limit * (slope + momentum * velocity if nesterov else velocity)
        assert (abs(at) < 1e-3) is falls
