"""`jaxttp gauss-newton`: exact Gauss-Newton steps, forecast and real."""

from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from jaxttp.cli._options import Given, Instead, because, takes
from jaxttp.cli._shell import write_json
from jaxttp.cli._vocabulary import option


@takes(
    without={
        **because(
            "reversible networks alone have these steps: `--blocks`, `--bottleneck`",
            "model", "hidden", "weights", "image_size", "max_length", "trainable", "rank",
        ),
        **because("the data are bundled ones, or a table", "split", "folder"),
        **because(
            "an exact step is of all samples, at one share of a whole step, without a memory",
            "momentum", "nesterov", "optimizer", "weight_decay", "schedule", "warmup", "batch_size",
        ),
        "metric": "the thresholds are about the loss; `--target-error` asks for an error",
        **because(
            "the forecast needs no kernel",
            "relinearize", "budget", "total_samples", "mesh", "distributed",
        ),
        "seconds": "steps are compared, in double precision, not seconds",
        "verify": "it always trains for real, beside the forecast",
    },
    instead={
        "learning_rate": Instead(
            "a share of a whole step",
            annotation=Annotated[
                float | None,
                option("Training", "Share of a whole step (default: 0.5, halved until stable)."),
            ],
        ),
        "steps": Instead("exact steps are few", default=12),
    },
)  # fmt: skip
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
        option("Training", "Of the pseudo-inverse (default: 1e-6, or the first that is stable)."),
    ] = None,
) -> None:
    """Train a reversible network by exact Gauss-Newton steps, beside their forecast."""
    from jaxttp.pipeline import StepSettings, gauss_newton_task

    shell = given.shell
    with shell.work() as report:
        settings = given.make(
            StepSettings, blocks=blocks, bottleneck=bottleneck, pseudoinverse=pseudoinverse,
            rtol=rtol,
        )  # fmt: skip
        result = gauss_newton_task(settings, progress=report)
    shell.deliver(
        result.to_json(),
        lambda to: _print(to, result),
        lambda folder: _write(result, folder),
        problem=result.problem,
    )


def _write(result: Any, folder: Path) -> list[Path]:
    from jaxttp.plots import save

    paths = [folder / "gauss_newton.json", folder / "gauss_newton.png"]
    write_json(paths[0], result.to_json())
    save(result.plot(), paths[1])
    return paths


def _print(console: Console, result: Any) -> None:
    console.print(result.description, soft_wrap=True)
    table = Table("loss within")
    for title in ("forecast steps", "real steps"):
        table.add_column(title, justify="right")
    for threshold, (ahead, real) in result.times().items():
        cells = [str(time) if time >= 0 else "not reached" for time in (ahead, real)]
        table.add_row(f"{100 * threshold:g} % of its drop", *cells)
    for one in result.targets:
        times = (one.steps, one.real_steps)
        table.add_row(one.words, *(str(t) if t >= 0 else "not reached" for t in times))
    console.print(table)
    ranks = result.ranks
    console.print(
        f"loss {result.loss[0]:.4g} to {result.loss[-1]:.4g} (forecast "
        f"{float(result.forecast.loss[-1]):.4g}), error {result.error[0]:.3g} to "
        f"{result.error[-1]:.3g}"
    )
    console.print(
        f"ranks {ranks.min()} to {ranks.max()} of {result.samples} samples, relative residual of "
        f"the first step {result.residual:.1e}"
    )
    if result.too_fine:
        rtols = " and ".join(f"{rtol:g}" for rtol in result.too_fine)
        console.print(f"rtol {result.settings.rtol:g}, as every rate diverged with {rtols}")
    if result.diverged:
        rates = ", ".join(f"{rate:g}" for rate in result.diverged)
        console.print(f"learning rate {result.settings.learning_rate:g}, as {rates} diverged")
    if result.shortfall is not None:
        console.print(f"not exact: {result.shortfall}", soft_wrap=True)
