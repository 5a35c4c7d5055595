"""`jaxttp conditioning`: how well conditioned the Gauss-Newton matrix is."""

import math
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxttp._core.checks import check_used
from jaxttp.cli._options import FORECAST, GOALS, TRAINING, Option, Options, numbers, takes
from jaxttp.cli._shell import figure, say
from jaxttp.cli._tables import table


@takes(
    ("model", "hidden", "weights", "image_size", "max_length", "trainable", "rank"),
    ("split", "folder", "samples_per_class", "classes", "loss"),
    TRAINING,
    GOALS,
    set(FORECAST) - {"mesh"},
    network=Option("Task", "linear, leaky_relu or mlp.", "linear"),
    samples=Option("Task", "Default: all (linear) or 50 (the others).", type=int),
    depth=Option("Task", "Weight matrices of linear and mlp.", 3),
    width=Option("Task", "Hidden units.", 100),
    skip=Option("Task", "Weight of the skips of linear.", 0.0),
    alpha=Option("Task", "Negative slope of leaky_relu.", 0.01),
    whiten=Option("Task", "Center and whiten the inputs.", True),
    batch_norm=Option("Task", "Frozen batch norm in linear.", False, flags=("--batch-norm",)),
    accuracy=Option("Targets", "Of the steps that gradient descent needs.", 0.01),
    sweep=Option("Forecast", "Also vary depth, width, skip or alpha.", type=str),
    values=Option("Forecast", "What the varied parameter takes, as 1,2,4.", type=str,
                  parse=numbers("values", "1,2,4")),
    seeds=Option("Forecast", "Draws of the weights at every value (default: 3).", type=int),
)  # fmt: skip
def conditioning(options: Options) -> None:
    """Condition number of the Gauss-Newton matrix, its bounds and its rank."""
    from jaxttp.pipeline import ConditionSettings, condition, condition_sweep, sweep_to_json

    shell, sweep, network = options.shell, options["sweep"], options["network"]
    with shell.work() as report:
        hint = "it is for --sweep, a parameter to vary"
        check_used("values", options["values"], sweep is not None, hint)
        check_used("seeds", options["seeds"], sweep is not None, hint)
        if sweep == "alpha" and network == "linear":
            network = "leaky_relu"  # the only network that has a slope
        settings = options.make(ConditionSettings, network=network)
        report("condition number", 0, 1)
        result, sweep_result = condition(settings), None
        if sweep is not None:
            report(f"sweep over {sweep}", 0, 1)
            seeds = {} if options["seeds"] is None else {"seeds": options["seeds"]}
            sweep_result = condition_sweep(settings, sweep, options["values"], **seeds)
    plain = result.to_json() | {"sweep": sweep_result and sweep_to_json(sweep_result)}
    files = {"conditioning.png": figure(result.plot)}
    if sweep_result is not None:
        title = f"over {sweep_result.parameter}: {result.description}"
        files["conditioning_sweep.png"] = figure(lambda: sweep_result.plot(title=title))
    shell.deliver("conditioning", plain, lambda to: _print(to, result, sweep_result), files)


def _print(console: Console, result: Any, sweep_result: Any) -> None:
    condition = result.condition
    say(console, result.description)
    rows = table("Gauss-Newton matrix", "value")
    sign = "at least " if condition.is_lower_bound else ""
    rows.add_row("condition number", f"{sign}{float(condition.value):.4g}")
    for name, bound in result.bounds.items():
        rows.add_row(f"bound, {name}", f"{bound:.4g}")
    rows.add_row("largest eigenvalue", f"{float(condition.largest):.4g}")
    rows.add_row("smallest that counts", f"{float(condition.smallest):.4g}")
    generic = "" if result.generic_rank is None else f" (generic: {result.generic_rank})"
    rank = "not known" if condition.rank is None else int(condition.rank)
    rows.add_row("rank", f"{rank}{generic}")
    neighbors = {"at rank - 1": condition.rank_below, "at rank + 1": condition.rank_above}
    for label, value in neighbors.items():
        if not math.isnan(float(value)):  # not known from the ends of a spectrum
            rows.add_row(label, f"{float(value):.4g}")
    rows.add_row("contraction of a step", f"{result.contraction:.6f}")
    rows.add_row(f"steps to {result.settings.accuracy:g}", f"{result.steps:.4g}")
    console.print(rows)
    if sweep_result is not None:
        console.print(_sweep_table(sweep_result))


def _sweep_table(sweep_result: Any) -> Table:
    curves = {"condition number": sweep_result.condition, "bound": sweep_result.bound}
    if sweep_result.maximum is not None:
        curves["maximum bound"] = sweep_result.maximum
    rows = table(sweep_result.parameter, *(f"{name} (median)" for name in curves))
    for value, *draws in zip(sweep_result.values, *curves.values(), strict=True):
        middles = (sorted(column)[len(column) // 2] for column in draws)
        rows.add_row(f"{value:g}", *(f"{middle:.4g}" for middle in middles))
    return rows
