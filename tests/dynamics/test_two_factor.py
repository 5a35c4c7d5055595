import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxttp.dynamics.two_factor import (
    balanced_features,
    power_law_labels,
    two_factor_descent,
    two_factor_flow,
    two_factor_observables,
)
from tests import oracles
from tests.draws import normal, split

B, H, V = 12, 4, 6
KEYS = split(11, 3)
W = np.asarray(normal(KEYS[0], (H, V))) / 2
F = np.asarray(normal(KEYS[1], (B, H))) / 2
BALANCED = np.asarray(balanced_features(W, B, key=KEYS[2]))
LABELS = np.asarray(power_law_labels(B, V))
ONE_HOT = np.eye(V)[LABELS]


def field(f, w, rate):
    residual = oracles.softmax(f @ w) - ONE_HOT
    return -rate * residual @ w.T, -rate * f.T @ residual


def runge_kutta(f, w, rate, end, count):
    """Classical RK4 in NumPy."""
    h = end / count
    for _ in range(count):
        k1 = field(f, w, rate)
        k2 = field(f + h / 2 * k1[0], w + h / 2 * k1[1], rate)
        k3 = field(f + h / 2 * k2[0], w + h / 2 * k2[1], rate)
        k4 = field(f + h * k3[0], w + h * k3[1], rate)
        f = f + h / 6 * (k1[0] + 2 * k2[0] + 2 * k3[0] + k4[0])
        w = w + h / 6 * (k1[1] + 2 * k2[1] + 2 * k3[1] + k4[1])
    return f, w


def imbalance(f, w):
    return f.T @ f - w @ w.T


@pytest.mark.slow
def test_flow_equals_runge_kutta():
    path = two_factor_flow(F, W, LABELS, learning_rate=0.1, ts=np.array([5.0]))
    f, w = runge_kutta(F, W, 0.1, 5.0, 1000)  # RK4 at h = 0.005: error about 1e-12
    np.testing.assert_allclose(path.f[0], f, atol=1e-8)
    np.testing.assert_allclose(path.w[0], w, atol=1e-8)


@pytest.mark.slow
def test_flow_conserves_the_imbalance():
    path = two_factor_flow(F, W, LABELS, learning_rate=0.1, ts=np.linspace(0, 200, 9))
    for f, w in zip(path.f, path.w, strict=True):
        np.testing.assert_allclose(imbalance(f, w), imbalance(F, W), atol=1e-8)


@pytest.mark.slow
def test_descent_drifts_from_it_by_first_order_in_the_rate():
    """Over a fixed time eta * steps the drift is O(eta): halving eta halves it."""
    drifts = []
    for rate in (0.02, 0.01):
        path = two_factor_descent(F, W, LABELS, learning_rate=rate, steps=round(2 / rate))
        drifts.append(np.abs(imbalance(path.f[-1], path.w[-1]) - imbalance(F, W)).max())
    assert np.log2(drifts[0] / drifts[1]) == pytest.approx(1.0, abs=0.1)  # measured: 1.01


def moments(f, w, rate=0.1):
    return jax.vmap(lambda a, b: two_factor_observables(a, b, LABELS, learning_rate=rate))(f, w)


@pytest.mark.slow
def test_balanced_start_fractions_singular_values_and_vectors():
    """Theorem B.2, along the whole path."""
    path = two_factor_flow(BALANCED, W, LABELS, learning_rate=0.1, ts=np.linspace(0, 30, 7))
    seen = moments(path.f, path.w)
    np.testing.assert_allclose(seen.singular_f, seen.singular_w, atol=1e-8)
    np.testing.assert_allclose(seen.alignment, 1.0, atol=1e-6)  # vectors lose digits at small gaps
    np.testing.assert_allclose(seen.imbalance, 0.0, atol=1e-8)


@pytest.mark.slow
def test_unbalanced_start_does_not():
    """The premise is needed."""
    seen = two_factor_observables(F, W, LABELS, learning_rate=0.1)
    assert float(jnp.max(jnp.abs(seen.singular_f - seen.singular_w))) > 0.1
    assert float(jnp.max(jnp.abs(seen.rate_f - seen.theorem_f))) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("start", ["balanced", "any"])
def test_rates_equal_finite_differences(start):
    """Lemma B.1 from any start; Theorem B.3 from a balanced one."""
    f0 = BALANCED if start == "balanced" else F
    h = 1e-3
    ts = np.array([2.0 - h, 2.0, 2.0 + h])
    path = two_factor_flow(f0, W, LABELS, learning_rate=0.1, ts=ts, rtol=1e-13, atol=1e-14)
    seen = moments(path.f, path.w)
    for values, rates, theorem in (
        (seen.singular_f, seen.rate_f[1], seen.theorem_f[1]),
        (seen.singular_w, seen.rate_w[1], seen.theorem_w[1]),
    ):
        difference = (values[2] - values[0]) / (2 * h)
        np.testing.assert_allclose(rates, difference, atol=1e-6)  # O(h^2) and solver / h
        if start == "balanced":
            np.testing.assert_allclose(theorem, rates, atol=1e-8)


@given(seed=st.integers(0, 2**31), scale=st.floats(0.01, 30.0))
def test_g_is_bounded_by_the_residual_norm(seed, scale):
    """|g_i| <= ||A||_2 <= sqrt(2 b), whatever the factors."""
    keys = split(seed, 3)
    f = normal(keys[0], (B, H), scale)
    w = normal(keys[1], (H, V))
    labels = jax.random.randint(keys[2], (B,), 0, V)
    seen = two_factor_observables(f, w, labels, learning_rate=0.1)
    assert float(jnp.max(jnp.abs(seen.g))) <= float(seen.residual_norm) * (1 + 1e-12)
    assert float(seen.residual_norm) <= np.sqrt(2 * B) * (1 + 1e-12)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 3.0])
def test_at_uniform_prediction_the_largest_class_bounds_it(exponent):
    """||A||_2 <= sqrt(N_max); the printed O(N_max) is looser by sqrt(N_max)."""
    labels = power_law_labels(60, 8, exponent=exponent)
    seen = two_factor_observables(np.zeros((60, 3)), np.ones((3, 8)), labels, learning_rate=1.0)
    largest = np.bincount(np.asarray(labels)).max()
    assert float(seen.residual_norm) <= np.sqrt(largest) * (1 + 1e-12)
    assert float(seen.residual_norm) >= 0.8 * np.sqrt(largest)  # and it is nearly reached


@given(  # few shapes: each is compiled
    samples=st.sampled_from([1, 7, 80]), classes=st.sampled_from([1, 5, 12]),
    exponent=st.floats(0.0, 3.0),
)  # fmt: skip
def test_power_law_labels(samples, classes, exponent):
    labels = np.asarray(power_law_labels(samples, classes, exponent=exponent))
    assert labels.shape == (samples,)
    assert labels.min() >= 0
    assert labels.max() < classes
    counts = np.bincount(labels, minlength=classes)
    assert np.all(np.diff(counts) <= 1)  # decreasing, up to rounding to whole samples


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"f": np.zeros(4)}, "f must"),
        ({"w": np.zeros((3, 6))}, "w must"),
        ({"w": np.full((4, 6), np.inf)}, "w holds"),
        ({"f": np.full((12, 4), np.nan)}, "f holds"),
        ({"labels": np.zeros(12)}, "labels"),
        ({"labels": np.zeros(5, int)}, "labels"),
        ({"labels": np.full(12, 6)}, "labels"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"ts": np.array([1.0, 0.0])}, "ts"),
    ],
)
def test_bad_input_names_the_argument(change, words):
    options = {
        "f": F, "w": W, "labels": LABELS, "learning_rate": 0.1, "ts": np.array([1.0]),
    } | change  # fmt: skip
    with pytest.raises(ValueError, match=words):
        two_factor_flow(options.pop("f"), options.pop("w"), options.pop("labels"), **options)


def test_overflow_is_an_error():
    with pytest.raises(Exception, match="smaller learning_rate"):
        two_factor_descent(1e3 * F, 1e3 * W, LABELS, learning_rate=1e200, steps=50)


def test_balanced_features_need_enough_samples():
    with pytest.raises(ValueError, match="samples"):
        balanced_features(W, 3, key=KEYS[0])


def test_one_step_is_one_of_gradient_descent_and_observables_are_of_both_factors():
    """Plain NumPy: the gradient of the summed loss, singular values, F'F - W W'."""
    draw = np.random.default_rng(0)
    f, w, labels = draw.normal(size=(5, 3)), draw.normal(size=(3, 4)), np.arange(5) % 4
    p = np.exp(f @ w)
    residual = p / p.sum(1, keepdims=True) - np.eye(4)[labels]
    path = two_factor_descent(f, w, labels, learning_rate=0.1, steps=1)
    np.testing.assert_allclose(path.f[1], f - 0.1 * residual @ w.T, atol=1e-14)
    np.testing.assert_allclose(path.w[1], w - 0.1 * f.T @ residual, atol=1e-14)
    seen = two_factor_observables(f, w, labels, learning_rate=0.1)
    picked = (p / p.sum(1, keepdims=True))[np.arange(5), labels]
    np.testing.assert_allclose(seen.loss, -np.log(picked).sum(), rtol=1e-12)
    np.testing.assert_allclose(seen.imbalance, f.T @ f - w @ w.T, atol=1e-13)
    s1, s2 = (np.linalg.svd(one, compute_uv=False)[:3] for one in (f, w))
    np.testing.assert_allclose(seen.theorem_f, -0.1 * np.asarray(seen.g) * s2, atol=1e-13)
    np.testing.assert_allclose(seen.theorem_w, -0.1 * np.asarray(seen.g) * s1, atol=1e-13)
