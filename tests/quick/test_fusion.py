"""Which sums are kept from being fused, and that keeping them changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp._core.xla_cpu.steps import FEW, keep, shared_sums, straight_line


def twice(s):
    return jnp.exp(s) * jnp.sin(s)


def grouped(x, w):
    inner = jax.jit(lambda x: jax.nn.relu(x + x * x))
    return twice(inner(x))


CASES = {
    "a sum of branches that two read": (lambda x, w: twice(x + x * x), "add"),
    "read twice by one": (lambda x, w: jnp.square(x + x * x) + 0 * w, None),
    "a bias": (lambda x, w: twice(x + w), None),
    "few numbers": (lambda x, w: twice(x[1:] + x[1:] ** 2), None),
    "after an activation": (lambda x, w: twice(jax.nn.relu(x + x * x)), "custom_jvp_call"),
    "after a scale": (lambda x, w: twice(w * (x + x * x)), "mul"),
    "kept before": (lambda x, w: twice(jnp.tanh(s := x + x * x)) + s, "add"),
    "a group": (grouped, "custom_jvp_call"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_shared(name):
    function, expected = CASES[name]
    x = jax.ShapeDtypeStruct((FEW,), jnp.float32)
    line = straight_line(jax.make_jaxpr(function)(x, x))
    shared = shared_sums(line.steps, line.inputs[:1])
    names = [step.name for step in line.steps if step.outputs[0] in shared]
    assert names == ([] if expected is None else [expected])


def test_whole_numbers_and_steps_without_outputs_are_passed_over():
    def network(x):
        jax.debug.print("{}", x[0])
        return twice(jnp.float32(1) * (x + x * x))

    line = straight_line(jax.make_jaxpr(network)(jnp.arange(FEW)))
    assert shared_sums(line.steps, line.inputs) == frozenset()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64])
@pytest.mark.parametrize("flag", [True, False])
def test_a_value_is_kept_as_it_is(dtype, flag):
    value = jnp.asarray([0.1, -0.0, jnp.inf, -jnp.inf, jnp.nan], dtype)
    found = jax.jit(keep)(value, jnp.asarray(flag))
    assert found.dtype == dtype
    np.testing.assert_array_equal(jnp.signbit(found), jnp.signbit(value))
    np.testing.assert_array_equal(np.asarray(found, float), np.asarray(value, float))
