"""Scores of checkpoints against brute force: densities of Gaussians, sums over loops, sorting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st

from jaxttp.representation import leep, logme, neighbor_accuracy

SHAPES = {"tall": (30, 5), "wide": (12, 40), "square": (15, 15)}


def task(shape, seed=0, signal=1.0):
    rng = np.random.default_rng(seed)
    y = np.arange(shape[0]) % 3
    centres = rng.standard_normal((3, shape[1]))
    return rng.standard_normal(shape) + signal * centres[y], y


def largest_evidence(z, target):
    """By the density of N(0, I/beta + F F^T/alpha), maximised over both from several starts."""
    n = len(z)

    def lost(logs):
        alpha, beta = np.exp(np.clip(logs, -60, 60))
        covariance = np.eye(n) / beta + z @ z.T / alpha
        sign, size = np.linalg.slogdet(covariance)
        fit = target @ np.linalg.solve(covariance, target)
        return 0.5 * (n * np.log(2 * np.pi) + size + fit) if sign > 0 else np.inf

    starts = [(a, b) for a in (-3.0, 3.0, 9.0) for b in (0.0, 4.0)]
    options = {"xatol": 1e-7, "fatol": 1e-9, "maxiter": 4000}
    return -min(
        scipy.optimize.minimize(lost, start, method="Nelder-Mead", options=options).fun
        for start in starts
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("signal", [0.0, 1.0])
def test_logme_is_the_largest_evidence(shape, signal):
    z, y = task(SHAPES[shape], signal=signal)
    by_class = [largest_evidence(z, (y == label).astype(float)) / len(y) for label in range(3)]
    # Where features say nothing the evidence is flat towards alpha = infinity.
    np.testing.assert_allclose(logme(z, y), np.mean(by_class), rtol=1e-5)


def test_logme_of_targets():
    z, _ = task((30, 5))
    target = z @ np.arange(5.0) + np.random.default_rng(1).standard_normal(30)
    np.testing.assert_allclose(logme(z, target), largest_evidence(z, target) / 30, rtol=1e-6)
    both = np.stack([target, -target], axis=1)
    np.testing.assert_allclose(logme(z, both), logme(z, target), rtol=1e-12)


@given(st.integers(0, 1000), st.sampled_from([(30, 5), (12, 40)]))
def test_logme_does_not_change_with_rotation_scale_order_and_names(seed, shape):
    z, y = task(shape, seed)
    rng = np.random.default_rng(seed)
    rotation = np.linalg.qr(rng.standard_normal((shape[1], shape[1])))[0]
    order, names = rng.permutation(len(y)), rng.permutation(3) * 7
    # A golden section knows the place of a maximum to 1e-8 only, its height to rounding.
    np.testing.assert_allclose(
        logme((3.0 * z @ rotation)[order], names[y][order]), logme(z, y), rtol=1e-9
    )


def test_logme_of_an_exact_fit_is_large_and_finite():
    z, y = np.eye(3)[np.arange(30) % 3], np.arange(30) % 3
    score = float(logme(z, y))
    assert np.isfinite(score)
    assert score > float(logme(z + 0.01 * np.random.default_rng(0).standard_normal(z.shape), y)) > 0


def test_logme_under_jit_and_in_float32():
    z, y = task((30, 5))
    np.testing.assert_allclose(jax.jit(lambda z: logme(z, y))(z), logme(z, y), rtol=1e-12)
    assert logme(jnp.asarray(z, jnp.float32), y).dtype == np.float64


@pytest.mark.parametrize("seed", range(3))
def test_leep_by_loops(seed):
    rng = np.random.default_rng(seed)
    theta, y = rng.dirichlet(np.ones(4), 20), rng.integers(0, 3, 20)
    total = 0.0
    for i in range(20):
        inside = 0.0
        for old in range(4):
            same = sum(theta[j, old] for j in range(20) if y[j] == y[i])
            inside += same / sum(theta[j, old] for j in range(20)) * theta[i, old]
        total += np.log(inside) / 20
    np.testing.assert_allclose(leep(theta, y), total, rtol=1e-12)


def test_leep_between_nothing_and_everything():
    y = np.arange(12) % 3
    np.testing.assert_allclose(leep(np.eye(3)[y], y), 0.0, atol=1e-12)
    constant = np.tile([[0.2, 0.8, 0.0]], (12, 1))  # an old class that never comes
    np.testing.assert_allclose(leep(constant, y), -np.log(3), rtol=1e-12)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("classes", [3, 1000])
def test_leep_takes_probabilities_of_every_precision(dtype, classes):
    """A softmax in bfloat16 has rows that sum to 1 to a percent; by cast of a float32 one, too."""
    rng = np.random.default_rng(classes)
    logits, y = jnp.asarray(rng.normal(size=(200, classes)), jnp.float32), np.arange(200) % 3
    wide = leep(jax.nn.softmax(logits), y)
    for theta in (jax.nn.softmax(logits).astype(dtype), jax.nn.softmax(logits.astype(dtype))):
        np.testing.assert_allclose(leep(theta, y), wide, atol=0.02)
    with pytest.raises(ValueError, match="rows that sum to 1"):
        leep((0.9 * jax.nn.softmax(logits)).astype(dtype), y)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("neighbors", [1, 4])
def test_neighbours_by_sorting(metric, neighbors):
    z, y = task((30, 5), signal=0.7)
    right = 0
    for i in range(30):
        if metric == "cosine":
            far = 1 - z @ z[i] / np.linalg.norm(z, axis=1) / np.linalg.norm(z[i])
        else:
            far = np.linalg.norm(z - z[i], axis=1)
        near = [j for j in np.argsort(far) if j != i][:neighbors]
        right += np.bincount(y[near], minlength=3).argmax() == y[i]
    assert neighbor_accuracy(z, y, neighbors=neighbors, metric=metric) == right / 30


def test_better_features_score_higher():
    scores = [
        (float(logme(z, y)), neighbor_accuracy(z, y)) for z, y in
        (task((90, 8), signal=signal) for signal in (0.0, 0.5, 2.0))
    ]  # fmt: skip
    assert scores == sorted(scores)


Z, Y = task((9, 4))
BAD = {
    "labels of another length": (logme, (Z, Y[:5]), {}, r"y must be integer labels \(9,\)"),
    "one label": (logme, (Z, 0 * Y), {}, "y must hold at least two different labels"),
    "no features": (logme, (0 * Z, Y), {}, "features must not all be zero"),
    "a zero target": (logme, (Z, np.zeros(9)), {}, "y must not have a target that is all zero"),
    "targets of another length": (logme, (Z, np.ones((4, 2))), {}, r"y must be targets \(9,\)"),
    "NaN": (logme, (np.nan * Z, Y), {}, "features holds 36 value"),
    "logits": (leep, (Z, Y), {}, "take jax.nn.softmax of logits"),
    "floats": (leep, (np.full((9, 2), 0.5), Y + 0.5), {}, "y must be integer labels"),
    "too many": (neighbor_accuracy, (Z, Y), {"neighbors": 9}, "neighbors"),
    "a metric": (neighbor_accuracy, (Z, Y), {"metric": "dot"}, "metric"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(name):
    score, given_, options, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        score(*given_, **options)


def test_what_is_traced_is_refused_by_name():
    with pytest.raises(ValueError, match="y"):
        jax.jit(lambda y: logme(Z, y))(Y)
    with pytest.raises(ValueError, match="features"):
        jax.jit(lambda z: neighbor_accuracy(z, Y))(Z)
