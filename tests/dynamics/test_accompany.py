"""Mini-batches beside the mean path, with rebuilds="auto"."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxttp
from jaxttp.dynamics import _accompany, batch_indices, recursion
from jaxttp.dynamics._pieces import estimate
from tests import oracles
from tests.dynamics import test_edge
from tests.dynamics.test_relinearize import OPTIMIZERS, cross_fn, forecast, truth
from tests.dynamics.test_relinearize_adaptive import loss_curve

BATCHES = {"batch_size": 3, "protocol": "independent"}


def linear(problem):
    return problem._replace(apply_fn=lambda w, s: s @ w, params=jnp.zeros((4, 3)))


def drawn(key, steps):
    return np.asarray(batch_indices(key, 7, 3, steps, protocol="independent"))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_linear_network_takes_the_very_steps_of_its_batches(problem, key, name):
    """Whatever the segments: the kernel stays, and velocities cross from one to the next."""
    simple, options = linear(problem), {"key": key, **BATCHES}
    path = forecast(simple, OPTIMIZERS[name], 20, rebuilds="auto", **options)
    want = oracles.train_network(
        simple.apply_fn, simple.params, simple.x, simple.targets, "cross_entropy",
        OPTIMIZERS[name], 20, indices=drawn(key, 20),
    )  # fmt: skip
    np.testing.assert_allclose(path.train, want, atol=1e-10)  # float64 rounding


@pytest.mark.slow
def test_batches_of_everything_go_the_mean_path(problem, key):
    """All samples in another order, up to the defects that sweeps leave.

    They start from others, and stop where a defect moves the loss by a thousandth of its drop.
    """
    optimizer = OPTIMIZERS["momentum"]
    mean = forecast(problem, optimizer, 60, rebuilds="auto")
    path = forecast(problem, optimizer, 60, rebuilds="auto", batch_size=7, key=key)
    assert (path.ends, path.kernels) == (mean.ends, mean.kernels)
    drop = float(mean.loss[0] - mean.loss[-1])
    np.testing.assert_allclose(path.loss, mean.loss, atol=2e-3 * drop)


@pytest.mark.slow
def test_the_very_batches_of_a_real_training(problem, key):
    """Closer by far than one kernel, with the mean path's kernels and no more."""
    optimizer, steps = OPTIMIZERS["momentum"], 60
    path = forecast(problem, optimizer, steps, rebuilds="auto", key=key, **BATCHES)
    mean = forecast(problem, optimizer, steps, rebuilds="auto")
    assert (path.ends, path.kernels) == (mean.ends, mean.kernels)
    assert path.gradient_evaluations > mean.gradient_evaluations
    want = loss_curve(
        problem,
        oracles.train_network(
            problem.apply_fn, problem.params, problem.x, problem.targets, "cross_entropy",
            optimizer, steps, indices=drawn(key, steps),
        ),
    )  # fmt: skip
    one = recursion(
        oracles.kernel(problem.apply_fn, problem.params, problem.x), problem.f0, problem.labels,
        loss="cross_entropy", optimizer=optimizer, steps=steps, key=key,
        **BATCHES,
    )  # fmt: skip
    drop = want[0] - want[-1]
    error = np.abs(np.asarray(path.loss) - want).max() / drop
    assert error < 0.25 * np.abs(loss_curve(problem, one.train) - want).max() / drop
    assert error < 0.05
    assert np.all(np.asarray(path.loss_uncertainty) >= 0)


@pytest.mark.slow
def test_test_samples_follow_the_batches(problem, key):
    """Training samples given as test samples are the path itself."""
    path = forecast(
        problem, OPTIMIZERS["momentum"], 40, rebuilds="auto", key=key, x_test=problem.x,
        kernel_test_fn=cross_fn(problem, problem.x), **BATCHES,
    )  # fmt: skip
    np.testing.assert_allclose(path.test, path.train, atol=1e-10)


@pytest.mark.slow
def test_at_the_edge_a_kernel_is_held_for_batches(key):
    """Where noise is followed nothing holds modes back: a kernel does, for both paths."""
    path = test_edge.forecast(rebuilds="auto", batch_size=2, key=key)
    assert path.held_from >= 0
    assert path.edge_at > 0
    real = jaxttp.train(
        test_edge.product, test_edge.PARAMS, test_edge.X, test_edge.Y, loss="squared_error",
        optimizer=optax.sgd(test_edge.RATE), steps=test_edge.STEPS,
    ).loss  # fmt: skip
    # Both samples are a batch. Its oscillation has hardly begun at the horizon.
    assert float(jnp.mean(jnp.abs(path.loss - real))) < 0.01 * float(real[0] - real[-1])


@pytest.mark.slow
def test_where_the_mean_path_ends_the_batches_end(problem, key):
    calls = []

    def kernel_fn(params):
        calls.append(0)
        kernel = jnp.asarray(oracles.kernel(problem.apply_fn, problem.params, problem.x))
        return kernel if len(calls) < 3 else jnp.full_like(kernel, jnp.nan)

    path = test_edge.relinearized_recursion(
        problem.apply_fn, problem.params, problem.x, problem.labels, loss="cross_entropy",
        optimizer=optax.sgd(0.05), steps=30, kernel_fn=kernel_fn, rebuilds="auto", key=key,
        **BATCHES,
    )  # fmt: skip
    last = path.ends[-2]
    assert int(path.diverged_at) == last + 1
    assert np.all(np.asarray(path.train[last:]) == np.asarray(path.train[last]))


def test_a_doubt_fades_with_the_loss():
    """It stays its share of a falling loss, and does not grow where the loss rises again."""
    curve = jnp.array([8.0, 4.0, 2.0, 1.0, 3.0])
    before = curve.at[1].add(0.4)  # 10 % of the loss there
    _, found, local = estimate(curve, before, jnp.array([False, True, False, False, True]))
    np.testing.assert_allclose(found, [0.0, 0.4, 0.2, 0.1, 0.1], rtol=1e-12)
    np.testing.assert_allclose(local[:2], [0.08, 0.0], atol=1e-12)  # of a drop of 5


def test_real_training_is_the_oracle(problem):
    """The truth of these tests goes where gradient descent on all samples goes."""
    every = np.tile(np.arange(7), (5, 1))
    args = (problem.apply_fn, problem.params, problem.x, problem.targets, "cross_entropy")
    want = truth(problem, OPTIMIZERS["momentum"], 5)
    found = oracles.train_network(*args, OPTIMIZERS["momentum"], 5, indices=every)
    np.testing.assert_allclose(found, want, atol=1e-12)


@pytest.mark.slow
def test_batches_that_cannot_be_followed_go_on_at_their_pace(monkeypatch):
    """They are left before the second segment: later outputs are the mean path's of before."""
    answers = iter([False, True])
    monkeypatch.setattr(_accompany, "_rises", lambda *_: next(answers))
    beside = {"x_test": test_edge.X, "kernel_test_fn": test_edge.kernel_of}
    drawn = {"batch_size": 1, "protocol": "replacement", "key": jax.random.key(2)}
    path = test_edge.forecast(rate=0.05, rebuilds="auto", **drawn, **beside)
    mean = test_edge.forecast(rate=0.05, rebuilds="auto")
    where, loss = path.left_at, np.asarray(mean.loss)
    assert (where, path.ends) == (4, mean.ends)
    np.testing.assert_allclose(path.test, path.train, atol=1e-10)
    # Their loss of step 4 the mean path, which falls, had at step 2.1; then they come half a step.
    reached = np.interp(-float(path.loss[where]), -loss, np.arange(len(loss)))
    assert where * 0.5 < reached < where * 0.6
    ts = reached + 0.5 * np.arange(1, len(loss) - where)
    for sample in range(2):
        want = np.interp(ts, np.arange(len(loss)), mean.train[:, sample, 0])
        np.testing.assert_allclose(path.train[where + 1 :, sample, 0], want, atol=1e-10)
    assert float(path.loss_uncertainty[8]) > 0
    assert np.all(np.isfinite(path.loss_uncertainty))
