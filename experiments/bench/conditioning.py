"""Time and memory of condition numbers, one process for each case.

    python -m experiments.bench.conditioning                   # linear networks, both sizes
    python -m experiments.bench.conditioning resnet20-100 --max-bytes 2147483648
    python -m experiments.bench.conditioning resnet20-1000 --accumulate float32

Columns: "first" and "cpu" are the seconds of the first call, compilation included, "again" those of
a second one; "peak GiB" the process's highest resident memory, imports included; "error" the
relative difference to the dense eigenvalues where those fit. "real" inputs have covariance
eigenvalues that fall by a power law over four orders, as images do.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from experiments.bench import kernel
from experiments.bench.harness import (
    Row,
    clock,
    in_own_process,
    parser,
    peak_gib,
    publish,
    store_of,
)
from jaxttp import conditioning

MODULE = "experiments.bench.conditioning"
COLUMNS = ("case", "kappa", "kind", "rank", "first", "cpu", "again", "peak GiB", "error")
LINEAR = {
    "kd-1960": (196, 300, 300, 10),
    "kd-1960-bottleneck": (196, 300, 5, 300, 10),
    "kd-30720": (3072, 3100, 3100, 10),
}
CASES = tuple(name + end for name in LINEAR for end in ("", "-real"))


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


def linear(widths: tuple[int, ...], real: bool) -> Row:
    """Kappa of a deep linear network at initialisation, matrix-free."""
    weights = _weights(widths)
    sigma = _power_law(widths[0]) if real else None
    found: list[Any] = []

    def compute() -> Any:
        operator = conditioning.gauss_newton_linear_operator(weights, sigma)
        found.append(conditioning.condition_number(operator))
        return found[-1].value

    first, cpu = clock(compute)
    row = {"first": first, "cpu": cpu} | ({"again": clock(compute)[0]} if first < 20 else {})
    row |= _described(found[0])
    if widths[0] * widths[-1] <= 2000:
        matrix = conditioning.gauss_newton_linear(weights, sigma)
        dense = conditioning.condition_number(matrix, rank=row["rank"])
        row["error"] = abs(row["kappa"] / float(dense.value) - 1)
    return row


def resnet20(n: int, max_bytes: int | None, accumulate: str) -> Row:
    """Kappa of one checkpoint of a ResNet20-like network: kernel and eigenvalues.

    With 270,000 weights and 10 n outputs the kernel has full rank for almost all weights, which is
    said to `condition_number`: a float32 kernel could not tell.
    """
    case = kernel.resnet(n, 32, 3, 10, 3)
    found: list[Any] = []

    def compute() -> Any:
        matrix = conditioning.curvature_matrix(
            *case, form="outputs", promote=False, max_bytes=max_bytes, accumulate=accumulate
        )
        found.append(conditioning.condition_number(matrix, rank=len(matrix)))
        return found[-1].value

    first, cpu = clock(compute)
    return {"first": first, "cpu": cpu} | _described(found[0])


def _described(found: Any) -> Row:
    return {
        "kappa": float(found.value), "kind": found.kind, "rank": int(found.rank),
        "peak GiB": peak_gib(),
    }  # fmt: skip


def measure(name: str, max_bytes: int | None, accumulate: str) -> Row:
    """One case in this process."""
    if name.startswith("resnet20-"):
        return {"case": name} | resnet20(int(name.split("-")[1]), max_bytes, accumulate)
    real = name.endswith("-real")
    return {"case": name} | linear(LINEAR[name.removesuffix("-real")], real)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Every case in a process of its own."""
    for name in options.cases or CASES:
        arguments = [name, "--accumulate", options.accumulate]
        if options.max_bytes is not None:
            arguments += ["--max-bytes", str(options.max_bytes)]
        yield {"case": name} | in_own_process(MODULE, arguments)


def main() -> None:
    """Print the table."""
    command = parser(MODULE, __doc__)
    command.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}, resnet20-<samples>")
    command.add_argument("--max-bytes", type=int)
    command.add_argument("--accumulate", choices=("float64", "float32"), default="float64")
    command.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = command.parse_args()
    if options.here:
        print(json.dumps(measure(options.cases[0], options.max_bytes, options.accumulate)))
        return
    publish(rows(options), COLUMNS, store_of(MODULE, options))


if __name__ == "__main__":
    main()
