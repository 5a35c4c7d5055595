"""The command line: arguments in, a pipeline called, tables, figures and JSON out."""

import gc
import os
import sys
from typing import Annotated

import typer

from jaxttp._core import process as _process
from jaxttp.cli._shell import OneLine
from jaxttp.cli.compare import compare
from jaxttp.cli.conditioning import conditioning
from jaxttp.cli.doctor import doctor
from jaxttp.cli.gauss_newton import gauss_newton
from jaxttp.cli.predict import predict
from jaxttp.cli.report import report, spectrum
from jaxttp.cli.sweep import sweep

app = typer.Typer(
    cls=OneLine,
    add_completion=True,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _print_version(is_set: bool) -> bool:
    if is_set:
        print(_process.__version__)
        raise typer.Exit
    return is_set


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Say which.")
    ] = False,
) -> None:
    """Before you train: how long will it take, and will it converge?"""


for command, help_text in (
    (predict, "Steps and seconds until the loss is down, without training."),
    (sweep, "Which rate, momentum, batch and schedule, from one kernel."),
    (compare, "Which weights to train: all, the head, the biases; and why."),
    (spectrum, "What is slow: eigenvalues, and where the labels lie."),
    (conditioning, "How well conditioned a network is, with bounds."),
    (gauss_newton, "What exact Gauss-Newton steps do, forecast and real."),
    (report, "Forecast, sweep and spectrum on one HTML page."),
    (doctor, "Does this machine compute what it should?"),
):
    app.command(command.__name__.replace("_", "-"), short_help=help_text)(command)


def main() -> None:
    """Run the command line."""
    _process.watch()
    gc.freeze()  # what was imported stays: half a second less of looking through it
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # inside the `try`: where the reader has left, this raises
    except BrokenPipeError:
        # Python flushes again at its end, which must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
