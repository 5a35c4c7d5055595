"""What the benchmarks share: clocks, a process for each case, tables, and records that are kept.

A benchmark prints a Markdown table and appends a line of JSON for every row to its store, with the
date, the machine and the versions (`stamp`). Rows that are there already are not measured again.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

try:
    import jax
except ImportError:  # in the environments of peers that are not made of JAX
    jax = None

Row = dict[str, Any]
STORES = Path("experiments/results/bench")
PACKAGES = ("jaxttp", "jax", "jaxlib", "numpy", "optax")


class Timing(NamedTuple):
    """Seconds of a call.

    Attributes:
        first: of the first call, which compiles, by the clock.
        wall: of later ones by the clock, the median.
        cpu: of later ones by the process's CPUs, the median.
    """

    first: float
    wall: float
    cpu: float


def clock(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of one call by the clock and by the process's CPUs; it waits for the result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    if jax is not None:
        jax.block_until_ready(result)
    return time.perf_counter() - wall, time.process_time() - cpu


def in_turn(calls: Mapping[str, Callable[[], Any]], rounds: int = 5) -> dict[str, Timing]:
    """Every call once to compile, then all of them one after the other, so many times."""
    first = {name: clock(call)[0] for name, call in calls.items()}
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            spent[name].append(clock(call))
    return {
        name: Timing(
            first[name], *(statistics.median(column) for column in zip(*some, strict=True))
        )
        for name, some in spent.items()
    }


def peak_gib() -> float:
    """The process's highest resident memory (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def stamp() -> Row:
    """When and where something was measured."""
    assert jax is not None
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "device": f"{device.platform}: {device.device_kind}",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def load(store: Path) -> list[Row]:
    """The rows that are in a store, a file of JSON lines."""
    return [json.loads(line) for line in store.read_text().splitlines()] if store.exists() else []


def keep(store: Path, row: Row) -> Row:
    """Append a row to a store, stamped."""
    store.parent.mkdir(parents=True, exist_ok=True)
    row = row | {"measured": stamp()}
    with store.open("a") as file:
        file.write(json.dumps(row) + "\n")
    return row


def go_on(
    store: Path, jobs: Iterable[tuple[str, Callable[[], Row]]], minutes: float = float("inf")
) -> list[Row]:
    """Measure what the store does not have yet, until the time is over; returns all its rows.

    Args:
        store: a file of JSON lines.
        jobs: names, and what makes their rows, which have the name under "name".
        minutes: nothing is begun after that.
    """
    begun, rows = time.monotonic(), load(store)
    known = {row["name"] for row in rows}
    for name, measure in jobs:
        if name in known:
            continue
        if time.monotonic() - begun > 60 * minutes:
            print("the time is over; call again to go on", flush=True)
            break
        one = time.perf_counter()
        rows.append(keep(store, measure()))
        print(f"{name}: {time.perf_counter() - one:.1f} s", flush=True)
    return rows


def in_own_process(module: str, arguments: Sequence[str]) -> Row:
    """The row that ``python -m module arguments --here`` prints last; {"failed": why} else."""
    command = [sys.executable, "-m", module, *arguments, "--here"]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"failed": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]}
    return json.loads(lines[-1])


def line(cells: Iterable[Any]) -> str:
    """A line of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


def head(titles: Sequence[str]) -> str:
    """The two lines that a table begins with."""
    return f"{line(titles)}\n|{'---|' * len(titles)}"


def shown(value: Any) -> str:
    """A cell: three digits of a number."""
    return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)


def publish(rows: Iterable[Row], columns: Sequence[str], store: Path) -> list[Row]:
    """Print rows as they come, in a table, and keep them.

    Args:
        rows: of which each has some of the columns.
        columns: in their order.
        store: a file of JSON lines.
    """
    print(head(columns), flush=True)
    kept = []
    for row in rows:
        cells = [shown(row.get(name)) for name in columns]
        print(line(cells) + (f" failed: {row['failed']}" if "failed" in row else ""), flush=True)
        kept.append(keep(store, row))
    return kept


def parser(
    module: str, doc: str | None, presets: Iterable[str] = (), *, preset: str = "cpu"
) -> argparse.ArgumentParser:
    """A command line with ``--store`` and, where there are any, ``--preset`` and ``--minutes``."""
    out = argparse.ArgumentParser(
        prog=f"python -m {module}", description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    name = module.rpartition(".")[2]
    if presets := tuple(presets):
        out.add_argument("--preset", choices=presets, default=preset)
        out.add_argument(
            "--minutes", type=float, default=float("inf"), help="begin nothing after that"
        )
    out.add_argument(
        "--store", type=Path, help=f"a file of JSON lines (default: in {STORES}, {name}*.jsonl)"
    )
    return out


def store_of(module: str, options: argparse.Namespace, *more: object) -> Path:
    """Where the rows of a command are kept: its name, preset and what else tells them apart."""
    parts = (module.rpartition(".")[2], getattr(options, "preset", None), *more)
    name = "-".join(str(part) for part in parts if part is not None)
    return options.store or STORES / f"{name}.jsonl"
