"""Independent brute force: slow and plain, sharing no code with jaxttp."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from scipy.integrate import solve_ivp


@functools.partial(jax.jit, static_argnums=0)
def _jacobian(apply_fn, params, x):
    flat, unravel = ravel_pytree(params)
    return jax.jacrev(lambda w: apply_fn(unravel(w), x))(flat)


def jacobian(apply_fn, params, x):
    """J (N, C, D) by reverse mode over the flattened parameters, for the whole batch at once.

    One program, and none for the same function and shapes: op by op it would be dozens.
    """
    return np.asarray(_jacobian(apply_fn, params, x))


def kernel(apply_fn, params, x1, x2=None):
    """Theta (N1, C, N2, C) from the whole Jacobian."""
    j1 = jacobian(apply_fn, params, x1)
    j2 = j1 if x2 is None else jacobian(apply_fn, params, x2)
    return np.einsum("iap,jbp->iajb", j1, j2)


def softmax(f):
    """Row-wise softmax (N, C)."""
    e = np.exp(f - f.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def gradient(name, f, y):
    """dl/df (N, C) of a named loss at targets (N, C)."""
    if name == "cross_entropy":
        return softmax(f) * y.sum(axis=1, keepdims=True) - y
    if name == "squared_error":
        return f - y
    return 1 / (1 + np.exp(-f)) - y


def integrate(theta, f0, y, name, rate, ts, theta_test=None, f0_test=None):
    """The function-space ODE by SciPy's LSODA at tight tolerances; train and test (T, ., C)."""
    n, c = f0.shape
    m = 0 if f0_test is None else f0_test.shape[0]
    square = theta.reshape(n * c, n * c)
    cross = None if m == 0 else theta_test.reshape(m * c, n * c)

    def field(_, state):
        g = gradient(name, state[: n * c].reshape(n, c), y).reshape(-1)
        train = -rate / n * (square @ g)
        return train if cross is None else np.concatenate([train, -rate / n * (cross @ g)])

    start = f0.reshape(-1) if m == 0 else np.concatenate([f0.reshape(-1), f0_test.reshape(-1)])
    out = solve_ivp(
        field, (0, ts[-1]), start, method="LSODA", t_eval=ts, rtol=1e-11, atol=1e-12
    ).y.T
    train = out[:, : n * c].reshape(-1, n, c)
    return train, None if m == 0 else out[:, n * c :].reshape(-1, m, c)


def train_linearised(apply_fn, params, x, y, name, optimizer, steps, batches=None, x_test=None):
    """Weight-space training of the linearised network, by an explicit Jacobian; (T+1, N, C)."""
    import optax

    j = jacobian(apply_fn, params, x)
    f0 = np.asarray(apply_fn(params, x))
    n, _, d = j.shape
    flat = np.asarray(ravel_pytree(params)[0])
    w, state = jnp.asarray(flat), optimizer.init(jnp.asarray(flat))

    @jax.jit  # optax's schedules round to float32, eager not as compiled
    def move(g, state, w):
        updates, state = optimizer.update(g, state, w)
        return optax.apply_updates(w, updates), state

    weights = [flat]
    for t in range(steps):
        f = f0 + np.einsum("ncd,d->nc", j, np.asarray(w) - flat)
        g = gradient(name, f, y)
        keep = np.arange(n) if batches is None else np.asarray(batches[t])
        total = np.zeros(d)
        for i in keep:
            total += j[i].T @ g[i] / len(keep)
        w, state = move(total, state, w)
        weights.append(np.asarray(w))
    moved = np.stack(weights) - flat
    train = f0 + np.einsum("ncd,td->tnc", j, moved)
    if x_test is None:
        return train
    j_test = jacobian(apply_fn, params, x_test)
    return train, np.asarray(apply_fn(params, x_test)) + np.einsum("mcd,td->tmc", j_test, moved)


def train_network(apply_fn, params, x, y, name, optimizer, steps, x_test=None, indices=None):
    """Weight-space training of the network itself; outputs (T+1, N, C), or those on x_test.

    `indices` (T, B) are the batches.
    """
    import optax

    flat, unravel = ravel_pytree(params)
    w, state, history = flat, optimizer.init(flat), []
    forward = jax.jit(lambda w, x: apply_fn(unravel(w), x))
    pull = jax.jit(lambda w, g: jax.vjp(lambda v: apply_fn(unravel(v), x), w)[1](g)[0])

    @jax.jit
    def move(g, state, w):
        updates, state = optimizer.update(g, state, w)
        return optax.apply_updates(w, updates), state

    for t in range(steps + 1):
        out = forward(w, x)
        history.append(np.asarray(out if x_test is None else forward(w, x_test)))
        fraction = np.ones(len(y)) / len(y)
        if indices is not None and t < steps:
            fraction = np.bincount(indices[t], minlength=len(y)) / indices.shape[1]
        g = gradient(name, np.asarray(out), y) * fraction[:, None]
        w, state = move(pull(w, g), state, w)
    return np.stack(history)
