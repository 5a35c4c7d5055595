"""`jaxttp conditioning`: how well conditioned the Gauss-Newton matrix is."""

import math
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from jaxttp.cli._options import FORECAST, GOALS, TRAINING, Given, option, takes
from jaxttp.cli._shell import figure, parse_numbers, say
from jaxttp.cli._tables import table


@takes(
    ("model", "hidden", "weights", "image_size", "max_length", "trainable", "rank"),
    ("split", "folder", "samples_per_class", "classes", "loss"),
    TRAINING,
    GOALS,
    FORECAST,
)
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
    whiten: Annotated[bool, option("Task", "Centre and whiten the inputs.")] = True,
    batch_norm: Annotated[
        bool, option("Task", "Frozen batch norm in linear.", "--batch-norm")
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
            ConditionSettings,
            network=network,
            samples=samples,
            depth=depth,
            width=width,
            skip=skip,
            alpha=alpha,
            whiten=whiten,
            batch_norm=batch_norm,
            accuracy=accuracy,
        )
        refuse_unused(settings, sweep)
        taken = None if values is None or sweep is None else _parse(sweep, values)
        report("condition number", 0, 1)
        result, swept = condition(settings), None
        if sweep is not None:
            report(f"sweep over {sweep}", 0, 1)
            swept = condition_sweep(settings, sweep, taken, seeds=3 if seeds is None else seeds)
    plain = result.to_json() | {"sweep": None if swept is None else sweep_to_json(swept)}
    files = {"conditioning.png": figure(result.plot)}
    if swept is not None:
        title = f"over {swept.parameter}: {result.description}"
        files["conditioning_sweep.png"] = figure(lambda: swept.plot(title=title))
    shell.deliver("conditioning", plain, lambda to: _print(to, result, swept), files)


def _parse(parameter: str, text: str) -> tuple:
    numbers = parse_numbers("values", text, "1,2,4")
    if parameter in ("depth", "width") and all(number == int(number) for number in numbers):
        return tuple(int(number) for number in numbers)
    return numbers


def _print(console: Console, result: Any, swept: Any) -> None:
    found = result.condition
    say(console, result.description)
    rows = table("Gauss-Newton matrix", "value")
    sign = "at least " if found.is_lower_bound else ""
    rows.add_row("condition number", f"{sign}{float(found.value):.4g}")
    for name, bound in result.bounds.items():
        rows.add_row(f"bound, {name}", f"{bound:.4g}")
    rows.add_row("largest eigenvalue", f"{float(found.largest):.4g}")
    rows.add_row("smallest that counts", f"{float(found.smallest):.4g}")
    generic = "" if result.generic_rank is None else f" (generic: {result.generic_rank})"
    rows.add_row("rank", f"{'not known' if found.rank is None else int(found.rank)}{generic}")
    for words, value in (("at rank - 1", found.rank_below), ("at rank + 1", found.rank_above)):
        if not math.isnan(float(value)):  # not known from the ends of a spectrum
            rows.add_row(words, f"{float(value):.4g}")
    rows.add_row("contraction of a step", f"{result.contraction:.6f}")
    rows.add_row(f"steps to {result.settings.accuracy:g}", f"{result.steps:.4g}")
    console.print(rows)
    if swept is not None:
        console.print(_sweep_table(swept))


def _sweep_table(swept: Any) -> Table:
    curves = {"condition number": swept.condition, "bound": swept.bound}
    if swept.maximum is not None:
        curves["maximum bound"] = swept.maximum
    rows = table(swept.parameter, *(f"{name} (median)" for name in curves))
    for value, *draws in zip(swept.values, *curves.values(), strict=True):
        middles = (sorted(each)[len(each) // 2] for each in draws)
        rows.add_row(f"{value:g}", *(f"{middle:.4g}" for middle in middles))
    return rows
