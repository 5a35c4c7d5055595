"""Kernels beyond the edge of stability: what is damped, and what the forecast makes of it.

The network gives a v for one sample and 0.3 v for another. The first is learned within a few steps;
the second slowly draws v up to 2, and with it the curvature (v^2 + a^2)/2 of the first from 0.5 to
2.03, beyond the edge of 2/eta = 1.67. There real training oscillates, which holds v back; a
linearised network diverges.
"""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxttp
from jaxttp.dynamics import recursion, relinearized_recursion
from jaxttp.dynamics.relinearize.edge import damping
from jaxttp.losses import cross_entropy
from jaxttp.ntk import empirical_ntk
from tests import oracles

X, Y = jnp.asarray(np.eye(2)), jnp.array([[0.5], [0.6]])
PARAMS = {"a": jnp.array(0.1), "v": jnp.array(1.0)}
RATE, STEPS = 1.2, 120


def product(w, x):
    return w["v"] * (w["a"] * x[:, :1] + 0.3 * x[:, 1:])


def kernel_of(w):
    return empirical_ntk(product, w, X)


def forecast(rate=RATE, kernel_fn=kernel_of, **options):
    return relinearized_recursion(
        product, PARAMS, X, Y, loss="squared_error", optimizer=optax.sgd(rate), steps=STEPS,
        kernel_fn=kernel_fn, **{"rebuilds": 3} | options,
    )  # fmt: skip


def plain(rate=RATE):
    return recursion(
        kernel_of(PARAMS), product(PARAMS, X), Y, loss="squared_error", optimizer=optax.sgd(rate),
        steps=STEPS,
    )  # fmt: skip


def test_modes_beyond_the_edge_are_slowed_and_no_others(problem):
    n, c = problem.f0.shape
    p = oracles.softmax(problem.f0)
    hessian = np.zeros((n * c, n * c))
    for i in range(n):
        block = slice(i * c, (i + 1) * c)
        hessian[block, block] = np.diag(p[i]) - np.outer(p[i], p[i])
    theta = np.asarray(problem.kernel).reshape(n * c, n * c) / n
    values = np.sort(np.linalg.eigvals(theta @ hessian).real)[::-1]
    edge = 0.5 * (values[1] + values[2])  # two modes are beyond
    problem = [jnp.asarray(each) for each in (problem.kernel, problem.f0, problem.targets)]
    found, sharpness = damping(*problem, cross_entropy, edge, 0.5)
    assert sharpness == pytest.approx(values[0] / edge, rel=1e-9)
    damped = np.eye(n * c) - np.asarray(found.left @ found.right.T)
    fold = found.fold(problem[0], (n, c))
    np.testing.assert_allclose(fold, n * theta @ found.left, atol=1e-9)
    assert damping(*problem, cross_entropy, 1.01 * values[0], 0.5)[0] is None
    slowed = np.sort(np.linalg.eigvals(theta @ damped @ hessian).real)[::-1]
    want = np.sort(np.concatenate([[0.5 * edge] * 2, values[2:]]))[::-1]
    np.testing.assert_allclose(slowed, want, atol=1e-9 * values[0])


@pytest.mark.slow
@pytest.mark.parametrize("rebuilds", [3, "auto"])
def test_the_mean_path_stays_where_the_network_does(rebuilds):
    real = jaxttp.train(
        product, PARAMS, X, Y, loss="squared_error", optimizer=optax.sgd(RATE), steps=STEPS
    ).loss
    beside = {"x_test": X, "kernel_test_fn": lambda w: kernel_of(w)} if rebuilds == 3 else {}
    found = forecast(rebuilds=rebuilds, **beside)
    if beside:  # the training samples themselves, held where those are
        np.testing.assert_allclose(found.test, found.train, rtol=1e-9, atol=1e-12)
    # The oscillation has hardly begun at the horizon: the mean path is the real one to 1 %.
    assert float(jnp.mean(jnp.abs(found.loss - real))) < 0.01 * float(real[0] - real[-1])
    assert float(found.loss[-1]) < 0.05 * float(found.loss[0])
    assert found.edge_at > 0
    assert found.ends[-1] == STEPS


@pytest.mark.slow
def test_without_damping_a_kernel_beyond_the_edge_diverges():
    found = forecast(damp=False)
    assert found.edge_at == found.frozen_from == -1
    assert float(found.loss[-1]) > 1e3 * float(found.loss[0])


@pytest.mark.slow
def test_a_rate_that_is_too_large_from_the_start_still_diverges():
    paths = forecast(rate=5.0), forecast(rate=5.0, damp=False)
    np.testing.assert_array_equal(*(path.loss for path in paths))
    assert float(paths[0].loss[-1]) > 10 * float(paths[0].loss[0])


def test_a_kernel_that_is_not_finite_keeps_the_last_outputs():
    built = []

    def broken(w):
        built.append(w)
        return kernel_of(w) * (1.0 if len(built) == 1 else jnp.nan)

    path = forecast(rate=0.02, kernel_fn=broken, rebuilds=2)
    assert (path.ends, int(path.diverged_at)) == ((STEPS,), 1)
    np.testing.assert_array_equal(path.train, np.broadcast_to(path.train[0], path.train.shape))


def test_a_forecast_says_that_it_holds_a_kernel():
    found = jaxttp.predict_training_time(
        product, PARAMS, X, Y, loss="squared_error", learning_rate=RATE, steps=STEPS, relinearize=3
    )
    assert found.stable
    assert found.warnings is not None
    assert "at the edge of stability by step" in found.warnings


@pytest.mark.parametrize(("rate", "fraction"), [(1.0, 0.05), (3.0, 0.3)])
def test_beyond_the_edge_a_linear_network_is_its_kernel(rate, fraction):
    """Softmax regression that leaves wrong answers, sharper on the way than at its start.

    Its curvature there is up to 2.25, the edge 2/eta; held back or damped it went astray.
    """
    x, y = 3 * jnp.eye(2), jnp.array([[1 - fraction, fraction], [0.5, 0.5]])
    w = jnp.array([[1.5, -1.5], [-1.5, 1.5]])
    path = relinearized_recursion(
        lambda w, x: x @ w, w, x, y, loss="cross_entropy", optimizer=optax.sgd(rate), steps=30,
        kernel_fn=lambda w: empirical_ntk(lambda w, x: x @ w, w, x), rebuilds="auto",
    )  # fmt: skip
    now = np.asarray(w)
    for found in np.asarray(path.train):
        outputs = np.asarray(x) @ now
        np.testing.assert_allclose(found, outputs, atol=1e-11)  # rounding
        odds = np.exp(outputs)
        off = odds / odds.sum(1, keepdims=True) - np.asarray(y)
        now = now - rate * np.asarray(x).T @ off / 2
    assert path.frozen_from == -1
