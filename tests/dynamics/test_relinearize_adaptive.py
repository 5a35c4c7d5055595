import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp.dynamics._placement import REJECT
from jaxttp.dynamics.relinearize import relinearized_recursion
from tests import oracles
from tests.dynamics.test_relinearize import truth

OPTIMIZERS = {"sgd": optax.sgd(0.1), "momentum": optax.sgd(0.01, 0.9)}


def forecast(problem, optimizer, steps, kernel_fn=None, **options):
    def exact(params):
        flat = jax.jacrev(problem.apply_fn)(params, problem.x)
        parts = [leaf.reshape(7, 3, -1) for leaf in jax.tree.leaves(flat)]
        return sum(jnp.einsum("iap,jbp->iajb", part, part) for part in parts)

    return relinearized_recursion(
        problem.apply_fn, problem.params, problem.x, problem.labels, loss="cross_entropy",
        optimizer=optimizer, steps=steps, kernel_fn=jax.jit(kernel_fn or exact), **options,
    )  # fmt: skip


def loss_curve(problem, path):
    f = np.asarray(path)
    top = f.max(axis=2)
    logsum = top + np.log(np.exp(f - top[..., None]).sum(axis=2))
    return (logsum - (f * problem.targets).sum(axis=2)).mean(axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_smaller_tolerance_costs_more_and_errs_less(problem, name):
    want = loss_curve(problem, truth(problem, OPTIMIZERS[name], 60))
    drop = want[0] - want[-1]
    errors, kernels = [], []
    for tolerance in (0.2, 0.01):
        path = forecast(
            problem, OPTIMIZERS[name], 60, rebuilds="auto", tolerance=tolerance, max_rebuilds=40
        )
        errors.append(np.abs(np.asarray(path.loss) - want).max() / drop)
        kernels.append(path.kernels)
        longer = np.diff((0, *path.ends)) > 1  # a single step cannot be divided
        # held against the drop so far predicted, which the final one may fall short of
        assert np.all(np.asarray(path.local_errors)[longer] < 1.5 * REJECT * tolerance)
        # the estimate, of first order, covers the error of the corrected curve
        assert errors[-1] <= 3 * float(path.loss_uncertainty.max()) / drop
    assert kernels[1] > kernels[0]
    assert errors[1] < 0.5 * errors[0]
    assert errors[1] < 0.01


@pytest.mark.slow
def test_rejected_segments_are_counted(problem):
    path = forecast(
        problem, OPTIMIZERS["sgd"], 60, rebuilds="auto", tolerance=1e-3, max_rebuilds=40
    )
    assert path.rejected > 0
    assert path.kernels == 1 + len(path.ends) + path.rejected
    assert len(path.kernel_seconds) == path.kernels
    assert path.ends[-1] == 60


@pytest.mark.slow
def test_a_rejected_segment_comes_back_shorter(problem):
    """One step may cover more of the path than asked for: the same end must not be tried again."""
    path = forecast(problem, optax.sgd(2.0), 60, rebuilds="auto", tolerance=1e-3, max_rebuilds=12)
    assert path.ends[0] <= 2
    assert path.rejected < 9


@pytest.mark.slow
def test_the_budget_is_kept(problem):
    path = forecast(problem, OPTIMIZERS["sgd"], 60, rebuilds="auto", tolerance=1e-6, max_rebuilds=3)
    assert path.kernels == 4
    assert path.ends[-1] == 60


@pytest.mark.slow
def test_a_linear_network_takes_few_long_segments(problem):
    """Its kernel does not move: the estimate is zero, and segments grow as fast as they may."""
    linear = problem._replace(apply_fn=lambda w, x: x @ w, params=jnp.zeros((4, 3)))
    kernel = jnp.asarray(oracles.kernel(linear.apply_fn, linear.params, linear.x))
    path = forecast(linear, OPTIMIZERS["sgd"], 100, lambda _: kernel, rebuilds="auto")
    assert len(path.ends) <= 4
    assert float(path.loss_uncertainty.max()) < 1e-10
    np.testing.assert_allclose(path.train, truth(linear, OPTIMIZERS["sgd"], 100), atol=1e-9)


def test_fixed_rebuilds_divide_the_path_and_leave_no_jump(problem):
    path = forecast(problem, OPTIMIZERS["sgd"], 60, rebuilds=4)
    assert path.ends[-1] == 60
    assert all(a < b for a, b in itertools.pairwise((0, *path.ends)))
    assert path.kernels == 5
    steps = np.abs(np.diff(np.asarray(path.loss)))
    assert steps[-1] < 2 * steps[-2] + 1e-6  # the last outputs are the network's, like those before


@pytest.mark.slow
def test_a_class_sketched_kernel_is_welcome(problem):
    """(N, N) stands for K ⊗ I_C; the same numbers as with the whole array."""

    def scalar(params):
        flat = jax.jacrev(problem.apply_fn)(params, problem.x)
        parts = [leaf.reshape(7, 3, -1) for leaf in jax.tree.leaves(flat)]
        return sum(jnp.einsum("iap,jap->ij", part, part) for part in parts) / 3

    whole = lambda w: jnp.einsum("ij,ab->iajb", scalar(w), jnp.eye(3))  # noqa: E731
    paths = [
        forecast(problem, OPTIMIZERS["momentum"], 20, fn, rebuilds=2) for fn in (scalar, whole)
    ]
    assert paths[0].ends == paths[1].ends
    np.testing.assert_allclose(paths[0].train, paths[1].train, atol=1e-10)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rebuilds": "all"}, "rebuilds"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"ends": (10,)}, "ends"),
        ({"max_rebuilds": 0}, "max_rebuilds"),
    ],
)
def test_bad_input_names_the_argument(problem, change, words):
    with pytest.raises(ValueError, match=words):
        forecast(problem, optax.sgd(0.1), 10, **({"rebuilds": "auto"} | change))
