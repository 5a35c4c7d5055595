"""Kernels as operators: dense, scalar and factored ones against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxttp
from jaxttp._core.checks import all_finite
from jaxttp.dynamics import recursion
from jaxttp.dynamics.stability import max_learning_rate
from jaxttp.ntk import Factored, Sketched, as_matrix, eigendecomposition
from jaxttp.ntk.estimators import delete_groups
from jaxttp.ntk.kernels import operator_of
from tests.draws import normal, split

M, N, C, K = 3, 6, 2, 4
KEYS = split(0, 4)
A, B = normal(KEYS[0], (M, C, K)), normal(KEYS[1], (N, C, K))
SQUARE, CROSS = Factored.of(B, B), Factored.of(A, B)
F0, Y = normal(KEYS[2], (N, C)), jnp.asarray(np.arange(N) % C)

FACTORS = np.einsum("mck,ndk->mcnd", A, B)
SCALARS = np.asarray(A[:, 0] @ B[:, 0].T)


@pytest.mark.parametrize(
    ("kernel", "want"),
    [
        (CROSS, FACTORS),
        (jnp.asarray(FACTORS), FACTORS),
        (jnp.asarray(SCALARS), np.einsum("mn,cd->mcnd", SCALARS, np.eye(C))),
    ],
    ids=["factored", "dense", "scalar"],
)
def test_an_operator_multiplies_and_is_cut_as_its_array(kernel, want):
    operator, many = operator_of(kernel, C), normal(KEYS[3], (5, N, C))
    close = lambda found, wanted: np.testing.assert_allclose(found, wanted, atol=1e-12)  # noqa: E731
    close(operator.as_matrix(), want.reshape(M * C, N * C))
    close(operator.mv(many), np.einsum("mcnd,tnd->tmc", want, many))
    close(operator.mv(many[0]), np.einsum("mcnd,nd->mc", want, many[0]))
    batch = np.array([4, 1, 1])
    wanted = want[:, :, batch]
    close(operator.some_columns(jnp.asarray(batch)).mv(many[:, batch]),
          np.einsum("mcnd,tnd->tmc", wanted, many[:, batch]))  # fmt: skip
    close(operator.block([2, 0], batch).as_matrix(), wanted[[2, 0]].reshape(2 * C, 3 * C))


def test_factors_stand_for_their_array():
    assert (CROSS.shape, CROSS.ndim) == (FACTORS.shape, 4)
    assert CROSS.astype(jnp.float32).dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(CROSS), FACTORS, atol=1e-12)
    np.testing.assert_allclose(as_matrix(SQUARE), as_matrix(SQUARE.dense()), atol=1e-12)
    values = eigendecomposition(SQUARE).values
    np.testing.assert_allclose(values, eigendecomposition(SQUARE.dense()).values, atol=1e-10)
    limits = [max_learning_rate(k, F0, Y, loss="cross_entropy") for k in (SQUARE, SQUARE.dense())]
    np.testing.assert_allclose(*limits, rtol=1e-10)


def test_what_is_not_finite_is_seen():
    bad = Factored.of(B, B.at[0, 0, 0].set(jnp.nan))
    assert bool(all_finite(SQUARE))
    assert not bool(all_finite(bad))
    with pytest.raises(ValueError, match=r"kernel\.columns holds 1 value"):
        recursion(bad, F0, Y, loss="cross_entropy", optimizer=optax.sgd(0.1), steps=2)
    with pytest.raises(ValueError, match="kernel must have shape"):
        recursion(CROSS, F0, Y, loss="cross_entropy", optimizer=optax.sgd(0.1), steps=2)


def test_sketches_stay_factored_where_that_is_cheaper():
    x, params = normal(KEYS[2], (N, 5)), normal(KEYS[3], (5, C))
    y = jnp.arange(N) % C
    problem = jaxttp.forecast.Problem.of(lambda w, x: x @ w, params, x, y)
    for dim, kind in ((4, Factored), (8, jax.Array)):  # N C / 2 = 6
        found = Sketched(dim, KEYS[0]).estimate(problem, params)
        assert isinstance(found.kernel, kind)
        sketch = jaxttp.ntk.sketch_jacobian(
            lambda w, x: x @ w, params, x, key=jax.random.fold_in(KEYS[0], 1), dim=dim
        )
        want = np.einsum("nck,mdk->ncmd", sketch, sketch)
        np.testing.assert_allclose(np.asarray(found.kernel), want, atol=1e-12)
        parts = [np.asarray(part) for part in found.parts]
        np.testing.assert_allclose(np.mean(parts, axis=0), want, atol=1e-12)
        assert isinstance(next(delete_groups(sketch)), kind)
