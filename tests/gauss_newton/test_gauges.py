"""Exactness: J J^⊣ = 1, and first-order convergence to the flow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp.gauss_newton import (
    flow_error,
    gauss_newton_direction,
    inverse_error,
    orthonormal_readout,
    revmlp_forward,
)
from tests.draws import normal
from tests.gauss_newton.networks import network

pytestmark = pytest.mark.usefixtures("strict_dtypes")


@pytest.mark.slow
def test_inverse_error_is_rounding_or_the_share_that_is_lost(key):
    w, v, x = network()
    p = orthonormal_readout(key, 2, 6)
    common = {"key": key, "activation": "tanh", "readout": p}
    # The required 1e-10.
    assert float(inverse_error(w, v, x, pseudoinverse="exact", **common)) < 1e-10
    lost = inverse_error(w, v, x, pseudoinverse="truncate", rtol=0.5, **common)
    assert float(lost) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_halving_the_step_halves_the_flow_error(activation, key):
    w, v, x = network(blocks=2, samples=6, width=40)
    p = orthonormal_readout(key, 2, 6)
    y = normal(3, (6, 2), 0.3) + x @ p.T
    errors = [
        float(
            flow_error(
                w,
                v,
                x,
                y,
                learning_rate=1 / k,
                steps=2 * k,
                activation=activation,
                readout=p,
                pseudoinverse="exact",
            )
        )
        for k in (40, 80)
    ]
    assert 1.7 < errors[0] / errors[1] < 2.3  # the required range around first order
    assert errors[1] < 0.05


@pytest.mark.slow
def test_the_loss_of_j_plus_and_of_the_right_inverse_agree_to_first_order():
    # J J⁺ = J J^⊣ = 1: one step changes the outputs alike up to O(α²).
    w, v, x = network(blocks=2, half=2, width=16, samples=4)
    f = revmlp_forward(w, v, x, activation="tanh")
    epsilon = f - 1
    dense = jax.jit(jax.jacrev(lambda w: revmlp_forward(w, v, x, activation="tanh")))(w)
    plus = np.linalg.pinv(np.asarray(dense).reshape(f.size, -1)) @ np.ravel(epsilon)
    ours = gauss_newton_direction(w, v, x, epsilon, activation="tanh", pseudoinverse="exact")
    gaps = []
    for rate in (1e-2, 5e-3):
        losses = [
            float(jnp.sum((revmlp_forward(w - rate * step, v, x, activation="tanh") - 1) ** 2))
            for step in (ours, jnp.asarray(plus.reshape(w.shape)))
        ]
        gaps.append(abs(losses[0] - losses[1]))
    # Quarter the gap of one step, hence half the gap at a fixed time.
    assert 3.4 < gaps[0] / gaps[1] < 4.6


@pytest.mark.parametrize(
    ("change", "message"),
    [({"learning_rate": 0.0}, "learning_rate must be"), ({"steps": 0}, "steps must be")],
)
def test_bad_input(change, message):
    w, v, x = network()
    with pytest.raises(ValueError, match=message):
        flow_error(w, v, x, x, **({"learning_rate": 0.1, "steps": 2} | change))
    with pytest.raises(ValueError, match="probes must be"):
        inverse_error(w, v, x, key=jax.random.key(0), probes=0)
