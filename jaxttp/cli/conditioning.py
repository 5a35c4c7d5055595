"""`jaxttp conditioning`: how well conditioned the Gauss-Newton matrix is."""

import math
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from jaxttp.cli._options import Given, because, takes
from jaxttp.cli._shell import parse_numbers, write_json
from jaxttp.cli._vocabulary import FORECAST, GOALS, TRAINING, flag, option


@takes(
    without={
        **because(
            "`--network`, `--depth` and `--width` say which: networks whose bounds are known",
            "model", "hidden", "weights", "image_size", "max_length", "trainable", "rank",
        ),
        **because("the data are bundled ones, or a table", "split", "folder"),
        **because("`--samples` counts inputs, whose classes do not matter", "samples_per_class",
                  "classes"),
        "loss": "the Gauss-Newton matrix of the outputs, whatever the loss",
        **because("a matrix before training depends on no training", TRAINING, GOALS, FORECAST),
    }
)  # fmt: skip
def conditioning(
    given: Given,
    *,
    network: Annotated[
        str, option("Task", "linear, leaky_relu, mlp, or resnet (pre-trained; digits only).")
    ] = "linear",
    samples: Annotated[
        int | None, option("Task", "Default: all (linear) or 50 (the others).")
    ] = None,
    depth: Annotated[int, option("Task", "Weight matrices of linear and mlp.")] = 3,
    width: Annotated[int, option("Task", "Hidden units.")] = 100,
    skip: Annotated[float, option("Task", "Weight of the skips of linear.")] = 0.0,
    alpha: Annotated[float, option("Task", "Negative slope of leaky_relu.")] = 0.01,
    whiten: Annotated[bool, flag("Task", "Centre and whiten the inputs.")] = True,
    batch_norm: Annotated[
        bool, flag("Task", "Frozen batch norm in linear.", "--batch-norm")
    ] = False,
    accuracy: Annotated[float, option("Goals", "Of the steps that gradient descent needs.")] = 0.01,
    sweep: Annotated[
        str | None, option("Forecast", "Also vary depth, width, skip or alpha.")
    ] = None,
    values: Annotated[
        str | None, option("Forecast", "What the swept parameter takes, as 1,2,4.")
    ] = None,
    seeds: Annotated[
        int | None, option("Forecast", "Draws of the weights at every value (default: 3).")
    ] = None,
) -> None:
    """Condition number of the Gauss-Newton matrix, its bounds and its rank."""
    from jaxttp.pipeline import ConditionSettings, condition, condition_sweep, sweep_to_json
    from jaxttp.pipeline.conditioning import refuse_unused

    shell = given.shell
    with shell.work() as report:
        if values is not None and sweep is None:
            raise ValueError("values: say with --sweep which parameter takes them.")
        if seeds is not None and sweep is None:
            raise ValueError(f"seeds={seeds} are those of --sweep; say which parameter it varies.")
        if sweep == "alpha" and network == "linear":
            network = "leaky_relu"  # the only network that has a slope
        settings = given.make(
            ConditionSettings, network=network, samples=samples, depth=depth, width=width,
            skip=skip, alpha=alpha, whiten=whiten, batch_norm=batch_norm, accuracy=accuracy,
        )  # fmt: skip
        refuse_unused(settings, sweep)
        chosen = None if values is None or sweep is None else _parse(sweep, values)
        report("condition number", 0, 1)
        result = condition(settings)
        swept = None
        if sweep is not None:
            report(f"sweep over {sweep}", 0, 1)
            swept = condition_sweep(settings, sweep, chosen, seeds=3 if seeds is None else seeds)
    plain = result.to_json() | {"sweep": None if swept is None else sweep_to_json(swept)}
    shell.deliver(
        plain,
        lambda to: _print(to, result, swept),
        lambda folder: _write(plain, result, swept, folder),
    )


def _parse(parameter: str, text: str) -> tuple:
    numbers = parse_numbers("values", text, "1,2,4")
    if parameter in ("depth", "width") and all(number == int(number) for number in numbers):
        return tuple(int(number) for number in numbers)
    return numbers


def _write(plain: Any, result: Any, swept: Any, folder: Path) -> list[Path]:
    from jaxttp.plots import save

    paths = [folder / "conditioning.json", folder / "conditioning.png"]
    write_json(paths[0], plain)
    save(result.plot(), paths[1])
    if swept is not None:
        paths.append(folder / "conditioning_sweep.png")
        save(swept.plot(title=f"over {swept.parameter}: {result.description}"), paths[2])
    return paths


def _print(console: Console, result: Any, swept: Any) -> None:
    found = result.condition
    console.print(result.description, soft_wrap=True)
    table = Table("Gauss-Newton matrix")
    table.add_column("value", justify="right")
    sign = "at least " if found.is_lower_bound else ""
    table.add_row("condition number", f"{sign}{float(found.value):.4g}")
    for name, bound in result.bounds.items():
        table.add_row(f"bound, {name}", f"{bound:.4g}")
    table.add_row("largest eigenvalue", f"{float(found.largest):.4g}")
    table.add_row("smallest that counts", f"{float(found.smallest):.4g}")
    generic = "" if result.generic_rank is None else f" (generic: {result.generic_rank})"
    table.add_row("rank", f"{int(found.rank)}{generic}")
    for words, value in (("at rank - 1", found.rank_below), ("at rank + 1", found.rank_above)):
        if not math.isnan(float(value)):  # not known from the ends of a spectrum
            table.add_row(words, f"{float(value):.4g}")
    table.add_row("contraction of a step", f"{result.contraction:.6f}")
    table.add_row(f"steps to {result.settings.accuracy:g}", f"{result.steps:.4g}")
    console.print(table)
    if swept is not None:
        console.print(_sweep_table(swept))


def _sweep_table(swept: Any) -> Table:
    names = ["condition number", "bound"] + ([] if swept.maximum is None else ["maximum bound"])
    table = Table(swept.parameter)
    for name in names:
        table.add_column(f"{name} (median)", justify="right")
    tables = [swept.condition, swept.bound, swept.maximum][: len(names)]
    for place, value in enumerate(swept.values):
        middles = (sorted(rows[place])[len(rows[place]) // 2] for rows in tables)
        table.add_row(f"{value:g}", *(f"{middle:.4g}" for middle in middles))
    return table
