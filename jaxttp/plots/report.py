"""Reports: one HTML page about a named task, or about any results, that needs nothing else."""

import base64
import datetime
import html
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from jaxttp._core.files import replaced
from jaxttp._core.process import versions
from jaxttp._core.progress import readable_time
from jaxttp._core.results import html_table
from jaxttp.losses.rule import step_words
from jaxttp.pipeline import Arrival, TaskReport
from jaxttp.pipeline.settings import hyperparameters
from jaxttp.plots._style import draw, figure_of
from jaxttp.plots.forecast import plot_forecast

_STYLE = """
* { box-sizing: border-box; }
body { margin: 0; background: #f3f4f6; color: #1c1e21;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 1.2rem; margin: 36px 0 12px; }
p { margin: 6px 0; overflow-wrap: anywhere; }
.soft { color: #5a616b; }
.cards { display: grid; gap: 12px; margin-top: 20px;
  grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
.card, figure, .table { background: #ffffff; border: 1px solid #d9dce1;
  border-radius: 10px; padding: 14px; }
.card b { display: block; font-size: 1.5rem; line-height: 1.2; color: #0072b2; }
.table, figure { margin: 16px 0; overflow-x: auto; }
figure img { display: block; width: 100%; min-width: 720px; }
figcaption { font-size: 0.9rem; color: #5a616b; margin-top: 8px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 7px 8px; border-bottom: 1px solid #d9dce1; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
pre { overflow-x: auto; font-size: 0.85rem; }
"""

# --- parts of a page, their text escaped ----------------------------------------------------------


def _heading(text: str, level: int = 2) -> str:
    return f"<h{level}>{html.escape(text)}</h{level}>"


def _paragraph(text: str, *, soft: bool = False) -> str:
    return f"<p{' class=soft' if soft else ''}>{html.escape(text)}</p>"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    return f'<div class="table">{html_table(head, rows)}</div>'


def _cards(values: Mapping[str, str]) -> str:
    """The main numbers, each with its name."""
    inner = "".join(
        f'<div class="card"><b>{html.escape(value)}</b>{html.escape(name)}</div>'
        for name, value in values.items()
    )
    return f'<div class="cards">{inner}</div>'


def _image(figure: Figure, caption: str) -> str:
    """A figure inside the page, with its caption as alternative text."""
    file = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "jaxttp"}):  # the same page from the same results
        figure.savefig(file, format="svg", metadata={"Date": None})
    data = base64.b64encode(file.getvalue()).decode()
    text = html.escape(caption)
    image = f'<img alt="{text}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}<figcaption>{text}</figcaption></figure>"


def _page(title: str, parts: Sequence[str]) -> str:
    """A whole HTML page; nothing in it is fetched from elsewhere."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
{"".join(parts)}
</main>
</body>
</html>
"""


# --- the page of a task ---------------------------------------------------------------------------


@figure_of
def plot_report(result: TaskReport) -> Figure:
    """The forecast's curves; the page of a report has the other figures, too."""
    return plot_forecast(result.forecast)


def report_html(result: TaskReport) -> str:
    """The page of a report: curves, spectrum, sweep, settings, versions.

    Args:
        result: of `jaxttp.pipeline.report_task`.

    Returns:
        HTML that needs no network.
    """
    forecast, grid, spectrum = result.forecast, result.sweep, result.spectrum
    prediction = forecast.prediction
    filled = "" if forecast.run is None else " Filled marks are real."
    curves = f"Loss and error by step; the marks are the times of the table.{filled}"
    choice = (
        f"Left: steps to {grid.target}; hatched settings diverge or do not get there. Line: "
        "largest stable rate. Star: fewest steps. Right: final loss by cost, with the Pareto front."
    )
    slow = (
        "Left: eigenvalues of the kernel before training; modes of small ones are learned slowly. "
        "Right: fractions of residual and labels along the leading eigenvectors."
    )
    made = (
        f"Made on {datetime.date.today().isoformat()}. The forecast cost {prediction.cost}. It is "
        "less accurate with batch norm in training mode or augmented data."
    )
    parts = [
        _heading("How long will it train?", 1),
        _paragraph(forecast.task.description),
        _paragraph(f"{hyperparameters(forecast.settings)}, {prediction.horizon} steps", soft=True),
        _cards(_first_numbers(result)),
        _heading("Forecast"),
        _table(*_times(result)),
        "" if prediction.warnings is None else _paragraph(f"Warning: {prediction.warnings}."),
        _image(forecast.plot(), curves),
        _heading("Which learning rate?"),
        _paragraph(
            f"{grid.sweep.advice} ({grid.sweep.depth}). Without momentum, rates up to "
            f"{grid.max_learning_rate:.3g} are stable."
        ),
        _image(grid.plot(), choice),
        _table(*_best_settings(result)),
        _heading("What is slow?"),
        _paragraph(
            f"{spectrum.rank} eigenvalues count, from {spectrum.values[0]:.3g} down to "
            f"{spectrum.values[spectrum.rank - 1]:.3g} (condition number "
            f"{spectrum.condition:.3g}); they fall as rank to the power of "
            f"-{float(spectrum.law.exponent):.2f}. Half of the residual lies along the first "
            f"{spectrum.head(0.5)} eigenvectors, 99 % along the first {spectrum.head(0.99)}."
        ),
        _image(spectrum.plot(), slow),
        _heading("Settings"),
        _table(("setting", "value"), result.settings_in_words().items()),
        _heading("Made with"),
        _table(("", "version"), result.versions.items()),
        _paragraph(made, soft=True),
    ]
    return _page(f"jaxttp: {forecast.task.description}", parts)


def save_report(result: TaskReport, path: str | os.PathLike[str]) -> Path:
    """Write the page of a report, see `report_html`, to a file.

    Args:
        result: of `jaxttp.pipeline.report_task`.
        path: of the file; its folder is made if need be.

    Returns:
        The path.
    """
    path, text = Path(path), report_html(result)
    with replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def _first_numbers(result: TaskReport) -> dict[str, str]:
    """The first target, or the middle threshold where there is none; the end, and the limit."""
    prediction, arrivals = result.forecast.prediction, result.forecast.arrivals
    thresholds = tuple(prediction.steps)
    main = arrivals[next(iter(prediction.targets), thresholds[len(thresholds) // 2])]
    numbers = {}
    if main.seconds is not None:
        numbers[f"steps to {main.words}"] = _when(main, prediction.horizon)
        numbers["until there, on this device"] = readable_time(main.seconds)
    else:
        never = "does not get there" if prediction.stable else "diverges"
        numbers["at this learning rate"] = never
    numbers["predicted loss at the end"] = f"{float(prediction.loss[-1]):.3g}"
    if math.isfinite(prediction.max_learning_rate):
        numbers["largest stable learning rate"] = f"{prediction.max_learning_rate:.3g}"
    return numbers


def _when(arrival: Arrival, horizon: int) -> str:
    return step_words(arrival.steps, arrival.unsure, horizon)


def _times(result: TaskReport) -> tuple[list[str], list[list[Any]]]:
    prediction, run = result.forecast.prediction, result.forecast.run
    head = ["target", "steps", "time"] + ([] if run is None else ["real steps", "real time"])

    def cells(steps: Any, seconds: float | None, stable: bool) -> list[Any]:
        if seconds is None:
            return ["not reached" if stable else "diverges", None]
        return [steps, readable_time(seconds)]

    rows = []
    for arrival in result.forecast.arrivals.values():
        when = _when(arrival, prediction.horizon)
        row = [arrival.words, *cells(when, arrival.seconds, prediction.stable)]
        if run is not None:
            row += cells(arrival.real_steps, arrival.real_seconds, run.finite)
        rows.append(row)
    return head, rows


def _best_settings(result: TaskReport) -> tuple[list[str], list[list[Any]]]:
    grid = result.sweep.sweep
    target = f"steps to {result.sweep.target}"
    head = ["cheapest for their loss", target, "loss at the end", "error"]
    rows = [
        [grid.named(i), grid.time_words(i, grid.ranked_by), float(grid.final_loss[i]),
         float(grid.final_error[i])]
        for i in grid.pareto()
    ]  # fmt: skip
    return head, rows


def results_html(results: Mapping[str, Any], *, title: str = "jaxttp") -> str:
    """One page about any results: what each says of itself, and its figure.

    Args:
        results: heading -> a result of this library, such as a forecast for a model of your own.
        title: of the page.

    Returns:
        HTML that needs no network.

    Raises:
        ValueError: no results.
        TypeError: something that is no result.

    Example:
        >>> import numpy as np
        >>> from jaxttp.conditioning import linear_bound
        >>> text = results_html({"Bounds": linear_bound([np.eye(2)])})
        >>> "<h2>Bounds</h2>" in text, text.count("<img")
        (True, 1)
    """
    if not results:
        raise ValueError("results must hold at least one result.")
    parts = [_heading(title, 1)]
    for name, result in results.items():
        figure = _image(draw(result), f"{name}: {type(result).__name__}")
        parts += [_heading(name), f'<div class="table">{result._repr_html_()}</div>', figure]
    made_with = versions() | {"matplotlib": mpl.__version__}
    parts += [_heading("Made with"), _table(("", "version"), made_with.items())]
    return _page(title, parts)
