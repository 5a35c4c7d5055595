import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from jaxttp.dynamics import closed_form
from tests import oracles

TS = np.array([0.0, 0.5, 3.0, 40.0, 1000.0])


@pytest.mark.slow
def test_train_is_the_matrix_exponential(problem):
    n, c = problem.f0.shape
    theta = problem.kernel.reshape(n * c, n * c)
    path = closed_form(problem.kernel, problem.f0, problem.labels, learning_rate=0.1, ts=TS)
    for t, f in zip(TS, path.train, strict=True):
        decay = scipy.linalg.expm(-0.1 / n * theta * t)
        want = problem.targets.reshape(-1) + decay @ (problem.f0 - problem.targets).reshape(-1)
        # expm and eigh both round at about 1e-13 here; the issue asks for 1e-8
        np.testing.assert_allclose(f.reshape(-1), want, atol=1e-10)


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


def test_works_under_jit_and_vmap(problem, strict_dtypes):
    def last(rate):
        path = closed_form(
            problem.kernel, problem.f0, problem.labels, learning_rate=rate, ts=jnp.array([10.0])
        )
        return path.train[-1]

    rates = jnp.array([0.05, 0.2])
    together = jax.jit(jax.vmap(last))(rates)
    for rate, got in zip(rates, together, strict=True):
        np.testing.assert_allclose(got, last(rate), atol=1e-12)


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
        ({"loss": "hinge"}, "loss"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"ts": np.array([1.0, 0.5])}, "ts"),
        ({"ts": np.array([-1.0, 0.5])}, "ts"),
        ({"ts": np.array([])}, "ts"),
        ({"ts": np.array([0.0, np.inf])}, "ts"),
        ({"kernel": np.eye(4)}, "kernel"),
        ({"f0": np.zeros(7)}, "f0"),
        ({"f0": np.full((7, 3), np.nan)}, "f0"),
        ({"y": np.zeros(6, int)}, "y"),
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
