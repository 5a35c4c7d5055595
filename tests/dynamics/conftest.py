"""A small network with more weights than outputs, so that its kernel has full rank."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.draws import normal, split


class Problem(NamedTuple):
    apply_fn: object
    params: object
    x: jax.Array
    labels: jax.Array
    targets: np.ndarray
    x_test: jax.Array
    kernel: np.ndarray
    kernel_test: np.ndarray
    f0: np.ndarray
    f0_test: np.ndarray


def apply_fn(params, x):
    return jnp.tanh(x @ params["in"] + params["bias"][None]) @ params["out"]


@pytest.fixture(scope="package")
def problem():
    keys = split(7, 6)
    params = {
        "in": normal(keys[0], (4, 12)),
        "bias": normal(keys[1], (12,), 0.1),
        "out": normal(keys[2], (12, 3), 1 / 3),
    }
    x, x_test = normal(keys[3], (7, 4)), normal(keys[4], (3, 4))
    labels = jax.random.randint(keys[5], (7,), 0, 3)
    return Problem(
        apply_fn,
        params,
        x,
        labels,
        np.eye(3)[np.asarray(labels)],
        x_test,
        oracles.kernel(apply_fn, params, x),
        oracles.kernel(apply_fn, params, x_test, x),
        np.asarray(apply_fn(params, x)),
        np.asarray(apply_fn(params, x_test)),
    )
