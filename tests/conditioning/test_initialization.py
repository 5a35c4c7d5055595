import numpy as np
import pytest

from jaxttp import conditioning
from tests.conditioning import brute


@pytest.mark.parametrize(("d", "k", "m"), [(10, 3, 200), (3, 10, 60), (20, 5, 15)])
@pytest.mark.parametrize("t", [2.0, 3.0])
def test_the_bound_holds_as_often_as_promised(d, k, m, t):
    rng = np.random.default_rng(0)
    bound = float(conditioning.gaussian_init_bound(d, k, m, var_w=1 / m, var_v=1 / d, t=t))
    held, draws = 0, 100
    for _ in range(draws):
        w = np.linalg.svd(rng.standard_normal((k, m)), compute_uv=False) ** 2 / m
        v = np.linalg.svd(rng.standard_normal((m, d)), compute_uv=False) ** 2 / d
        low = (w[-1] if m >= k else 0.0) + (v[-1] if m >= d else 0.0)
        held += (w[0] + v[0]) / low <= bound
    assert held / draws >= float(conditioning.gaussian_init_probability(t))


def test_unclipped_the_statement_is_false():
    """d = 40 > m = 10: (√m - √d - t)^2 is large, the smallest singular value is zero."""
    d, k, m, t = 60, 2, 10, 2.5
    rng = np.random.default_rng(1)
    v, w = rng.standard_normal((m, d)), rng.standard_normal((k, m))
    kappa = brute.pseudo_condition(brute.gauss_newton([v, w * 1e-3]))
    root = [np.sqrt(value) for value in (d, k, m)]
    above = 1e-6 * (root[2] + root[1] + t) ** 2 + (root[2] + root[0] + t) ** 2
    below = 1e-6 * (root[2] - root[1] - t) ** 2 + (root[2] - root[0] - t) ** 2
    assert kappa > above / below
    bound = conditioning.gaussian_init_bound(d, k, m, var_w=1e-6, var_v=1.0, t=t)
    assert kappa <= float(bound)


def test_vacuous_and_asymptotic():
    assert float(conditioning.gaussian_init_bound(9, 9, 9, var_w=1.0, var_v=1.0, t=0.0)) == np.inf
    options = {"var_w": 0.01, "var_v": 0.2, "covariance_condition": 7.0}
    limit = float(conditioning.asymptotic_bound(5, 3, 100, **options))
    r = np.sqrt([3 / 100, 5 / 100])
    want = 7 * (0.01 * (1 + r[0]) ** 2 + 0.2 * (1 + r[1]) ** 2)
    want /= 0.01 * (1 - r[0]) ** 2 + 0.2 * (1 - r[1]) ** 2
    assert limit == pytest.approx(want, rel=1e-12)
    zero = conditioning.gaussian_init_bound(5, 3, 100, t=0.0, **options)
    assert float(zero) == pytest.approx(want, rel=1e-12)
    assert float(conditioning.gaussian_init_probability(0.0)) == 0.0
    likely = float(conditioning.gaussian_init_probability(2.0))
    assert likely == pytest.approx(1 - 4 * np.exp(-2), rel=1e-12)  # rounding


@pytest.mark.parametrize(
    ("name", "value"),
    [("d", 0), ("m", -2), ("var_w", -1.0), ("var_v", np.nan), ("covariance_condition", 0.5),
     ("t", -1.0)],
)  # fmt: skip
def test_bad_input(name, value):
    options = {"d": 2, "k": 2, "m": 9, "var_w": 1.0, "var_v": 1.0, "t": 1.0} | {name: value}
    with pytest.raises(ValueError, match=name):
        conditioning.gaussian_init_bound(**options)


@pytest.mark.parametrize(("d", "k", "m"), [(9, 2, 9), (2, 9, 8)])
def test_the_asymptotic_bound_needs_width(d, k, m):
    with pytest.raises(ValueError, match="m must be larger"):
        conditioning.asymptotic_bound(d, k, m, var_w=1.0, var_v=1.0)
