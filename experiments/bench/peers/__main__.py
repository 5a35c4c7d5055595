"""Measure jaxttp beside its peers.

python -m experiments.bench.peers list
python -m experiments.bench.peers setup [ENVIRONMENT...] [--cache DIR]
python -m experiments.bench.peers run [--all | ROW or GROUP...] [--cache DIR] [--results DIR]
python -m experiments.bench.peers table [--results DIR] [--write FILE] [--again DIR]

A row's result is a file of JSON in the results' folder; a run replaces those of its rows. It goes
through all rows and then times them all again, in other processes: ranges are of both passes.
Nothing of a peer comes into this environment: they have their own, below ~/.cache/jaxttp-peers
unless a folder is named. A side whose environment is not there is left out, and the table says so.
"""

import argparse
import datetime
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.bench.peers import environments
from experiments.bench.peers.harness import Bench, Limits, Row
from experiments.bench.peers.rows import PRESETS, make_rows
from experiments.bench.peers.table import confirmed, table
from experiments.bench.peers.worker import GIB

RESULTS = Path("experiments/results/peers")


def chosen(rows: Sequence[Row], names: Sequence[str], everything: bool) -> list[Row]:
    """Those rows that are named, by their names or their groups'.

    Raises:
        ValueError: an unknown name, or none.
    """
    if everything:
        return list(rows)
    if not names:
        raise ValueError("name rows or groups to run, or say --all; `list` shows them.")
    known = {row.name for row in rows} | {row.group for row in rows}
    for name in names:
        if name not in known:
            raise ValueError(f"ROW must be one of {', '.join(sorted(known))}; got {name!r}.")
    return [row for row in rows if row.name in names or row.group in names]


def run(rows: Sequence[Row], bench: Bench, results: Path, minutes: float) -> None:
    """Measure rows, then all their clocks again; name those that the time did not suffice for."""
    from experiments.bench.threads import machine

    results.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()

    def in_time(rows: Sequence[Row], said: str) -> Iterator[tuple[Row, Path]]:
        for index, row in enumerate(rows):
            if time.perf_counter() - begun > 60 * minutes:
                left = " ".join(one.name for one in rows[index:])
                bench.say(f"the time (--minutes {minutes:g}) is over; {said}: {left}")
                return
            yield row, results / f"{row.name}.json"

    measured: list[Row] = []
    for row, file in in_time(rows, "left"):
        found = bench.run(row) | {"machine": machine(), "date": _now()}
        file.write_text(json.dumps(found, indent=1) + "\n")
        measured.append(row)
    for row, file in in_time(measured, "not repeated"):
        found = bench.again(row, json.loads(file.read_text())) | {"again": _now()}
        file.write_text(json.dumps(found, indent=1) + "\n")
    bench.say(f"{(time.perf_counter() - begun) / 60:.1f} minutes")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")


def load(results: Path) -> list[dict[str, Any]]:
    """The results of a folder, in the order of the rows.

    Raises:
        ValueError: nothing is there.
    """
    rows = make_rows(PRESETS["full"])
    order = {row.name: index for index, row in enumerate(rows)}
    why = {row.name: row.why for row in rows}
    files = sorted(results.glob("*.json"), key=lambda file: order.get(file.stem, len(order)))
    if not files:
        raise ValueError(f"{results} has no results; `run --results {results}` puts them there.")
    found = [json.loads(file.read_text()) for file in files]
    return [{"why": why.get(one["row"], "")} | one for one in found]


def read(results: Path, again: Path | None = None) -> str:
    """The tables of a folder of results, and whether those of another run confirm their ratios."""
    found = load(results)
    machines = "; ".join(dict.fromkeys(one["machine"] for one in found))
    dates = sorted(one["date"] for one in found)
    loads = [load for one in found for load in one["load"]]
    head = (
        f"{dates[0]} to {dates[-1]}, {machines}; load of the machine {min(loads):.1f} to "
        f"{max(loads):.1f}, this measurement included."
    )
    text = f"{head}\n\n{table(found)}"
    if again is not None:
        text += "\n\nA second run:\n\n" + "\n".join(confirmed(found, load(again)))
    return text


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(
        prog="python -m experiments.bench.peers", description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )  # fmt: skip
    commands = out.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="rows and environments")
    make = commands.add_parser("setup", help="make the peers' environments")
    make.add_argument("names", nargs="*", metavar="ENVIRONMENT")
    go = commands.add_parser("run", help="measure")
    go.add_argument("names", nargs="*", metavar="ROW")
    go.add_argument("--all", action="store_true", help="every row")
    go.add_argument("--preset", choices=PRESETS, default="full", help="smoke: does it run?")
    go.add_argument("--max-gib", type=float, default=8.0, help="memory of one process")
    go.add_argument("--timeout", type=float, default=150.0, help="seconds of one call")
    go.add_argument("--minutes", type=float, default=55.0, help="no row is begun after these")
    for one in (make, go):
        one.add_argument("--cache", type=Path, help="folder of the environments")
    show = commands.add_parser("table", help="Markdown of what was measured")
    show.add_argument("--write", type=Path, help="to this file as well")
    show.add_argument("--again", type=Path, help="results of a second run, to confirm the first's")
    for one in (go, show):
        one.add_argument("--results", type=Path, default=RESULTS, help=f"folder ({RESULTS})")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 2 where what was asked cannot be."""
    given = parser().parse_args(arguments)
    try:
        if given.command == "list":
            for row in make_rows(PRESETS["full"]):
                print(f"{row.group}: {row.name} ({', '.join(side.name for side in row.sides)})")
            print(f"environments: {', '.join(environments.known())}")
        elif given.command == "setup":
            cache = environments.cache_folder(given.cache)
            for name in environments.check_names(given.names):
                print(f"{name}: {environments.make(name, cache)}", flush=True)
        elif given.command == "run":
            limits = Limits(max_bytes=int(given.max_gib * GIB), timeout=given.timeout)
            rows = chosen(make_rows(PRESETS[given.preset]), given.names, given.all)
            say = lambda line: print(line, flush=True)  # noqa: E731
            run(
                rows,
                Bench(environments.cache_folder(given.cache), limits, say),
                given.results,
                given.minutes,
            )
        else:
            text = read(given.results, given.again)
            print(text)
            if given.write is not None:
                given.write.write_text(text + "\n")
    except (ValueError, RuntimeError) as problem:
        print(problem, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
