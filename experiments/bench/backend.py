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

from jaxttp.cli.known_answers import Answer, cross_entropy, softmax_behind_layers

CASES = {"cross-entropy": cross_entropy, "softmax": softmax_behind_layers}
ROOT = Path(__file__).parents[2]


def ask(compilations: int) -> dict[str, Answer]:
    """Both cases, compiled several times in a process of their own.

    Args:
        compilations: of each case.

    Returns:
        case -> its `Answer`.

    Raises:
        RuntimeError: the process failed.
    """
    code = (
        "import json; from experiments.bench.backend import CASES\n"
        f"print(json.dumps([case({compilations}) for case in CASES.values()]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"a process left with {done.returncode}: {done.stderr.strip()}")
    rows = json.loads(done.stdout.splitlines()[-1])
    return {name: Answer(*row) for name, row in zip(CASES, rows, strict=True)}


def main(arguments: list[str] | None = None) -> dict[str, list[Answer]]:
    """Print a row for each case.

    Args:
        arguments: of the command line.

    Returns:
        case -> its answers, one a process.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=20)
    parser.add_argument("--compilations", type=int, default=8)
    given = parser.parse_args(arguments)
    found: dict[str, list[Answer]] = {name: [] for name in CASES}
    for _ in range(given.processes):
        for name, answer in ask(given.compilations).items():
            found[name].append(answer)
    print(f"jaxlib {JAXLIB}, {given.processes} processes")
    print("| case | compilations | wrong | largest error |\n|---|---|---|---|")
    for name, answers in found.items():
        total, wrong = sum(a.compilations for a in answers), sum(a.wrong for a in answers)
        print(f"| {name} | {total} | {wrong} | {max(a.error for a in answers):.1e} |")
    return found


if __name__ == "__main__":
    main()
