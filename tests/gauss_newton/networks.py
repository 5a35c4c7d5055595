"""Small random RevMLPs, and the network written out once more, plainly."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.draws import normal, split


def network(blocks=3, half=3, width=20, samples=6, dtype=jnp.float64, scale=0.7, seed=0):
    """(weights, bottlenecks, x), normal entries."""
    k = split(seed, 3)
    weights = normal(k[0], (blocks, 2, half, width), scale / width**0.5, dtype)
    bottlenecks = normal(k[1], (blocks, 2, width, half), half**-0.5, dtype)
    return weights, bottlenecks, normal(k[2], (samples, 2 * half), dtype=dtype)


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


def filtered_pinv(matrix, mode, rtol=0.01, atol=1e-5):
    """φ(S) of a dense matrix by NumPy's SVD; directions of a singular matrix dropped."""
    u, values, vt = np.linalg.svd(np.asarray(matrix), full_matrices=False)
    delta = rtol * values[0]
    alive = values > 1e-12 * values[0]
    safe = np.where(alive, values, 1)
    weight = {
        "exact": 1 / safe,
        "truncate": (values >= max(delta, atol)) / safe,
        "damp": 1 / (safe + delta),
        "tikhonov": safe / (safe**2 + delta**2),
    }[mode]
    return vt.T @ ((alive * weight)[:, None] * u.T)


def brute_direction(weights, bottlenecks, x, epsilon, act, readout=None, mode="exact", rtol=0.01):
    """Eqs (16)-(17) from dense Jacobians: jacrev, dense solves and dense pseudo-inverses."""
    blocks, _, half, _ = weights.shape
    n, d = x.shape
    p = np.eye(d) if readout is None else np.asarray(readout)
    target = np.asarray(epsilon) @ np.linalg.pinv(p).T
    states = plain_forward(weights, bottlenecks, x, act)
    direction = np.zeros(weights.shape)
    for level in range(blocks):
        w, v = weights[level], bottlenecks[level]
        x1, x2 = states[level]
        new1, _ = states[level + 1]

        def onward(z, level=level):
            return jnp.concatenate(
                plain_forward(weights[level + 1 :], bottlenecks[level + 1 :], z, act)[-1], axis=1
            )

        here = jnp.concatenate(states[level + 1], axis=1)
        dense = np.asarray(jax.jacfwd(onward)(here)).reshape(n * d, n * d)
        delta = np.linalg.solve(dense, target.reshape(-1)).reshape(n, d)

        def write_first(w0, w=w, v=v, x1=x1, x2=x2):
            return x1 + plain_half(w0, v[0], x2, act)

        def write_second(w1, new1=new1, v=v, x2=x2):
            return x2 + plain_half(w1, v[1], new1, act)

        def second_of_first(w0, w=w, v=v, x2=x2, write_first=write_first):
            return x2 + plain_half(w[1], v[1], write_first(w0), act)

        j0 = np.asarray(jax.jacrev(write_first)(w[0])).reshape(n * half, -1)
        j1 = np.asarray(jax.jacrev(write_second)(w[1])).reshape(n * half, -1)
        cross = np.asarray(jax.jacrev(second_of_first)(w[0])).reshape(n * half, -1)
        d0 = filtered_pinv(j0, mode, rtol) @ delta[:, :half].reshape(-1)
        d1 = filtered_pinv(j1, mode, rtol) @ (delta[:, half:].reshape(-1) - cross @ d0)
        direction[level, 0] = d0.reshape(w[0].shape)
        direction[level, 1] = d1.reshape(w[1].shape)
    return direction / blocks
