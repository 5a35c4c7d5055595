import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp.forecast import DEVICES, Device, wall_clock

PARAMS = jnp.zeros((200, 300))
X, Y = np.ones((64, 200)), np.zeros((64, 300))


def network(params, x):
    return x @ params


def clock(**options):
    options = {
        "steps": {0.1: 30, 0.01: -1}, "horizon": 100, "optimizer": optax.sgd(0.1),
        "loss": "squared_error",
    } | options  # fmt: skip
    return wall_clock(network, PARAMS, X, Y, **options)


def test_measured_seconds_add_up_and_leave_the_weights_alone():
    found = clock(repeats=2)
    assert found.step_seconds > 0
    assert found.seconds == {0.1: 30 * found.step_seconds}  # the other one is never reached
    assert found.total_seconds == 100 * found.step_seconds
    assert jax.devices()[0].device_kind in found.source
    assert not np.asarray(PARAMS).any()
    assert "whole horizon" in str(found)


def test_an_estimate_is_a_roofline():
    # Products: 2 N a b forward, 2 N a b for the weights' gradient; XLA adds elementwise ones.
    products = 2 * 2 * 64 * 200 * 300
    fast = clock(device=Device(flops=1e9, bandwidth=1e30), efficiency=1.0)
    assert fast.step_seconds == pytest.approx(products / 1e9, rel=0.1)
    slow = clock(device=Device(flops=1e30, bandwidth=1e9), efficiency=1.0)
    # Read and write the weights, at least, in float64.
    assert slow.step_seconds > 2 * 200 * 300 * 8 / 1e9
    half = clock(device=Device(flops=1e9, bandwidth=1e30), efficiency=0.5)
    assert half.step_seconds == pytest.approx(2 * fast.step_seconds)
    few = clock(device=Device(flops=1e9, bandwidth=1e30), efficiency=1.0, batch_size=8)
    assert few.step_seconds < 0.2 * fast.step_seconds
    assert fast.source == "estimated for the given device"
    assert set(DEVICES) >= {"T4", "A100", "H200"}


def test_a_step_is_no_shorter_than_its_start():
    """5.5 µs for 32 samples once: the arithmetic alone."""
    found, known = clock(device="A100", batch_size=32), DEVICES["A100"]
    assert found.step_seconds == known.dispatch
    assert "the time to start a step" in str(found)
    assert clock(device=dataclasses.replace(known, dispatch=0.0)).step_seconds < 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "A1000"}, "device='A1000' is not known; choose one of 'T4'"),
        ({"horizon": 0}, "horizon must be"),
        ({"efficiency": 1.5}, "efficiency must be at most 1"),
        ({"batch_size": 65}, "batch_size must be"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        clock(**options)
