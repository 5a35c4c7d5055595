"""Reports: one page about a named task, or about any results."""

import datetime
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxttp._core.files import replaced
from jaxttp._core.process import versions
from jaxttp.forecast.wall_clock import readable_time
from jaxttp.losses.rule import Target, step_words
from jaxttp.pipeline import TaskReport
from jaxttp.pipeline.settings import training_words
from jaxttp.plots import _page
from jaxttp.plots._style import draw, figure_of, panels, styled
from jaxttp.plots.forecast import has_classes, plot_error, plot_loss
from jaxttp.plots.sweeps import plot_heat_map, plot_pareto
from jaxttp.plots.theory import plot_eigenvalues, plot_law, plot_shares

Panel = Callable[[Axes, TaskReport], None]


def _loss_panel(axes: Axes, result: TaskReport) -> None:
    found, real = result.forecast, result.forecast.real_steps
    name = found.task.loss
    plot_loss(axes, found.prediction, run=found.run, real_steps=real, name=name, times=False)


def _error_panel(axes: Axes, result: TaskReport) -> None:
    found = result.forecast
    plot_error(axes, found.prediction, run=found.run, classes=has_classes(found))


def _heat_map_panel(axes: Axes, result: TaskReport) -> None:
    plot_heat_map(axes, result.sweep.sweep, result.sweep.threshold)


def _pareto_panel(axes: Axes, result: TaskReport) -> None:
    plot_pareto(axes, result.sweep.sweep, result.sweep.threshold)


def _eigenvalue_panel(axes: Axes, result: TaskReport) -> None:
    plot_eigenvalues(axes, result.spectrum.values, result.spectrum.rank)
    plot_law(axes, result.spectrum.law)


def _share_panel(axes: Axes, result: TaskReport) -> None:
    plot_shares(axes, result.spectrum)


@figure_of
def plot_report(result: TaskReport) -> Figure:
    """The loss, the spectrum and the sweep of a report."""
    figure, axes = panels(3, title=result.forecast.task.description, height=5.2)
    for place, panel in zip(axes, (_loss_panel, _eigenvalue_panel, _heat_map_panel), strict=True):
        panel(place, result)
    return figure


@styled
def _drawn(panel: Panel, result: TaskReport) -> Figure:
    figure = Figure(figsize=(4.2, 3.6), layout="constrained")  # read on a phone at its own size
    panel(figure.subplots(), result)
    return figure


def report_html(result: TaskReport) -> str:
    """The page of a report: curves, spectrum, sweep, settings, versions.

    Args:
        result: of `jaxttp.pipeline.report_task`.

    Returns:
        HTML that needs no network.
    """
    found, swept = result.forecast, result.sweep
    goal, trust = swept.sweep.goal(swept.threshold), found.prediction.trust

    def figures(panels: Mapping[str, Panel]) -> str:
        return _page.figures({words: _drawn(panel, result) for words, panel in panels.items()})

    filled = "" if found.run is None else " Filled marks are real."
    settings = f"{training_words(found.settings)}, {found.prediction.horizon} steps"
    made = (
        f"Made on {datetime.date.today().isoformat()}. The forecast cost {found.prediction.cost}. "
        "It trusts the network's linearisation at its present weights: far from them, with batch "
        "norm in training mode or augmented data, it errs."
    )
    parts = [
        _page.heading("How long will it train?", 1),
        _page.paragraph(found.task.description),
        _page.paragraph(settings, soft=True),
        _page.paragraph(" ".join(_to_act_on(result))),
        _page.cards(_first_numbers(result)),
        _page.heading("Forecast"),
        _page.table(*_times(result)),
        "" if trust is None else _page.paragraph(f"Trust: {trust}."),
        figures(
            {
                f"Loss by step; the marks are the times of the table.{filled}": _loss_panel,
                "Error on the training samples by step.": _error_panel,
            }
        ),
        _page.heading("Which learning rate?"),
        _page.paragraph(_advice(result)),
        figures(
            {
                f"Steps to {goal}; hatched settings diverge or do not get there, the line is the "
                "largest stable rate, the star the fewest steps.": _heat_map_panel,
                "Loss at the end against what it takes to get there; the joined settings are those "
                "that no other one beats in both.": _pareto_panel,
            }
        ),
        _page.table(*_best_settings(result)),
        _page.heading("What is slow?"),
        _page.paragraph(_spectrum_words(result)),
        figures(
            {
                "Eigenvalues of the kernel before training: what lies along small ones is learned "
                "slowly.": _eigenvalue_panel,
                "What the leading eigenvectors hold of residual and labels.": _share_panel,
            }
        ),
        _page.heading("Settings"),
        _page.table(("setting", "value"), result.settings_in_words().items()),
        _page.heading("Made with"),
        _page.table(("", "version"), result.versions.items()),
        _page.paragraph(made, soft=True),
    ]
    return _page.page(f"jaxttp: {found.task.description}", "\n".join(parts))


def save_report(result: TaskReport, path: str | os.PathLike[str]) -> Path:
    """Write the page of a report, see `report_html`, to a file.

    Args:
        result: of `jaxttp.pipeline.report_task`.
        path: of the file; its folder is made if need be.

    Returns:
        The path.
    """
    path = Path(path)
    text = report_html(result)
    with replaced(path) as place:
        place.write_text(text, encoding="utf-8")
    return path


def _goals(result: TaskReport) -> Iterator[tuple[str, int, str, float | None]]:
    """Every threshold and target: words, its step, the step in words, and the real one."""
    found, prediction = result.forecast, result.forecast.prediction
    off = {**dict(prediction.steps_uncertainty or {}), **dict(prediction.targets_uncertainty)}
    real: dict[Any, Any] = dict(found.real_steps or {})
    if found.run is not None:
        known = [t for t in prediction.targets if hasattr(found.run, t.curve_name)]
        real |= found.run.reach([t for t in known if getattr(found.run, t.curve_name) is not None])
    for goal, step in {**prediction.steps, **prediction.targets}.items():
        words = goal.words() if isinstance(goal, Target) else f"{100 * goal:g} %"
        yield words, step, step_words(step, off.get(goal), prediction.horizon), real.get(goal)


def _main_goal(result: TaskReport) -> tuple[str, int, str, float | None]:
    """The first target, or the middle threshold where there is none."""
    goals, thresholds = list(_goals(result)), len(result.forecast.prediction.steps)
    if len(goals) > thresholds:
        return goals[thresholds]
    words, step, when, real = goals[thresholds // 2]
    return f"{words} of the drop", step, when, real


def _to_act_on(result: TaskReport) -> list[str]:
    """When it is done, whether a faster rate is at hand, and whether more steps are worth it."""
    found, swept = result.forecast, result.sweep
    prediction, each = found.prediction, found.step_time.seconds
    loss = np.asarray(prediction.loss, float)
    if not prediction.stable:
        return [
            f"Do not train with these settings: {prediction.message}.",
            f"Without momentum, rates up to {swept.max_learning_rate:.3g} are stable.",
        ]
    words, step, time, _ = _main_goal(result)
    when = f"is there at step {time}, after {readable_time(step * each)} on this device"
    if step < 0:
        when = "is not reached"
    out = [
        f"The {found.task.loss.replace('_', '-')} loss falls from {loss[0]:.3g} to {loss[-1]:.3g} "
        f"in {prediction.horizon} steps; {words} {when}."
    ]
    here, best = None if step < 0 else step, swept.fastest
    if best is not None:
        faster = int(swept.sweep.times(swept.threshold)[best])
        one = swept.sweep.settings[best]
        if here is None or faster < 0.8 * here:
            is_followed = best in swept.sweep.relinearized
            way = "Along rebuilt kernels" if is_followed else "By one kernel"
            then = "train with it" if is_followed else "forecast it, and train it if that holds"
            out.append(
                f"{way}, {one} would take {faster} steps to "
                f"{swept.sweep.goal(swept.threshold)}: {then}."
            )
        else:
            out.append("No other rate or momentum tried is a fifth faster.")
    tenth = max(1, prediction.horizon // 10)
    left = (loss[-1 - tenth] - loss[-1]) / max(loss[0] - loss[-1], 1e-30)
    worth = "are worth it" if left > 0.01 else "are hardly worth it"
    out.append(
        f"In its last tenth the loss still falls by {100 * left:.1f} % of the whole: more steps "
        f"{worth}."
    )
    return out


def _first_numbers(result: TaskReport) -> dict[str, str]:
    found, prediction = result.forecast, result.forecast.prediction
    words, step, when, _ = _main_goal(result)
    if step >= 0:
        numbers = {f"steps to {words}": when}
        numbers["until there, on this device"] = readable_time(step * found.step_time.seconds)
    else:
        never = "does not get there" if prediction.stable else "diverges"
        numbers = {"at this learning rate": never}
    numbers["predicted loss at the end"] = f"{float(prediction.loss[-1]):.3g}"
    numbers["largest stable learning rate"] = f"{prediction.max_learning_rate:.3g}"
    return numbers


def _times(result: TaskReport) -> tuple[list[str], list[list[Any]]]:
    found, run = result.forecast, result.forecast.run
    head = ["left of the drop, or target", "steps", "time"]
    head += [] if run is None else ["real steps", "real time"]

    def cells(step: float | None, words: Any, seconds: float, stable: bool) -> list[Any]:
        if step is None:
            return [None, None]
        if step < 0:
            return ["not reached" if stable else "diverges", None]
        return [words, readable_time(step * seconds)]

    rows = []
    for words, step, when, real in _goals(result):
        row = [words, *cells(step, when, found.step_time.seconds, found.prediction.stable)]
        if run is not None:
            row += cells(real, real, run.seconds / found.prediction.horizon, run.finite)
        rows.append(row)
    return head, rows


def _advice(result: TaskReport) -> str:
    swept = result.sweep
    limit = f"Without momentum, rates up to {swept.max_learning_rate:.3g} are stable."
    if swept.fastest is None:
        return f"None of {len(swept.sweep.settings)} settings gets there in time. {limit}"
    best = swept.sweep.settings[swept.fastest]
    return (
        f"{best} needs the fewest steps: "
        f"{swept.sweep.time_words(swept.fastest, swept.threshold)} ({swept.sweep.depth}). {limit}"
    )


def _best_settings(result: TaskReport) -> tuple[list[str], list[list[Any]]]:
    swept, threshold = result.sweep.sweep, result.sweep.threshold
    target = isinstance(threshold, Target)
    goal = f"steps to {threshold.words()}" if target else f"steps to {100 * threshold:g} %"
    head = ["cheapest for their loss", goal, "loss at the end", "error"]
    rows = [
        [swept.named(i), swept.time_words(i, threshold), float(swept.final_loss[i]),
         float(swept.final_error[i])]
        for i in swept.pareto(threshold)
    ]  # fmt: skip
    return head, rows


def _spectrum_words(result: TaskReport) -> str:
    found = result.spectrum
    return (
        f"{found.rank} eigenvalues count, from {found.values[0]:.3g} down to "
        f"{found.values[found.rank - 1]:.3g} (condition number {found.condition:.3g}); they fall "
        f"as rank to the power of -{float(found.law.exponent):.2f}. Half of the residual lies "
        f"along the first {found.head(0.5)} eigenvectors, 99 % along the first {found.head(0.99)}."
    )


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
        >>> from jaxttp.conditioning import psd_sum_bounds
        >>> text = results_html({"Bounds": psd_sum_bounds(np.eye(2), np.eye(2))})
        >>> "<h2>Bounds</h2>" in text, text.count("<img")
        (True, 1)
    """
    if not results:
        raise ValueError("results must hold at least one result.")
    parts = [_page.heading(title, 1)]
    for name, result in results.items():
        drawn = _page.figures({f"{name}: {type(result).__name__}": draw(result)}, wide=True)
        table = f'<div class="table">{result._repr_html_()}</div>'
        parts += [_page.heading(name), table, drawn]
    made_with = versions() | {"matplotlib": mpl.__version__}
    parts += [_page.heading("Made with"), _page.table(("", "version"), made_with.items())]
    return _page.page(title, "\n".join(parts))
