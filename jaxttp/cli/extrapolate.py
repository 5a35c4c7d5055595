"""`jaxttp extrapolate`: how long training takes on all the data, from the kernel of a part."""

import math
from typing import Annotated, Any

from rich.console import Console

from jaxttp.cli._options import DEVICES, TASK, TRAINING, Given, option, takes
from jaxttp.cli._shell import figure, say
from jaxttp.cli._tables import add_targets, cells, print_task, table


@takes(
    set(TRAINING) - {"learning_rate", "momentum", "steps"},
    ("metric", "target_error", "total_samples", "budget", "relinearize"),
    DEVICES,
    samples_per_class=TASK["samples_per_class"]._replace(default="all"),
)
def extrapolate(
    given: Given,
    *,
    subset: Annotated[int, option("Forecast", "Samples of the kernel, N0.")] = 100,
    method: Annotated[
        str | None,
        option("Forecast", "resolvent (default) or power_law; of the squared error's spectrum."),
    ] = None,
    alpha: Annotated[
        float | None, option("Forecast", "Correction of the power law's slope (default: none).")
    ] = None,
) -> None:
    """Forecast training on all samples from the kernel of a few; how far off its halves are.

    The squared error's spectrum is extrapolated; for other losses the subset's curve is taken.
    """
    from jaxttp.pipeline import extrapolate_task

    shell = given.shell
    with shell.work() as report:
        settings = given.settings()
        result = extrapolate_task(
            settings,
            subset=subset,
            verify=given["verify"],
            method=method,
            alpha=alpha,
            time_steps=given["seconds"],
            progress=report,
        )
    problem = f"diverges at learning rate {settings.learning_rate:g}; choose a smaller one."
    shell.deliver(
        "extrapolation",
        result.to_json(),
        lambda to: _print(to, result),
        {"extrapolation.png": figure(result.plot)},
        problem=None if result.found.stable else problem,
    )


def _print(console: Console, result: Any) -> None:
    found, real, run = result.found, result.real_steps, result.run
    print_task(console, result.task)
    extra = ("real steps", "real seconds") if real is not None else ()
    rows = table("loss within", "steps", "seconds", "halves of the subset off by", *extra)
    timed, spent = result.seconds or {}, result.real_seconds or {}
    for threshold, step in found.steps.items():
        spread = found.spread[threshold]
        halves = f"{spread:.1f}" if math.isfinite(spread) and step >= 0 else "-"
        row = [f"{100 * threshold:g} % of its drop", *cells(step, timed.get(threshold)), halves]
        if real is not None:
            row += cells(real[threshold], spent.get(threshold), stable=run.finite)
        rows.add_row(*row)
    add_targets(rows, result.targets, stable=run is None or run.finite, between=1)
    console.print(rows)
    after = "" if run is None else f", real {float(run.loss[-1]):.4g}"
    own = "the subset's own curve, which knows nothing of the other samples"
    say(
        console,
        f"from {found.subset} to {found.samples} samples",
        f"final loss: predicted {found.loss[-1]:.4g}{after}",
        own if found.spectrum is None else found.spectrum.message,
        found.trust and f"trust: {found.trust}",
    )
