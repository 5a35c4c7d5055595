import jax
import numpy as np
import pytest

from jaxttp import conditioning
from tests.conditioning import brute


@jax.jit
@jax.jacrev
def jacobian(parameters, x, alpha):
    return (parameters[0] @ jax.nn.leaky_relu(parameters[1] @ x, alpha)).T.reshape(-1)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize(("d", "k", "m", "n"), [(4, 3, 6, 5), (6, 3, 5, 3)])
def test_gram_equals_the_sum_over_units_and_autodiff(alpha, d, k, m, n):
    rng = np.random.default_rng(0)
    w, v, x = (rng.standard_normal(s) for s in ((k, m), (m, d), (d, n)))
    got = np.asarray(jax.jit(conditioning.leaky_relu_gram)(w, v, x, alpha))
    np.testing.assert_allclose(got, brute.leaky_gram(w, v, x, alpha), atol=1e-12)
    parts = jacobian((w, v), x, alpha)
    j = np.concatenate([np.asarray(part).reshape(n * k, -1) for part in parts], axis=1)
    np.testing.assert_allclose(got, j @ j.T, atol=1e-12)  # rounding of sums of ten terms


# d, k, m, n: n < d, n > d, m < n, m < k
FAMILIES = [(5, 2, 8, 3), (4, 2, 9, 6), (6, 2, 3, 5), (5, 4, 3, 4)]


@pytest.mark.parametrize(("d", "k", "m", "n"), FAMILIES)
def test_the_bound_is_never_violated(d, k, m, n):
    """50 networks of each family and 3 slopes."""
    rng = np.random.default_rng(d * k * m * n)
    w, v, x = (rng.standard_normal((50, *s)) for s in ((k, m), (m, d), (d, n)))
    compiled = jax.jit(jax.vmap(conditioning.leaky_relu_bound, (0, 0, 0, None)))
    for alpha in (0.0, 0.3, 1.0):
        bound = np.asarray(compiled(w, v, x, alpha))
        for i in range(50):
            kappa = brute.pseudo_condition(brute.leaky_gram(w[i], v[i], x[i], alpha))
            # kappa itself is known to about size * eps * kappa
            assert kappa <= bound[i] * (1 + 1e-9 + 1e-14 * kappa)
        if n > d and n > m:
            assert np.all(np.isinf(bound))


def test_bound_by_hand():
    rng = np.random.default_rng(1)
    w, v, x = (rng.standard_normal(s) for s in ((2, 9), (9, 6), (6, 4)))
    hidden = v @ x
    active = np.where(hidden >= 0, hidden, 0.2 * hidden)
    gamma = np.linalg.eigvalsh(active.T @ active)
    s = [np.linalg.svd(a, compute_uv=False) ** 2 for a in (x, w)]
    want = (s[0][0] * s[1][0] + gamma[-1]) / (0.04 * s[0][-1] * s[1][-1] + gamma[0])
    got = float(conditioning.leaky_relu_bound(w, v, x, 0.2))
    assert got == pytest.approx(want, rel=1e-8)


def test_the_second_bound_is_false():
    """Counter-examples to eq (25), and to eq (26)."""
    x = np.eye(2)
    for v, alpha, end in (([[1, -1], [-1, 0.01]], 0.1, 0), ([[1, 1], [1, -1]], 0.0, -1)):
        hidden = np.array(v) @ x
        active = np.where(hidden >= 0, hidden, alpha * hidden)
        gamma = np.linalg.eigvalsh(active.T @ active)
        linear = np.linalg.eigvalsh(hidden.T @ hidden)
        if end == 0:
            assert gamma[0] < alpha**2 * linear[0] - 1e-3
        else:
            assert gamma[-1] > linear[-1] + 0.5


@pytest.mark.parametrize(
    ("shapes", "alpha", "match"),
    [
        (((2, 3), (4, 5), (5, 6)), 0.1, "chain"),
        (((2, 4), (4, 5), (6, 5)), 0.1, "transpose"),
        (((2, 4), (4, 5), (5,)), 0.1, "X must have 2 axes"),
        (((2, 4), (4, 5), (5, 6)), 1.5, "alpha"),
        (((2, 4), (4, 5), (5, 6)), -0.1, "alpha"),
    ],
)
def test_bad_input(shapes, alpha, match):
    with pytest.raises(ValueError, match=match):
        conditioning.leaky_relu_bound(*(np.ones(s) for s in shapes), alpha)
