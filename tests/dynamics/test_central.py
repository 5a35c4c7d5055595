"""The central path at the edge of stability, against brute force."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp.dynamics import _central, relinearized_recursion
from jaxttp.dynamics.stability import curvature_modes
from jaxttp.losses import encode_targets
from jaxttp.ntk import empirical_ntk
from tests.dynamics import test_edge

X = jax.random.normal(jax.random.key(1), (6, 3))
LABELS = jnp.arange(6) % 3


def network(w, x):
    return jnp.tanh(x @ w["in"]) @ w["out"]


def weights(seed=0):
    one, two = jax.random.split(jax.random.key(seed))
    return {"in": jax.random.normal(one, (3, 5)), "out": 2 * jax.random.normal(two, (5, 3))}


def all_subsets(gram, excess):
    """The one xi >= 0 with gram xi >= excess and xi = 0 or equality in every place."""
    k = len(excess)
    for active in itertools.product((False, True), repeat=k):
        on = np.array(active)
        xi = np.zeros(k)
        if on.any():
            xi[on] = np.linalg.solve(gram[np.ix_(on, on)], excess[on])
        if (xi >= -1e-12).all() and (gram @ xi - excess >= -1e-12).all():
            return xi
    raise AssertionError("a positive definite Gram matrix has one")


@pytest.mark.parametrize("seed", range(8))
def test_the_least_that_holds_back(seed):
    rng = np.random.default_rng(seed)
    k = 1 + seed % 4
    root = rng.normal(size=(k, 7))
    gram, excess = root @ root.T, rng.normal(size=k)
    found = _central.least(jnp.asarray(gram), jnp.asarray(excess))
    # Sixteen sweeps of Gauss and Seidel over at most four modes in seven dimensions.
    np.testing.assert_allclose(found, all_subsets(gram, excess), atol=2e-2)
    assert np.all(np.asarray(found) >= 0)


def test_a_step_below_the_edge_is_left_alone():
    guard = _central.Guard(jnp.array([1.0, 0.5]), jnp.array(2.0), jnp.zeros(2))
    xi, after = _central.hold_back(guard, guard.curvatures, jnp.array([0.1, -0.2]), jnp.eye(2))
    np.testing.assert_array_equal(xi, 0.0)
    np.testing.assert_allclose(after, [1.1, 0.3])


def test_what_is_beyond_comes_back_by_a_share():
    guard = _central.Guard(jnp.array([3.0]), jnp.array(2.0), jnp.zeros(1))
    xi, after = _central.hold_back(guard, guard.curvatures, jnp.array([0.5]), 4 * jnp.eye(1))
    assert float(after[0]) == pytest.approx(3.0 - _central.BACK)
    assert float(xi[0]) == pytest.approx((0.5 + _central.BACK) / 4)


def test_modes_are_matched_by_their_order():
    guard = _central.Guard(jnp.array([1.0, 3.0]), jnp.array(2.0), jnp.zeros(2))
    found = guard.corrected(jnp.array([1.5, 2.5]), jnp.array([2.75, 1.0, 0.1]))
    np.testing.assert_allclose(found.missed, [-0.5, 0.25])


@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])
def test_gradients_of_the_curvature(loss):
    """Against differences of the largest eigenvalue, off the mode itself."""
    w = weights()
    f = network(w, X)
    y = LABELS if loss == "cross_entropy" else jax.random.normal(jax.random.key(3), f.shape)
    targets, loss = encode_targets(loss, y, f)

    def steepest(w):
        f = network(w, X)
        values, left, _ = curvature_modes(empirical_ntk(network, w, X), f, targets, loss)
        return values[:2], left[:, :2].T.reshape(2, *f.shape)

    values, left = steepest(w)
    found = _central.steepening(network, loss)(w, X, targets, left, values)
    flat, unflatten = jax.flatten_util.ravel_pytree(w)
    _, pull = jax.vjp(lambda w: network(w, X), w)
    modes = [jax.flatten_util.ravel_pytree(pull(each)[0])[0] for each in left]
    for i, each in enumerate(found):
        gradient = np.asarray(jax.flatten_util.ravel_pytree(each)[0])
        for seed in range(3):
            way = np.asarray(jax.random.normal(jax.random.key(seed), flat.shape))
            basis = np.linalg.qr(np.stack([np.asarray(m) for m in modes], 1))[0]
            way = way - basis @ (basis.T @ way)
            ahead, behind = (
                float(steepest(unflatten(flat + step * way))[0][i]) for step in (1e-4, -1e-4)
            )
            # Differences of second order: (1e-4)^2, over the gap of the eigenvalues.
            assert gradient @ way == pytest.approx((ahead - behind) / 2e-4, rel=1e-4, abs=1e-6)
        np.testing.assert_allclose(basis.T @ gradient, 0.0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("momentum", "over"), [(0.0, 0.01), (0.9, 0.1)])
def test_a_kernel_at_every_step_keeps_the_curvature_at_the_edge(momentum, over):
    """The network of `test_edge`, whose curvature is known; velocities push beyond for a while."""
    rate, steps = test_edge.RATE * (1 + momentum), 60
    path = relinearized_recursion(
        test_edge.product, test_edge.PARAMS, test_edge.X, test_edge.Y, loss="squared_error",
        optimizer=optax.sgd(rate, momentum or None), steps=steps, kernel_fn=test_edge.kernel_of,
        rebuilds="auto", tolerance=1e-9, max_rebuilds=2 * steps,
    )  # fmt: skip
    v = np.asarray(path.train[:, 1, 0]) / 0.3
    curvature = (v**2 + (np.asarray(path.train[:, 0, 0]) / v) ** 2) / 2
    edge = 2 / test_edge.RATE
    assert path.edge_at > 0
    assert path.held_from == -1
    assert curvature.max() < (1 + over) * edge
    assert curvature[-10:].mean() == pytest.approx(edge, rel=0.03)


@pytest.mark.parametrize("over", [2.0, 3.0])
def test_modes_held_back_in_a_try_are_in_the_next_one_to_the_horizon(over):
    """Nine steps, the budget ends at once: the path that was foreseen before knew no such modes."""
    draw = np.random.default_rng(6)
    w = {"in": draw.normal(size=(4, 12)) / 2, "out": draw.normal(size=(12, 3)) / 12**0.5}
    w, x = jax.tree.map(jnp.asarray, w), jnp.asarray(draw.normal(size=(8, 4)))
    labels = draw.integers(0, 3, 8)

    def relu(w, x):
        return jax.nn.relu(x @ w["in"]) @ w["out"]

    def kernel(w):
        return empirical_ntk(relu, w, x)

    steepest = np.linalg.eigvalsh(np.asarray(kernel(w)).reshape(24, 24))[-1] / 8
    path = relinearized_recursion(
        relu, w, x, labels, loss="cross_entropy", optimizer=optax.sgd(over * 3.8 / steepest, 0.9),
        steps=10, kernel_fn=kernel, rebuilds="auto", max_rebuilds=3,
    )  # fmt: skip
    assert path.ends == (1, 10)
    assert path.rejected == 1
    assert np.all(np.isfinite(path.train))
    assert path.loss[-1] < 0.1 * path.loss[0]  # as real training does at both rates
