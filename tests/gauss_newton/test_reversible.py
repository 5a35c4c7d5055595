"""Forward, inverse and the frugal backward pass against the network written out plainly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxttp import empirical_ntk, from_nnx, ntk_operator
from jaxttp.gauss_newton import revmlp_forward, revmlp_inverse
from jaxttp.models import RevMLP
from tests import oracles
from tests.draws import normal
from tests.gauss_newton.networks import ACTIVATIONS, network, plain_forward

pytestmark = pytest.mark.usefixtures("strict_dtypes")


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_forward_is_the_coupling_written_out(activation):
    w, v, x = network()
    expected = jnp.concatenate(plain_forward(w, v, x, ACTIVATIONS[activation])[-1], axis=1)
    # Rounding of a few products of 20 terms.
    assert jnp.abs(revmlp_forward(w, v, x, activation=activation) - expected).max() < 1e-13


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_inverse_undoes_the_forward_pass(activation):
    w, v, x = network(blocks=4)
    back = revmlp_inverse(
        w, v, revmlp_forward(w, v, x, activation=activation), activation=activation
    )
    # The required 1e-12; eight half-layers at float64 leave about 1e-14.
    assert jnp.abs(back - x).max() < 1e-12


@pytest.mark.slow
def test_input_reconstruction_in_float32_at_64_blocks():
    w, v, x = network(blocks=64, half=8, width=32, samples=4, dtype=jnp.float32, scale=0.3)
    back = revmlp_inverse(w, v, revmlp_forward(w, v, x))
    # 128 half-layers each add a rounding of 1e-7; the couplings amplify it by less than 10³ here.
    assert jnp.abs(back - x).max() < 1e-3


@pytest.mark.parametrize("activation", ["tanh", "gelu"])
def test_the_frugal_backward_pass_is_the_ordinary_one(activation):
    arguments = network()
    out = normal(9, arguments[2].shape)

    def loss(reversible):
        return lambda *a: jnp.sum(
            out * jnp.sin(revmlp_forward(*a, activation=activation, reversible=reversible))
        )

    ours = jax.grad(loss(True), (0, 1, 2))(*arguments)
    plain = jax.grad(loss(False), (0, 1, 2))(*arguments)
    for a, b in zip(ours, plain, strict=True):
        # Rebuilt states are off by 1e-15, amplified a little.
        np.testing.assert_allclose(a, b, atol=1e-12)


@pytest.mark.slow
def test_every_mode_of_differentiation_works():
    w, v, x = network(blocks=2, half=1, width=5, samples=2)

    @functools.partial(jax.jit, static_argnums=0)
    def curvature(reversible):
        def loss(w):
            return jnp.sum(revmlp_forward(w, v, x, activation="tanh", reversible=reversible) ** 3)

        return jax.jvp(jax.grad(loss), (w,), (w,))[1]

    np.testing.assert_allclose(curvature(True), curvature(False), atol=1e-12)  # the same sums
    dense = jax.jit(jax.jacrev(lambda w: revmlp_forward(w, v, x, activation="tanh")))(w)
    forward = jax.jit(jax.jacfwd(lambda w: revmlp_forward(w, v, x, activation="tanh")))(w)
    np.testing.assert_allclose(dense, forward, atol=1e-13)  # two orders of the same sums
    stacked = jnp.stack([x, 2 * x])
    each = jax.jit(
        jax.vmap(jax.grad(lambda x: jnp.sum(revmlp_forward(w, v, x, activation="tanh"))))
    )
    one = jax.grad(lambda x: jnp.sum(revmlp_forward(w, v, x, activation="tanh")))
    np.testing.assert_allclose(each(stacked)[1], one(stacked[1]), atol=1e-13)  # the same sums


def temporaries(blocks, reversible):
    w, v, x = network(blocks, half=8, width=64, samples=64, dtype=jnp.float32)

    def loss(w):
        return jnp.sum(revmlp_forward(w, v, x, reversible=reversible) ** 2)

    return jax.jit(jax.grad(loss)).lower(w).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_of_the_backward_pass_does_not_grow_with_depth():
    # The requirement is 30 %; a handful of scalars per block is all that may differ.
    assert temporaries(32, True) < 1.3 * temporaries(4, True)
    # Stored activations: eight times the blocks, more than four times the memory.
    assert temporaries(32, False) > 4 * temporaries(4, False)


def test_a_last_column_is_a_bias_and_no_bottleneck_the_identity():
    w, v, x = network()
    bias = normal(4, (3, 2, 3, 1))
    with_bias = revmlp_forward(jnp.concatenate([w, bias], axis=3), v, x)
    x1, x2 = x[:, :3], x[:, 3:]
    for wl, vl, bl in zip(w, v, bias, strict=True):
        x1 = x1 + jax.nn.relu(x2 @ vl[0].T) @ wl[0].T + bl[0].T
        x2 = x2 + jax.nn.relu(x1 @ vl[1].T) @ wl[1].T + bl[1].T
    np.testing.assert_allclose(with_bias, jnp.concatenate([x1, x2], axis=1), atol=1e-13)  # sums
    square = w[..., :3]
    identity = jnp.broadcast_to(jnp.eye(3), (3, 2, 3, 3))
    np.testing.assert_array_equal(
        revmlp_forward(square, None, x), revmlp_forward(square, identity, x)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": np.ones((2, 3, 4))}, r"weights must be \(L, 2, d/2, m\)"),
        ({"weights": np.full((3, 2, 3, 20), np.nan)}, "weights holds 360"),
        ({"bottlenecks": np.ones((3, 2, 3, 20))}, "bottlenecks must be"),
        ({"bottlenecks": None}, "where m = d/2"),
        ({"x": np.ones((5, 5))}, "pad odd inputs with one zero column"),
        ({"x": np.ones((0, 6))}, "N >= 1"),
        ({"x": np.full((5, 6), np.inf)}, "x holds 30"),
        ({"activation": "swish"}, "activation='swish' is not known"),
    ],
)
def test_bad_input(change, message):
    w, v, x = network()
    arguments = {"weights": w, "bottlenecks": v, "x": x} | change
    with pytest.raises(ValueError, match=message):
        revmlp_forward(**arguments)


def test_the_reversible_backward_pass_can_be_transposed_again():
    """Jv is had from Jᵀu, whose solve must be linear in all of its right-hand side."""
    model = RevMLP(
        6, 2, rngs=nnx.Rngs(0), blocks=2, bottleneck=9, readout="orthonormal", scale="xavier",
        param_dtype=jnp.float64,
    )  # fmt: skip
    apply_fn, params = from_nnx(model)
    x = normal(0, (4, 6))
    theta = oracles.kernel(apply_fn, params, x)
    got = empirical_ntk(apply_fn, params, x, method="vector_product")
    np.testing.assert_allclose(got, theta, atol=1e-11)  # the same float64 sums in another order
    v = normal(1, (4, 2))
    np.testing.assert_allclose(
        ntk_operator(apply_fn, params, x).mv(v), jnp.einsum("ncmd,md->nc", theta, v), atol=1e-11
    )
