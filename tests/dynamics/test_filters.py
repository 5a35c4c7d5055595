import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp.dynamics import linear_filter, recursion

LINEAR = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, 0.9),
    "nesterov": optax.sgd(0.1, 0.9, nesterov=True),
    "schedule": optax.sgd(optax.warmup_cosine_decay_schedule(0.0, 0.1, 3, 10)),
    "decay": optax.chain(optax.add_decayed_weights(0.01), optax.sgd(0.1)),
    "injected": optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
    "accumulated": optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    "ema": optax.ema(0.9),
    "everything masked in": optax.masked(optax.sgd(0.1), lambda p: jax.tree.map(lambda _: True, p)),
}
NOT_LINEAR = {
    "adam, accumulated": optax.MultiSteps(optax.adam(0.1), 8).gradient_transformation(),
    "adam, applied seldom": optax.chain(optax.apply_every(8), optax.adam(0.1)),
    "adam, begun late": optax.adam(optax.join_schedules([lambda _: 0.0, lambda _: 0.1], [10])),
    "nothing ever": optax.set_to_zero(),
    "adam": optax.adam(1e-3),
    "lion": optax.lion(1e-3),
    "sign": optax.sign_sgd(0.1),
    "clip": optax.chain(optax.clip(1.0), optax.sgd(0.1)),
    "clip by norm": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    "normalised": optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
    "trust ratio": optax.lars(0.1),
    "adafactor": optax.adafactor(1e-3),
    "centralize": optax.chain(optax.centralize(), optax.sgd(0.1)),
    "masked by rank": optax.masked(
        optax.sgd(0.1), lambda p: jax.tree.map(lambda leaf: leaf.ndim > 1, p)
    ),
    "masked by name": optax.masked(optax.sgd(0.1), {"kernel": True, "bias": False}),
    "two rates": optax.multi_transform(
        {"a": optax.sgd(0.1), "b": optax.sgd(0.2)}, {"kernel": "a", "bias": "b"}
    ),
}


def by_name(rule):
    """Labels or a mask by the names on the way to a leaf, as optax's examples make them."""
    return lambda params: jax.tree_util.tree_map_with_path(
        lambda path, _: rule(jax.tree_util.keystr(path, simple=True, separator="/")), params
    )


NETWORK = {"head": {"w": np.zeros((3, 2)), "b": np.zeros(2)}, "body": {"w": np.zeros((3, 3))}}
BY_NAME = {
    "decay of matrices": optax.chain(
        optax.add_decayed_weights(0.1, mask=by_name(lambda name: name.endswith("w"))),
        optax.sgd(0.3),
    ),
    "adam for the head": optax.multi_transform(
        {"head": optax.adam(0.1), "body": optax.sgd(0.1)},
        by_name(lambda name: "head" if name.startswith("head") else "body"),
    ),
    "a frozen body": optax.multi_transform(
        {"yes": optax.sgd(0.1), "no": optax.set_to_zero()},
        by_name(lambda name: "no" if name.startswith("body") else "yes"),
    ),
}
BEYOND = {  # what the first 64 steps do not show
    "clipped from 70 on": optax.chain(
        optax.conditionally_transform(optax.clip(0.01), lambda t: t >= 70), optax.sgd(0.1)
    ),
    "biases slow down at 70": optax.multi_transform(
        {
            "a": optax.sgd(0.1),
            "b": optax.sgd(optax.piecewise_constant_schedule(0.1, {70: 0.1})),
        },
        lambda p: jax.tree.map(lambda leaf: "a" if leaf.ndim > 1 else "b", p),
    ),
}
LATE_DECAY = optax.chain(
    optax.add_decayed_weights(lambda t: jnp.where(t >= 70, 0.5, 0.0)), optax.sgd(0.1)
)


@pytest.mark.parametrize("name", BEYOND)
def test_the_verdict_is_about_the_whole_horizon(name):
    linear_filter(BEYOND[name])  # so they are, for 64 steps
    with pytest.raises(ValueError, match=r"optimizer is not one linear"):
        linear_filter(BEYOND[name], steps=75)


def test_a_long_horizon_is_probed_to_its_end():
    """In time and memory proportional to it: 10,000 steps take no longer to compile than 64."""
    clipped = optax.conditionally_transform(optax.clip(0.01), lambda t: t >= 9_990)
    with pytest.raises(ValueError, match=r"optimizer is not one linear"):
        linear_filter(optax.chain(clipped, optax.sgd(0.1)), steps=10_000)
    found = linear_filter(optax.sgd(0.1, 0.9), steps=10_000)
    assert found.decay.shape == (10_000,)


def test_decay_that_begins_after_64_steps_is_followed():
    assert linear_filter(LATE_DECAY).weight_decay is False
    assert linear_filter(LATE_DECAY, steps=150).weight_decay is True
    kernel, f0, w0 = jnp.eye(2).reshape(2, 1, 2, 1), jnp.ones((2, 1)), jnp.ones((2, 1))
    common = {"loss": "squared_error", "optimizer": LATE_DECAY, "steps": 90}
    y = jnp.array([[3.0], [-1.0]])
    with pytest.raises(ValueError, match="initial_tangent"):
        recursion(kernel, f0, y, **common)
    got = recursion(kernel, f0, y, initial_tangent=w0, **common).train[-1]
    w = np.ones(2)  # outputs are the weights themselves
    for t in range(90):
        w = w - 0.1 * ((w - y[:, 0]) / 2 + (0.5 * w if t >= 70 else 0))
    np.testing.assert_allclose(got[:, 0], w, rtol=1e-12)


def test_averages_of_weights_need_float64():
    """Their updates are differences of weights, a thousandth of the learning rate and less."""
    for rate in (0.1, 1e-4):
        assert linear_filter(optax.contrib.schedule_free_sgd(rate), steps=200).weight_decay is False


@pytest.mark.parametrize("name", BY_NAME)
def test_names_are_seen_with_the_parameters(name):
    with pytest.raises(ValueError, match=r"optimizer is not one linear"):
        linear_filter(BY_NAME[name], NETWORK)


def test_names_that_all_parameters_fraction_are_no_matter():
    masked = optax.masked(optax.sgd(0.1), by_name(lambda name: "/" in name or name != ""))
    assert linear_filter(masked, NETWORK).weight_decay is False


def test_usual_names_are_seen_without_them():
    kernels = optax.add_decayed_weights(0.1, mask=by_name(lambda name: name.endswith("kernel")))
    no_bias = optax.add_decayed_weights(0.1, mask=by_name(lambda name: "bias" not in name))
    for decay in (kernels, no_bias):
        with pytest.raises(ValueError, match=r"optimizer is not one linear"):
            linear_filter(optax.chain(decay, optax.sgd(0.1)))


@pytest.mark.parametrize("tangent", [None, jax.numpy.ones((2, 1))])
def test_a_recursion_under_jit_refuses_at_run_time(tangent):
    def path(rate, make):
        kernel = jax.numpy.eye(2).reshape(2, 1, 2, 1)
        return recursion(
            kernel, jax.numpy.zeros((2, 1)), jax.numpy.ones((2, 1)), loss="squared_error",
            optimizer=make(rate), steps=3, initial_tangent=tangent,
        ).train  # fmt: skip

    assert jax.jit(lambda rate: path(rate, optax.sgd))(0.1).shape == (4, 2, 1)
    with pytest.raises(Exception, match="linear scalar filter"):
        jax.block_until_ready(jax.jit(lambda rate: path(rate, optax.adam))(0.1))


@pytest.mark.parametrize("name", LINEAR)
def test_linear_filters_are_recognised(name):
    response = linear_filter(LINEAR[name])
    assert response.weight_decay is (name == "decay")


def test_decay_has_its_response():
    response = linear_filter(LINEAR["decay"])
    np.testing.assert_allclose(response.decay, -0.001 * 0.999 ** np.arange(64), rtol=1e-4)


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_others_are_refused_with_a_pointer(name):
    with pytest.raises(ValueError, match=r"optimizer is not one linear.*weight space"):
        linear_filter(NOT_LINEAR[name])


def test_traced_hyper_parameters_are_checked_at_run_time():
    def response(rate):
        return linear_filter(optax.chain(optax.add_decayed_weights(0.1), optax.sgd(rate))).decay[0]

    assert float(jax.jit(response)(0.25)) == pytest.approx(-0.025)

    def refused(rate):
        return linear_filter(optax.adam(rate)).decay[0]

    with pytest.raises(Exception, match="linear scalar filter"):
        jax.block_until_ready(jax.jit(refused)(0.25))
