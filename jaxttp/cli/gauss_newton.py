"""`jaxttp gauss-newton`: exact Gauss-Newton steps, forecast and real."""

from typing import Any

from rich.console import Console

from jaxttp.cli._options import FORECAST, TRAINING, Option, Options, takes
from jaxttp.cli._shell import figure, say
from jaxttp.cli._tables import table
from jaxttp.losses.rule import target_label


@takes(
    ("model", "hidden", "weights", "image_size", "max_length", "trainable", "rank"),
    ("split", "folder", "metric", "target_loss", "target_error"),
    set(TRAINING) - {"learning_rate", "steps"},
    FORECAST,
    learning_rate=Option("Training", "Fraction of a whole step.", 0.5),
    steps=Option("Training", "The horizon T in steps.", 12),
    blocks=Option("Task", "Of the reversible network.", 2),
    bottleneck=Option("Task", "Hidden units m (default: twice the samples, full rank).", type=int),
    pseudoinverse=Option("Training", "exact, truncate, damp, tikhonov or noise.", "truncate"),
    rtol=Option("Training", "Of the pseudo-inverse (default: 1e-6).", type=float),
)
def gauss_newton(options: Options) -> None:
    """Train a reversible network by exact Gauss-Newton steps, compared with their forecast."""
    from jaxttp.pipeline import StepSettings, gauss_newton_task

    shell = options.shell
    with shell.work() as report:
        result = gauss_newton_task(options.make(StepSettings), progress=report)
    files, show = {"gauss_newton.png": figure(result.plot)}, lambda to: _print(to, result)
    shell.deliver("gauss_newton", result.to_json(), show, files, problem=result.problem)


def _print(console: Console, result: Any) -> None:
    say(console, result.description)
    rows = table("loss", "forecast steps", "real steps")
    for threshold, times in result.times().items():
        cells = (str(time) if time >= 0 else "not reached" for time in times)
        rows.add_row(target_label(threshold, "relative"), *cells)
    console.print(rows)
    ranks, loss, error = result.ranks, result.loss, result.error
    say(
        console,
        f"loss {loss[0]:.4g} to {loss[-1]:.4g} (forecast {float(result.forecast.loss[-1]):.4g}), "
        f"error {error[0]:.3g} to {error[-1]:.3g}",
        f"ranks {ranks.min()} to {ranks.max()} of {result.samples} samples, relative residual of "
        f"the first step {result.residual:.1e}",
        result.shortfall and f"not exact: {result.shortfall}",
    )
