"""`jaxttp gauss-newton`: exact Gauss-Newton steps, forecast and real."""

from typing import Annotated, Any

from rich.console import Console

from jaxttp.cli._options import DEVICES, FORECAST, TRAINING, Given, Option, option, takes
from jaxttp.cli._shell import figure, say
from jaxttp.cli._tables import table


@takes(
    ("model", "hidden", "weights", "image_size", "max_length", "trainable", "rank"),
    ("split", "folder", "metric"),
    set(TRAINING) - {"learning_rate", "steps"},
    FORECAST,
    DEVICES,
    learning_rate=Option(
        "Training", "Share of a whole step (default: 0.5, halved until stable).", type=float
    ),
    steps=Option("Training", "The horizon T in steps.", 12),
)
def gauss_newton(
    given: Given,
    *,
    blocks: Annotated[int, option("Task", "Of the reversible network.")] = 2,
    bottleneck: Annotated[
        int | None, option("Task", "Hidden units m (default: twice the samples, full rank).")
    ] = None,
    pseudoinverse: Annotated[
        str, option("Training", "exact, truncate, damp, tikhonov or noise.")
    ] = "truncate",
    rtol: Annotated[
        float | None,
        option("Training", "Of the pseudo-inverse (default: 1e-6)."),
    ] = None,
) -> None:
    """Train a reversible network by exact Gauss-Newton steps, beside their forecast."""
    from jaxttp.pipeline import StepSettings, gauss_newton_task

    shell = given.shell
    with shell.work() as report:
        settings = given.make(
            StepSettings,
            blocks=blocks,
            bottleneck=bottleneck,
            pseudoinverse=pseudoinverse,
            rtol=rtol,
        )
        result = gauss_newton_task(settings, progress=report)
    shell.deliver(
        "gauss_newton",
        result.to_json(),
        lambda to: _print(to, result),
        {"gauss_newton.png": figure(result.plot)},
        problem=result.problem,
    )


def _print(console: Console, result: Any) -> None:
    say(console, result.description)
    rows = table("loss within", "forecast steps", "real steps")
    times = {f"{100 * goal:g} % of its drop": pair for goal, pair in result.times().items()}
    times |= {one.words: (one.steps, one.real_steps) for one in result.targets}
    for words, pair in times.items():
        rows.add_row(words, *(str(time) if time >= 0 else "not reached" for time in pair))
    console.print(rows)
    ranks, loss, error = result.ranks, result.loss, result.error
    tried = [f"{rate:g}" for rate in result.diverged]
    rate = result.settings.learning_rate
    say(
        console,
        f"loss {loss[0]:.4g} to {loss[-1]:.4g} (forecast {float(result.forecast.loss[-1]):.4g}), "
        f"error {error[0]:.3g} to {error[-1]:.3g}",
        f"ranks {ranks.min()} to {ranks.max()} of {result.samples} samples, relative residual of "
        f"the first step {result.residual:.1e}",
        f"learning rate {rate:g}, as {', '.join(tried)} diverged" if tried else None,
        result.shortfall and f"not exact: {result.shortfall}",
    )
