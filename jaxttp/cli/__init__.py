"""The command line: arguments in, a pipeline called, tables, figures and JSON out."""

import typer

from jaxttp.cli.compare import compare
from jaxttp.cli.conditioning import conditioning
from jaxttp.cli.extrapolate import extrapolate
from jaxttp.cli.gauss_newton import gauss_newton
from jaxttp.cli.predict import predict
from jaxttp.cli.spectrum import spectrum
from jaxttp.cli.sweep import sweep

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Before you train: how long will it take, and will it converge?",
)


@app.callback()
def _root() -> None:
    """Before you train: how long will it take, and will it converge?"""


for command in (predict, sweep, compare, extrapolate, spectrum, conditioning):
    app.command()(command)
app.command("gauss-newton")(gauss_newton)


def main() -> None:
    """Run the command line."""
    app()
