"""`jaxttp extrapolate`: how long training takes on all the data, from the kernel of a part."""

import math
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Column, Table

from jaxttp.cli._goals import add_targets, cells
from jaxttp.cli._options import Given, Instead, because, takes
from jaxttp.cli._shell import print_task, write_json
from jaxttp.cli._vocabulary import option


@takes(
    without={
        **because(
            "full-batch descent at one rate is extrapolated, with or without momentum",
            "batch_size", "schedule", "warmup", "optimizer", "nesterov", "weight_decay",
        ),
        **because("the error on all samples is not known", "metric", "target_error"),
        "total_samples": "it is for all the samples that are drawn, from `--subset` of them",
        "budget": "one kernel, exact, is extrapolated",
        **because("it decomposes the kernel of the subset, on one device", "mesh", "distributed"),
        "relinearize": "one kernel, of the subset at the start, is extrapolated",
    },
    instead={
        "samples_per_class": Instead("it forecasts for all the data, from a part", default="all")
    },
)  # fmt: skip
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
            settings, subset=subset, verify=given["verify"], method=method, alpha=alpha,
            time_steps=given["seconds"], progress=report,
        )  # fmt: skip
    problem = None
    if not result.found.stable:
        problem = f"diverges at learning rate {settings.learning_rate:g}; choose a smaller one."
    shell.deliver(
        result.to_json(),
        lambda to: _print(to, result),
        lambda folder: _write(result, folder),
        problem=problem,
    )


def _write(result: Any, folder: Path) -> list[Path]:
    from jaxttp.plots import save

    paths = [folder / "extrapolation.json", folder / "extrapolation.png"]
    write_json(paths[0], result.to_json())
    save(result.plot(), paths[1])
    return paths


def _print(console: Console, result: Any) -> None:
    found, real, run = result.found, result.real_steps, result.run
    print_task(console, result.task)
    table = Table(Column("loss within", no_wrap=True))
    extra = ("real steps", "real seconds") if real is not None else ()
    for title in ("steps", "seconds", "halves of the subset off by", *extra):
        table.add_column(title, justify="right")
    timed, spent = result.seconds or {}, result.real_seconds or {}
    for threshold, step in found.steps.items():
        spread = found.spread[threshold]
        halves = f"{spread:.1f}" if math.isfinite(spread) and step >= 0 else "-"
        row = [f"{100 * threshold:g} % of its drop", *cells(step, timed.get(threshold)), halves]
        if real is not None:
            row += cells(real[threshold], spent.get(threshold), stable=run.finite)
        table.add_row(*row)
    add_targets(table, result.targets, stable=run is None or run.finite, between=1)
    console.print(table)
    console.print(f"from {found.subset} to {found.samples} samples")
    final = f"final loss: predicted {found.loss[-1]:.4g}"
    if result.run is not None:
        final += f", real {float(result.run.loss[-1]):.4g}"
    console.print(final)
    words = "the subset's own curve, which knows nothing of the other samples"
    if found.spectrum is not None:
        words = found.spectrum.message
    console.print(words, soft_wrap=True)
    if found.trust is not None:
        console.print(f"trust: {found.trust}", soft_wrap=True)
