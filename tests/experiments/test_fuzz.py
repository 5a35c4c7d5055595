"""Random forecasts of linear models are the training itself, and what is not is found."""

import dataclasses

import jax.numpy as jnp
import optax
import pytest

from experiments.bench import fuzz


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(400, 480, 10))
def test_forecasts_of_linear_models_are_exact(seed):
    verdict = fuzz.try_call(seed)
    assert verdict.kind in fuzz.GOOD, f"{verdict.call}: {verdict.said}"


# Found: a linear network's kernel held or damped at the edge of stability (660, 853, 3248, 3742;
# 6283 without a word), or its times in doubt (2491). A chaotic training (1816), the sketch of a
# small budget, in doubt whether it is off (6110) or not (15108), and means that the optimiser
# rounds to float32 (13506) are no faults.
@pytest.mark.slow
@pytest.mark.parametrize("seed", [660, 853, 1816, 2491, 3248, 3742, 6110, 6283, 13506, 15108])
def test_what_was_found_stays_mended(seed):
    verdict = fuzz.try_call(seed)
    assert verdict.kind in fuzz.GOOD, f"{verdict.call}: {verdict.said}"


X = jnp.asarray([[0.3, 1.0], [-0.5, 0.2], [0.8, -0.4]])
Y = jnp.asarray([[1.0], [-1.0], [0.5]])


def call(**changed):
    plain = fuzz.Call(
        "a call", (lambda w, x: x @ w, jnp.zeros((2, 1)), X, Y),
        {"loss": "squared_error", "steps": 6}, {"learning_rate": 0.1, "momentum": 0.0},
        optax.sgd(0.1), {"relinearize": 0}, fuzz.ROUNDING,
    )  # fmt: skip
    return dataclasses.replace(plain, **changed)


def test_what_is_wrong_is_called_so():
    assert fuzz.judge(call()).kind == "equal"
    wrong = fuzz.judge(call(optimizer=optax.sgd(0.2)))
    assert wrong.kind == "wrong"
    assert wrong.said.startswith("off by")
    refused = fuzz.judge(call(options={"budget": -1.0}))
    assert (refused.kind, refused.said[:6]) == ("refused", "budget")
    assert fuzz.judge(call(options={"progress": 3})).kind not in fuzz.GOOD


def test_networks_that_are_not_linear_are_doubted_or_wrong():
    curved = (lambda w, x: jnp.tanh(3 * x @ w) + (x @ w) ** 2, jnp.full((2, 1), 0.3), X, Y)
    found = fuzz.judge(call(model=curved, options={"dynamics": "weight_space"}))
    assert found.kind in ("wrong", "doubted")
