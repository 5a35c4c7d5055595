"""Modes as values: what they do, what they refuse, and that other numbers compile nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp._core.timing import compilations
from jaxttp.gauss_newton import (
    Damp,
    Exact,
    Filter,
    Mode,
    Noise,
    Solve,
    Tikhonov,
    Truncate,
    apply_pseudoinverse,
    forecast_steps,
    gauss_newton,
    gauss_newton_direction,
    inverse_error,
    scale_by_gauss_newton,
)
from jaxttp.gauss_newton.shorthands import MODES, to_mode
from tests.draws import normal
from tests.gauss_newton.networks import ACTIVATIONS, brute_direction, filtered_pinv, network

pytestmark = pytest.mark.usefixtures("strict_dtypes")

RNG = np.random.default_rng(0)
S, T = RNG.normal(size=(5, 9)), RNG.normal(size=(5, 2))
VALUES = {"exact": Exact(), "truncate": Truncate(0.5), "damp": Damp(0.5), "tikhonov": Tikhonov(0.5)}
SMALL = {"blocks": 1, "half": 2, "width": 10, "samples": 4}


@pytest.mark.parametrize("name", VALUES)
def test_a_mode_is_its_filter_on_dense_features(name):
    found = apply_pseudoinverse(S, T, pseudoinverse=VALUES[name])
    expected = filtered_pinv(S, name, 0.5) @ T
    # A Gram of condition below 100 in float64 leaves about 1e-14.
    np.testing.assert_allclose(found.solution, expected, atol=1e-12)
    np.testing.assert_allclose(found.achieved, S @ expected, atol=1e-12)
    assert int(found.rank) == (5 if name != "truncate" else np.sum(_spectrum() >= 0.5))


def _spectrum():
    values = np.linalg.svd(S, compute_uv=False)
    return values / values[0]


def test_noise_is_the_exact_inverse_of_disturbed_features(key):
    found = apply_pseudoinverse(S, T, pseudoinverse=Noise(key, 0.2))
    disturbed = S + 0.2 * S.std() * np.asarray(normal(key, S.shape))
    np.testing.assert_allclose(found.solution, np.linalg.pinv(disturbed) @ T, atol=1e-12)


@pytest.mark.parametrize("name", MODES)
def test_a_shorthand_is_its_value(name, key):
    options = {"rtol": 0.3, "key": key}
    value = {"exact": Exact(), "truncate": Truncate(0.3), "damp": Damp(0.3),
             "tikhonov": Tikhonov(0.3), "noise": Noise(key)}[name]  # fmt: skip
    short = apply_pseudoinverse(S, T, pseudoinverse=name, **options)
    for left, right in zip(short, apply_pseudoinverse(S, T, pseudoinverse=value), strict=True):
        np.testing.assert_array_equal(left, right)
    assert to_mode(name, **options).method == value.method
    assert repr(value).startswith(f"{type(value).__name__}(")


def test_directions_by_values_against_dense_jacobians():
    w, v, x = network(**SMALL)
    epsilon = normal(7, x.shape)
    for name, mode in VALUES.items():
        direction = gauss_newton_direction(w, v, x, epsilon, activation="tanh", pseudoinverse=mode)
        expected = brute_direction(w, v, x, epsilon, ACTIVATIONS["tanh"], None, name, 0.5)
        # The required 1e-9, see test_update.
        np.testing.assert_allclose(direction, expected, atol=1e-9 * np.abs(expected).max())


def test_a_mode_passes_through_jit_and_vmap():
    def rank(mode):
        return apply_pseudoinverse(S, T, pseudoinverse=mode).rank

    values = _spectrum()
    rtols = (values[:-1] + values[1:]) / 2
    found = jax.vmap(lambda rtol: rank(Truncate(rtol)))(jnp.asarray(rtols))
    assert found.tolist() == [1, 2, 3, 4]
    assert [int(jax.jit(rank)(Truncate(rtol))) for rtol in rtols] == [1, 2, 3, 4]


def test_what_a_fine_tolerance_needs_is_kept_where_it_is_traced():
    fine = Truncate(1e-8)
    assert (fine.method, fine.fine, Truncate(1e-6).method) == ("svd", True, "eigh")
    kept = jax.jit(lambda mode: [mode.fine] * (mode.method == "svd"))
    assert kept(fine) == [True]


def test_options_that_are_traced_pass_beside_a_mode():
    """`optax.inject_hyperparams` traces the defaults too, which were not given."""
    assert jax.jit(lambda rtol: to_mode(Damp(0.1), rtol=rtol).rtol)(0.5) == 0.1


SECONDS = {
    "truncate": (Truncate(0.5, 1e-4), Truncate(0.1, 1e-3)),
    "damp": (Damp(0.5), Damp(np.float32(0.25))),
    "tikhonov": (Tikhonov(0.5), Tikhonov(0.1)),
    "noise": (Noise(jax.random.key(0)), Noise(jax.random.key(1), 0.3)),
}


@pytest.mark.parametrize("name", SECONDS)
def test_other_numbers_and_keys_compile_nothing(name):
    w, v, x = network(**SMALL)

    def step(mode):
        direction = gauss_newton_direction(w, v, x, 0.1 * x, pseudoinverse=mode)
        return np.asarray(direction), np.asarray(
            apply_pseudoinverse(S, T, pseudoinverse=mode).solution
        )

    first = step(SECONDS[name][0])
    with compilations() as compiled:
        second = step(SECONDS[name][1])
    assert not compiled
    assert all(np.any(a != b) for a, b in zip(first, second, strict=True))


def test_gauges_and_forecasts_with_other_numbers_compile_nothing():
    w, v, x = network(**SMALL)

    def measured(seed, rtol, rate):
        lost = inverse_error(w, v, x, key=jax.random.key(seed), probes=2, pseudoinverse=Damp(rtol))
        path = forecast_steps(x, 0 * x, loss="squared_error", learning_rate=rate, steps=3)
        return float(lost), float(path.loss[-1])

    first = measured(0, 0.1, 0.5)
    with compilations() as compiled:
        second = measured(1, 0.2, 0.4)
    assert not compiled
    assert first[0] != second[0]
    assert first[1] < second[1]  # the smaller rate


def test_noise_draws_anew_in_every_step_and_half_layer(key):
    w, v, x = network(**SMALL)
    data = {"x": x, "y": 0 * x, "bottlenecks": v}
    optimizer = scale_by_gauss_newton(pseudoinverse=Noise(key, 0.5))
    state = optimizer.init(w)
    first, state = optimizer.update(w, state, w, **data)
    second, _ = optimizer.update(w, state, w, **data)
    again, _ = optimizer.update(w, optimizer.init(w), w, **data)
    given, _ = optimizer.update(w, state, w, key=jax.random.fold_in(key, 0), **data)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, given)  # of step 0, though it is step 1
    assert np.abs(first - second).max() > 0.01 * np.abs(first).max()
    each = Noise(key).each((3, 2))
    assert len(np.unique(np.asarray(jax.random.key_data(each.key)).reshape(6, -1), axis=0)) == 6


class Leading(Filter):
    """The leading direction alone: a mode is one class with one method."""

    def filter(self, values, tolerance, floor):
        counted = values == jnp.max(values)
        return counted, jnp.where(counted, 1 / jnp.max(values), 0.0)


class Transposed(Mode):
    """Not an inverse at all, but sᵀ t: what has no spectrum to filter."""

    def apply(self, features, change):
        solution = features.T @ change
        achieved = features @ solution
        one = jnp.ones((), features.dtype)
        return Solve(solution, achieved, jnp.asarray(0, jnp.int32), one, one)


def test_a_mode_of_ones_own_is_one_class():
    found = apply_pseudoinverse(S, T, pseudoinverse=Leading())
    u, values, vt = np.linalg.svd(S, full_matrices=False)
    expected = vt[:1].T @ (u[:, :1].T @ T) / values[0]
    np.testing.assert_allclose(found.solution, expected, atol=1e-12)  # as above
    w, v, x = network(**SMALL)
    for mode, method in ((Leading(), "eigh"), (Transposed(), "auto")):
        step, info = gauss_newton_direction(w, v, x, x, pseudoinverse=mode, return_info=True)
        assert np.all(np.isfinite(step))
        assert info.method == method
    assert int(found.rank) == 1
    with pytest.raises(NotImplementedError, match="Mode needs apply"):
        Mode().apply(jnp.asarray(S), jnp.asarray(T))
    with pytest.raises(NotImplementedError, match="Filter needs filter"):
        Filter().apply(jnp.asarray(S), jnp.asarray(T))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Truncate(-0.1), "rtol must be at least 0"),
        (lambda: Truncate(0.1, np.nan), "atol must be finite"),
        (lambda: Damp(1.0), "rtol must be at least 0 and less than 1; got 1.0"),
        (lambda: Damp(method="qr"), "method='qr' is not known"),
        (lambda: Damp(method="cholesky"), "does not see the spectrum that pseudoinverse='damp'"),
        (lambda: Noise(jnp.zeros(3)), "key must be a jax.random.key"),
        (lambda: Noise(jax.random.key(0), -1.0), "noise must be at least 0"),
        (lambda: Exact().check(6, 4), "N = 6 samples, m = 4"),
        (lambda: Noise().check(4, 6), "needs key"),
        (lambda: to_mode("lucky"), r"pseudoinverse='lucky' is not known.*Truncate\(0.01\)"),
        (lambda: to_mode(Truncate(0.1), rtol=0.2), "rtol=0.2 does nothing here: the mode holds"),
        (lambda: to_mode(Damp(0.1), atol=0.2), "atol=0.2 does nothing here"),
        (lambda: to_mode(Exact(), method="svd"), "method='svd' does nothing here"),
        (lambda: to_mode(Exact(), noise=0.2), "noise=0.2 does nothing here"),
        (
            lambda: to_mode(Exact(), key=jax.random.key(0)),
            r"^key \(a PRNGKeyArray\) does nothing here: it is that of Noise",
        ),
        (lambda: gauss_newton(1.0, pseudoinverse=Damp(0.1), rtol=0.01), "rtol=0.01 does nothing"),
    ],
)
def test_bad_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()
