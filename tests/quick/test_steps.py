"""Traced functions as steps: what is dissolved, what is not, and that they run to the same end."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxttp._core.xla_cpu.steps import straight_line
from jaxttp.ntk import ntk_plan
from tests.meshes import four


def run(function, *arguments, single_sample=False):
    line = straight_line(jax.make_jaxpr(function)(*arguments), single_sample=single_sample)
    values = line.literals | line.constants | dict(zip(line.inputs, arguments, strict=True))
    for step in line.steps:
        kept = [slot for slot in step.outputs if slot is not None]
        values.update(zip(kept, step.evaluate(values), strict=True))
    return [values[slot] for slot in line.outputs], [step.name for step in line.steps]


def test_loops_and_derivatives_of_ones_own_are_one_step():
    odd = jax.custom_jvp(lambda x: x)
    odd.defjvp(lambda primals, tangents: (odd(*primals), tangents[0]))

    def function(x):
        _, many = jax.lax.scan(lambda c, _: (2 * c, c), odd(x), length=3)
        return jax.checkpoint(lambda y: jnp.sin(y))(many)

    found, names = run(function, jnp.ones(2))
    assert names[:2] == ["custom_jvp_call", "scan"]
    assert len(names) == 3
    again, dissolved = run(function, jnp.ones(2), single_sample=True)
    assert dissolved == ["custom_jvp_call", "scan", "sin"]
    np.testing.assert_array_equal(found[0], again[0])


def test_where_arrays_are_to_lie_is_kept():
    place = jax.sharding.NamedSharding(four(), jax.P("rows"))
    x = jnp.ones((4, 2))
    placed = jax.jit(lambda x: 2 * x, out_shardings=place)
    assert run(placed, x)[1] == ["jit"]
    assert run(placed, x, single_sample=True)[1] == ["mul"]


def test_a_layer_that_says_where_its_outputs_lie_is_no_obstacle_to_the_kernel():
    place = jax.sharding.NamedSharding(four(), jax.P())
    layer = jax.jit(lambda w, x: jnp.tanh(x @ w), out_shardings=place)
    params, x = {"a": jnp.ones((5, 6)), "b": jnp.ones((6, 2))}, jnp.ones((3, 5))
    plan = ntk_plan(lambda p, x: layer(p["a"], x) @ p["b"], params, x)
    assert set(plan.forms.values()) == {"activation"}
