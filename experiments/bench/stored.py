"""Rows of a measurement that takes long: kept as they come, and never measured twice."""

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def load(store: Path) -> list[Row]:
    """The rows that are in a store, a file of JSON lines."""
    return [json.loads(line) for line in store.read_text().splitlines()] if store.exists() else []


def go_on(
    store: Path,
    jobs: Iterable[tuple[str, Callable[[], Row]]],
    minutes: float = float("inf"),
    key: str = "name",
) -> list[Row]:
    """Measure what the store does not have yet, until the time is over; returns all its rows.

    Args:
        store: a file of JSON lines.
        jobs: names, and what makes their rows.
        minutes: nothing is begun after that.
        key: of a row, what holds its name.
    """
    begun, rows = time.monotonic(), load(store)
    known = {row[key] for row in rows}
    for name, measure in jobs:
        if name in known:
            continue
        if time.monotonic() - begun > 60 * minutes:
            print("the time is over; call again to go on", flush=True)
            break
        one = time.perf_counter()
        rows.append(measure())
        with store.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        print(f"{name}: {time.perf_counter() - one:.1f} s", flush=True)
    return rows
