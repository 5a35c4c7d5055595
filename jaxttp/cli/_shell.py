"""What every command shares: a progress bar, folders, and one line for bad input."""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


def check_folder(output: Path | None) -> None:
    """Refuse a file in place of the folder for the results, before the work begins."""
    if output is not None and output.exists() and not output.is_dir():
        raise ValueError(f"output={str(output)!r} is a file; give a folder.")


def parse_numbers(name: str, text: str, example: str) -> tuple[float, ...]:
    """Numbers separated by commas."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"{name}={text!r} must be numbers separated by commas, such as {example}."
        ) from None


@contextlib.contextmanager
def progress_bar() -> Iterator[Any]:
    """A bar on standard error, for people only."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    silent = not sys.stderr.isatty()  # a console calls itself a terminal under FORCE_COLOR
    with Progress(*columns, console=console, transient=True, disable=silent) as bar:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                for task in tasks.values():
                    bar.update(task, visible=False)
                tasks[stage] = bar.add_task(stage, total=None if total <= 1 else total)
            bar.update(tasks[stage], completed=done)

        report("loading", 0, 1)
        yield report


@contextlib.contextmanager
def bad_input_exits() -> Iterator[None]:
    """A `ValueError` or a missing extra becomes one line on standard error and exit code 2."""
    try:
        yield
    except (ValueError, ImportError) as problem:
        fail(str(problem))


def write_json(path: Path, values: Any) -> None:
    """Plain values into a file, its folder made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n")


def print_json(values: Any) -> None:
    """Plain values on standard output."""
    print(json.dumps(values, indent=1, allow_nan=False))


def say_written(paths: Sequence[Path]) -> None:
    """Name the files that were written, if any."""
    if paths:
        print("written: " + ", ".join(map(str, paths)))


def fail(message: str) -> NoReturn:
    """One line on standard error and exit code 2."""
    print(f"jaxttp: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(2)
