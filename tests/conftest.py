"""The suite's strict settings: float64, no silent rank promotion, four virtual CPU devices.

Most of what a test waits for is compilation, of programs that then run for microseconds. So the
suite compiles without optimisation and with XLA's older, quicker emitter (a third of the time), and
equal programs once (`tests/shortcuts.py`); ``--optimised`` compiles as users do. Processes that a
test starts do so in any case, unless it asks for `quick_processes`.
"""

import ast
import collections
import contextlib
import gc
import itertools
import os
import platform
import sys
import types
from pathlib import Path

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
).strip()
os.environ.setdefault("MPLBACKEND", "agg")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # commands keep nothing; tests are cold

import hypothesis
import jax
import jaxlib
import numpy as np
import pytest
from jaxtyping import _import_hook

from tests import shortcuts

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Flags of a user who wants to see how other CPUs compute.
GIVEN = " ".join(
    flag for flag in os.environ["XLA_FLAGS"].split() if "host_platform_device_count" not in flag
)

hypothesis.settings.register_profile(
    "jaxttp", deadline=None, max_examples=25, derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("jaxttp")


# Examples that take several seconds: whole forecasts, trainings, networks that compile long.
SLOW_EXAMPLES = (
    "jaxttp.pipeline.",
    "jaxttp.dynamics.diffusion.diffusion",
    "jaxttp.conditioning.sweeps.sweep",
    "jaxttp.forecast.compare.compare",
    "jaxttp.forecast.online.Online",
    "jaxttp.forecast.predict.forecast_training",
    "jaxttp.models.transformers.ViT",
    "jaxttp.models.convolutional.VGG",
    "jaxttp.models.convolutional.",
    "jaxttp.dynamics.two_factor.two_factor_flow",
)


# Flags that XLA does not know end the process: they are for the versions that were tried. AVX has
# no fused multiply-add, with which this emitter would round a b + c d and c d + a b differently.
# One module of LLVM a program: compiling small ones took 40 % less CPU time than in 32 modules.
QUICK = (
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    " --xla_cpu_max_isa=AVX"
)
if jaxlib.__version__ not in ("0.10.1", "0.10.2") or platform.machine() != "x86_64":
    QUICK = ""
if "xla_cpu_max_isa=SSE" in os.environ["XLA_FLAGS"]:  # other CPUs are imitated
    QUICK = QUICK.rpartition(" ")[0]
elif "xla_cpu_max_isa" in os.environ["XLA_FLAGS"]:  # with fused products the emitter is not exact
    QUICK = ""


class Shapes(_import_hook.JaxtypingTransformer):
    """Functions whose annotations give shapes are checked; basedpyright checks the other types.

    Not those within others: they would be compiled with their checks whenever they are defined.
    After a change here delete the compiled modules (`__pycache__`), which are kept under one name.
    """

    def visit_FunctionDef(self, node):
        annotations = [part.annotation for part in ast.walk(node.args) if isinstance(part, ast.arg)]
        parts = [ast.walk(part) for part in (*annotations, node.returns) if part]
        shapes = [part for part in itertools.chain(*parts) if isinstance(part, ast.Constant)]
        is_inner = any(isinstance(parent, ast.FunctionDef) for parent in self._parents)
        if is_inner or not any(isinstance(part.value, str) for part in shapes):
            return node
        return super().visit_FunctionDef(node)


_import_hook.JaxtypingTransformer = Shapes


def pytest_addoption(parser):
    """``--optimised``: as users run it."""
    parser.addoption(
        "--optimised", action="store_true", help="let XLA optimise what it compiles, as users do"
    )


def pytest_configure(config):
    """Compiles quickly, in this process; the environment of others stays as it is."""
    if config.getoption("optimised", False):
        return
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_traceback_in_locations_limit", 0)  # the shared context keeps them
    shortcuts.install()
    before = os.environ["XLA_FLAGS"]
    os.environ["XLA_FLAGS"] = f"{before} {QUICK}".strip()
    jax.jit(lambda: 0)()  # XLA reads its flags once
    os.environ["XLA_FLAGS"] = before


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks examples as slow, which have no place for a mark; files with slow tests go first.

    Workers take whole files (--dist=loadfile): what takes longest must not come last.
    """
    for item in items:
        if isinstance(item, pytest.DoctestItem) and item.name.startswith(SLOW_EXAMPLES):
            item.add_marker(pytest.mark.slow)
    slow = collections.Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


def pytest_collection_finish():
    """Imported modules stay: the collector passes over them, and looks less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


@pytest.fixture(scope="module", autouse=True)
def bounded_memory():
    """Compiled programs are never dropped by themselves: a worker grows to 6 GiB without this.

    Nor does a worker map so many pieces of memory that `bound_programs` drops what is compiled in
    the middle of a test that counts compilations.
    """
    yield
    from jaxttp._core.compile import (
        give_back,  # here: the hooks of this file come before the package
    )

    status, maps = Path("/proc/self/statm"), Path("/proc/self/maps")
    pages = int(status.read_text().split()[1]) if status.exists() else 0
    pieces = maps.read_bytes().count(b"\n") if maps.exists() else 0
    if pages * os.sysconf("SC_PAGE_SIZE") > 2.5 * 2**30 or pieces > 15_000:
        shortcuts.forget()
        # Without this what was freed stays with the process: too large after every module, it
        # would drop all programs and compile them again, dozens of times.
        give_back()


@pytest.fixture
def quick_processes(request, monkeypatch):
    """Processes that the test starts compile quickly too, on one device, with flags given to us."""
    monkeypatch.setenv("XLA_FLAGS", GIVEN)
    if not request.config.getoption("optimised", False):
        monkeypatch.setenv("XLA_FLAGS", f"{GIVEN} {QUICK}".strip())
        monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


@pytest.fixture
def unchecked_types(monkeypatch):
    """As users call: without the type checks that only the tests switch on."""
    from jaxtyping import config

    monkeypatch.setattr(config, "jaxtyping_disable", True)


@pytest.fixture
def strict_dtypes():
    """Our own functions mix no dtypes (optax's schedules do, so this is not global)."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def full_precision():
    """GPUs round products of float32 matrices; a network held against a reference must not."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def key():
    """A fixed key: tests that draw are reproducible."""
    return jax.random.key(0)


@pytest.fixture
def full_disk():
    """Files may have so many bytes: what writes more is told so by the system, wherever it is."""
    resource = pytest.importorskip("resource", reason="Windows has no such limits")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    @contextlib.contextmanager
    def limited(size=4096):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


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
