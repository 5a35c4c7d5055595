"""Four virtual devices (see conftest), a small network, and what a compiled program holds."""

import math
import re

import jax
import jax.numpy as jnp
import pytest


def need(devices):
    """Ends a test where there are fewer: a machine with one GPU, which conftest cannot divide."""
    if jax.device_count() < devices:
        pytest.skip(f"needs {devices} devices, {jax.default_backend()} has {jax.device_count()}")


def four():
    """A mesh of four devices, with the explicit axes that JAX gives."""
    need(4)
    return jax.make_mesh((4,), ("rows",))


def network(params, x):
    return jnp.tanh(x @ params["w"] + params["b"][None]) @ params["v"]


def weights(width=6):
    w, v = (jax.random.normal(jax.random.key(i), s) for i, s in ((0, (4, width)), (1, (width, 3))))
    return {"b": jnp.full(width, 0.1), "v": 0.5 * v, "w": w}


def samples(n, seed=2):
    return jax.random.normal(jax.random.key(seed), (n, 4))


def labels(x):
    return jnp.argmax(x[:, :3], axis=1)


def largest(compiled):
    """The numbers in the largest array that a device holds while a compiled program runs."""
    shapes = re.findall(r"\b[a-z]+[0-9]*\[([0-9,]+)\]", compiled.as_text())
    return max(math.prod(int(size) for size in shape.split(",")) for shape in shapes)
