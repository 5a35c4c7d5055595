"""What LAPACK's threads cost and gain, inside compiled programs and outside.

    python -m experiments.bench.threads [linalg] [step] [without]
                                        [--sizes 500 2000 6000] [--routines eigh cholesky ...]
                                        [--calls 10] [--smoke]

linalg: every routine in a compiled program (`jnp.linalg`) and outside (SciPy, for singular values
NumPy), on one BLAS thread and on one a core, alone and two at a time: two operations of one
program, or two Python threads. Seconds: wall / CPU, the median of three calls (one at 6000), in
turn. Singular values at 6000 are left out: a table of them takes longer than all others.
step: a truncated Gauss-Newton step beside Adam's, as a user runs it, alone and beside two busy
processes: the median and the slowest of the calls, CPU seconds, and both in steps of Adam.
without: the same with one BLAS thread a core, as it was before `xla_cpu.threads`; slow.

Nothing here reads or sets an environment variable: run it where none is set.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import scipy.linalg
from threadpoolctl import threadpool_info, threadpool_limits

from experiments.bench.gauss_newton import step_functions

SIZES = (500, 2000, 6000)
ONCE = 6000
"""Size from which one call is enough, and singular values take too long."""

INSIDE: dict[str, Callable] = {
    "eigh": jnp.linalg.eigh,
    "eigvalsh": jnp.linalg.eigvalsh,
    "cholesky": jnp.linalg.cholesky,
    "svd": functools.partial(jnp.linalg.svd, compute_uv=False),
}
OUTSIDE: dict[str, Callable] = {
    "eigh": functools.partial(scipy.linalg.eigh, driver="evd"),
    "eigvalsh": functools.partial(scipy.linalg.eigvalsh, driver="evd"),
    "cholesky": functools.partial(scipy.linalg.cholesky, lower=True),
    "svd": functools.partial(np.linalg.svd, compute_uv=False),
}

Times = tuple[float, float]


def machine() -> str:
    """The processor and the libraries, for the caption of a table."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    lines = dict(line.split("\t: ", 1) for line in text.splitlines() if "\t: " in line)
    name = next((v for k, v in lines.items() if k.strip() == "model name"), "unknown processor")
    wide = "AVX-512" if " avx512f" in text else "AVX2" if " avx2" in text else "neither AVX2"
    blas = [
        f"{one['internal_api']} {one['version']} ({one.get('architecture', '?')})"
        for one in threadpool_info()
        if one["user_api"] == "blas" and "numpy.libs" not in one["filepath"]
    ]
    return f"{name}, {wide}, {cores()} cores; jaxlib {jaxlib.__version__}, {', '.join(blas)}"


def cores() -> int:
    """Logical cores of this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure(function: Callable[[], object]) -> Times:
    """Wall and CPU seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(function())
    return time.perf_counter() - wall, time.process_time() - cpu


def matrix(size: int) -> np.ndarray:
    """Symmetric, positive definite, float32."""
    draw = np.random.default_rng(0).standard_normal((size, size)).astype(np.float32)
    return draw @ draw.T / size + np.eye(size, dtype=np.float32)


def calls(routine: str, size: int) -> dict[str, dict[str, Callable[[], object]]]:
    """The calls to measure, by place and number at a time."""
    a = matrix(size)
    x, inside, outside = jnp.asarray(a), INSIDE[routine], OUTSIDE[routine]
    one = jax.jit(inside).lower(x).compile()
    two = jax.jit(lambda x, y: (inside(x), inside(y))).lower(x, x).compile()

    def pair() -> list:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            return list(pool.map(outside, (a, a)))

    y = jnp.asarray(a[::-1, ::-1].copy())
    return {
        "compiled": {"alone": lambda: one(x), "two": lambda: two(x, y)},
        "outside": {"alone": lambda: outside(a), "two": pair},
    }


def linalg(routines: list[str], sizes: list[int]) -> None:
    """Print a row for each routine, size and place."""
    counts = (1, cores())
    columns = [
        f"{number}, {count} thread{'s' * (count > 1)}"
        for number in ("alone", "two at a time")
        for count in counts
    ]
    print(f"\nSeconds, wall / CPU, float32. {machine()}.\n")
    print("| routine | n | where | " + " | ".join(columns) + " |")
    print("|---" * (3 + len(columns)) + "|")
    for routine in routines:
        for size in sizes:
            if routine == "svd" and size >= ONCE:
                continue
            for place, functions in calls(routine, size).items():
                cells = []
                for function in functions.values():
                    found: dict[int, list[Times]] = {count: [] for count in counts}
                    for _ in range(1 if size >= ONCE else 3):
                        for count in counts:
                            with threadpool_limits(count, user_api="blas"):
                                found[count].append(measure(function))
                    cells += [_pair(found[count]) for count in counts]
                print(f"| {routine} | {size} | {place} | " + " | ".join(cells) + " |", flush=True)


def _pair(found: list[Times]) -> str:
    wall, cpu = (statistics.median(part) for part in zip(*found, strict=True))
    return f"{wall:.3g} / {cpu:.3g}"


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """That many processes which compute without end, stopped at the end of the block."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def step(repeats: int, limit: int | None = None, **sizes: int) -> None:
    """Print what a step costs, alone and beside others; `limit` overrules the library's policy."""
    wanted = ("adam", "truncate (eigh)")
    functions = {name: f for name, f in step_functions(**sizes).items() if name in wanted}
    for function in functions.values():
        jax.block_until_ready(function())
    threads = "as a user runs it" if limit is None else f"{limit} BLAS threads"
    print(f"\nSeconds a step, {repeats} calls in turn, {threads}. {machine()}.\n")
    print(
        "| step | beside | wall, median | slowest | slowest / median | CPU | wall / Adam "
        "| CPU / Adam |"
    )
    print("|---" * 8 + "|")
    for others in (0, 2):
        found: dict[str, list[Times]] = {name: [] for name in functions}
        scope = contextlib.nullcontext() if limit is None else threadpool_limits(limit, "blas")
        with busy(others), scope:
            for _ in range(repeats):
                for name, function in functions.items():
                    found[name].append(measure(function))
        beside = f"{others} busy processes" if others else "nothing"
        middle = {
            name: [statistics.median(part) for part in zip(*times, strict=True)]
            for name, times in found.items()
        }
        for name, times in found.items():
            (wall, cpu), slowest = middle[name], max(wall for wall, _ in times)
            adam_wall, adam_cpu = middle["adam"]
            print(
                f"| {name} | {beside} | {wall:.3f} | {slowest:.3f} | {slowest / wall:.2f} "
                f"| {cpu:.3f} | {wall / adam_wall:.2f} | {cpu / adam_cpu:.2f} |",
                flush=True,
            )


def main() -> None:
    """Read the options, print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    known = ("linalg", "step", "without")
    parser.add_argument("parts", nargs="*", default=[], help=f"of {', '.join(known)}")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--routines", nargs="+", choices=list(INSIDE), default=list(INSIDE))
    parser.add_argument("--calls", type=int, default=10, help="of each step")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(known):
        parser.error(f"parts are {', '.join(known)}; got {', '.join(sorted(unknown))}")
    sizes = {"samples": 32, "half": 8, "width": 64, "blocks": 1} if options.smoke else {}
    for part in options.parts or ("linalg", "step"):
        if part == "linalg":
            linalg(options.routines, [20] if options.smoke else options.sizes)
        elif part == "step":
            step(options.calls, **sizes)
        else:
            step(options.calls, limit=cores(), **sizes)


if __name__ == "__main__":
    main()
