import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import dynamics
from jaxttp.dynamics import diagonal_noise, recursion
from jaxttp.dynamics.diffusion import increments, noise_factor, protocol_scale
from tests import oracles


def diffusion(problem, key, **options):
    options = {
        "key": key, "loss": "cross_entropy", "learning_rate": 0.1, "batch_size": 2, "steps": 8,
        "protocol": "replacement",
    } | options  # fmt: skip
    return dynamics.diffusion(problem.kernel, problem.f0, problem.labels, **options)


def covariance(problem):
    """J, and Sigma of single-sample gradients, from the whole Jacobian."""
    j = oracles.jacobian(problem.apply_fn, problem.params, problem.x)
    g = oracles.gradient("cross_entropy", problem.f0, problem.targets)
    single = np.einsum("ncd,nc->nd", j, g)
    centred = single - single.mean(axis=0)
    return j.reshape(21, -1), centred.T @ centred / 7, single


def test_factor_is_exact(problem):
    j, sigma, _ = covariance(problem)
    force = oracles.gradient("cross_entropy", problem.f0, problem.targets)
    s = noise_factor(jnp.asarray(problem.kernel), jnp.asarray(force))
    s = np.asarray(s).reshape(21, 7)
    np.testing.assert_allclose(s @ s.T, j @ sigma @ j.T, atol=1e-10)  # float64 rounding


def test_diagonal_noise_is_the_papers(problem):
    j, sigma, _ = covariance(problem)
    got = diagonal_noise(
        problem.apply_fn, problem.params, problem.x, problem.labels, loss="cross_entropy"
    )
    want = j @ np.diag(np.diag(sigma)) @ j.T
    np.testing.assert_allclose(np.asarray(got).reshape(21, 21), want, atol=1e-10)
    both = diagonal_noise(
        problem.apply_fn, problem.params, problem.x, problem.labels, loss="cross_entropy",
        x_test=problem.x_test,
    )  # fmt: skip
    assert both.shape == (10, 3, 10, 3)
    np.testing.assert_allclose(both[:7, :, :7], got, atol=1e-12)


def test_one_step_has_the_covariance_of_a_batch(problem, key):
    """A solver that shares one Brownian motion between components would give rank one."""
    j, sigma, _ = covariance(problem)
    path = diffusion(problem, key, steps=1, paths=4000)
    moved = np.asarray(path.train[:, 1]).reshape(4000, 21) - problem.f0.reshape(21)
    g = oracles.gradient("cross_entropy", problem.f0, problem.targets)
    mean = -0.1 / 7 * problem.kernel.reshape(21, 21) @ g.reshape(21)
    want = 0.1**2 / 2 * j @ sigma @ j.T
    scale = np.sqrt(np.diag(want))
    # 4000 draws: standard errors 1.6 % of the standard deviation, 2.2 % of a variance
    np.testing.assert_allclose((moved.mean(axis=0) - mean) / scale, 0, atol=0.08)
    got = np.cov(moved.T) / np.outer(scale, scale)
    np.testing.assert_allclose(got, want / np.outer(scale, scale), atol=0.1)
    assert np.linalg.matrix_rank(moved - moved.mean(axis=0), tol=1e-8) == 6  # N - 1


@pytest.mark.slow
def test_epochs_cancel_like_shuffled_batches(key):
    """Variance (1/B)(N-B)/(N-1) of a batch mean and covariance -1/(N-1) within an epoch."""
    for n, b, kappa in ((6, 2, 1.0), (7, 2, 1 - np.sqrt(1 / 7))):
        draw = increments(key, 8000, 6, 3, kappa, "float64")
        steps = np.asarray(jax.lax.map(draw, jnp.arange(6.0)))
        got = np.cov(steps) * protocol_scale("epochs", n, b) ** 2 / b
        want = np.full((6, 6), -1 / (n - 1))
        np.fill_diagonal(want, (n - b) / (b * (n - 1)))
        want[:3, 3:] = want[3:, :3] = 0.0
        np.testing.assert_allclose(got, want, atol=0.03)  # 8000 draws: 1.6 % of the variance


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["replacement", "independent", "epochs"])
def test_spread_of_the_loss_is_that_of_exact_mini_batch_runs(problem, key, protocol):
    common = {"loss": "cross_entropy", "batch_size": 2, "steps": 12, "protocol": protocol}
    run = lambda k: recursion(  # noqa: E731
        problem.kernel, problem.f0, problem.labels, optimizer=optax.sgd(0.02), key=k, **common
    ).train  # fmt: skip
    real = jax.jit(jax.vmap(run))(jax.random.split(key, 1000))
    forecast = diffusion(problem, key, paths=1000, learning_rate=0.02, **common)
    std = [np.std(np.asarray(p)[:, 1:], axis=0) for p in (real, forecast.train)]
    ratio = np.sqrt((std[1][3:] ** 2).sum(axis=(1, 2)) / (std[0][3:] ** 2).sum(axis=(1, 2)))
    # 1000 draws: 2 % each; the SDE draws Gaussian noise and linearises within an epoch. At the end
    # of an epoch of 3 batches most of the noise cancels, and what is left is of second order.
    middle = ratio if protocol != "epochs" else ratio[np.arange(4, 13) % 3 != 0]
    assert np.all((middle > 0.85) & (middle < 1.18)), ratio


@pytest.mark.slow
def test_diagonal_starts_as_constant_and_shrinks(problem, key):
    noise_kernel = diagonal_noise(
        problem.apply_fn, problem.params, problem.x, problem.labels, loss="cross_entropy"
    )
    options = {"noise_kernel": noise_kernel, "paths": 20, "steps": 40, "learning_rate": 0.3}
    paths = [diffusion(problem, key, noise=n, **options) for n in ("diagonal", "constant")]
    np.testing.assert_allclose(paths[0].train[:, 1], paths[1].train[:, 1], atol=1e-10)
    late = [np.std(np.diff(np.asarray(p.train[:, -10:]), axis=1)) for p in paths]
    assert late[0] < 0.5 * late[1]


def test_diagonal_without_weights_keeps_the_variance_along_eigenvectors(problem, key):
    """Theta's eigenvectors see the variances of the full noise; between them nothing is kept."""
    j, sigma, _ = covariance(problem)
    path = diffusion(problem, key, noise="diagonal", steps=1, paths=3000)
    moved = np.asarray(path.train[:, 1]).reshape(3000, 21)
    _, vectors = np.linalg.eigh(problem.kernel.reshape(21, 21))
    along = moved @ vectors
    want = 0.1**2 / 2 * np.diag(vectors.T @ j @ sigma @ j.T @ vectors)
    np.testing.assert_allclose(along.var(axis=0), want, rtol=0.12)  # 2.6 % each
    assert np.abs(np.corrcoef(along.T) - np.eye(21)).max() < 0.08


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["full", "diagonal", "constant"])
def test_test_samples_that_are_the_training_samples(problem, key, noise):
    path = diffusion(
        problem, key, noise=noise, kernel_test=problem.kernel, f0_test=problem.f0, paths=2
    )
    np.testing.assert_allclose(path.test, path.train, atol=1e-6)  # Theta's inverse in "diagonal"


@pytest.mark.slow
def test_momentum_is_the_effective_rate(problem, key):
    heavy = diffusion(problem, key, learning_rate=0.05, momentum=0.5)
    plain = diffusion(problem, key, learning_rate=0.1)
    np.testing.assert_allclose(heavy.train, plain.train, atol=1e-12)


@pytest.mark.slow
def test_scalar_kernels_curves_and_print(problem, key):
    scalar = np.einsum("icjc->ij", problem.kernel) / 3
    whole = np.einsum("ij,ab->iajb", scalar, np.eye(3))
    options = {"paths": 3, "save": "curves", "steps": 5}
    a = diffusion(problem._replace(kernel=scalar), key, **options)
    b = diffusion(problem._replace(kernel=whole), key, **options)
    np.testing.assert_allclose(a.loss, b.loss, atol=1e-12)
    assert a.train is None
    assert a.bands((0.5,)).shape == (1, 6)
    assert re.search(r"Diffusion\n.*  loss +float64\[3, 6\] from .*  noise +full\n", repr(a), re.S)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"noise": "loud"}, "noise"),
        ({"key": None}, "key"),
        ({"protocol": "none"}, "protocol"),
        ({"batch_size": 8}, "batch_size"),
        ({"steps": 0}, "steps"),
        ({"momentum": 1.0}, "momentum"),
        ({"noise": "diagonal", "noise_kernel": np.eye(7)}, "noise_kernel"),
        ({"paths": 0}, "paths"),
        ({"save": "all"}, "save"),
    ],
)
def test_bad_input_names_the_argument(problem, key, change, words):
    with pytest.raises(ValueError, match=words):
        diffusion(problem, **{"key": key} | change)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "loss"),
    [("full", "cross_entropy"), ("full", "squared_error"), ("constant", "squared_error")],
)
def test_divergence_is_held_never_nan(problem, key, noise, loss):
    y = problem.targets if loss == "squared_error" else problem.labels
    path = dynamics.diffusion(
        problem.kernel, problem.f0, y, loss=loss, learning_rate=1e12, batch_size=2, steps=20,
        key=key, noise=noise, paths=2,
    )  # fmt: skip
    assert bool(jnp.all(jnp.isfinite(path.train)))
    assert bool(jnp.all(jnp.isfinite(path.loss)))
    if loss == "squared_error":  # the softmax saturates before its outputs leave the numbers
        assert bool(jnp.all(path.diverged_at > 0))


def test_scales_are_those_of_all_batches():
    """The variance of a mean of B of N numbers, over every subset."""
    values, b = np.array([1.0, 2.0, 4.0, 8.0, 16.0]), 2
    means = [np.mean(each) for each in itertools.combinations(values, b)]
    wanted = np.var(means) / (np.var(values) / b)
    assert protocol_scale("independent", len(values), b) ** 2 == pytest.approx(wanted, rel=1e-12)
    assert protocol_scale("replacement", len(values), b) == 1.0
    assert protocol_scale("epochs", 5, b) ** 2 == pytest.approx(5 / 4)
