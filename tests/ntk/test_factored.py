"""Kernels kept as their factors, against the kernels themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxttp
from jaxttp.dynamics import (
    closed_form,
    diffusion,
    gradient_flow,
    recursion,
    relinearized_recursion,
)
from jaxttp.dynamics._pieces import is_finite
from jaxttp.dynamics.stability import max_learning_rate
from jaxttp.forecast.sweeps import sweep_kernel
from jaxttp.ntk import Factored, Sketched, as_matrix, eigendecomposition, empirical_ntk
from jaxttp.ntk.estimators import delete_groups
from tests.draws import normal, split

M, N, C, K = 3, 6, 2, 4
KEYS = split(0, 4)
A, B = normal(KEYS[0], (M, C, K)), normal(KEYS[1], (N, C, K))
SQUARE, CROSS = Factored.of(B, B), Factored.of(A, B)
F0, Y = normal(KEYS[2], (N, C)), jnp.asarray(np.arange(N) % C)


def test_it_is_the_product_of_its_factors():
    want = np.einsum("mck,ndk->mcnd", A, B)
    np.testing.assert_allclose(CROSS.dense(), want, atol=1e-12)
    np.testing.assert_allclose(np.asarray(CROSS), want, atol=1e-12)
    assert (CROSS.shape, CROSS.ndim) == (want.shape, 4)
    many = normal(KEYS[3], (5, N, C))
    np.testing.assert_allclose(
        CROSS.apply(many), np.einsum("mcnd,tnd->tmc", want, many), atol=1e-12
    )
    np.testing.assert_allclose(CROSS.apply(many[0]), CROSS.apply(many)[0], atol=1e-12)
    assert CROSS.astype(jnp.float32).dtype == jnp.float32
    np.testing.assert_allclose(as_matrix(SQUARE), as_matrix(SQUARE.dense()), atol=1e-12)
    values = eigendecomposition(SQUARE).values
    np.testing.assert_allclose(values, eigendecomposition(SQUARE.dense()).values, atol=1e-10)


@pytest.mark.slow
def test_every_dynamics_takes_it():
    def paths(square, cross):
        test = {"kernel_test": cross, "f0_test": jnp.zeros((M, C))}
        ts, soft, square_loss = jnp.arange(4.0), "cross_entropy", "squared_error"
        yield recursion(square, F0, Y, loss=soft, optimizer=optax.sgd(0.1), steps=4, **test)
        common = {"ts": ts, "learning_rate": 0.1, **test}
        yield gradient_flow(square, F0, Y, loss=soft, **common)
        yield closed_form(square, F0, Y, loss=square_loss, **common)
        noisy = {"learning_rate": 0.1, "batch_size": 2, "key": KEYS[0], "steps": 4, "paths": 2}
        yield diffusion(square, F0, Y, loss=soft, save="outputs", **noisy, **test)

    both = zip(
        paths(SQUARE, CROSS), paths(SQUARE.dense(), CROSS.dense()), strict=True
    )  # fmt: skip
    for found, want in both:
        # Solvers choose their steps by the last bits as well: their tolerance is 1e-6 and less.
        np.testing.assert_allclose(found.train, want.train, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(found.test, want.test, rtol=1e-6, atol=1e-7)
    limits = [max_learning_rate(k, F0, Y, loss="cross_entropy") for k in (SQUARE, SQUARE.dense())]
    np.testing.assert_allclose(*limits, rtol=1e-10)


def test_sweeps_take_it():
    settings = jaxttp.grid(learning_rate=(0.01, 0.1), steps=5)
    found, want = (sweep_kernel(k, F0, Y, settings) for k in (SQUARE, SQUARE.dense()))
    np.testing.assert_allclose(found.loss, want.loss, rtol=1e-10)


@pytest.mark.slow
def test_it_is_followed_along_a_path():
    w = normal(KEYS[3], (3, C))
    x = normal(KEYS[0], (N, 3))

    def network(w, x):
        return jnp.tanh(x @ w)

    def factors(w):
        jacobian = jax.jacrev(lambda w: network(w, x))(w).reshape(N, C, -1)
        return Factored.of(jacobian, jacobian)

    paths = [
        relinearized_recursion(
            network, w, x, Y, loss="cross_entropy", optimizer=optax.sgd(0.5, 0.9), steps=30,
            kernel_fn=kernel_fn, rebuilds="auto", batch_size=3, key=KEYS[1],
        )
        for kernel_fn in (factors, lambda w: empirical_ntk(network, w, x))
    ]  # fmt: skip
    assert paths[0].ends == paths[1].ends
    np.testing.assert_allclose(paths[0].train, paths[1].train, atol=1e-8)  # rounding, 30 steps


def test_what_is_not_finite_is_seen():
    bad = Factored.of(B, B.at[0, 0, 0].set(jnp.nan))
    assert bool(is_finite(SQUARE))
    assert not bool(is_finite(bad))
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
