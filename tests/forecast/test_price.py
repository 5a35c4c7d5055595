"""What forecasts and trainings cost, by count."""

import jax
import jax.numpy as jnp
import pytest

from jaxttp.forecast import Descent, Problem
from jaxttp.forecast.cost import Price, share_of
from jaxttp.ntk import Exact, Sketched
from tests.draws import normal, split
from tests.forecast.test_values import Multiplied

N, D, H, C = 20, 5, 7, 3
FORWARD = 2 * D * H + H + 2 * H * C  # two products and a tanh


def problem():
    keys = split(0, 3)
    params = {"a": normal(keys[0], (D, H)), "b": normal(keys[1], (H, C))}
    x = normal(keys[2], (N, D))
    return Problem.of(lambda w, x: jnp.tanh(x @ w["a"]) @ w["b"], params, x, jnp.arange(N) % C)


def descent(**more):
    return Descent.of(learning_rate=0.1, steps=50, **more)


def test_operations_are_those_of_the_layers():
    full = Price.of(problem(), descent(), Exact())
    forward = pytest.approx(FORWARD, rel=0.1)  # a sample is also given its shape
    assert full.training / (50 * N * 3) == forward
    assert full.whole_pass / (N * 3) == forward
    assert full.product == 2 * (N * C) ** 2
    batches = Price.of(problem(), descent(batch_size=4, key=jax.random.key(1)), Exact())
    assert batches.training == full.training / 5
    assert batches.kernel == full.kernel
    whole = full.forecast(kernels=2, passes=3, products=4)
    assert whole == 2 * full.kernel + 3 * full.whole_pass + 4 * full.product


def test_every_estimator_has_a_price():
    exact, wide, narrow, own = (
        Price.of(problem(), descent(), estimator).kernel
        for estimator in (
            Exact(), Sketched(200, jax.random.key(0)), Sketched(2, jax.random.key(0)),
            Multiplied(2.0),
        )
    )  # fmt: skip
    assert wide - narrow == 200 * 2 * (N * C) ** 2  # the narrow one stays as its factors
    assert 0 < narrow < wide
    products = [
        Price.of(problem(), descent(), Sketched(dim, jax.random.key(0))).product for dim in (200, 2)
    ]
    assert products == [2 * (N * C) ** 2, 4 * N * C * 2]
    assert 0 < exact <= own  # a whole Jacobian, where nothing better is known


def test_shares_in_words():
    assert [share_of(x, 1.0) for x in (0.02, 0.3, 1.0, 4.0, 1234.0)] == [
        "1/50 of", "1/3.3 of", "1 times", "4 times", "1,234 times"
    ]  # fmt: skip
    assert share_of(1.0, 0.0) == "1 times"  # nothing is trained
