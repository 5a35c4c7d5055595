"""Centered logits: the losses that depend on them alone, and forecasts in them."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxttp import predict_training_time, weighted
from jaxttp.forecast import Problem
from jaxttp.forecast.methods.base import Linearizer
from jaxttp.losses import cross_entropy, encode_targets, get_loss
from jaxttp.losses.centered_logits import (
    basis,
    centered,
    centered_logits,
    depends_on_centered_logits,
    from_centered_logits,
)
from jaxttp.ntk import Exact, Sketched
from tests import oracles


def normal(seed, shape, scale=1.0):
    return scale * jax.random.normal(jax.random.key(seed), shape)


PARAMS = {"a": normal(1, (4, 6), 0.5), "b": normal(2, (6, 3), 0.5)}
X, Y = normal(3, (14, 4)), jnp.arange(14) % 3
WHOLE = dataclasses.replace(cross_entropy, shift_invariant=False)
"""The same loss, of which nobody says that it sees no more than centered logits."""


def network(params, x):
    return jnp.tanh(x @ params["a"]) @ params["b"]


@given(classes=st.integers(2, 12), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_centered_logits_are_all_but_the_mean(classes, seed):
    b = basis(classes)
    np.testing.assert_allclose(b.T @ b, np.eye(classes - 1), atol=1e-12)
    np.testing.assert_allclose(b @ b.T, np.eye(classes) - 1 / classes, atol=1e-12)
    f = np.random.default_rng(seed).normal(size=(3, classes))
    found = centered_logits(jnp.asarray(f))
    np.testing.assert_allclose(found, centered_logits(jnp.asarray(f + 7.0)), atol=1e-11)
    np.testing.assert_allclose(
        from_centered_logits(found), f - f.mean(1, keepdims=True), atol=1e-11
    )


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("kind", ["labels", "soft", "weights of classes", "-100"])
def test_a_loss_of_centered_logits_is_the_loss(classes, kind):
    """Values, errors, gradients B^T g and Hessians B^T H B, of every form of targets."""
    draw = np.random.default_rng(classes)
    f, labels = draw.normal(size=(9, classes)), draw.integers(0, classes, 9)
    soft = oracles.softmax(draw.normal(size=(9, classes)))
    y = {
        "labels": labels,
        "soft": soft,
        "weights of classes": weighted(labels, class_weight=draw.uniform(0.5, 2.0, classes)),
        "-100": np.where(np.arange(9) == 4, -100, labels),
    }[kind]
    f = jnp.asarray(f)
    targets, loss = encode_targets("cross_entropy", y, f)
    assert depends_on_centered_logits(loss, classes)
    found, small = centered(loss, classes), centered_logits(f)
    b = basis(classes)
    np.testing.assert_allclose(found.value(small, targets), loss.value(f, targets), rtol=1e-12)
    np.testing.assert_allclose(found.error(small, targets), loss.error(f, targets), rtol=1e-12)
    np.testing.assert_allclose(
        found.gradient(small, targets), loss.gradient(f, targets) @ b, atol=1e-12
    )
    np.testing.assert_allclose(
        found.hessian(small, targets), b.T @ loss.hessian(f, targets) @ b, atol=1e-12
    )
    again, same = encode_targets(found, targets, small)  # encoded before
    assert same is found
    np.testing.assert_array_equal(again, targets)
    with pytest.raises(ValueError, match=r"y has shape .* takes what encode_targets made"):
        encode_targets(found, targets[:, :-1], small)


def test_what_sees_more_than_centered_logits():
    """A squared error asks for the mean of the outputs too: without it the loss is another."""
    assert not depends_on_centered_logits(get_loss("squared_error"), 3)
    assert not depends_on_centered_logits(get_loss("binary_cross_entropy"), 3)
    assert not depends_on_centered_logits(centered(cross_entropy, 3), 2)  # once is enough
    assert not depends_on_centered_logits(cross_entropy, 65)
    assert depends_on_centered_logits(cross_entropy, 64)
    f = jnp.array([[3.0, 4.0]])
    wrong = centered(get_loss("squared_error"), 2)
    y = jnp.array([[1.0, 0.0]])
    assert float(wrong.value(centered_logits(f), y)) < 0.2 * float(
        get_loss("squared_error").value(f, y)
    )  # 1.25 and 10: the mean of 3.5 is missing
    tokens = encode_targets("cross_entropy", jnp.zeros((2, 4), int), jnp.zeros((2, 4, 5)))[1]
    assert not depends_on_centered_logits(tokens, 20)


def test_the_kernel_of_centered_logits():
    """B^T Theta B, from the brute-force Jacobian; projected or computed, exact or sketched."""
    problem = Problem.of(network, PARAMS, X, Y)
    small = problem.centered()
    assert small.centered() is small
    assert small.f0.shape == (14, 2)
    b = basis(3)
    want = np.einsum("ca,icjd,db->iajb", b, oracles.kernel(network, PARAMS, X), b)
    found = Exact().estimate(small, small.weights).kernel
    np.testing.assert_allclose(np.asarray(found), want, atol=1e-12)
    for estimator in (Exact(), Sketched(8, jax.random.key(0)), Sketched(64, jax.random.key(0))):
        lines = Linearizer(problem, estimator)
        _ = lines.first
        projected = lines.centered()
        np.testing.assert_allclose(
            np.asarray(projected.first),
            np.asarray(estimator.estimate(small, small.weights).kernel), atol=1e-12,
        )  # fmt: skip
        assert projected.kernels == 0  # of the first one


WAYS = {
    "relinearized": {"relinearize": 1},
    "batches": {
        "batch_size": 5, "key": jax.random.key(3), "learning_rate": 0.1, "budget": math.inf,
    },
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_forecasts_in_centered_logits_are_those_of_all_outputs(way):
    asked = {"learning_rate": 0.5, "steps": 8, "y": Y} | WAYS[way]
    y = asked.pop("y")
    small = predict_training_time(network, PARAMS, X, y, **asked)
    whole = predict_training_time(network, PARAMS, X, y, **asked, loss=WHOLE)
    # Rounding, through 8 steps and 2 kernels of numbers near 1.
    np.testing.assert_allclose(small.loss, whole.loss, atol=1e-9)
    np.testing.assert_array_equal(small.error, whole.error)
    assert small.steps == whole.steps
    np.testing.assert_allclose(small.max_learning_rate, whole.max_learning_rate, rtol=1e-9)
    centred = [one.outputs - one.outputs.mean(-1, keepdims=True) for one in (small, whole)]
    np.testing.assert_allclose(*centred, atol=1e-8)
    np.testing.assert_allclose(
        small.outputs.mean(-1), jnp.broadcast_to(network(PARAMS, X).mean(-1), (9, 14)), atol=1e-12
    )
    assert small.cost.kernels == whole.cost.kernels
    assert small.cost.operations < whole.cost.operations
    assert small.cost.training_operations == whole.cost.training_operations


def test_a_loss_that_is_not_shift_invariant_is_found_out():
    """Made from the cross-entropy, as users do, with a penalty on the size of the logits."""
    penalised = dataclasses.replace(
        cross_entropy, name="penalised",
        sample_loss=lambda f, y: cross_entropy.sample_loss(f, y) + 0.1 * jnp.sum(f**2),
    )  # fmt: skip
    asked = {"learning_rate": 0.5, "steps": 10, "relinearize": 0}
    with pytest.raises(
        ValueError, match=r"loss=Loss\('penalised'\) says shift_invariant=True, but"
    ):
        predict_training_time(network, PARAMS, X, Y, loss=penalised, **asked)
    right = dataclasses.replace(penalised, shift_invariant=False)
    assert predict_training_time(network, PARAMS, X, Y, loss=right, **asked).stable
