"""The closed-form kernel against an explicit Jacobian."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp.gauss_newton import orthonormal_readout, revmlp_forward, revmlp_kernel
from tests.gauss_newton.networks import network

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def brute(w, v, x1, x2, readout, activation):
    def j(x):
        p = jnp.eye(x.shape[1], dtype=x.dtype) if readout is None else readout
        whole = jax.jacrev(lambda w: revmlp_forward(w, v, x, activation=activation) @ p.T)
        dense = jax.jit(whole)(w)
        return np.asarray(dense, float).reshape(x.shape[0], p.shape[0], -1)

    return np.einsum("iap,jbp->iajb", j(x1), j(x2))


@pytest.mark.slow
@pytest.mark.parametrize(("activation", "with_readout"), [("relu", True), ("gelu", False)])
def test_it_is_j_times_its_transpose(activation, with_readout):
    w, v, x = network()
    p = orthonormal_readout(jax.random.key(1), 2, 6) if with_readout else None
    x2 = x[:4] + 1
    full = revmlp_kernel(w, v, x, x2, activation=activation, readout=p)
    # Two orders of the same sums, entries up to 1e3.
    np.testing.assert_allclose(full, brute(w, v, x, x2, p, activation), rtol=1e-11, atol=1e-10)
    diagonal = revmlp_kernel(w, v, x, x2, activation=activation, readout=p, output="diagonal")
    trace = revmlp_kernel(w, v, x, x2, activation=activation, readout=p, output="trace")
    np.testing.assert_allclose(diagonal, np.einsum("iaja->ija", full), atol=1e-10)  # as above
    np.testing.assert_allclose(trace, np.mean(diagonal, axis=2), atol=1e-10)  # as above


def test_biases_count():
    w, v, x = network()
    w = jnp.concatenate([w, jnp.ones((3, 2, 3, 1))], axis=3)
    ours = revmlp_kernel(w, v, x, activation="tanh")
    # As above.
    np.testing.assert_allclose(ours, brute(w, v, x, x, None, "tanh"), rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output": "dense"}, "output='dense' is not known"),
        ({"x2": np.ones((3, 4))}, "x2 must be"),
        ({"readout": np.zeros((2, 6))}, "full row rank"),
    ],
)
def test_bad_input(change, message):
    w, v, x = network()
    arguments = {"x1": x} | change
    with pytest.raises(ValueError, match=message):
        revmlp_kernel(w, v, **arguments)
