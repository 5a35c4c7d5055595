"""What every command shares: progress, files, tables or JSON, and one line for bad input."""

import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from typer.core import TyperGroup

from jaxttp._core.files import replaced
from jaxttp._core.process import keep_compiled, whole
from jaxttp._core.progress import print_progress

Report = Callable[[str, int, int], None]


class OneLine(TyperGroup):
    """Commands that report a bad argument in one line on standard error."""

    def main(self, *args: Any, standalone_mode: bool = True, **options: Any) -> Any:
        """Run, and leave with 0 for good, 2 for bad input, 1 for anything else."""
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **options)
        try:
            code = super().main(*args, standalone_mode=False, **options)
        except typer.Abort:
            sys.exit(1)
        except Exception as problem:
            format_message = getattr(problem, "format_message", None)  # of a parser's error
            if format_message is None:
                raise
            if type(problem).__name__ == "NoArgsIsHelpError":
                print(format_message())
            else:
                print(_one_line(format_message()), file=sys.stderr)
            sys.exit(2)
        sys.exit(code if isinstance(code, int) else 0)


@dataclasses.dataclass(frozen=True)
class Shell:
    """The output of a command: tables or JSON, verbosity, and a folder for files.

    Attributes:
        output: the folder for files, or None.
        as_json: JSON on standard output in place of the table.
        quiet: no progress, no table.
        verbose: progress in lines, on standard error; problems with their origin.
        cache: keep compiled programs for the next process, see `jaxttp._core.process`.
    """

    output: Path | None = None
    as_json: bool = False
    quiet: bool = False
    verbose: bool = False
    cache: bool = True

    @contextlib.contextmanager
    def work(self) -> Iterator[Report]:
        """A function that reports progress; a `ValueError` inside becomes one line and code 2."""
        try:
            if self.quiet and self.verbose:
                raise ValueError("quiet and verbose: choose one of them.")
            if self.output is not None and self.output.exists() and not self.output.is_dir():
                raise ValueError(f"output={str(self.output)!r} is a file; give a folder.")
            programs = keep_compiled(self.cache)
            if self.verbose:
                print(f"compiled programs: {programs}", file=sys.stderr)
                yield print_progress()
            else:
                with _progress_bar(silent=self.quiet) as report:
                    yield report
        except (ValueError, ImportError, FileNotFoundError) as problem:
            if self.verbose:
                import traceback

                traceback.print_exc()
            fail(str(problem))

    def deliver(
        self,
        name: str | None,
        values: Any,
        show: Callable[[Console], None],
        files: Mapping[str, Callable[[Path], Any]],
        *,
        problem: str | None = None,
    ) -> None:
        """Write the files, print the JSON or the table, name the files; then the problem, if any.

        Args:
            name: of the JSON file, without its suffix; None for no such file.
            values: plain ones, for JSON.
            show: prints a table for people.
            files: what else is written: file's name -> writes it.
            problem: what keeps the result from being good; no table is printed then.

        Raises:
            typer.Exit: there is a problem.
        """
        with whole():
            written = []
            if name is not None:
                files = {f"{name}.json": lambda path: write_json(path, values), **files}
            if self.output is not None:
                try:
                    for file, write in files.items():
                        written.append(self.output / file)
                        write(written[-1])
                except OSError as refusal:
                    fail(f"output={str(self.output)!r} cannot be written: {refusal}")
            if self.as_json:
                print(_json(values))
            elif problem is None and not self.quiet:
                show(Console(highlight=False))
                if written:
                    print("written: " + ", ".join(map(str, written)))
            sys.stdout.flush()
        if problem is not None:
            fail(problem)


def figure(draw: Callable[[], Any]) -> Callable[[Path], None]:
    """Writes the figure that a function draws; matplotlib is loaded no sooner."""

    def write(path: Path) -> None:
        from jaxttp.plots import save

        save(draw(), path)

    return write


def parse_numbers(name: str, text: str, example: str) -> tuple[Any, ...]:
    """Numbers separated by commas; whole ones as integers."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"{name}={text!r} must be numbers separated by commas, such as {example}."
        ) from None
    return tuple(int(number) if number.is_integer() else number for number in numbers)


def say(console: Console, *lines: str | None) -> None:
    """Lines that the terminal wraps, so that they can be copied; what is None or empty is not."""
    for line in filter(None, lines):
        console.print(line, soft_wrap=True)


@contextlib.contextmanager
def _progress_bar(*, silent: bool) -> Iterator[Report]:
    """A bar with the time that is left, on standard error, for people only."""
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    # A console calls itself a terminal under FORCE_COLOR.
    silent = silent or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=silent) as bar:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if total == 0 and not silent:
                bar.console.print(stage)
            if total == 0:
                return
            if stage not in tasks:
                for task in tasks.values():
                    bar.update(task, visible=False)
                tasks[stage] = bar.add_task(stage, total=None)
            # A stage may learn how much there is to do after it began: the tiles of a kernel.
            bar.update(tasks[stage], completed=done, total=None if total <= 1 else total)

        report("loading", 0, 1)
        yield report


def write_json(path: Path, values: Any) -> None:
    """Plain values into a file, its folder made if need be."""
    with replaced(path) as place:
        place.write_text(_json(values) + "\n")


def _json(values: Any) -> str:
    """JSON, a list of numbers on one line."""
    text = json.dumps(values, indent=1, allow_nan=False)
    # Finds lists of numbers alone: strings bring quotes, lists and dictionaries brackets. Inside a
    # string nothing is found, as JSON writes the end of a line there as two characters.
    return re.sub(r"\[\n[^][{}\"]*\]", lambda m: f"[{' '.join(m[0][1:-1].split())}]", text)


def _one_line(message: str) -> str:
    return f"jaxttp: {' '.join(message.split())}"


def fail(message: str) -> NoReturn:
    """One line on standard error and exit code 2."""
    print(_one_line(message), file=sys.stderr)
    raise typer.Exit(2)
