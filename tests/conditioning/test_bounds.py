import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp import conditioning
from tests.conditioning import brute

# d, a_1, ..., k: wide, m < d and m < k, L = 1, narrow in the middle
FAMILIES = [(5, 8, 3), (5, 2, 3), (4, 3), (5, 9, 2, 9, 4)]


@pytest.mark.parametrize("widths", FAMILIES)
def test_the_bounds_are_never_violated(widths):
    """100 networks of each of the families; a quarter of them badly scaled."""
    rng = np.random.default_rng(sum(widths))
    weights = brute.draw(rng, widths, 100)
    for weight in weights:
        weight[::4] *= np.geomspace(1, 1e-3, weight.shape[2])
    bounds = jax.jit(jax.vmap(lambda ws: conditioning.linear_bound(ws)))(weights)
    kappa = brute.pseudo_condition(brute.gauss_newton(weights))
    # kappa itself is known to about size * eps * kappa
    slack = 1 + 1e-9 + 1e-14 * kappa
    assert np.sum(kappa > np.asarray(bounds.convex) * slack) == 0
    assert np.sum(np.asarray(bounds.convex) > np.asarray(bounds.maximum) * slack) == 0
    if len(widths) == 3 and widths[1] >= min(widths[0], widths[-1]):
        assert np.all(np.isfinite(bounds.convex))


@pytest.mark.parametrize("n", [3, 20])
def test_the_bounds_hold_with_a_covariance_singular_or_not(n):
    rng = np.random.default_rng(n)
    compiled = jax.jit(lambda ws, s: conditioning.linear_bound(ws, s))
    for _ in range(40):
        weights = brute.draw(rng, (5, 8, 6, 3))
        sigma = brute.covariance(rng, 5, n)
        bounds = compiled(weights, sigma)
        kappa = brute.pseudo_condition(brute.gauss_newton(weights, sigma), 1e-13)
        assert kappa <= float(bounds.convex) * (1 + 1e-9)
        values = np.linalg.eigvalsh(sigma)[-min(n, 5) :]
        assert float(bounds.covariance_condition) == pytest.approx(values[-1] / values[0], rel=1e-8)


@pytest.mark.parametrize("widths", [(5, 8, 3), (5, 4, 3)])
def test_one_hidden_layer_with_identity_covariance_is_an_equality(widths):
    weights = brute.draw(np.random.default_rng(0), widths)
    kappa = brute.pseudo_condition(brute.gauss_newton(weights))
    bound = float(jax.jit(conditioning.linear_bound)(weights).convex)
    assert bound == pytest.approx(float(kappa), rel=1e-10)


def test_bounds_by_hand():
    """Independent singular values, the terms, the weights and their combination."""
    rng = np.random.default_rng(1)
    weights, sigma = brute.draw(rng, (4, 7, 6, 3)), brute.covariance(rng, 4)
    bounds = conditioning.linear_bound(weights, sigma)
    left = [weights[2] @ weights[1], weights[2], np.eye(3)]
    right = [np.eye(4), weights[0], weights[1] @ weights[0]]
    pairs = list(zip(left, right, strict=True))
    big = [(np.linalg.norm(s, 2) * np.linalg.norm(p, 2)) ** 2 for s, p in pairs]
    small = [(np.linalg.norm(s, -2) * np.linalg.norm(p, -2)) ** 2 for s, p in pairs]
    condition = np.linalg.cond(sigma)
    # the tolerance; measured 1e-13
    assert float(bounds.convex) == pytest.approx(condition * sum(big) / sum(small), rel=1e-8)
    terms = np.array(big) / np.array(small)
    np.testing.assert_allclose(bounds.terms, terms, rtol=1e-8)
    np.testing.assert_allclose(bounds.weights, np.array(small) / sum(small), rtol=1e-8)
    assert float(bounds.maximum) == pytest.approx(condition * terms.max(), rel=1e-8)


def test_unpadded_singular_values_would_violate_the_bound():
    """The erratum: with svd(...)[-1] many random networks violate the printed bound."""
    rng, violated, padded = np.random.default_rng(2), 0, 0
    bound = jax.jit(lambda ws: conditioning.linear_bound(ws).convex)
    for _ in range(100):
        v, w = brute.draw(rng, (5, 2, 3))
        kappa = brute.pseudo_condition(brute.gauss_newton([v, w]))
        s, t = (np.linalg.svd(m, compute_uv=False) for m in (w, v))
        violated += kappa > (s[0] ** 2 + t[0] ** 2) / (s[-1] ** 2 + t[-1] ** 2)
        padded += kappa > float(bound([v, w]))
    assert violated > 10
    assert padded == 0


def test_a_narrow_layer_needs_only_one_wide_side():
    weights = brute.draw(np.random.default_rng(3), (5, 4, 3))  # m < d, m > k
    bounds = conditioning.linear_bound(weights)
    assert np.isfinite(float(bounds.convex))
    assert float(bounds.maximum) == np.inf
    narrow = conditioning.linear_bound(brute.draw(np.random.default_rng(3), (5, 2, 3)))
    assert float(narrow.convex) == np.inf
    assert np.all(np.isnan(narrow.weights))


def test_one_matrix_is_the_covariance_and_zero_is_nan():
    rng = np.random.default_rng(4)
    sigma = brute.covariance(rng, 4)
    bounds = conditioning.linear_bound(brute.draw(rng, (4, 3)), sigma)
    assert float(bounds.convex) == pytest.approx(np.linalg.cond(sigma), rel=1e-10)
    zero = conditioning.linear_bound([np.zeros((3, 4)), np.zeros((2, 3))])
    assert np.isnan(float(zero.convex))
    assert np.isnan(float(zero.maximum))


def test_gain_invariance_of_linear_networks_but_not_with_skips():
    """The same gain on every layer."""
    rng = np.random.default_rng(5)
    weights, sigma = brute.draw(rng, (4, 6, 7, 3)), brute.covariance(rng, 4)
    scaled = [7.0 * w for w in weights]

    @functools.partial(jax.jit, static_argnums=1)
    def value(ws, skip):
        matrix = conditioning.gauss_newton_linear(ws, sigma, skip=skip)
        return conditioning.condition_number(matrix).value

    def kappa(ws, skip=0.0):
        return float(value(ws, skip))

    assert kappa(scaled) == pytest.approx(kappa(weights), rel=1e-10)
    bounds = [float(conditioning.linear_bound(ws, sigma).convex) for ws in (weights, scaled)]
    assert bounds[1] == pytest.approx(bounds[0], rel=1e-10)
    assert kappa(scaled, 1.0) != pytest.approx(kappa(weights, 1.0), rel=1e-2)


def test_skips_do_not_always_improve():
    """The counter-example to the remark below eq (8): diag(-1, -1.2), beta = 0.9."""
    weights = [np.diag([-1.0, -1.2])] * 2
    kappas = [
        float(conditioning.condition_number(
            conditioning.gauss_newton_linear(weights, skip=beta)
        ).value)
        for beta in (0.0, 0.9)
    ]  # fmt: skip
    assert kappas == pytest.approx([1.44, 9.0], rel=1e-10)


@pytest.mark.parametrize(("k", "d", "m"), [(4, 3, 2), (1, 4, 2)])
def test_functional_hessian(k, d, m):
    rng = np.random.default_rng(9)
    w, v, z = (rng.standard_normal(s) for s in ((k, m), (m, d), (k, d)))
    x = rng.standard_normal((d, 30)) * np.geomspace(1, 0.3, d)[:, None]
    sigma = x @ x.T / 30

    def loss(parameters):
        out = parameters[0] @ (parameters[1] @ x)
        return 0.5 * jnp.sum((out - z @ x) ** 2) / 30

    flat, unravel = jax.flatten_util.ravel_pytree((jnp.asarray(w), jnp.asarray(v)))
    full = jax.jit(jax.hessian(lambda p: loss(unravel(p))))(flat)
    j = jax.jit(jax.jacfwd(lambda p: (unravel(p)[0] @ (unravel(p)[1] @ x)).reshape(-1)))(flat)
    want = np.linalg.eigvalsh(np.asarray(full - j.T @ j / 30))
    kappa = brute.pseudo_condition(np.diag(want), 1e-12)
    bound = float(conditioning.functional_hessian_bound(w, v, z, sigma))
    assert kappa <= bound * (1 + 1e-9)


def test_functional_hessian_refuses_what_does_not_hold():
    w, v, z = np.ones((1, 2)), np.ones((2, 2)), np.ones((1, 2))
    with pytest.raises(ValueError, match="singular"):
        conditioning.functional_hessian_bound(w, v, z, np.diag([1.0, 0.0]))
    with pytest.raises(ValueError, match="teacher"):
        conditioning.functional_hessian_bound(w, v, np.ones((2, 2)))
    assert np.isnan(float(conditioning.functional_hessian_bound(w, v, w @ v)))
