"""Small forecasts that several test modules look at; each is made once a process."""

import dataclasses
import functools

import jax.numpy as jnp

from jaxttp.pipeline import Forecast, Settings, forecast

SETTINGS = Settings(
    data="wine", samples_per_class=4, steps=15, learning_rate=0.1, relinearize=0
)  # fmt: skip


@functools.cache
def verified() -> Forecast:
    """Three cultivars of wine, four samples each, with the real training beside the forecast."""
    return forecast(SETTINGS, verify=True)


@functools.cache
def regression() -> Forecast:
    """All of diabetes, forecast only."""
    one = {"relinearize": 0, "thresholds": (0.3,)}
    return forecast(Settings(data="diabetes", steps=10, learning_rate=0.02, **one))


def real_run_diverged() -> Forecast:
    """The same forecast beside a real run that left the representable numbers, as some do."""
    result = verified()
    loss = result.run.loss.at[-3:].set(jnp.array([jnp.inf, jnp.nan, jnp.nan], jnp.float32))
    return dataclasses.replace(result, run=result.run._replace(loss=loss))
