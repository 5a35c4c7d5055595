"""Networks put differently for CPUs: values and derivatives stay, what is slow is gone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp._core import traced as module
from jaxttp._core.traced import Network, network_of
from tests.draws import normal, split
from tests.meshes import four

CPU = pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere nothing is replaced")


def count(name, function, *arguments):
    return str(jax.make_jaxpr(function)(*arguments)).count(f" = {name}[")


def deep(params, x):
    """An image of 4 x 4 pixels that becomes 2 x 2 and 1 x 1, in a jit of its own."""
    numbers = {"padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}

    @jax.jit
    def half(w, x):
        return jax.nn.relu(jax.lax.conv_general_dilated(x, w, (2, 2), **numbers))

    for w in params[:-1]:
        x = half(w, x)
    return x.mean(axis=(1, 2)) @ params[-1]


def deep_parts():
    keys = split(3, 4)
    shapes = ((3, 3, 2, 4), (3, 3, 4, 5), (5, 3))
    return [normal(k, s) for k, s in zip(keys, shapes, strict=False)], normal(keys[3], (6, 4, 4, 2))


@CPU
def test_only_slow_ones_are_replaced():
    params, x = deep_parts()
    assert count("conv_general_dilated", deep, params, x) == 2
    assert count("conv_general_dilated", network_of(deep).run, params, x) == 0
    large = jnp.ones((1, 16, 16, 2))
    assert (
        count("conv_general_dilated", network_of(deep).run, params, large) == 2
    )  # 16 to 8 to 4 pixels: quick as they are


def test_elsewhere_nothing_is_replaced(monkeypatch):
    monkeypatch.setattr(module.jax, "default_backend", lambda: "tpu")
    params, x = deep_parts()
    assert count("conv_general_dilated", Network(lambda w, x: deep(w, x)).run, params, x) == 2


def test_derivatives_of_ones_own_are_kept():
    @jax.custom_jvp
    def odd(x):
        return x

    odd.defjvp(lambda primals, tangents: (odd(*primals), 7 * tangents[0]))
    params, x = deep_parts()

    def network(w, x):
        return odd(deep(w, x))

    found = jax.grad(lambda w: network_of(network).run(w, x).sum())(params)
    plain = jax.grad(lambda w: deep(w, x).sum())(params)
    for a, b in zip(found, plain, strict=True):
        np.testing.assert_allclose(a, 7 * b, rtol=1e-12)


def blocks(params, x):
    """Residual blocks of layer norms, the activation after the sum in a jit of its own."""

    @jax.jit
    def block(w, h):
        inner = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 0.1)
        return jax.nn.relu(h + jnp.tanh(inner @ w))

    h = x @ params[0]
    for w in params[1:]:
        h = block(w, h)
    return h.mean(1)


def block_parts():
    keys = split(5, 4)
    return [normal(key, (32, 32)) for key in keys], normal(keys[0], (8, 4, 32))


@pytest.mark.parametrize("name", ["deep", "blocks"])
def test_outputs_and_derivatives_are_those_of_the_network(name):
    network = {"deep": deep, "blocks": blocks}[name]
    params, x = {"deep": deep_parts, "blocks": block_parts}[name]()

    def value(network, w):
        return jnp.sum(jnp.sin(network(w, x)))

    def both(network, w):
        return jax.jvp(jax.grad(functools.partial(value, network)), (w,), (w,))

    many = jax.tree.map(lambda w: jnp.stack([w, 2 * w]), params)
    for one in (lambda f: f(params, x), lambda f: jax.jit(functools.partial(both, f))(params),
                lambda f: jax.vmap(f, (0, None))(many, x),
                lambda f: jax.vmap(lambda row: f(params, row[None]))(x)):  # fmt: skip
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10),
            one(network_of(network).run), one(network),
        )  # fmt: skip


@CPU
def test_sums_are_kept_within_groups_too_and_elsewhere_not(monkeypatch):
    params, x = block_parts()
    assert count("cond", blocks, params, x) == 0
    assert (
        count("cond", network_of(blocks).run, params, x) == 2
    )  # nothing but the mean reads the last
    assert count("cond", network_of(blocks).run, params, x[:1, :1]) == 0  # too few numbers
    monkeypatch.setattr(module.jax, "default_backend", lambda: "gpu")
    assert count("cond", Network(lambda w, x: blocks(w, x)).run, params, x) == 0


def test_weights_that_are_not_a_number_stay_so():
    params, x = block_parts()
    params[0] = params[0].at[0, 0].set(jnp.nan)
    np.testing.assert_array_equal(network_of(blocks).run(params, x), blocks(params, x))
    params[0] = params[0].at[0, 0].set(jnp.inf)
    np.testing.assert_array_equal(network_of(blocks).run(params, x), blocks(params, x))


@CPU
def test_weights_on_several_devices():
    """With explicit axes nothing may be cut out of a sharded array."""
    params, x = block_parts()
    rows, whole = (jax.NamedSharding(four(), jax.P(*axes)) for axes in (("rows",), ()))
    placed = [jax.device_put(w, rows) for w in params]

    def network(params, x):
        return blocks([jax.reshard(w, whole) for w in params], x)

    found = jax.jit(lambda w, x: network_of(network).run(w, x))(placed, jax.device_put(x, rows))
    np.testing.assert_allclose(found, blocks(params, x), rtol=1e-10, atol=1e-10)
