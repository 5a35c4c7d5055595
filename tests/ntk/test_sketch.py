"""Sketches: unbiased, of the predicted variance, the same whatever the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp.forecast import Problem
from jaxttp.ntk import (
    ClassSketched,
    Exact,
    class_sketch,
    empirical_ntk,
    sketch_jacobian,
)
from tests import oracles
from tests.draws import normal
from tests.ntk.networks import mlp

KINDS = ("countsketch", "achlioptas")
KEYS = 200
DIM = 24


def _linear(d=240, n=4):
    """J is the data itself: every moment of the sketch is known."""
    x = normal(3, (n, d)) * jnp.exp(normal(4, (1, d)))
    return lambda w, x: x @ w, jnp.zeros((d, 1)), x


def _variance(x, kind):
    """E|Θ̂ − Θ|² (n, n): MATH.md's formula. Of CountSketch 240 coordinates are one block of 240
    buckets, in which none meet, and of its pairs (240/24 - 1)/239 are folded together."""
    xx = jnp.einsum("na,ma->nma", x, x)
    first = jnp.sum(x**2, 1)[:, None] * jnp.sum(x**2, 1)[None] + jnp.sum(xx, -1) ** 2
    same = jnp.sum(xx**2, -1)
    if kind == "achlioptas":
        return first / DIM
    return (first - 2 * same) * (x.shape[1] / DIM - 1) / (x.shape[1] - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_unbiased_with_the_predicted_variance(kind):
    apply_fn, w, x = _linear()

    def kernel(key):
        s = sketch_jacobian(apply_fn, w, x, key=key, dim=DIM, kind=kind)[:, 0]
        return s @ s.T

    kernels = jax.jit(jax.vmap(kernel))(jax.random.split(jax.random.key(0), KEYS))
    exact, variance = x @ x.T, _variance(x, kind)
    # The mean over 200 keys has a standard error of sqrt(variance / 200): 4 of them.
    error = jnp.abs(jnp.mean(kernels, 0) - exact) / jnp.sqrt(variance / KEYS)
    assert float(jnp.max(error)) < 4
    # Summed over entries, the ratio of measured to predicted variance is within 20 %.
    measured = jnp.mean((kernels - exact[None]) ** 2, 0)
    assert 0.8 < float(jnp.sum(measured) / jnp.sum(variance)) < 1.2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_batch_size_changes_nothing(kind):
    apply_fn, params, x = mlp()
    options = {"key": jax.random.key(1), "dim": 16, "kind": kind}
    whole = sketch_jacobian(apply_fn, params, x, **options)
    assert whole.shape == (5, 3, 16)
    parts = sketch_jacobian(apply_fn, params, x, batch_size=2, **options)
    np.testing.assert_allclose(parts, whole, rtol=1e-12, atol=1e-12)  # rounding


def test_frozen_parameters_are_left_out():
    apply_fn, params, x = mlp()
    theta = empirical_ntk(apply_fn, params, x, trainable=lambda path: path == "2/b")
    # 3 biases fit into one block of 16: CountSketch is exact there.
    s = sketch_jacobian(
        apply_fn, params, x, key=jax.random.key(0), dim=16, trainable=lambda path: path == "2/b"
    )
    np.testing.assert_allclose(jnp.einsum("ncd,med->ncme", s, s), theta, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_class_sketch_measures_its_error():
    apply_fn, params, x = mlp()
    theta = oracles.kernel(apply_fn, params, x)
    result = class_sketch(apply_fn, params, x, key=jax.random.key(2), check=3)
    guess = jnp.einsum("nm,cd->ncmd", result.kernel, jnp.eye(3))[:3, :, :3]
    block = theta[:3, :, :3]
    wanted = jnp.linalg.norm((guess - block).ravel()) / jnp.linalg.norm(block.ravel())
    np.testing.assert_allclose(result.error, wanted, rtol=1e-10)  # rounding
    assert result.checked == 3
    assert float(result.shared) <= float(result.error) * (1 + 1e-10)
    # Unbiased: all 8 sign patterns are equally likely, so the mean over many keys is the trace.
    keys = jax.random.split(jax.random.key(3), 200)
    kernels = jax.jit(
        jax.vmap(lambda key: class_sketch(apply_fn, params, x, key=key, check=1).kernel)
    )(keys)
    trace = jnp.einsum("ncmc->nm", theta) / 3
    spread = jnp.std(kernels, axis=0) / jnp.sqrt(200.0)
    assert float(jnp.max(jnp.abs(jnp.mean(kernels, 0) - trace) / (spread + 1e-12))) < 4.5


def test_kernels_by_class_sketch_are_those_of_signed_outputs():
    """By brute force: the outputs under the draw's signs, K = G G^T of their gradients."""
    apply_fn, params, x = mlp()
    problem = Problem.of(apply_fn, params, x, jnp.arange(len(x)) % 3, x_test=x[:2], y_test=[0, 1])
    key, flat = jax.random.key(4), oracles.jacobian(apply_fn, params, x)
    single = jax.random.split(key, 1)[0]
    signs = jax.random.rademacher(single, (3, 1), x.dtype)[:, 0] / np.sqrt(3.0)
    gradients = jnp.einsum("ncp,c->np", flat, signs)
    wanted, estimator = gradients @ gradients.T, ClassSketched(key)
    found = estimator.estimate(problem, problem.weights)
    np.testing.assert_allclose(found.kernel, wanted, rtol=1e-10, atol=1e-12)  # rounding
    assert found.parts is None
    cross = estimator.cross(problem, problem.weights, x[:2])
    np.testing.assert_allclose(cross, wanted[:2], rtol=1e-10, atol=1e-12)
    assert (estimator.passes(problem), Exact().passes(problem)) == (1, 3)
    alone = class_sketch(apply_fn, params, x, key=single).kernel
    np.testing.assert_allclose(found.kernel, alone, rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"key": 3}, "key"),
        ({"batch_size": 0}, "kernel_batch_size must be"),
        ({"max_bytes": 0}, "max_bytes must be"),
    ],
)
def test_bad_class_sketches(options, match):
    with pytest.raises((ValueError, TypeError), match=match):
        ClassSketched(**({"key": jax.random.key(0)} | options))


@pytest.mark.parametrize(
    ("changes", "match"),
    [({"kind": "hash"}, "kind='hash'"), ({"dim": 0}, "dim"), ({"batch_size": 0}, "batch_size")],
)
def test_bad_input(changes, match):
    apply_fn, params, x = mlp()
    with pytest.raises(ValueError, match=match):
        sketch_jacobian(apply_fn, params, x, **{"key": jax.random.key(0), "dim": 4, **changes})
