"""One kernel held against rebuilt ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import predict_training_time
from jaxttp.forecast import (
    Checked,
    ClosedForm,
    GradientFlow,
    Noisy,
    Recursion,
    Relinearized,
    Scaled,
)
from jaxttp.forecast._trust import trust_in_one_kernel
from jaxttp.losses.rule import Rule
from tests.forecast.test_trust import path_of

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((12, 3)), RNG.integers(0, 2, 12)
W = {"w": jnp.asarray(RNG.standard_normal((3, 4))), "v": jnp.zeros((4, 2))}


EVEN = np.linspace(1, 0, 60)


def tanh(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"]


def linear(params, x):
    return x @ params["w"][:, :2]


def forecast(network, dynamics, **options):
    options = {"learning_rate": 0.5, "steps": 60} | options
    return predict_training_time(network, W, X, Y, dynamics=dynamics, **options)


def test_the_numbers_are_those_of_the_centre_and_the_doubt_is_by_rebuilt_kernels():
    test = {"x_test": X[:4] + 0.1, "y_test": Y[:4]}
    found, one = (forecast(tanh, way, **test) for way in (Checked(), Recursion()))
    rebuilt = forecast(tanh, Relinearized())
    np.testing.assert_array_equal(found.loss, one.loss)
    np.testing.assert_array_equal(found.test_loss, one.test_loss)
    assert found.steps == one.steps
    assert found.stable
    worst = max(one.steps, key=lambda e: abs(one.steps[e] - rebuilt.steps[e]) / rebuilt.steps[e])
    assert abs(one.steps[worst] - rebuilt.steps[worst]) > 0.13 * rebuilt.steps[worst] > 2
    assert f"at step {rebuilt.steps[worst]}, this one linearization at step" in str(found.trust)
    # Kernels of both, the cross kernel of the centre; the first is built once.
    assert found.cost.kernels == rebuilt.cost.kernels + 1
    assert found.cost.gradient_evaluations > one.cost.gradient_evaluations


def test_a_linear_network_is_confirmed():
    found = forecast(linear, Checked(GradientFlow(), Relinearized(2)), learning_rate=0.05)
    assert found.trust is None
    assert found.dynamics == "ode"


@pytest.mark.parametrize(
    ("ours", "theirs", "fields", "words"),
    [
        ([1.0, 0.5, 0.25, 0.125], [1.0, 0.5, 0.25, 0.125], {}, None),
        (EVEN, EVEN ** 2, {}, "come to 10 % of the loss's drop"),
        (EVEN, EVEN, {"held_from": 3}, "do not confirm it: at the edge"),
        (EVEN, EVEN, {"diverged_at": 9}, "diverge at step 9"),
        ([1.0, 3.0, 0.2], [1.0, 0.5, 0.2], {}, "the loss rises on the way"),
    ],
)  # fmt: skip
def test_words(ours, theirs, fields, words):
    ours, theirs = jnp.asarray(ours), jnp.asarray(theirs)
    path = path_of(theirs, **fields)
    found = trust_in_one_kernel((ours, None), (theirs, None), path, Rule((0.1,)))
    assert found is None if words is None else words in found


def test_never_is_far_from_the_first_step_too():
    ours, theirs = jnp.asarray([1.0, 0.5, 0.4, 0.3]), jnp.asarray([1.0, 0.1, 0.1, 0.1])
    rule = Rule((0.4, 0.2), kind="absolute")
    found = trust_in_one_kernel((ours, None), (theirs, None), path_of(theirs), rule)
    assert "loss below 0.2 at step 1, this one linearization never" in found


@pytest.mark.parametrize("centre", [Scaled(40, Recursion()), Noisy()])
@pytest.mark.parametrize("around", [Checked, lambda centre: Noisy(centre=centre)])
def test_only_single_paths_of_the_samples_at_hand_have_others_around_them(centre, around):
    with pytest.raises(ValueError, match="centre must be a single path"):
        around(centre)


@pytest.mark.slow
def test_it_can_be_a_centre():
    batches = {"batch_size": 4, "key": jax.random.key(3)}
    found = forecast(tanh, Noisy(paths=2, centre=Checked(by=Relinearized(1))), **batches)
    assert found.stable
    assert forecast(tanh, Scaled(24, Checked(by=Relinearized(1)))).stable
    assert Checked().by_products
    assert not Checked(ClosedForm()).by_products


def test_what_neither_can_follow_is_refused_before_a_kernel_is_built():
    with pytest.raises(TypeError, match="by"):
        Checked(by=Recursion())
    with pytest.raises(TypeError, match="centre"):
        Checked("recursion")
    with pytest.raises(ValueError, match="optimizer"):
        forecast(tanh, Checked(), learning_rate=None, optimizer=optax.adam(0.1))


def test_the_same_batches():
    batches = {"batch_size": 4, "key": jax.random.key(3)}
    found, one = (forecast(tanh, way, **batches) for way in (Checked(), Recursion()))
    np.testing.assert_array_equal(found.loss, one.loss)
