"""Θv without Θ, against the brute-force kernel."""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

from jaxttp.ntk import ntk_operator
from tests import oracles
from tests.draws import normal
from tests.ntk.networks import NETWORKS, mlp


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "conv_channels_first", "custom_derivatives", "scanned"])
def test_products(name):
    apply_fn, params, x = NETWORKS[name]()
    theta = oracles.kernel(apply_fn, params, x)
    v = normal(7, theta.shape[:2])
    operator = ntk_operator(apply_fn, params, x)
    got = jax.jit(lambda v: operator.mv(v))(v)
    # The same float64 sums in another order.
    np.testing.assert_allclose(got, jnp.einsum("ncmd,md->nc", theta, v), rtol=1e-11, atol=1e-11)


@pytest.mark.slow
def test_lineax_interface():
    apply_fn, params, x = mlp()
    operator = ntk_operator(apply_fn, params, x, trainable=lambda path: path.startswith("2/"))
    assert lx.is_positive_semidefinite(operator)
    assert lx.is_symmetric(operator)
    assert operator.T is operator
    frozen = params[:2]
    theta = oracles.kernel(lambda last, x: apply_fn([*frozen, last], x), params[2], x)
    matrix = theta.reshape(15, 15)
    np.testing.assert_allclose(operator.as_matrix(), matrix, rtol=1e-11, atol=1e-11)
    v = jnp.ones((5, 3))
    dense = lx.materialise(operator)
    np.testing.assert_allclose(dense.mv(v), operator.mv(v), rtol=1e-11, atol=1e-11)
    shifted = operator + 0.1 * lx.IdentityLinearOperator(operator.in_structure())
    solved = lx.linear_solve(
        lx.TaggedLinearOperator(shifted, lx.positive_semidefinite_tag), v, lx.CG(1e-10, 1e-10)
    ).value
    # The solver stops at a residual of 1e-10 relative to v; the smallest eigenvalue is 0.1.
    np.testing.assert_allclose(
        solved.reshape(-1), np.linalg.solve(matrix + 0.1 * np.eye(15), np.ones(15)), rtol=1e-6
    )


def test_bad_input():
    apply_fn, params, x = mlp()
    with pytest.raises(ValueError, match="outputs' shape"):
        ntk_operator(apply_fn, params, x).mv(jnp.ones(5))


@pytest.mark.parametrize(
    ("v", "match"),
    [
        (jnp.ones((3, 1), int), r"dtype float64; got int64. Cast it: v.astype\('float64'\)"),
        (jnp.ones((3, 1), jnp.float32), "dtype float64; got float32"),
        (jnp.ones((3, 1), complex), "v must hold real numbers; got complex128"),
    ],
)
def test_vectors_of_another_dtype(v, match):
    operator = ntk_operator(lambda w, x: x @ w, jnp.ones((2, 1)), jnp.ones((3, 2)))
    with pytest.raises(ValueError, match=match):
        operator.mv(v)
