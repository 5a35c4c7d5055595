"""`jaxttp conditioning`: how well conditioned the Gauss-Newton matrix is."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from jaxttp.cli._options import (
    AsJson,
    BundledData,
    NoCache,
    Output,
    Quiet,
    Seed,
    Verbose,
)
from jaxttp.cli._shell import Shell, parse_numbers, write_json


def conditioning(
    data: BundledData = "digits",
    network: Annotated[
        str,
        typer.Option(help="linear, leaky_relu, mlp, or resnet (pre-trained; digits only)."),
    ] = "linear",
    samples: Annotated[
        int | None, typer.Option(help="Default: all (linear) or 50 (the others).")
    ] = None,
    depth: Annotated[int, typer.Option(help="Weight matrices of linear and mlp.")] = 3,
    width: Annotated[int, typer.Option(help="Hidden units.")] = 100,
    skip: Annotated[float, typer.Option(help="Weight of the skips of linear.")] = 0.0,
    alpha: Annotated[float, typer.Option(help="Negative slope of leaky_relu.")] = 0.01,
    whiten: Annotated[bool, typer.Option(help="Centre and whiten the inputs.")] = True,
    batch_norm: Annotated[
        bool, typer.Option("--batch-norm", help="Frozen batch norm in linear.")
    ] = False,
    accuracy: Annotated[
        float, typer.Option(help="Of the steps that gradient descent needs.")
    ] = 0.01,
    sweep: Annotated[
        str | None, typer.Option(help="Also vary depth, width, skip or alpha.")
    ] = None,
    values: Annotated[
        str | None, typer.Option(help="What the swept parameter takes, as 1,2,4.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Draws of the weights at every value (default: 3).")
    ] = None,
    seed: Seed = 0,
    output: Output = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_cache: NoCache = False,
) -> None:
    """Condition number of the Gauss-Newton matrix, its bounds and its rank."""
    from jaxttp.pipeline import ConditionSettings, condition, condition_sweep, sweep_to_json
    from jaxttp.pipeline.conditioning import refuse_unused

    shell = Shell(output, as_json=as_json, quiet=quiet, verbose=verbose, cache=not no_cache)
    with shell.work() as report:
        if values is not None and sweep is None:
            raise ValueError("values: say with --sweep which parameter takes them.")
        if seeds is not None and sweep is None:
            raise ValueError(f"seeds={seeds} are those of --sweep; say which parameter it varies.")
        if sweep == "alpha" and network == "linear":
            network = "leaky_relu"  # the only network that has a slope
        settings = ConditionSettings(
            data=data,
            network=network,
            samples=samples,
            depth=depth,
            width=width,
            skip=skip,
            alpha=alpha,
            whiten=whiten,
            batch_norm=batch_norm,
            accuracy=accuracy,
            seed=seed,
        )
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
