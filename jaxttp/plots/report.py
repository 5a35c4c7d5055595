"""Reports: one page about a named task, or about any results."""

import datetime
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxttp._core.files import replaced
from jaxttp._core.versions import versions
from jaxttp.forecast.prediction import Prediction
from jaxttp.forecast.wall_clock import readable_time
from jaxttp.losses.rule import Target, step_words
from jaxttp.pipeline import TaskReport
from jaxttp.pipeline.optimizers import training_words
from jaxttp.plots import _page
from jaxttp.plots._draw import draw, figure_of, styled
from jaxttp.plots._style import legend, panels
from jaxttp.plots.forecast import has_classes, plot_error, plot_loss
from jaxttp.plots.kernel import plot_eigenvalues, plot_law, plot_shares
from jaxttp.plots.sweeps import plot_heat_map, plot_pareto

WIDTH, HEIGHT = 4.2, 3.6
"""Inches of a panel: a phone shows its text at about its own size."""
WORTH = 0.01
"""More steps are worth it where the last tenth of them brings more than this share of the fall."""


@figure_of
def plot_report(result: TaskReport) -> Figure:
    """The loss, the spectrum and the sweep of a report.

    Args:
        result: of `jaxttp.pipeline.report_task`.

    Returns:
        A matplotlib figure.
    """
    figure, (left, middle, right) = panels(3, title=result.forecast.task.description, height=5.2)
    _loss_panel(left, result)
    _eigenvalue_panel(middle, result)
    _heat_map_panel(right, result)
    return figure


def _loss_panel(axes: Axes, result: TaskReport) -> None:
    found = result.forecast
    plot_loss(axes, found.prediction, run=found.run, real_steps=found.real_steps,
              name=found.task.loss, times=False)  # fmt: skip


def _error_panel(axes: Axes, result: TaskReport) -> None:
    found = result.forecast
    plot_error(axes, found.prediction, run=found.run, classes=has_classes(found))


def _eigenvalue_panel(axes: Axes, result: TaskReport) -> None:
    plot_eigenvalues(axes, result.spectrum.values, result.spectrum.rank)
    plot_law(axes, result.spectrum.law)
    legend(axes)


def _heat_map_panel(axes: Axes, result: TaskReport) -> None:
    plot_heat_map(axes, result.sweep.sweep, result.sweep.threshold)


def _pareto_panel(axes: Axes, result: TaskReport) -> None:
    plot_pareto(axes, result.sweep.sweep, result.sweep.threshold)


def _panel(draw_panel: Callable[[Axes, TaskReport], None], result: TaskReport) -> Figure:
    @styled
    def drawn() -> Figure:
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        draw_panel(figure.subplots(), result)
        return figure

    return drawn()


def report_html(result: TaskReport) -> str:
    """The page of a report: curves, spectrum, sweep, settings, versions.

    Args:
        result: of `jaxttp.pipeline.report_task`.

    Returns:
        HTML that needs no network and follows the reader's light or dark.
    """
    found, swept = result.forecast, result.sweep
    goal, trust = swept.sweep.goal(swept.threshold), found.prediction.trust
    parts = [
        _page.heading("How long will it train?", 1),
        _page.paragraph(found.task.description),
        _page.paragraph(
            f"{training_words(found.settings)}, {found.prediction.horizon} steps", soft=True
        ),
        _page.paragraph(" ".join(_to_act_on(result))),
        _page.cards(_first_numbers(result)),
        _page.heading("Forecast"),
        _page.table(*_times(result)),
        "" if trust is None else _page.paragraph(f"Trust: {trust}."),
        _page.figures(
            {
                "loss": (_panel(_loss_panel, result), _loss_caption(result)),
                "error": (_panel(_error_panel, result), "Error on the training samples by step."),
            }
        ),
        _page.heading("Which learning rate?"),
        _page.paragraph(_advice(result)),
        _page.figures(
            {
                "sweep": (
                    _panel(_heat_map_panel, result),
                    f"Steps to {goal}; hatched settings diverge or do not get "
                    "there, the line is the largest stable rate, the star the fewest steps.",
                ),
                "pareto": (
                    _panel(_pareto_panel, result),
                    "Loss at the end against what it takes to get there; the joined settings are "
                    "those that no other one beats in both.",
                ),
            }
        ),
        _page.table(*_best_settings(result)),
        _page.heading("What is slow?"),
        _page.paragraph(_spectrum_words(result)),
        _page.figures(
            {
                "values": (
                    _panel(_eigenvalue_panel, result),
                    "Eigenvalues of the kernel before training: what lies along small ones is "
                    "learned slowly.",
                ),
                "shares": (
                    _panel(lambda axes, one: plot_shares(axes, one.spectrum), result),
                    "How much of the residual and of the labels the leading eigenvectors hold.",
                ),
            }
        ),
        _page.heading("Settings"),
        _page.table(("setting", "value"), result.settings_in_words().items()),
        _page.heading("Made with"),
        _page.table(("", "version"), result.versions.items()),
        _page.paragraph(
            f"Made on {datetime.date.today().isoformat()}. The forecast cost "
            f"{found.prediction.cost}. It trusts the network's linearisation at its present "
            "weights: far from them, with batch norm in training mode or augmented data, it errs.",
            soft=True,
        ),
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
    targets = prediction.targets
    times = {t.words(): step for t, step in targets.items()} or {
        f"{100 - 100 * e:g} % of its fall": step for e, step in prediction.steps.items()
    }
    words, step = list(times.items())[0 if targets else len(times) // 2]
    goal = next(iter(targets)) if targets else list(prediction.steps)[len(times) // 2]
    off = _unsure(prediction).get(goal)
    when = (
        f"is there at step {step_words(step, off, prediction.horizon)}, after "
        f"{readable_time(step * each)} on this device"
    )
    out = [
        f"The {found.task.loss.replace('_', '-')} loss falls from {loss[0]:.3g} to {loss[-1]:.3g} "
        f"in {prediction.horizon} steps; {words} " + (when if step >= 0 else "is not reached") + "."
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
    out.append(
        f"In its last tenth the loss still falls by {100 * left:.1f} % of the whole: more steps "
        + ("are worth it." if left > WORTH else "are hardly worth it.")
    )
    return out


def _unsure(prediction: Prediction) -> dict[float | Target, int]:
    """By how many steps times may be off, where that is known."""
    return {**dict(prediction.steps_uncertainty or {}), **dict(prediction.targets_uncertainty)}


def _first_numbers(result: TaskReport) -> dict[str, str]:
    found = result.forecast
    steps, targets = found.prediction.steps, found.prediction.targets
    middle = list(steps)[len(steps) // 2]
    words, step = f"{100 * middle:g} % of the drop", steps[middle]
    off = _unsure(found.prediction).get(middle)
    if targets:
        first, step = next(iter(targets.items()))
        words, off = first.words(), _unsure(found.prediction).get(first)
    numbers = {}
    if step >= 0:
        numbers[f"steps to {words}"] = step_words(step, off, found.prediction.horizon)
        numbers["until there, on this device"] = readable_time(step * found.step_time.seconds)
    else:
        stable = found.prediction.stable
        numbers["at this learning rate"] = "does not get there" if stable else "diverges"
    numbers["predicted loss at the end"] = f"{float(found.prediction.loss[-1]):.3g}"
    numbers["largest stable learning rate"] = f"{found.prediction.max_learning_rate:.3g}"
    return numbers


def _times(result: TaskReport) -> tuple[list[str], list[list[Any]]]:
    found = result.forecast
    head = ["left of the drop, or target" if found.prediction.targets else "left of the drop"]
    head += ["steps", "time"]
    if found.real_steps is not None:
        head += ["real steps", "real time"]
    never = {True: "not reached", False: "diverges"}
    rows, off, horizon = [], _unsure(found.prediction), found.prediction.horizon
    for e, step in found.prediction.steps.items():
        row: list[Any] = [f"{100 * e:g} %"]
        words = never[found.prediction.stable]
        ahead = [step_words(step, off.get(e), horizon), readable_time(found.seconds.get(e, 0.0))]
        row += ahead if step >= 0 else [words, None]
        if found.run is not None and found.real_steps is not None:
            real, words = found.real_steps[e], never[found.run.finite]
            spent = (found.real_seconds or {}).get(e)
            row += [words, None] if spent is None else [real, readable_time(spent)]
        rows.append(row)
    for target, step in found.prediction.targets.items():
        row = [target.words()]
        words, each = never[found.prediction.stable], found.step_time.seconds
        ahead = [step_words(step, off.get(target), horizon), readable_time(step * each)]
        row += ahead if step >= 0 else [words, None]
        known = getattr(found.run, target.curve_name, None)
        if found.run is not None and known is not None:
            real, words = found.run.reach([target])[target], never[found.run.finite]
            each = found.run.seconds / found.prediction.horizon
            row += [real, readable_time(real * each)] if real >= 0 else [words, None]
        rows.append(row + [None] * (len(head) - len(row)))
    return head, rows


def _loss_caption(result: TaskReport) -> str:
    words = "Loss on the training samples by step; the marks are the times of the table."
    return words if result.forecast.run is None else words + " Filled marks are real."


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
        HTML that needs no network and follows the reader's light or dark.

    Raises:
        ValueError: no results.
        TypeError: something that is no result.

    Example:
        >>> import numpy as np
        >>> from jaxttp.conditioning import psd_sum_bounds
        >>> text = results_html({"Bounds": psd_sum_bounds(np.eye(2), np.eye(2))})
        >>> "<h2>Bounds</h2>" in text, text.count("<svg")
        (True, 1)
    """
    if not results:
        raise ValueError("results must hold at least one result.")
    parts = [_page.heading(title, 1)]
    for index, (name, result) in enumerate(results.items()):
        drawn = {f"r{index}": (draw(result), f"{name}: {type(result).__name__}")}
        parts += [
            _page.heading(name),
            f'<div class="table">{result._repr_html_()}</div>',
            _page.figures(drawn, wide=True),
        ]
    made_with = versions() | {"matplotlib": mpl.__version__}
    parts += [_page.heading("Made with"), _page.table(("", "version"), made_with.items())]
    return _page.page(title, "\n".join(parts))
