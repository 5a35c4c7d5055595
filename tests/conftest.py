"""The suite's strict settings: float64, no silent rank promotion, four virtual CPU devices."""

import gc
import os
import sys
import types
from pathlib import Path

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
).strip()
os.environ.setdefault("MPLBACKEND", "agg")
os.environ["JAXTTP_CACHE"] = "off"  # commands keep nothing in the user's folder; tests are cold

import hypothesis
import jax
import numpy as np
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile(
    "jaxttp", deadline=None, max_examples=25, derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("jaxttp")


# Examples that take several seconds: whole forecasts, trainings, networks that compile long.
SLOW_EXAMPLES = (
    "jaxttp.pipeline.",
    "jaxttp.dynamics.diffusion.diffusion",
    "jaxttp.conditioning.sweeps.sweep",
    "jaxttp.forecast.comparison.compare",
    "jaxttp.forecast.watch.Online",
    "jaxttp.models.vit.ViT",
    "jaxttp.models.vgg.VGG",
)


def pytest_configure(config):
    """Without the slow tests all others compile quickly; the whole suite is as users run it."""
    if config.option.markexpr == "not slow":
        jax.config.update("jax_disable_most_optimizations", True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks examples as slow, which have no place for a mark."""
    for item in items:
        if isinstance(item, pytest.DoctestItem) and item.name.startswith(SLOW_EXAMPLES):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module", autouse=True)
def bounded_memory():
    """Compiled programs are never dropped by themselves: a worker grows to 6 GiB without this."""
    yield
    status = Path("/proc/self/statm")
    pages = int(status.read_text().split()[1]) if status.exists() else 0
    if pages * os.sysconf("SC_PAGE_SIZE") > 2.5 * 2**30:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def strict_dtypes():
    """Our own functions mix no dtypes (optax's schedules do, so this is not global)."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def key():
    """A fixed key: tests that draw are reproducible."""
    return jax.random.key(0)


@pytest.fixture
def stub_tfds(monkeypatch):
    """A tensorflow-datasets of 20 training and 10 test samples, which needs no download."""

    class Part(list):
        label = types.SimpleNamespace(names=[str(i) for i in range(10)])
        dataset_info = types.SimpleNamespace(features={"image": None, "label": label})

    def source(name, split, download=True, try_gcs=True):
        assert not download
        assert not try_gcs
        shape, rows = {"mnist": (28, 28, 1), "cifar10": (32, 32, 3)}[name], {}
        draw = np.random.default_rng(0)
        for part, size in (("train", 20), ("test", 10)):
            rows[part] = Part(
                {"image": draw.integers(0, 256, shape, np.uint8), "label": np.int64(i % 10)}
                for i in range(size)
            )
        return [rows[part] for part in split]

    stub = types.SimpleNamespace(data_source=source)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", stub)
    return stub
