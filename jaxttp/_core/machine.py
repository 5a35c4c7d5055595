"""What a computation runs on: versions, devices, cores, memory, threads; and what does not fit."""

import dataclasses
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxttp._core import programs as _programs
from jaxttp._core.versions import __version__
from jaxttp._core.xla_cpu import backend as _backend

PACKAGES = ("jaxttp", "jax", "jaxlib", "numpy", "scipy", "flax", "optax", "diffrax")
CUDA = ("jax-cuda13-plugin", "jax-cuda12-plugin")
PLUGINS = (
    *CUDA, "jax-cuda13-pjrt", "jax-cuda12-pjrt", "jax-rocm7-plugin", "jax-rocm60-plugin", "libtpu",
)  # fmt: skip
MUST_MATCH = ("jax-cuda13-plugin", "jax-cuda12-plugin", "jax-cuda13-pjrt", "jax-cuda12-pjrt")
"""JAX leaves a CUDA plugin alone whose version is not jaxlib's."""
VARIABLES = (
    "XLA_FLAGS", "JAX_PLATFORMS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION",
    "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION", "CUDA_VISIBLE_DEVICES",
    "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS",
    "OPENBLAS_CORETYPE", "JAX_COMPILATION_CACHE_DIR", _programs.VARIABLE,
)  # fmt: skip


class Fault(NamedTuple):
    """What is wrong, and what to do about it."""

    what: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a computation runs on.

    Attributes:
        versions: package -> version; accelerators' plugins only where they are installed.
        processor: the CPU's name, and its widest vector instructions.
        cores: that this process may use.
        cores_there: all of them.
        memory: GiB that are free now, or None where the system does not say.
        memory_there: GiB in all, or None.
        devices: JAX's, one line each, or what keeps it from starting.
        backend: "cpu", "gpu", "tpu", or "none".
        accelerators: that the system shows, whether or not JAX uses them: "NVIDIA GPU", "TPU".
        threads: of every BLAS that is loaded: library, version, kernels, threads.
        programs: where the commands keep compiled ones and how many there are, or why they do not.
        environment: the variables that matter, where they are set.
    """

    versions: Mapping[str, str]
    processor: str
    cores: int
    cores_there: int
    memory: float | None
    memory_there: float | None
    devices: tuple[str, ...]
    backend: str
    accelerators: tuple[str, ...]
    threads: tuple[str, ...]
    programs: str
    environment: Mapping[str, str]


def inspect_machine() -> Machine:
    """Look at this machine; starts JAX's backend.

    Returns:
        A `Machine`.

    Example:
        >>> machine = inspect_machine()
        >>> machine.cores >= 1, "jaxlib" in machine.versions
        (True, True)
    """
    devices, backend = _devices()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = host_memory()
    return Machine(
        versions=_versions(),
        processor=_processor(),
        cores=usable or 1,
        cores_there=os.cpu_count() or 1,
        memory=memory.get("MemAvailable"),
        memory_there=memory.get("MemTotal"),
        devices=devices,
        backend=backend,
        accelerators=_accelerators(),
        threads=_threads(),
        programs=str(_programs.place()),
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def faults(machine: Machine) -> list[Fault]:
    """What of a machine does not fit together.

    Args:
        machine: as `inspect_machine` found it.

    Returns:
        A `Fault` for each: JAX does not start; jaxlib computes wrongly and nothing was done; a
        plugin is not jaxlib's; an accelerator lies idle without anybody having asked for that.
    """
    found = []
    versions = machine.versions
    if machine.backend == "none":
        found.append(Fault(f"JAX does not start: {machine.devices[0]}", _reinstall(versions)))
    flags = machine.environment.get("XLA_FLAGS", "")
    listed = _backend.listed_flags(flags)
    wanted = _backend.protect(versions.get("jaxlib", ""), flags, started=True, listed=listed)
    if wanted.warning is not None:
        what, _, remedy = wanted.warning.partition(": ")
        found.append(Fault(what, remedy.rstrip(".")))
    for name in MUST_MATCH:
        if name in versions and versions[name] != versions.get("jaxlib"):
            found.append(
                Fault(
                    f"{name} {versions[name]} does not match jaxlib {versions.get('jaxlib')}: JAX "
                    "leaves the GPU alone and computes on the CPU",
                    _reinstall(versions),
                )
            )
    idle = machine.backend == "cpu" and not _declined(machine.environment) and not found
    if idle and "NVIDIA GPU" in machine.accelerators:
        installed = [name for name in CUDA if name in versions]
        if not installed:
            found.append(
                Fault("there is an NVIDIA GPU, but JAX has no plugin for it", _reinstall(versions))
            )
        else:
            found.append(
                Fault(
                    f"there is an NVIDIA GPU and {installed[0]}, but JAX computes on the CPU",
                    f"JAX_PLATFORMS=cuda {_ASK} says why (often the driver: nvidia-smi shows the "
                    "CUDA it bears, jax[cuda12] needs less than jax[cuda13])",
                )
            )
    if idle and "TPU" in machine.accelerators:
        found.append(
            Fault(
                "there is a TPU, but JAX computes on the CPU",
                _reinstall(versions, "tpu")
                if "libtpu" not in versions
                else f"JAX_PLATFORMS=tpu {_ASK} says why (one process at a time may use it)",
            )
        )
    return found


_ASK = "python -c 'import jax; jax.devices()'"


def _reinstall(versions: Mapping[str, str], extra: str = "") -> str:
    """The line that installs JAX, jaxlib and a plugin in versions that belong together."""
    cuda = "cuda12" if "jax-cuda12-plugin" in versions else "cuda13"
    return (
        f"pip install --upgrade 'jax[{extra or cuda}]' 'jaxlib!={_backend.WRONG_VERSION}' (jaxlib "
        "and the plugin in one line, so that they match)"
    )


def _declined(environment: Mapping[str, str]) -> bool:
    """Whether somebody asked for the CPU."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return environment.get("JAX_PLATFORMS", "").split(",")[0] == "cpu" or visible in ("", "-1")


def _versions() -> dict[str, str]:
    import jax
    from jaxlib.version import __version__ as jaxlib

    # What runs, which a search path may hide from the metadata.
    running = {"jaxttp": __version__, "jax": jax.__version__, "jaxlib": jaxlib}
    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *PLUGINS):
        try:
            found[name] = running.get(name) or importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in PACKAGES:
                found[name] = "not installed"
    return found


def _processor() -> str:
    """The name, and the widest vector instructions, by which results may differ in rounding."""
    name, flags = platform.processor() or platform.machine(), set()
    info = Path("/proc/cpuinfo")
    if info.exists():
        first = info.read_text(errors="replace").split("\n\n")[0]
        rows = (line.partition(":") for line in first.splitlines())
        fields = {key.strip(): value.strip() for key, _, value in rows}
        name = fields.get("model name", name)
        flags = set(fields.get("flags", "").split())
    widest = next((word for word in ("avx512f", "avx2", "avx", "sse4_2") if word in flags), "")
    return f"{name}, {widest}" if widest else name


def host_memory() -> dict[str, float]:
    """GiB, by the names of /proc/meminfo; a control group's limit counts where it is lower."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return {}
    rows = (line.split() for line in info.read_text().splitlines())
    found = {row[0].rstrip(":"): int(row[1]) / 2**20 for row in rows if len(row) > 1}
    for limit, used in _group_limits():
        found["MemTotal"] = min(found["MemTotal"], limit)
        found["MemAvailable"] = min(found["MemAvailable"], limit - used)
    return found


def _group_limits(root: Path = Path("/sys/fs/cgroup")) -> Iterator[tuple[float, float]]:
    """Limit and use, GiB, of this process's control groups and of those around them."""
    groups = Path("/proc/self/cgroup")
    lines = groups.read_text().splitlines() if groups.exists() else []
    for _, kinds, path in (line.split(":", 2) for line in lines):
        if kinds and "memory" not in kinds.split(","):
            continue
        top = root / "memory" if kinds else root
        names = ("limit_in_bytes", "usage_in_bytes") if kinds else ("max", "current")
        here = top / path.lstrip("/")
        for folder in {top, here, *(up for up in here.parents if top in up.parents)}:
            files = [folder / f"memory.{name}" for name in names]
            values = [file.read_text().strip() for file in files if file.exists()]
            if len(values) == 2 and all(value.isdigit() for value in values):
                yield int(values[0]) / 2**30, int(values[1]) / 2**30


def _devices() -> tuple[tuple[str, ...], str]:
    import jax

    try:
        devices: Sequence[Any] = jax.devices()
        return tuple(f"{one.platform} {one.id}: {one.device_kind}" for one in devices), str(
            jax.default_backend()
        )
    except RuntimeError as problem:  # a platform was asked for that is not there
        return (" ".join(str(problem).split()),), "none"


def _accelerators() -> tuple[str, ...]:
    found = []
    if Path("/dev/nvidia0").exists() or _nvidia_smi():
        found.append("NVIDIA GPU")
    if Path("/dev/accel0").exists():
        found.append("TPU")
    return tuple(found)


def _nvidia_smi() -> bool:
    """Whether the driver's tool lists a GPU (under Windows' Linux there is no device file)."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "GPU 0" in done.stdout


def _threads() -> tuple[str, ...]:
    import scipy.linalg  # noqa: F401  (its BLAS is jaxlib's)
    from threadpoolctl import threadpool_info

    from jaxttp._core.xla_cpu.threads import settle

    settle()  # so that the numbers are those that compiled programs find

    def line(pool: Mapping[str, Any]) -> str:
        where = Path(pool["filepath"]).parent.name
        kernels = pool.get("architecture")
        of = f", kernels for {kernels}" if kernels else ""
        name = f"{pool['internal_api']} {pool.get('version') or ''}".strip()
        return f"{name} ({where}{of}): {pool['num_threads']} threads"

    return tuple(line(pool) for pool in threadpool_info())
