"""From a subset to all: exact where nothing is missing, near on real data, honest."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxttp.adapters import from_nnx
from jaxttp.data import load_dataset, select
from jaxttp.forecast import (
    Hyperparameters,
    extrapolate,
    extrapolate_spectrum,
    extrapolation,
    mode_curve,
    predict_training_time,
    training_time,
)
from jaxttp.forecast.spectra import METHODS
from jaxttp.models import MLP

RNG = np.random.default_rng(0)
WIDE = jnp.asarray(RNG.standard_normal((20, 60))) / 5
X = RNG.standard_normal((40, 20))
Y = RNG.standard_normal((40, 2)) * 0.1 + X[:, :2]
PARAMS = jnp.asarray(RNG.standard_normal((60, 2))) / 10
KEY = jax.random.key(5)
POWER = {"method": "power_law", "head": 16}


def apply_fn(params, x):
    return jnp.tanh(x @ WIDE) @ params


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_the_whole_set_as_subset_is_the_exact_forecast(momentum):
    options = {"learning_rate": 0.05, "momentum": momentum, "loss": "squared_error", "steps": 30}
    found = extrapolate(apply_fn, PARAMS, X, Y, subset=40, key=KEY, **options)
    single = predict_training_time(apply_fn, PARAMS, X, Y, relinearize=0, **options)
    assert found.stable
    np.testing.assert_allclose(found.loss, single.loss, rtol=1e-9)  # modes against outputs
    assert found.steps == single.steps
    assert "all samples are in the kernel" in str(found)
    # What halves of the subset differ by is no error bar ("234 ± 2.9" where 255 is true).
    assert "±" not in str(found)
    assert f"(halves of the subset: {found.spread[0.1]:.1f} off)" in str(found)


def test_a_true_power_law_is_continued_exactly():
    n0, n, s, b = 64, 256, 1.7, 1.3
    ranks = np.arange(1, n + 1)
    values, shares = 3 * ranks**-s, ranks**-b
    kernel = np.diag(values[:n0] * n0).reshape(n0, 1, n0, 1)
    # The subset's modes hold all that the whole set's do, as a random subset's must.
    scale = shares.sum() / shares[:n0].sum()
    residual = np.sqrt(shares[:n0] * scale * n0)[:, None]
    found = extrapolate_spectrum(kernel, residual, samples=n, size=shares.sum(), **POWER)
    np.testing.assert_allclose(found.values, values, rtol=1e-9)
    assert found.exponent == pytest.approx(s, rel=1e-9)
    assert found.feasible
    assert found.residual.sum() == pytest.approx(shares.sum(), rel=1e-9)
    assert np.all(np.diff(found.residual[16:]) < 0)
    corrected = extrapolate_spectrum(kernel, residual, samples=n, alpha=0.2, **POWER)
    # The paper's correction flattens or steepens by alpha (N0/N - 1) = -0.15.
    assert corrected.exponent == pytest.approx(s + 0.2 * 0.75, rel=1e-9)


def test_an_infeasible_tail_is_reported_and_nothing_is_lost():
    kernel = np.diag(1.0 / np.arange(1, 41) ** 2).reshape(40, 1, 40, 1)
    residual = np.ones((40, 1))
    residual[10:] = 3.0  # a tail far above the head's end
    residual[7:13] = 1e-3
    found = extrapolate_spectrum(kernel, residual, samples=45, method="power_law", head=10)
    assert not found.feasible
    assert "no power law" in found.message
    assert found.residual.sum() == pytest.approx((residual**2).sum() / 40)
    exact = extrapolate_spectrum(kernel, np.zeros((40, 1)), samples=45, method="power_law", head=10)
    assert exact.feasible
    assert not exact.residual.any()


@pytest.mark.parametrize("method", METHODS)
def test_a_kernel_of_low_rank_has_no_tail(method):
    residual = RNG.standard_normal((30, 1))
    found = extrapolate_spectrum(
        np.ones((30, 1, 30, 1)), residual, samples=60, head=5, method=method
    )
    assert not np.any(found.values[5:] > 1e-9)
    assert found.values[0] == pytest.approx(1.0)
    learned = residual.sum() ** 2 / 30**2  # the one mode's share, the rest is never learned
    if method == "resolvent":  # power laws want a tail that falls from the head's end
        assert found.residual[found.values > 1e-9].sum() == pytest.approx(learned, rel=1e-3)


def gaussian_rows(n, c, seed):
    """Rows of normal features with eigenvalues k^-1.5, and noisy labels: no law of the residual."""
    rng = np.random.default_rng(seed)
    k = np.arange(1, 1501)
    jacobian = rng.standard_normal((n * c, k.size)) * k**-0.75
    residual = jacobian @ (rng.standard_normal(k.size) * k**-0.2) + 0.3 * rng.standard_normal(n * c)
    return (jacobian @ jacobian.T).reshape(n, c, n, c), residual.reshape(n, c)


def test_the_resolvent_foresees_four_times_the_rows():
    """The theory's own assumptions: many independent rows. Brute force is the larger kernel."""
    setting = Hyperparameters(0.03, loss="squared_error", steps=3000)
    off = {"resolvent": [], "subset": []}
    for seed in range(3):
        kernel, residual = gaussian_rows(400, 2, seed)
        size = float((residual**2).sum() / 400)
        some, start = kernel[:100][:, :, :100], residual[:100]
        whole = extrapolate_spectrum(kernel, residual, samples=400)
        true, _ = mode_curve(whole.values, whole.residual, setting)
        found = extrapolate_spectrum(some, start, samples=400, size=size)
        small = extrapolate_spectrum(some, start, samples=100, size=size)
        for name, one in (("resolvent", found), ("subset", small)):
            path, stable = mode_curve(one.values, one.residual, setting)
            assert stable
            off[name].append(np.log(path[-1] / true[-1]))
        assert found.feasible
        assert found.residual.sum() == pytest.approx(size, rel=1e-9)
    # What is left is the draw of 200 rows; the subset alone ends at little more than half the loss.
    assert np.abs(off["resolvent"]).mean() < 0.15
    assert np.mean(off["subset"]) < -0.4


def test_a_head_is_a_share_of_all_modes():
    kernel, residual = gaussian_rows(20, 5, 0)
    for method, share in (("power_law", 4), ("resolvent", 50)):
        found = extrapolate_spectrum(kernel, residual, samples=40, method=method)
        assert found.head == 20 * 5 // share
    assert "2 of the subset's 100 modes kept" in found.message


@pytest.mark.slow
def test_digits_from_100_samples():
    """A fresh MLP on three digits; the reference is the forecast from all 300 samples."""
    data = select(load_dataset("digits"), classes=(0, 1, 2), per_class=100, key=jax.random.key(4))
    x, y = data.x.reshape(300, -1), data.y
    sizes = (64, 48, 3)
    model = from_nnx(MLP(sizes, rngs=nnx.Rngs(params=jax.random.key(7)), param_dtype=jnp.float64))
    options = {"learning_rate": 0.05, "loss": "squared_error"}
    whole = predict_training_time(*model, x, y, relinearize=0, **options)
    assert whole.stable
    found = extrapolate(*model, x, y, subset=100, key=KEY, **options)
    for threshold, bound in zip((0.01, 0.1, 0.4), (12, 3, 2), strict=True):
        assert abs(found.steps[threshold] - whole.steps[threshold]) <= bound  # what is asked for
    assert found.loss[0] == pytest.approx(float(whole.loss[0]), rel=1e-9)
    text = str(found)
    assert "From 100 to 300 samples" in text
    assert "modes kept" in text


@pytest.mark.slow
def test_other_losses_use_the_subset_and_measure_its_spread():
    labels = (X[:, 0] > 0).astype(int)
    options = {"learning_rate": 0.3, "loss": "cross_entropy", "steps": 40}
    found = extrapolate(apply_fn, PARAMS, X, labels, subset=24, key=KEY, samples=500, **options)
    assert found.spectrum is None
    assert found.samples == 500
    assert all(0 <= s < 40 for s in found.spread.values())
    assert found.loss_spread.shape == (41,)
    assert found.loss_spread[0] > 0
    chosen = jax.random.permutation(jax.random.split(KEY, 9)[0], 40)[:24]
    single = predict_training_time(
        apply_fn, PARAMS, X[chosen], labels[chosen], relinearize=0, **options
    )
    assert found.steps == single.steps
    assert "used as it is" in str(found)


def test_a_diverging_rate_is_no_exception():
    for loss, target in (("squared_error", Y), ("cross_entropy", (X[:, 0] > 0).astype(int))):
        found = extrapolate(
            apply_fn, PARAMS, X, target, subset=20, key=KEY, learning_rate=1e4, loss=loss
        )
        assert not found.stable
        assert set(found.steps.values()) == {-1}
        assert np.all(np.isfinite(found.loss))


def test_mode_curve_follows_schedules():
    setting = Hyperparameters(0.5, schedule="linear", loss="squared_error", steps=3)
    path, _ = mode_curve(np.array([1.0]), np.array([2.0]), setting)
    decay = np.cumprod(1 - setting.rates())
    np.testing.assert_allclose(path[1:], decay**2, rtol=1e-12)
    never = mode_curve(np.array([1.0]), np.array([2.0]), dataclasses.replace(setting, steps=1))
    assert int(training_time(never[0], 0.5)) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"subset": 41}, "subset must be an integer between 2 and 40"),
        ({"subset": 4}, "subset=4 is too small"),
        ({"samples": 30}, "samples must be an integer of at least 40"),
        ({"head": 40}, "head must be an integer between 1 and"),
        ({"alpha": -1.0}, "alpha must be"),
        ({"alpha": 0.1}, "give method='power_law' with it"),
        ({"method": "ridge"}, "method='ridge' is not known"),
        ({"resamples": 1}, "resamples must be"),
        ({"learning_rate": 0.0}, "learning_rate must be"),
        ({"loss": "hinge"}, "loss='hinge' is not known"),
        ({"key": 0}, r"key must be a jax.random.key, such as jax.random.key\(0\); got 0\."),
    ],
)
def test_bad_input(change, message):
    options = {"learning_rate": 0.1, "subset": 20, "key": KEY, "loss": "squared_error"} | change
    with pytest.raises(ValueError, match=message):
        extrapolate(apply_fn, PARAMS, X, Y, **options)


def test_a_spread_that_is_not_known_is_infinite():
    labels = (X[:, 0] > 0).astype(int)
    options = {"learning_rate": 0.3, "loss": "cross_entropy", "steps": 40, "rule": "absolute"}
    first = extrapolate(apply_fn, PARAMS, X, labels, subset=24, key=KEY, **options)
    goals = (float(first.loss[0]) * 2, float(first.loss[-1]) / 1e3)  # at once, and never
    found = extrapolate(
        apply_fn, PARAMS, X, labels, subset=24, key=KEY, thresholds=goals, **options
    )
    assert [found.steps[e] for e in goals] == [0, -1]
    assert [found.spread[e] for e in goals] == [0.0, np.inf]
    assert "inf" not in str(found)


def test_one_mode_leaves_no_tail():
    with pytest.raises(ValueError, match="kernel has one mode"):
        extrapolate_spectrum(np.ones((1, 1, 1, 1)), np.ones((1, 1)), samples=2)


def test_halves_that_diverge_leave_the_spread_unknown(monkeypatch):
    calls = []

    def curve_of(*arguments):
        calls.append(0)
        path, stable = mode_curve(*arguments)
        return path, stable and len(calls) != 3  # the second half

    monkeypatch.setattr(extrapolation, "mode_curve", curve_of)
    found = extrapolate(
        apply_fn, PARAMS, X, Y, loss="squared_error", learning_rate=0.02, subset=20, key=KEY
    )
    assert found.stable
    assert set(found.spread.values()) == {np.inf}
    assert np.all(np.isinf(found.loss_spread))
