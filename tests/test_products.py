"""Products with the Jacobian of networks without a forward mode, or a transposable derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxttp
from jaxttp import conditioning
from jaxttp._core.products import pull_and_push, with_forward_mode
from tests.draws import normal

X = normal(0, (8, 3))
Y = np.asarray(X[:, 0] > 0).astype(int)
PARAMS = {"w": normal(1, (3, 5), 1 / 2), "v": normal(2, (5, 2), 1 / 2)}


@jax.custom_vjp
def fused(x):
    return jnp.tanh(x)


fused.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * (1 - jnp.tanh(x) ** 2),))


def custom(p, x):
    """An activation with a backward rule alone, as flash attention and fused losses have it."""
    return fused(x @ p["w"]) @ p["v"]


def plain(p, x):
    return jnp.tanh(x @ p["w"]) @ p["v"]


@jax.custom_vjp
def opaque(x):
    """Neither mode: its backward rule has no derivative, as that of a solver's adjoint."""
    return jnp.sin(x)


@jax.custom_vjp
def slope(x):
    return jnp.cos(x)


def refuse(x, g):
    raise ValueError("no derivative of the slope")


slope.defvjp(lambda x: (jnp.cos(x), x), refuse)
opaque.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * slope(x),))


def predicted(f, **options):
    return jaxttp.predict_training_time(f, PARAMS, X, Y, steps=5, **options).loss


def operator(kind, *y, **loss):
    def product(f):
        made = conditioning.curvature_operator(f, PARAMS, X, *y, kind=kind, **loss)
        return made.mv(jnp.ones(made.in_structure().shape))

    return product


DOORS = {
    "Adam": lambda f: predicted(f, optimizer=optax.adam(0.05)),
    "ntk_operator": lambda f: jaxttp.ntk_operator(f, PARAMS, X).mv(jnp.ones((8, 2))),
    "vector products": lambda f: jaxttp.empirical_ntk(f, PARAMS, X, method="vector_product"),
    "Gauss-Newton operator": operator("gauss_newton"),
    "Hessian operator": operator("hessian", Y, loss="cross_entropy"),
    "functional Hessian operator": operator("functional_hessian", Y, loss="cross_entropy"),
    "Hessian": lambda f: conditioning.curvature_matrix(
        f, PARAMS, X, Y, kind="hessian", loss="cross_entropy"
    ),
}


@pytest.mark.parametrize("name", DOORS)
def test_a_network_with_a_backward_rule_alone(name):
    door = DOORS[name]
    # The same derivatives in another order of sums, in float64.
    np.testing.assert_allclose(door(custom), door(plain), rtol=1e-9, atol=1e-12)


def test_what_has_neither_mode_names_the_way_out():
    run = with_forward_mode(lambda p: opaque(X @ p["w"]) @ p["v"], PARAMS)
    slopes = jax.grad(lambda p: run(p).sum())
    with pytest.raises(ValueError, match=r"forward mode.*custom_jvp.*DirectAdjoint"):
        jax.jvp(slopes, (PARAMS,), (PARAMS,))


def test_products_are_those_with_the_jacobian():
    def function(p):
        return custom(p, X)

    outputs, pull, push = pull_and_push(function, PARAMS)
    jacobian = jax.jacrev(function)(PARAMS)
    u, v = normal(3, (8, 2)), jax.tree.map(lambda a: normal(4, a.shape), PARAMS)
    np.testing.assert_allclose(outputs, plain(PARAMS, X), rtol=1e-12)
    for name, leaf in jacobian.items():
        np.testing.assert_allclose(pull(u)[name], np.tensordot(u, leaf, 2), rtol=1e-10, atol=1e-13)
    expected = sum(np.tensordot(leaf, v[name], 2) for name, leaf in jacobian.items())
    np.testing.assert_allclose(push(v), expected, rtol=1e-10, atol=1e-13)
    run = with_forward_mode(function, PARAMS)
    np.testing.assert_allclose(jax.jvp(run, (PARAMS,), (v,))[1], expected, rtol=1e-10, atol=1e-13)


def test_a_function_with_a_forward_mode_stays_as_it_is():
    def function(p):
        return plain(p, X)

    assert with_forward_mode(function, PARAMS) is function
