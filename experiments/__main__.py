"""Run the experiments by name.

python -m experiments list
python -m experiments run NAME... [--preset smoke|cpu|gpu|paper] [--plot]
python -m experiments run --all
python -m experiments run NAME... --preset paper --dry-run [--few] [--image-size 64]
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from experiments.dry_run import DryRun, dry_run
from experiments.harness import RESULTS, Outcome, Report, add_to_gallery, load_script, run_script
from experiments.scripts import SCRIPTS
from experiments.store import MissingError
from jaxttp._core.process import watch

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
console = Console()


@app.command("list")
def show() -> None:
    """Scripts, their pictures, and what the papers claim."""
    table = Table(Column("script", no_wrap=True), Column("picture", no_wrap=True), "claim")
    for name in SCRIPTS:
        script = load_script(name)
        for row, (picture, claim) in enumerate(script.claim.items()):
            table.add_row(name if row == 0 else "", picture, claim)
        table.add_section()
    console.print(table)


@app.command()
def run(
    names: Annotated[list[str] | None, typer.Argument(help="scripts or pictures")] = None,
    preset: Annotated[str, typer.Option(help="smoke, cpu, paper; some have gpu")] = "cpu",
    all_of_them: Annotated[bool, typer.Option("--all", help="every script")] = False,
    plot: Annotated[
        bool, typer.Option("--plot", help="draw, and compute only what is missing")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="throw saved results away")] = False,
    gallery: Annotated[bool, typer.Option("--gallery", help="copy to docs/gallery")] = False,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="one step on made-up data, to see that it fits")
    ] = False,
    few: Annotated[bool, typer.Option("--few", help="a dry run with few samples")] = False,
    image_size: Annotated[
        int | None, typer.Option(min=1, help="of photographs in a dry run, pixels a side")
    ] = None,
    output: Annotated[Path, typer.Option(help="folder of all results")] = RESULTS,
) -> None:
    """Run scripts, or go on with them, and draw their pictures from what is saved."""
    if bool(names) == all_of_them:
        raise typer.BadParameter("give names, or --all.")
    if (few or image_size is not None) and not dry:
        raise typer.BadParameter("--few and --image-size are for --dry-run.")
    if dry and (plot or fresh or gallery):
        raise typer.BadParameter("--dry-run saves nothing: no --plot, --fresh or --gallery.")
    if plot and fresh:
        raise typer.BadParameter("--plot draws what is saved, --fresh throws it away: choose one.")
    chosen = list(names or SCRIPTS)
    if all_of_them:
        for name in [name for name in chosen if preset not in load_script(name).presets]:
            console.print(f"{name}: has no preset {preset!r}, left out")
            chosen.remove(name)
    failed = []
    for name in chosen:
        console.rule(f"{name}, {preset}")
        try:
            if dry:
                _dry(dry_run(name, preset, few=few, image_size=image_size))
                continue
            with _bar(name) as report:
                task = functools.partial(run_script, preset=preset, results=output, report=report)
                found = draw(task, name) if plot else task(name, fresh=fresh)
        except (ValueError, ImportError, MissingError) as error:
            # One that cannot run here (data that is not there) must not stop the others.
            console.print(f"[red]{name}:[/red] {error}", highlight=False)
            failed.append(name)
            continue
        for picture, lines in found.measured.items():
            console.print(f"[bold]{picture}[/bold]")
            for line in lines:
                console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"{found.seconds:.0f} s; in {found.folder}", highlight=False)
        if gallery:
            add_to_gallery(found)
    if failed:
        console.print(f"failed: {', '.join(failed)}")
        raise typer.Exit(1)


def draw(task: Callable[..., Outcome], name: str) -> Outcome:
    """Draw what is saved; where something is missing, compute it first."""
    try:
        return task(name, only_plot=True)
    except MissingError as missing:
        console.print(f"{name}: {missing} It is run first.", highlight=False, soft_wrap=True)
        return task(name)


def _dry(found: DryRun) -> None:
    memory = ""
    if found.peak_bytes is not None:
        memory = f", at most {found.peak_bytes / 2**30:.2f} GiB in use on the device"
    console.print(f"one step: {found.seconds:.0f} s with compilation{memory}", highlight=False)


@contextmanager
def _bar(name: str) -> Iterator[Report]:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(name, total=None)

        def report(piece: str, done: int, total: int) -> None:
            progress.update(bar, description=f"{name}: {piece}", completed=done, total=total)

        yield report


if __name__ == "__main__":
    watch()
    app()
