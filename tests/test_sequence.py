"""No two batches of decompositions of one program may run at the same time (see the module)."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp import conditioning, dynamics
from jaxttp._core.xla_cpu.threads import after
from jaxttp.gauss_newton import gauss_newton_direction
from tests.draws import normal

BATCH = 3


def draw(*shape, dtype=jnp.float64):
    return normal(0, (BATCH, *shape), dtype=dtype)


def unordered(function, *arguments) -> tuple[int, list[tuple[str, str]]]:
    """How many batches LAPACK computes in the compiled program, and pairs that do not wait."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    computations: list[dict[str, str]] = []
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            computations.append({})
        elif " = " in line and computations:
            name, body = line.strip().removeprefix("ROOT ").split(" = ", 1)
            computations[-1][name.lstrip("%")] = body
    count, pairs = 0, []
    for lines in computations:

        def needs(name, lines=lines):
            seen, todo = set(), [name]
            while todo:
                words = set(re.findall(r"[\w.\-]+", lines[todo.pop()]))
                fresh = (words & lines.keys()) - seen
                seen |= fresh
                todo += fresh
            return seen

        calls = [name for name, body in lines.items() if 'custom_call_target="lapack_' in body]
        calls = [name for name in calls if re.match(r"\(?\w+\[\d+,\d+,\d", lines[name])]
        before = {name: needs(name) for name in calls}
        count += len(calls)
        pairs += [
            (one, two)
            for i, one in enumerate(calls)
            for two in calls[i + 1 :]
            if one not in before[two] and two not in before[one]
        ]
    return count, pairs


WEIGHTS = [draw(6, 5), draw(4, 6), draw(3, 4)]
SPD = jnp.einsum("bij,bkj->bik", draw(4, 4), draw(4, 4)) + jnp.eye(4)[None]
CASES = {
    "linear_bound": (lambda w: conditioning.linear_bound(w), (WEIGHTS,)),
    "linear_point": (lambda w: conditioning.linear_point(w).condition.value, (WEIGHTS,)),
    "layer_spectra": (conditioning.layer_spectra, (WEIGHTS,)),
    "leaky_relu_bound": (
        lambda w, v, x: conditioning.leaky_relu_bound(w, v, x, 0.1),
        (draw(3, 6), draw(6, 5), draw(5, 4)),
    ),
    "functional_hessian_bound": (
        lambda w, v, z, s: conditioning.functional_hessian_bound(w, v, z, s),
        (draw(3, 6), draw(6, 4), draw(3, 4), SPD),
    ),
    "two_factor_observables": (
        lambda f, w: dynamics.two_factor_observables(
            f, w, jnp.array([0, 1, 2]), learning_rate=0.1
        ),
        (draw(3, 4), draw(4, 5)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_vmapped_programs_compute_one_batch_after_the_other(name):
    function, arguments = CASES[name]
    count, pairs = unordered(jax.vmap(function), *arguments)
    assert count >= 2
    assert not pairs


def test_the_repetition_in_float64_waits_for_the_attempt_in_float32():
    """Under vmap both branches of a `cond` are computed."""
    shapes = ((2, 2, 3, 8), (2, 2, 8, 3), (4, 6), (4, 6))
    arguments = [draw(*shape, dtype=jnp.float32) for shape in shapes]
    count, pairs = unordered(
        jax.vmap(lambda *a: gauss_newton_direction(*a, pseudoinverse="exact")), *arguments
    )
    assert count >= 4
    assert not pairs


def test_without_it_they_do_not_wait():
    """The check finds what it looks for."""

    def two(a, b):
        return jnp.linalg.svd(a, compute_uv=False), jnp.linalg.svd(b, compute_uv=False)

    assert len(unordered(jax.vmap(two), draw(4, 4), draw(4, 4))[1]) == 1

    def ordered(a, b):
        first = jnp.linalg.svd(a, compute_uv=False)
        return first, jnp.linalg.svd(after(b, first), compute_uv=False)

    assert unordered(jax.vmap(ordered), draw(4, 4), draw(4, 4)) == (2, [])


@pytest.mark.parametrize("done", [5.0, jnp.inf, jnp.nan])
def test_the_value_is_unchanged(done):
    value, done = draw(2), jnp.full((BATCH, 1), done)
    np.testing.assert_array_equal(jax.vmap(after)(value, done), value)
    np.testing.assert_array_equal(jax.jit(jax.vmap(after))(value, done), value)
    np.testing.assert_array_equal(after(value, done), value)
    np.testing.assert_array_equal(jax.jit(after)(value, done), value)
    narrow = value.astype(jnp.float32)
    assert jax.vmap(after)(narrow, done).dtype == jnp.float32


def test_it_is_the_identity_to_derivatives():
    gradient = jax.grad(lambda v, d: jnp.sum(jax.vmap(after)(v, d) ** 2))
    np.testing.assert_array_equal(gradient(draw(2), draw(1)), 2 * draw(2))
    np.testing.assert_array_equal(jax.jit(gradient)(draw(2), draw(1)), 2 * draw(2))
    tangent = jax.jvp(jax.jit(after), (draw(2), draw(1)), (draw(2), draw(1)))[1]
    np.testing.assert_array_equal(tangent, draw(2))
