"""Time and memory of condition numbers, one process for each case.

    python -m experiments.bench.conditioning                   # linear networks, both sizes
    python -m experiments.bench.conditioning resnet20-100 --max-bytes 2147483648
    python -m experiments.bench.conditioning resnet20-1000 --accumulate float32

Columns: first = wall seconds of the first call, compilation included; CPU = its CPU seconds; again
= wall seconds of a second call; peak = highest resident memory of the process, imports included;
error = relative difference to the dense eigenvalues where those fit. "real" inputs have covariance
eigenvalues that fall by a power law over four orders, as images do.
"""

import argparse
import itertools
import json
import resource
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import kernel
from jaxttp import conditioning

LINEAR = {
    "kd-1960": (196, 300, 300, 10),
    "kd-1960-bottleneck": (196, 300, 5, 300, 10),
    "kd-30720": (3072, 3100, 3100, 10),
}
TARGETS = {"kd-1960": (1.0, 2.0), "kd-30720": (60.0, 2.0), "resnet20-1000": (600.0, 6.0)}
"""Wall seconds and GiB."""


def _weights(widths: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [
        (rng.standard_normal((b, a)) / np.sqrt(a)).astype(np.float32)
        for a, b in itertools.pairwise(widths)
    ]


def _power_law(d: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    basis, _ = np.linalg.qr(rng.standard_normal((d, d)))
    values = (1.0 + np.arange(d)) ** (-4 / np.log10(d))
    matrix = basis * values @ basis.T
    return 0.5 * (matrix + matrix.T)


def linear(widths: tuple[int, ...], real: bool) -> dict[str, Any]:
    """Kappa of a deep linear network at initialisation, matrix-free."""
    weights = _weights(widths)
    sigma = _power_law(widths[0]) if real else None
    seconds, cpu, result = [], [], None
    for _ in range(2):
        start, used = time.perf_counter(), time.process_time()
        operator = conditioning.gauss_newton_linear_operator(weights, sigma)
        result = conditioning.condition_number(operator)
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - used)
        if seconds[0] > 20:
            break
    assert result is not None
    row = _row(result, seconds, cpu)
    if widths[0] * widths[-1] <= 2000:
        matrix = conditioning.gauss_newton_linear(weights, sigma)
        dense = conditioning.condition_number(matrix, rank=int(result.rank))
        row["error"] = abs(float(result.value) / float(dense.value) - 1)
    return row


def resnet20(n: int, max_bytes: int | None, accumulate: str) -> dict[str, Any]:
    """Kappa of one checkpoint of a ResNet20-like network: kernel and eigenvalues.

    With 270,000 weights and 10 n outputs the kernel has full rank for almost all weights, which is
    said to `condition_number`: a float32 kernel could not tell.
    """
    case = kernel.resnet(n, 32, 3, 10, 3)
    start, used = time.perf_counter(), time.process_time()
    matrix = conditioning.curvature_matrix(
        case.apply_fn, case.params, case.x, form="outputs", promote=False, max_bytes=max_bytes,
        accumulate=accumulate,
    )  # fmt: skip
    jax.block_until_ready(matrix)
    middle = time.perf_counter() - start
    result = conditioning.condition_number(matrix, rank=len(matrix))
    seconds = time.perf_counter() - start
    row = _row(result, [seconds], [time.process_time() - used])
    row["kernel_s"] = middle
    return row


def _row(result: Any, seconds: list[float], cpu: list[float]) -> dict[str, Any]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "kappa": float(result.value),
        "kind": result.kind,
        "rank": int(result.rank),
        "first_s": seconds[0],
        "again_s": seconds[1] if len(seconds) > 1 else None,
        "cpu_s": cpu[0],
        "peak_gib": peak,
    }


def cases() -> list[str]:
    """Names of the linear cases, white and real."""
    return [name + end for name in LINEAR for end in ("", "-real")]


def measure(name: str, max_bytes: int | None, accumulate: str = "float64") -> dict[str, Any]:
    """One case in this process."""
    if name.startswith("resnet20-"):
        return {"case": name} | resnet20(int(name.split("-")[1]), max_bytes, accumulate)
    real = name.endswith("-real")
    return {"case": name} | linear(LINEAR[name.removesuffix("-real")], real)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(cases())}, resnet20-<samples>")
    parser.add_argument("--max-bytes", type=int, default=None)
    parser.add_argument("--accumulate", choices=("float64", "float32"), default="float64")
    parser.add_argument("--here", action="store_true", help="measure in this process")
    arguments = parser.parse_args()
    jnp.zeros(1).block_until_ready()
    for name in arguments.cases or cases():
        if arguments.here:
            row = measure(name, arguments.max_bytes, arguments.accumulate)
            print(json.dumps(row), flush=True)
            continue
        command = [sys.executable, "-m", "experiments.bench.conditioning", name, "--here"]
        command += ["--accumulate", arguments.accumulate]
        if arguments.max_bytes is not None:
            command += ["--max-bytes", str(arguments.max_bytes)]
        row = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        if name in TARGETS:
            most_seconds, most_gib = TARGETS[name]
            row["met"] = row["first_s"] < most_seconds and row["peak_gib"] < most_gib
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
