"""The suite's strict settings: float64, no silent rank promotion, four virtual CPU devices."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
).strip()
os.environ.setdefault("MPLBACKEND", "agg")

import hypothesis
import jax
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile(
    "jaxttp", deadline=None, max_examples=25, derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("jaxttp")


@pytest.fixture
def strict_dtypes():
    """Our own functions mix no dtypes (optax's schedules do, so this is not global)."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def key():
    """A fixed key: tests that draw are reproducible."""
    return jax.random.key(0)
