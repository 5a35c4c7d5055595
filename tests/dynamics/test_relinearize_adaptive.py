import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp.dynamics.relinearize import relinearized_recursion
from jaxttp.dynamics.relinearize.controller import CONTROLS, Controller
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
def test_a_smaller_tolerance_costs_more_and_errs_less(problem):
    optimizer = OPTIMIZERS["momentum"]
    want = loss_curve(problem, truth(problem, optimizer, 60))
    drop = want[0] - want[-1]
    errors, kernels = [], []
    for tolerance in (0.2, 0.01):
        path = forecast(
            problem, optimizer, 60, rebuilds="auto", tolerance=tolerance, max_rebuilds=40
        )
        errors.append(np.abs(np.asarray(path.loss) - want).max() / drop)
        kernels.append(path.kernels)
        longer = np.diff((0, *path.ends)) > 1  # a single step cannot be divided
        # held against the drop so far predicted, which the final one may fall short of
        assert np.all(np.asarray(path.local_errors)[longer] < 1.5 * CONTROLS.reject * tolerance)
        # the estimate, of first order, covers the error of the corrected curve
        assert errors[-1] <= 3 * float(path.loss_uncertainty.max()) / drop
    assert kernels[1] > kernels[0]
    assert errors[1] < 0.5 * errors[0]
    assert errors[1] < 0.01


@pytest.mark.slow
def test_rejected_segments_are_counted_and_the_budget_is_kept(problem):
    path = forecast(
        problem, OPTIMIZERS["sgd"], 60, rebuilds="auto", tolerance=1e-3, max_rebuilds=40
    )
    assert path.rejected > 0
    assert path.kernels == 1 + len(path.ends) + path.rejected
    short = forecast(
        problem, OPTIMIZERS["sgd"], 60, rebuilds="auto", tolerance=1e-6, max_rebuilds=3
    )
    assert short.kernels == 4
    assert path.ends[-1] == short.ends[-1] == 60


@pytest.mark.slow
def test_a_rejected_segment_comes_back_shorter(problem):
    """One step may cover more of the path than asked for: the same end must not be tried again."""
    path = forecast(problem, optax.sgd(2.0), 60, rebuilds="auto", tolerance=1e-3, max_rebuilds=12)
    assert path.ends[0] <= 2
    assert path.rejected < 9


def test_fixed_rebuilds_divide_the_path_and_leave_no_jump(problem):
    path = forecast(problem, OPTIMIZERS["sgd"], 60, rebuilds=4)
    assert path.ends[-1] == 60
    assert all(a < b for a, b in itertools.pairwise((0, *path.ends)))
    assert path.kernels == 5
    steps = np.abs(np.diff(np.asarray(path.loss)))
    assert steps[-1] < 2 * steps[-2] + 1e-6  # the last outputs are the network's, like those before


PATH = np.linspace(0.0, 1.0, 11)


@pytest.mark.parametrize(("rebuilds", "steps"), [(3, 10), (5, 5), (9, 4), (1, 7)])
def test_a_given_number_of_segments_is_early_and_dense(rebuilds, steps):
    controller, path = Controller.of(rebuilds, steps, 0.02, 16), np.linspace(0, 1, steps + 1)
    ends, start = [], 0
    while start < steps:
        rest = np.maximum(path - path[start], 0.0)
        proposal = controller.propose(start, 1 + len(ends), rest)
        assert proposal.limit == np.inf
        controller, start = controller.learn(proposal, 1.0, is_taken=True), proposal.end
        ends.append(start)
    assert len(ends) == min(rebuilds, steps)
    lengths = np.diff([0, *ends])
    assert np.all(lengths[:-1] <= lengths[1:])


def test_segments_by_error_shrink_with_it():
    controller = Controller(10, 8, 0.02)
    first = controller.propose(0, 1, PATH)
    assert first.limit == np.inf  # one step cannot be divided
    quick = controller.learn(first, 0.0, is_taken=True)
    assert quick.length == pytest.approx(CONTROLS.grow * 0.1)  # as fast as it may
    second = quick.propose(1, 2, np.maximum(PATH - 0.1, 0))
    assert (second.end, second.limit) == (5, CONTROLS.reject * 0.02)
    again = quick.learn(second, 1.0, is_taken=False)
    assert again.propose(1, 3, np.maximum(PATH - 0.1, 0)).end < 5
    assert again.propose(1, 8, np.maximum(PATH - 0.1, 0)).end == 10  # the last kernel


def test_kernels_are_as_many_as_their_products_allow():
    controller = Controller(100, 16, 0.02, products=(60.0, 2.0))
    start, kernels, products, path = 0, 1, 1, np.linspace(0.0, 1.0, 101)
    while start < 100:
        rest = np.maximum(path - path[start], 0.0)
        proposal = controller.propose(start, kernels, rest, products)
        controller = controller.learn(proposal, 0.02, is_taken=True)
        start, kernels, products = proposal.end, kernels + 1, products + 6
    assert kernels == 8  # 8 x 2 + 1 + 7 x 6 = 59


def test_the_last_kernel_reaches_the_horizon_whatever_its_error():
    """Also where the rest of the path is longer, by a rounding, than the least that is asked for.

    Such a segment was rejected and proposed again, for ever.
    """
    for seed in range(100):
        path = np.cumsum(np.random.default_rng(seed).exponential(size=25))
        start = seed % 22
        rest = np.maximum(path - path[start], 0.0)
        found = Controller(24, 16, 0.02).propose(start, 16, rest)
        assert (found.end, found.limit) == (24, np.inf)
