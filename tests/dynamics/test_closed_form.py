import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxttp
from jaxttp.dynamics import closed_form
from tests import oracles

TS = np.array([0.0, 0.5, 3.0, 40.0, 1000.0])


def test_train_and_test_outputs_equal_scipy(problem):
    ts = np.linspace(0, 60, 7)
    path = closed_form(
        problem.kernel, problem.f0, problem.labels, learning_rate=0.2, ts=ts,
        kernel_test=problem.kernel_test, f0_test=problem.f0_test,
    )  # fmt: skip
    train, test = oracles.integrate(
        problem.kernel, problem.f0, problem.targets, "squared_error", 0.2, ts,
        problem.kernel_test, problem.f0_test,
    )  # fmt: skip
    np.testing.assert_allclose(path.train, train, atol=1e-8)  # LSODA ran at rtol 1e-11
    np.testing.assert_allclose(path.test, test, atol=1e-8)


def test_singular_kernel_needs_no_inverse(problem):
    """Directions outside the range stay where they are; test outputs stay finite."""
    kernel = np.zeros((2, 1, 2, 1))
    kernel[0, 0, 0, 0] = 1.0
    cross = np.ones((1, 1, 2, 1)) * np.array([1.0, 0.0])[None, None, :, None]
    path = closed_form(
        kernel, np.array([[0.0], [5.0]]), np.array([[1.0], [0.0]]), learning_rate=2.0,
        ts=np.array([1e6]), kernel_test=cross, f0_test=np.zeros((1, 1)),
    )  # fmt: skip
    np.testing.assert_allclose(path.train[0], [[1.0], [5.0]], atol=1e-12)
    np.testing.assert_allclose(path.test[0], [[1.0]], atol=1e-12)


@pytest.mark.parametrize("is_scalar", [False, True])
def test_the_limit_is_the_minimum_of_the_loss_that_is_nearest(problem, is_scalar):
    """f0 + Theta Theta^+ (y - f0), with pinv of NumPy; of a kernel of rank 3, which loses most."""
    half = np.random.default_rng(0).standard_normal((7 if is_scalar else 21, 3))
    cross = np.random.default_rng(1).standard_normal((2 if is_scalar else 6, 3)) @ half.T
    kernel = half @ half.T
    whole, across = (np.kron(k, np.eye(3)) if is_scalar else k for k in (kernel, cross))
    dual = np.linalg.pinv(whole, rcond=1e-9) @ (problem.targets - problem.f0).reshape(-1)
    f0_test = np.ones((2, 3))
    if not is_scalar:
        kernel, cross = kernel.reshape(7, 3, 7, 3), cross.reshape(2, 3, 7, 3)
    options = {"ts": [0.0, 2.0, np.inf], "kernel_test": cross, "f0_test": f0_test}
    path = closed_form(kernel, problem.f0, problem.labels, learning_rate=0.1, **options)
    # eigh and pinv of numbers of order 10 in float64
    np.testing.assert_allclose(path.train[2], problem.f0 + (whole @ dual).reshape(7, 3), atol=1e-10)
    np.testing.assert_allclose(path.test[2], f0_test + (across @ dual).reshape(2, 3), atol=1e-10)
    np.testing.assert_allclose(path.train[0], problem.f0, atol=1e-12)
    long = closed_form(
        kernel, problem.f0, problem.labels, learning_rate=0.1, **options | {"ts": 1e8}
    )
    np.testing.assert_allclose(long.test[0], path.test[2], atol=1e-5)  # t amplifies rounding


def test_the_limit_under_jit_and_its_derivative(problem):
    def last(ts):
        path = closed_form(problem.kernel, problem.f0, problem.labels, learning_rate=0.1, ts=ts)
        return path.train[-1]

    np.testing.assert_allclose(jax.jit(last)(jnp.inf), problem.targets, atol=1e-9)

    def limit(f0):
        options = {"kernel_test": problem.kernel_test, "f0_test": problem.f0_test}
        path = closed_form(
            problem.kernel, f0, problem.labels, learning_rate=0.1, ts=jnp.inf, **options
        )
        return jnp.sum(path.test)

    assert bool(jnp.all(jnp.isfinite(jax.grad(limit)(jnp.asarray(problem.f0)))))


def test_weights_have_a_limit(problem):
    """A sample of weight 0 moves with the others: f0 + Theta_a Theta_aa^-1 (y - f0)_a."""
    mask = np.array([1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    path = closed_form(
        problem.kernel, problem.f0, jaxttp.weighted(problem.targets, mask=mask), learning_rate=0.1,
        ts=jnp.inf,
    )  # fmt: skip
    kept = np.flatnonzero(np.repeat(mask, 3))
    theta = problem.kernel.reshape(21, 21)
    residual = (problem.targets - problem.f0).reshape(-1)[kept]
    moved = theta[:, kept] @ np.linalg.solve(theta[np.ix_(kept, kept)], residual)
    np.testing.assert_allclose(
        path.train[0], problem.f0 + moved.reshape(7, 3), atol=1e-8
    )  # the kernel's condition number is about 1e3


def test_time_of_a_loss_that_is_a_mean_over_outputs_is_c_times_as_long():
    """neural-tangents' loss is half the mean over all N C outputs: t there is C t here.

    Weights of a linear network are moved by that loss's own gradient, in steps of 1e-3.
    """
    rng, c = np.random.default_rng(0), 3
    x, y, w = (rng.standard_normal(shape) for shape in ((5, 4), (5, c), (4, c)))
    start, t, rate, small = x @ w, 6.0, 0.7, 1e-3
    for _ in range(int(t / small)):
        w -= small * rate * x.T @ (x @ w - y) / y.size  # d/dw of mean((f - y)^2) / 2
    path = closed_form(x @ x.T, start, y, learning_rate=rate, ts=t / c)
    np.testing.assert_allclose(path.train[0], x @ w, atol=2e-3)  # Euler's steps of 1e-3
    assert np.max(np.abs(path.train[0] - start)) > 0.3


def test_scalar_kernel_is_the_kronecker_product(problem):
    scalar = np.asarray(problem.kernel[:, 0, :, 0])
    cross = np.asarray(problem.kernel_test[:, 0, :, 0])
    full = np.einsum("nm,cd->ncmd", scalar, np.eye(3))
    full_cross = np.einsum("nm,cd->ncmd", cross, np.eye(3))
    common = {"learning_rate": 0.1, "ts": TS, "f0_test": problem.f0_test}
    a = closed_form(scalar, problem.f0, problem.labels, kernel_test=cross, **common)
    b = closed_form(full, problem.f0, problem.labels, kernel_test=full_cross, **common)
    # t = 1000 with eigenvalues of order 10: the exponent's rounding is about 1e-12
    np.testing.assert_allclose(a.train, b.train, atol=1e-10)
    np.testing.assert_allclose(a.test, b.test, atol=1e-9)


def test_indefinite_kernel_is_refused():
    with pytest.raises(RuntimeError, match="positive semi-definite"):
        closed_form(
            np.diag([1.0, -1.0]).reshape(2, 1, 2, 1), np.zeros((2, 1)), np.ones((2, 1)),
            learning_rate=0.1, ts=np.array([1.0]),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss": "cross_entropy"}, "loss"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"ts": np.array([1.0, 0.5])}, "ts"),
        ({"ts": np.array([0.0, np.nan])}, "ts"),
        ({"ts": -np.inf}, "ts"),
        ({"kernel": np.eye(4)}, "kernel"),
        ({"f0": np.full((7, 3), np.nan)}, "f0"),
        ({"y": np.full(7, 3)}, "y"),
        ({"f0_test": np.zeros((3, 3))}, "kernel_test"),
        ({"f0_test": np.zeros((3, 2)), "kernel_test": np.zeros((3, 3, 7, 3))}, "f0_test"),
    ],
)
def test_bad_input_names_the_argument(problem, change, words):
    options = {
        "kernel": problem.kernel, "f0": problem.f0, "y": np.asarray(problem.labels),
        "learning_rate": 0.1, "ts": TS,
    } | change  # fmt: skip
    with pytest.raises(ValueError, match=words):
        closed_form(options.pop("kernel"), options.pop("f0"), options.pop("y"), **options)
