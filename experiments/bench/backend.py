"""Whether the installed backend gives known answers, in many processes and compilations.

    python -m experiments.bench.backend [--processes 20] [--compilations 8]

Two computations that jaxlib 0.10.2 gets wrong on CPUs, in float32: the cross-entropy of 100,000
rows (in every compilation) and a softmax behind three residual layers (NaN in 2 to 5 of 8, on some
CPUs). The second fault depends on the compilation, hence the processes. For each the worst error
against float64, relative to the largest value.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from jaxlib.version import __version__ as JAXLIB

from jaxttp.cli.doctor import TOLERANCES, cross_entropy, softmax_behind_layers

CASES = {"cross-entropy": cross_entropy, "softmax": softmax_behind_layers}
ROOT = Path(__file__).parents[2]


def ask(compilations: int) -> dict[str, list[float]]:
    """Both cases, compiled several times in a process of their own.

    Args:
        compilations: of each case.

    Returns:
        case -> the error of each compilation.

    Raises:
        RuntimeError: the process failed.
    """
    code = (
        "import json; from experiments.bench.backend import CASES\n"
        f"print(json.dumps([[case() for _ in range({compilations})] for case in CASES.values()]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"a process left with {done.returncode}: {done.stderr.strip()}")
    rows = json.loads(done.stdout.splitlines()[-1])
    return dict(zip(CASES, rows, strict=True))


def main(arguments: list[str] | None = None) -> dict[str, list[float]]:
    """Print a row for each case.

    Args:
        arguments: of the command line.

    Returns:
        case -> the error of each compilation.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=20)
    parser.add_argument("--compilations", type=int, default=8)
    given = parser.parse_args(arguments)
    found: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(given.processes):
        for name, errors in ask(given.compilations).items():
            found[name] += errors
    print(f"jaxlib {JAXLIB}, {given.processes} processes")
    print("| case | compilations | wrong | largest error |\n|---|---|---|---|")
    for name, errors in found.items():
        wrong = sum(not error <= TOLERANCES["float32"] for error in errors)
        print(f"| {name} | {len(errors)} | {wrong} | {max(errors):.1e} |")
    return found


if __name__ == "__main__":
    main()
