"""Small random RevMLPs, and the network written out once more, plainly."""

import jax
import jax.numpy as jnp
import numpy as np


def network(blocks=3, half=3, width=20, samples=6, dtype=jnp.float64, scale=0.7, seed=0):
    """(weights, bottlenecks, x), normal entries."""
    k = jax.random.split(jax.random.key(seed), 3)
    weights = scale * jax.random.normal(k[0], (blocks, 2, half, width), dtype) / width**0.5
    bottlenecks = jax.random.normal(k[1], (blocks, 2, width, half), dtype) / half**0.5
    return weights, bottlenecks, jax.random.normal(k[2], (samples, 2 * half), dtype)


def plain_half(w, v, z, act):
    """W σ(V z) for rows z, in plain jnp."""
    return act(z @ v.T) @ w.T


def plain_forward(weights, bottlenecks, x, act):
    """Every state x_0, x1_1|x2_1, ..., as a Python loop: [(x1, x2), ...]."""
    half = x.shape[1] // 2
    states = [(x[:, :half], x[:, half:])]
    for w, v in zip(weights, bottlenecks, strict=True):
        x1, x2 = states[-1]
        x1 = x1 + plain_half(w[0], v[0], x2, act)
        x2 = x2 + plain_half(w[1], v[1], x1, act)
        states.append((x1, x2))
    return states


ACTIVATIONS = {
    "relu": lambda z: jnp.where(z > 0, z, 0.0),
    "tanh": jnp.tanh,
    "gelu": lambda z: 0.5 * z * (1 + jax.scipy.special.erf(z / np.sqrt(2.0))),
    "identity": lambda z: z,
}
