import jax
import numpy as np
import optax
import pytest

from jaxttp.dynamics import linear_filter

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
    "adam": optax.adam(1e-3),
    "adamw": optax.adamw(1e-3),
    "rmsprop": optax.rmsprop(1e-3),
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
    "two rates by rank": optax.multi_transform(
        {"a": optax.sgd(0.1), "b": optax.sgd(0.2)},
        lambda p: jax.tree.map(lambda leaf: "a" if leaf.ndim > 1 else "b", p),
    ),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_filters_are_recognised(name):
    response = linear_filter(LINEAR[name])
    assert response.weight_decay is (name == "decay")


def test_momentum_has_its_impulse_response():
    impulse = linear_filter(optax.sgd(0.5, 0.9)).impulse
    lag = np.subtract.outer(np.arange(6), np.arange(6))
    want = np.where(lag >= 0, -0.5 * 0.9 ** np.maximum(lag, 0), 0.0)
    np.testing.assert_allclose(impulse, want, rtol=1e-5)  # the probe runs in float32


def test_decay_has_its_response():
    response = linear_filter(LINEAR["decay"])
    np.testing.assert_allclose(response.decay, -0.001 * 0.999 ** np.arange(6), rtol=1e-4)


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_others_are_refused_with_a_pointer(name):
    with pytest.raises(ValueError, match=r"optimizer is not one linear.*weight space"):
        linear_filter(NOT_LINEAR[name])


def test_traced_hyper_parameters_are_checked_at_run_time():
    def response(rate):
        return linear_filter(optax.sgd(rate)).impulse[0, 0]

    assert float(jax.jit(response)(0.25)) == pytest.approx(-0.25)

    def refused(rate):
        return linear_filter(optax.adam(rate)).impulse[0, 0]

    with pytest.raises(Exception, match="linear scalar filter"):
        jax.block_until_ready(jax.jit(refused)(0.25))
