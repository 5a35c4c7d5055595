"""A prediction whose fields are set by hand."""

import dataclasses

import jax.numpy as jnp

from jaxttp.forecast import Cost, Prediction

STEPS = 4
PLAIN = Prediction(
    steps={}, loss=jnp.linspace(1.0, 0.2, STEPS + 1), error=jnp.linspace(1.0, 0.0, STEPS + 1),
    max_learning_rate=1.0, stable=True, cost=Cost(1, 2, 0.0, 0.0, 1.0, 2.0), horizon=STEPS,
    rule="relative", dynamics="recursion", hyperparameters={},
    outputs=jnp.zeros((STEPS + 1, 1, 1)),
)  # fmt: skip


def prediction(**fields):
    """A falling loss on one sample, with these fields."""
    return dataclasses.replace(PLAIN, **fields)
