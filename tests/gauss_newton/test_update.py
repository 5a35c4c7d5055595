"""Directions against dense Jacobians and Moore-Penrose inverses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp.gauss_newton import (
    gauss_newton_direction,
    orthonormal_readout,
    output_change,
    revmlp_forward,
    selection_readout,
)
from tests.draws import normal
from tests.gauss_newton.networks import ACTIVATIONS, brute_direction, network

pytestmark = pytest.mark.usefixtures("strict_dtypes")

READOUTS = {
    "none": None,
    "selection": selection_readout(3, 6),
    "general": normal(6, (3, 6)),
}


def outputs_of(w, v, x, activation, readout):
    f = revmlp_forward(w, v, x, activation=activation)
    return f if readout is None else f @ readout.T


def close(direction, expected, relative=1e-9):
    # The required 1e-9. Dense solves and Grams of condition up to 1e4 leave about 1e-11.
    size = np.abs(expected).max()
    np.testing.assert_allclose(direction, expected, atol=relative * size, rtol=0)


@pytest.mark.parametrize("readout", READOUTS)
def test_exact_direction_of_squared_error_for_every_readout(readout):
    w, v, x = network(blocks=2)
    p, activation = READOUTS[readout], "tanh"
    f = outputs_of(w, v, x, activation, p)
    epsilon = output_change(f, jnp.ones_like(f), loss="squared_error")
    options = {"activation": activation, "readout": p, "pseudoinverse": "exact"}
    direction, info = gauss_newton_direction(w, v, x, epsilon, **options, return_info=True)
    close(direction, brute_direction(w, v, x, f - 1, ACTIVATIONS[activation], p))
    assert float(info.residual) < 1e-10  # J J^⊣ = 1, as required
    assert (info.method, info.dtype) == ("cholesky", "float64")
    assert np.all(np.asarray(info.ranks) == 6)
    assert "residual" in str(info)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "samples"), [("truncate", 6), ("truncate", 14), ("damp", 6), ("tikhonov", 14)]
)
def test_regularised_directions(mode, samples):
    # 14 samples of 10 features: no right inverse, the thin side of the Gram.
    w, v, x = network(blocks=2, samples=samples, width=10, seed=2)
    epsilon, activation = normal(7, x.shape), "relu"
    options = {"activation": activation, "pseudoinverse": mode, "rtol": 0.1}
    direction, info = gauss_newton_direction(w, v, x, epsilon, **options, return_info=True)
    close(direction, brute_direction(w, v, x, epsilon, ACTIVATIONS[activation], None, mode, 0.1))
    _, push = jax.jvp(lambda w: revmlp_forward(w, v, x, activation=activation), (w,), (direction,))
    residual = np.linalg.norm(push - epsilon) / np.linalg.norm(epsilon)
    assert abs(float(info.residual) - residual) < 1e-12  # the same sums
    assert residual > 1e-3  # the regularisation is felt
    if mode == "truncate":
        assert np.all(np.asarray(info.ranks) < min(samples, 10) + 1)


def test_the_correction_is_that_of_the_change_really_made():
    # Under truncation the inverse's tangent is not the braces of eq (17).
    w, v, x = network(seed=3)
    epsilon = normal(8, x.shape)
    direction = gauss_newton_direction(w, v, x, epsilon, activation="tanh", rtol=0.5)
    expected = brute_direction(w, v, x, epsilon, jnp.tanh, None, "truncate", 0.5)
    close(direction, expected)
    full = brute_direction(w, v, x, epsilon, jnp.tanh)
    assert np.abs(expected - full).max() > 0.05 * np.abs(full).max()


def test_the_direction_is_a_right_inverse():
    w, v, x = network(blocks=2)
    p = READOUTS["general"]

    def round_trip(epsilon):
        step = gauss_newton_direction(
            w, v, x, epsilon, activation="tanh", readout=p, pseudoinverse="exact"
        )
        forward = lambda w: outputs_of(w, v, x, "tanh", p)  # noqa: E731
        return jax.jvp(forward, (w,), (step,))[1]

    size = 6 * 3
    columns = jax.jit(jax.vmap(round_trip))(jnp.eye(size).reshape(size, 6, 3))
    # The required 1e-10.
    assert np.abs(np.asarray(columns).reshape(size, size) - np.eye(size)).max() < 1e-10


@pytest.mark.slow
def test_float32_agrees_with_float64_and_promotes_where_it_must():
    w, v, x = network(samples=8, width=24)
    epsilon = normal(8, x.shape)
    narrow = [a.astype(jnp.float32) for a in (w, v, x, epsilon)]
    wide = [a.astype(jnp.float64) for a in narrow]
    for mode, tolerance in (("exact", 1e-4), ("truncate", 1e-3)):
        # Exact: 1e-7 times the features' condition, below 100 here. Truncated: what a float32 Gram
        # may lose before float64 takes over.
        ours = gauss_newton_direction(*narrow, pseudoinverse=mode)
        assert ours.dtype == jnp.float32
        close(ours, gauss_newton_direction(*wide, pseudoinverse=mode), tolerance)
    with jax.enable_x64(False):
        fine, info = jax.jit(lambda *a: gauss_newton_direction(*a, rtol=0.0, return_info=True))(
            *narrow
        )
    assert (info.method, info.dtype, fine.dtype) == ("svd", "float64", jnp.float32)
    # float64 throughout, rounded to float32 once.
    close(fine, gauss_newton_direction(*wide, rtol=0.0), 2e-7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pseudoinverse": "exact", "x": np.ones((21, 6)), "epsilon": np.ones((21, 6))}, "N = 21"),
        ({"epsilon": np.ones((4, 5))}, r"the shape of the outputs, \(4, 6\)"),
        ({"epsilon": np.full((4, 6), np.nan)}, "epsilon holds 24"),
        ({"x": np.ones((4, 5))}, "pad odd inputs"),
        ({"readout": np.ones((2, 6)), "epsilon": np.ones((4, 2))}, "full row rank"),
        ({"readout": np.ones((7, 6)), "epsilon": np.ones((4, 7))}, r"readout must be \(C, d\)"),
    ],
)
def test_bad_input(change, message):
    w, v, _ = network()
    arguments = {"x": np.ones((4, 6)), "epsilon": np.ones((4, 6))} | change
    with pytest.raises(ValueError, match=message):
        gauss_newton_direction(w, v, **arguments)


def test_what_is_only_known_at_run_time():
    w, v, x = network()
    repeated = x.at[1].set(x[0])
    with pytest.raises(RuntimeError, match="rank-deficient"):
        gauss_newton_direction(
            w, v, repeated, jnp.arange(36.0).reshape(6, 6), pseudoinverse="exact"
        )
    step = jax.jit(lambda e, p: gauss_newton_direction(w, v, x, e, readout=p))
    with pytest.raises(RuntimeError, match="epsilon holds NaN"):
        step(jnp.full((6, 2), jnp.nan), jnp.eye(2, 6))
    with pytest.raises(RuntimeError, match="full row rank"):
        step(jnp.ones((6, 2)), jnp.ones((2, 6)))


@pytest.mark.slow
def test_halving_the_step_halves_the_flow_error(key):
    """XGN eq (8): max_t |e(t) - exp(-t) e_0| / |e_0| along steps of the squared error."""
    w, v, x = network(blocks=2, samples=6, width=40)
    p = orthonormal_readout(key, 2, 6)
    y = normal(3, (6, 2), 0.3) + x @ p.T
    options = {"activation": "tanh", "readout": p, "pseudoinverse": "exact"}
    errors = []
    for k in (20, 40):
        now, path = w, []
        for _ in range(2 * k):
            path.append(outputs_of(now, v, x, "tanh", p) - y)
            now = now - gauss_newton_direction(now, v, x, path[-1], **options) / k
        flow = np.exp(-np.arange(2 * k) / k)[:, None, None] * np.asarray(path[0])
        deviation = np.linalg.norm((np.stack(path) - flow).reshape(2 * k, -1), axis=1)
        errors.append(deviation.max() / np.linalg.norm(path[0]))
    assert 1.7 < errors[0] / errors[1] < 2.3  # the required range around first order
