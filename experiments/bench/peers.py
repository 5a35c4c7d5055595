"""jaxttp, its peers and plain JAX on the same work: seconds, memory, and how far answers differ.

    python -m experiments.bench.peers setup [ENVIRONMENT...]   # below ~/.cache/jaxttp-peers
    python -m experiments.bench.peers run [ROW...] [--rounds 5] [--timeout 300] [--store FILE]

Every side (`experiments.bench.peers_sides`) runs in a process of its own, in the Python of its
environment: neural-tangents and curvlinops have theirs (`requirements/`; nothing of a peer is
installed here), and where that is not there the row says so. All sides of a row run one after the
other, twice over; the table has the better median. "wall/ours" and "cpu/ours" are seconds over
jaxttp's, "off" is the largest difference of an answer from jaxttp's, relative to its largest
number.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from experiments.bench.harness import Row, parser, publish, store_of
from experiments.bench.peers_sides import ROWS

MODULE = "experiments.bench.peers"
COLUMNS = (
    "row", "side", "first", "wall", "cpu", "peak GiB", "wall/ours", "cpu/ours", "off", "versions",
)  # fmt: skip
REQUIREMENTS = Path(__file__).parent / "requirements"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxttp-peers"
PYTHONS = {"neural-tangents": ("3.11", "3.12")}
"""Where the newest Python is too new: versions to look for."""
PASSES = 2


def environments() -> list[str]:
    """The names of the environments, ours not among them."""
    return sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))


def interpreter(name: str) -> Path | None:
    """The Python of an environment, None where it has not been made."""
    if name == "ours":
        return Path(sys.executable)
    python = CACHE / name / "bin" / "python"
    return python if python.exists() else None


def setup(names: Sequence[str]) -> None:
    """Make environments that are not there.

    Raises:
        RuntimeError: no Python that would do is on the path.
        subprocess.CalledProcessError: pip could not install one.
    """
    for name in names or environments():
        if interpreter(name) is None:
            here = f"{sys.version_info.major}.{sys.version_info.minor}"
            versions = PYTHONS.get(name, (here,))
            paths = [sys.executable] if here in versions else []
            paths += [path for v in versions if (path := shutil.which(f"python{v}"))]
            if not paths:
                raise RuntimeError(f"{name} needs Python {' or '.join(versions)}, none is there.")
            folder, file = CACHE / name, REQUIREMENTS / f"{name}.txt"
            subprocess.run([paths[0], "-m", "venv", "--clear", str(folder)], check=True)
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "-r", str(file)]
            subprocess.run(pip, check=True)
        print(f"{name}: {interpreter(name)}", flush=True)


def ask(row: str, side: str, rounds: int, timeout: float) -> tuple[Row, np.ndarray | None]:
    """What a side measured, and its answer; {"failed": why} and None where it did not."""
    environment = ROWS[row][side].environment
    python = interpreter(environment)
    if python is None:
        return {"failed": f"no environment {environment}: setup makes it"}, None
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.npy"
        command = [str(python), "-m", "experiments.bench.peers_sides", row, side]
        command += ["--rounds", str(rounds), "--answer", str(answer)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {timeout:g} s"}, None
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
            return {"failed": lines[-1][:200]}, None
        return json.loads(done.stdout.splitlines()[-1]), np.load(answer)


def difference(answer: np.ndarray, reference: np.ndarray) -> float:
    """The largest difference as a fraction of the largest number.

    Example:
        >>> difference(np.array([1.0, 2.0]), np.array([1.0, 4.0]))
        0.5
    """
    if answer.shape != reference.shape:
        return float("inf")
    return float(np.max(np.abs(answer - reference)) / np.max(np.abs(reference)))


def rows(names: Sequence[str], rounds: int, timeout: float) -> Iterator[Row]:
    """Every row: all of its sides in turn, twice over."""
    for row in names or ROWS:
        found: dict[str, Row] = {}
        answers: dict[str, np.ndarray | None] = {}
        for _ in range(PASSES):
            for side in ROWS[row]:
                if "failed" in found.get(side, {}):
                    continue
                new, answers[side] = ask(row, side, rounds, timeout)
                if side not in found or new.get("wall", 0.0) < found[side]["wall"]:
                    found[side] = new
        first = next(iter(ROWS[row]))
        for side, measured in found.items():
            out = {"row": row, "side": side} | measured
            answer, reference = answers[side], answers[first]
            if answer is not None and reference is not None and "wall" in found[first]:
                out["off"] = difference(answer, reference)
                out |= {f"{c}/ours": measured[c] / found[first][c] for c in ("wall", "cpu")}
            yield out


def main(arguments: Sequence[str] | None = None) -> None:
    """Make environments, or run rows."""
    command = parser(MODULE, __doc__)
    command.add_argument("what", choices=("setup", "run"))
    command.add_argument("names", nargs="*", help=f"environments, or of {', '.join(ROWS)}")
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--timeout", type=float, default=300.0, help="seconds of one side")
    options = command.parse_args(arguments)
    known = environments() if options.what == "setup" else list(ROWS)
    if unknown := [name for name in options.names if name not in known]:
        command.error(f"names must be among {', '.join(known)}; got {', '.join(unknown)}.")
    if options.what == "setup":
        setup(options.names)
    else:
        rows_of = rows(options.names, options.rounds, options.timeout)
        publish(rows_of, COLUMNS, store_of(MODULE, options))


if __name__ == "__main__":
    main()
