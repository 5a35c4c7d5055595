"""Mini-batches in the space of a kernel's factors are the dual recursion, in other words."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp.dynamics import relinearized_recursion as relinearized
from jaxttp.ntk import sketch_jacobian
from jaxttp.ntk.kernels import Factored

KEY = jax.random.key(3)
N, C, WIDTH, STEPS = 10, 3, 8, 24


def network(w, x):
    return jnp.tanh(x @ w["a"]) @ w["b"]


def weights():
    a, b = jax.random.split(KEY)
    return {"a": 0.6 * jax.random.normal(a, (5, 8)), "b": 0.6 * jax.random.normal(b, (8, C))}


X = jax.random.normal(jax.random.key(4), (N, 5))
Y = jnp.arange(N) % C


def kernel_at(w, x=X):
    rows, columns = (
        sketch_jacobian(network, w, some, key=KEY, dim=WIDTH).reshape(-1, WIDTH) for some in (x, X)
    )
    return Factored(rows, columns, C)


OPTIMIZERS = {
    "momentum": optax.sgd(0.1, momentum=0.8, nesterov=True),
    "decay": optax.chain(optax.add_decayed_weights(0.01), optax.sgd(0.2, momentum=0.5)),
    "beyond the edge": optax.sgd(6.0),
}


@pytest.mark.parametrize(
    ("name", "rebuilds"),
    [("beyond the edge", 3), ("momentum", "auto"), ("decay", "auto")],
)
def test_factors_are_the_kernel_itself(name, rebuilds):
    """With damping, carried velocities, defects, test samples and everything."""

    def follow(kernel_at=kernel_at):
        return relinearized(
            network, weights(), X, Y, loss="cross_entropy", optimizer=OPTIMIZERS[name],
            steps=STEPS, kernel_fn=kernel_at, rebuilds=rebuilds, batch_size=4, key=KEY,
            tolerance=0.1, x_test=X[:5] + 0.1, kernel_test_fn=lambda w: kernel_at(w, X[:5] + 0.1),
        )  # fmt: skip

    found = follow()
    expected = follow(lambda w, x=X: kernel_at(w, x).dense())
    # Both add the same products in another order; beyond the edge outputs are driven apart in every
    # step, which makes 1e-5 of roundings of 1e-16 within 40 of them.
    close = 1e-4 if name == "beyond the edge" else 1e-9
    for name_ in ("train", "test", "loss", "loss_uncertainty"):
        one, two = (np.asarray(getattr(each, name_)) for each in (found, expected))
        np.testing.assert_allclose(one, two, rtol=close, atol=close, err_msg=name_)
    assert found.ends == expected.ends
    assert int(found.diverged_at) == int(expected.diverged_at)
