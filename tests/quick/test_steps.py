"""Traced functions as steps: what is dissolved, what is not, and that they run to the same end."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxttp._quick.steps import straight_line
from tests.meshes import four


def run(function, *arguments, also=frozenset()):
    line = straight_line(jax.make_jaxpr(function)(*arguments), also)
    values = line.constants | dict(zip(line.inputs, arguments, strict=True))
    for step in line.steps:
        kept = [slot for slot in step.outputs if slot is not None]
        values.update(zip(kept, step.evaluate(values), strict=True))
    return [values[slot] for slot in line.outputs], [step.name for step in line.steps]


def test_groups_within_groups_literals_and_constants():
    table = jnp.arange(3.0)

    @jax.jit
    def inner(x, y):
        return jnp.sin(x) + table, 2.0, y

    @jax.jit
    def outer(x):
        first, two, same = inner(2 * x, 3.0)
        return first * two, same, x

    found, names = run(outer, jnp.ones(3))
    for a, b in zip(found, outer(jnp.ones(3)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-14)
    assert "jit" not in names


def test_loops_and_derivatives_of_ones_own_are_one_step():
    odd = jax.custom_jvp(lambda x: x)
    odd.defjvp(lambda primals, tangents: (odd(*primals), tangents[0]))

    def function(x):
        _, many = jax.lax.scan(lambda c, _: (2 * c, c), odd(x), length=3)
        return jax.checkpoint(lambda y: jnp.sin(y))(many)

    found, names = run(function, jnp.ones(2))
    assert names[:2] == ["custom_jvp_call", "scan"]
    assert len(names) == 3
    again, dissolved = run(function, jnp.ones(2), also=frozenset(names[2:]))
    assert dissolved == ["custom_jvp_call", "scan", "sin"]
    np.testing.assert_array_equal(found[0], again[0])


def test_where_arrays_are_to_lie_is_kept():
    place = jax.sharding.NamedSharding(four(), jax.P("rows"))
    x = jnp.ones((4, 2))
    _, names = run(jax.jit(lambda x: 2 * x, out_shardings=place), x)
    assert names == ["jit"]
